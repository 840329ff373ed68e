"""Run the kernel tests of tilert on a GPU under compute-sanitizer.

    python -m scripts.sanitize                        memcheck and racecheck over the kernel tests
    python -m scripts.sanitize --tools synccheck -- tests/tilert/test_language_mma.py -k attention

The tool comes with the CUDA toolkit, and alone with `pip install nvidia-cuda-sanitizer-api`. The
last line printed is JSON, one entry a tool. Exit status: 0 if every tool found nothing and every
test passed, 1 if not, 2 if there is no tool or no GPU.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tilert

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
TESTS = (
    "tests/tilert/test_language_*.py",
    "tests/tilert/test_host_pieces.py",
    "tests/tilert/test_host_opt_outs.py",
    "tests/tilert/test_exchange_kernels.py",
)
MARKER = "gpu and not slow"
_SHOWN = 20


class MissingError(Exception):
    """What is needed is not here; the message says what, and how to have it."""


@dataclass
class Findings:
    """What the log of a tool says.

    Attributes:
        summaries: closing lines; a tool that was killed leaves none.
        errors, warnings: as the closing lines count them.
        kinds: first lines of reports, without addresses and with how often they came.
        kernels: kernels that reports name, with how often.
        reports: the first reports, whole.
    """

    summaries: int = 0
    errors: int = 0
    warnings: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    kernels: dict[str, int] = field(default_factory=dict)
    reports: list[str] = field(default_factory=list)


def parse(log: str) -> Findings:
    """Count what a log of compute-sanitizer reports."""
    found = Findings()
    report: list[str] = []
    for line in log.splitlines():
        if not line.startswith("========="):
            continue
        text = line.removeprefix("=========").rstrip()
        if summary := re.search(r"ERROR SUMMARY: (\d+) error", text):
            found.summaries += 1
            found.errors += int(summary[1])
        elif summary := re.search(r"RACECHECK SUMMARY: .*\((\d+) errors?, (\d+) warning", text):
            found.summaries += 1
            found.errors += int(summary[1])
            found.warnings += int(summary[2])
        elif text.startswith("     ") and report:
            report.append(text.strip())
        elif not text:
            _keep(found, report)
            report = []
        elif text.strip() != "COMPUTE-SANITIZER" and "SUMMARY:" not in text:
            _keep(found, report)
            report = [text.strip()]
    _keep(found, report)
    return found


def _keep(found: Findings, report: list[str]) -> None:
    if not report:
        return
    kind = re.sub(r"(\(.*\))?\+0x[0-9a-f]+.*|0x[0-9a-f]+", "", report[0]).strip()
    found.kinds[kind] = found.kinds.get(kind, 0) + 1
    for name in set(re.findall(r"at (\w+)(?:\([^()]*\))?\+0x", " ".join(report))):
        found.kernels[name] = found.kernels.get(name, 0) + 1
    if len(found.reports) < _SHOWN:
        found.reports.append("\n".join(report))


def count_tests(report: Path) -> dict[str, int]:
    """How many tests passed, failed and were skipped, from pytest's JUnit file; {} without one."""
    try:
        suites = ElementTree.parse(report).getroot().iter("testsuite")
    except (OSError, ElementTree.ParseError):
        return {}
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in suites:
        for name in counts:
            counts[name] += int(suite.get(name, "0"))
    bad = counts["failures"] + counts["errors"]
    passed = counts["tests"] - bad - counts["skipped"]
    return {"passed": passed, "failed": bad, "skipped": counts["skipped"]}


def find_tool() -> Path:
    """The compute-sanitizer of $PATH, of the toolkit or of the Python package.

    Raises:
        MissingError: if there is none.
    """
    if on_path := shutil.which("compute-sanitizer"):
        return Path(on_path)
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    places = [Path(home) / "bin" for home in (*homes, "/usr/local/cuda") if home]
    for entry in sys.path:
        places += sorted(Path(entry or ".").glob("nvidia/*/bin"))
    for place in places:
        if (place / "compute-sanitizer").is_file():
            return place / "compute-sanitizer"
    raise MissingError(
        "compute-sanitizer is not here; install it with `pip install nvidia-cuda-sanitizer-api`, or"
        " with NVIDIA's CUDA toolkit, and put it on PATH"
    )


def check_gpu() -> None:
    """Make sure that there is a GPU.

    Raises:
        MissingError: saying why there is none.
    """
    try:
        tilert.device("cuda")
    except tilert.DeviceError as error:
        raise MissingError(f"there is no GPU to run kernels on: {error}") from None


def run_tool(program: Path, tool: str, tests: Sequence[str], limit: float) -> dict[str, Any]:
    """Run pytest under one tool; what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        log, report = Path(folder, "log"), Path(folder, "report.xml")
        command = [
            str(program), "--tool", tool, "--target-processes", "application-only",
            # A backtrace of the host holds Python's frames, and with them arrays, for good.
            "--show-backtrace", "device",
            "--log-file", str(log), sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
            f"--junitxml={report}", *tests,
        ]  # fmt: skip
        start = time.monotonic()
        try:
            status = subprocess.run(command, cwd=ROOT, check=False, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            status = None
        seconds = time.monotonic() - start
        text = log.read_text(errors="replace") if log.exists() else ""
        found, counts = parse(text), count_tests(report)
    problem = ""
    if status is None:
        problem = f"stopped after {limit:.0f} s"
    elif not found.summaries:
        problem = f"the tool ended with status {status} and gave no summary"
    elif not counts.get("passed"):
        problem = f"no test passed (status {status})"
    clean = not (problem or found.errors or found.warnings or found.kinds or counts["failed"])
    return {
        "tool": tool,
        "clean": clean,
        "problem": problem,
        "tests": counts,
        "status": status,
        "seconds": round(seconds, 1),
        **asdict(found),
    }


def expanded(tests: Sequence[str]) -> list[str]:
    """Arguments of pytest, with patterns of files as their files."""
    out: list[str] = []
    for test in tests:
        files = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob(test)) if "*" in test else []
        out += files or [test]
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--tools", nargs="+", choices=TOOLS, default=["memcheck", "racecheck"], help="(%(default)s)"
    )
    parser.add_argument("--limit", type=float, default=3600, help="seconds of a tool (%(default)s)")
    parser.add_argument("--out", type=Path, help="write the JSON to this file, too")
    parser.add_argument("tests", nargs="*", help="arguments of pytest, after --")
    options = parser.parse_args(argv)
    try:
        program = find_tool()
        check_gpu()
    except MissingError as error:
        print(f"nothing was run: {error}", file=sys.stderr)
        return 2
    tests = expanded(options.tests or TESTS)
    results = []
    for tool in options.tools:
        result = run_tool(program, tool, ["-m", MARKER, *tests], options.limit)
        results.append(result)
        verdict = "clean" if result["clean"] else result["problem"] or "NOT CLEAN"
        print(f"{tool}: {verdict}, {result['errors']} errors, tests {result['tests']}", flush=True)
        for report in result["reports"]:
            print(report, flush=True)
    text = json.dumps({"device": tilert.device("cuda").info(), "results": results})
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0 if all(result["clean"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
