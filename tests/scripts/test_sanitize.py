"""What is made of compute-sanitizer's output, and what is said where it cannot run."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import sanitize

MEMCHECK = """========= COMPUTE-SANITIZER
.....
========= Invalid __global__ write of size 4 bytes
=========     at scatter_kernel+0x90
=========     by thread (0,0,0) in block (1,0,0)
=========     Address 0x7f0000000400 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f0000000000 of size 1,024 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: cuLaunchKernel [0x2a3b4c] in libcuda.so.1
=========
========= Invalid __global__ write of size 4 bytes
=========     at unaligned(int *, float)+0x190 in x.cu:7
=========     by thread (1,0,0) in block (1,0,0)
=========
========= Program hit CUDA_ERROR_LAUNCH_FAILED (error 719) on CUDA API call to cuEventQuery.
=========     Saved host backtrace up to driver entry point at error
=========
.F
========= ERROR SUMMARY: 3 errors
"""
RACECHECK = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at sum_kernel(int *, int *)+0x90
=========     and Read access at sum_kernel(int *, int *)+0x100 [508 hazards]
=========
========= Warning: Race reported between Write access at other_kernel(float *)+0x10
=========     and Write access at other_kernel(float *)+0x20 [3 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
JUNIT = """<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite name="pytest" errors="1"
 failures="2" skipped="3" tests="20" time="1.5"></testsuite></testsuites>"""


def test_memcheck() -> None:
    found = sanitize.parse(MEMCHECK)
    assert (found.summaries, found.errors, found.warnings) == (1, 3, 0)
    assert found.kinds == {
        "Invalid __global__ write of size 4 bytes": 2,
        "Program hit CUDA_ERROR_LAUNCH_FAILED (error 719) on CUDA API call to cuEventQuery.": 1,
    }
    assert found.kernels == {"scatter_kernel": 1, "unaligned": 1}
    assert len(found.reports) == 3
    assert found.reports[1].splitlines()[1] == "at unaligned(int *, float)+0x190 in x.cu:7"


def test_racecheck() -> None:
    found = sanitize.parse(RACECHECK)
    assert (found.summaries, found.errors, found.warnings) == (1, 1, 1)
    assert found.kinds == {
        "Error: Race reported between Write access at sum_kernel": 1,
        "Warning: Race reported between Write access at other_kernel": 1,
    }
    assert found.kernels == {"sum_kernel": 1, "other_kernel": 1}


def test_a_clean_log_and_one_that_breaks_off() -> None:
    clean = sanitize.parse("========= COMPUTE-SANITIZER\n...\n========= ERROR SUMMARY: 0 errors\n")
    assert (clean.summaries, clean.errors, clean.kinds, clean.reports) == (1, 0, {}, [])
    cut = sanitize.parse(MEMCHECK[: MEMCHECK.index("=========     by thread (1")])
    assert (cut.summaries, cut.errors, sum(cut.kinds.values())) == (0, 0, 2)
    assert sanitize.parse("").summaries == 0


def test_counts_of_tests(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    assert sanitize.count_tests(path) == {}
    path.write_text("<testsuites><test")
    assert sanitize.count_tests(path) == {}
    path.write_text(JUNIT)
    assert sanitize.count_tests(path) == {"passed": 14, "failed": 3, "skipped": 3}


def fake_tool(folder: Path, log: str, junit: str, status: int = 0) -> Path:
    """A program that is called like the tool and leaves these files."""
    script = folder / "tool.py"
    script.write_text(
        "import pathlib, sys\n"
        "a = sys.argv\n"
        f"log, junit = {log!r}, {junit!r}\n"
        "if log: pathlib.Path(a[a.index('--log-file') + 1]).write_text(log)\n"
        "path = next(x for x in a if x.startswith('--junitxml=')).partition('=')[2]\n"
        "if junit: pathlib.Path(path).write_text(junit)\n"
        "assert a[a.index('-m', a.index('-q')) + 1] == 'gpu and not slow', a\n"
        f"sys.exit({status})\n"
    )
    program = folder / "compute-sanitizer"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n')
    program.chmod(0o755)
    return program


GOOD = '<testsuites><testsuite errors="0" failures="0" skipped="1" tests="9"/></testsuites>'
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"


class Gpu:
    def info(self) -> dict[str, Any]:
        return {"name": "a GPU"}


@pytest.mark.parametrize(
    ("log", "junit", "status", "code", "problem"),
    [
        (CLEAN, GOOD, 0, 0, ""),
        (MEMCHECK, GOOD, 0, 1, ""),
        (RACECHECK, GOOD, 0, 1, ""),
        (CLEAN, JUNIT, 1, 1, ""),
        ("", GOOD, 3, 1, "the tool ended with status 3 and gave no summary"),
        (CLEAN, "", 5, 1, "no test passed (status 5)"),
    ],
)
def test_the_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    log: str,
    junit: str,
    status: int,
    code: int,
    problem: str,
) -> None:
    fake_tool(tmp_path, log, junit, status)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sanitize.tilert, "device", lambda _: Gpu())
    out = tmp_path / "out.json"
    assert sanitize.main(["--tools", "memcheck", "--out", str(out), "--", "tests/x.py"]) == code
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed == json.loads(out.read_text())
    [result] = printed["results"]
    assert (result["clean"], result["problem"], result["status"]) == (code == 0, problem, status)
    assert printed["device"] == {"name": "a GPU"}


def test_what_is_missing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    real = Path.is_file
    monkeypatch.setattr(
        Path, "is_file", lambda p: real(p) and not str(p).startswith("/usr/local/cuda")
    )
    assert sanitize.main([]) == 2
    assert (
        "nothing was run: compute-sanitizer is not here; install it with `pip install nvidia-c"
        in (capsys.readouterr().err)
    )
    # As the Python package leaves it.
    place = tmp_path / "nvidia" / "cu13" / "bin"
    place.mkdir(parents=True)
    program = fake_tool(place, CLEAN, GOOD)
    assert sanitize.find_tool() == program

    def none(_: str) -> None:
        raise sanitize.tilert.DeviceError("CUDA is not usable: no driver")

    monkeypatch.setattr(sanitize.tilert, "device", none)
    assert sanitize.main([]) == 2
    assert capsys.readouterr().err == (
        "nothing was run: there is no GPU to run kernels on: CUDA is not usable: no driver\n"
    )


def test_the_kernel_tests_are_there() -> None:
    files = sanitize.expanded(sanitize.TESTS)
    assert len(files) > 10 and all((sanitize.ROOT / f).is_file() for f in files)
    assert sanitize.expanded(["tests/a.py", "-k", "x*"]) == ["tests/a.py", "-k", "x*"]
