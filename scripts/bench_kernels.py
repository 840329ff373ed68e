"""Kernels against the peer that is installed: torch, with cuBLAS, cuDNN and its own kernels.

Inputs are random and rotated past the cache, calls are recorded in graphs and timed with events;
the graphs of a case are replayed in turns, and a figure is the median of its replays. A sample of
every output is compared with float64. Every case runs in a process that may crash or hang without
harm to the others, and its results are written at once. On a machine without a GPU the exit status
is 2. The last line printed is JSON.

    python -m scripts.bench_kernels gemm --seconds 170 --out results
"""

import argparse
import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import tilert
from scripts.commit import commit
from scripts.kernel_cases import GROUPS, PEERS, Case, Variant, case_of, cases, step, variant_of
from scripts.kernel_memory import Memory
from scripts.kernel_report import Result, plot, rows, summary, table
from scripts.kernel_work import Work, switch, work_of
from scripts.read_bandwidth import read_bandwidth
from tilert import DeviceError

ROTATED_BYTES = 256 << 20
"""Inputs together: several times what a second-level cache holds."""
MOST_COPIES = 16
GRAPH_SECONDS = 3e-3
"""About how long one replay takes."""
REPLAYS, WARM_UP = 9, 2
START_SECONDS, STEP_SECONDS = 90.0, 40.0
"""After which a process counts as hung."""


# -- in the process that measures ----------------------------------------------------------------


def copies_of(case: Case) -> int:
    """Sets of inputs, enough that one is out of the cache when its turn comes again."""
    return max(1, min(MOST_COPIES, -(-ROTATED_BYTES // case.nbytes)))


def calls_of(case: Case, copies: int) -> int:
    """Calls a graph, whole turns of the rotation: about `GRAPH_SECONDS`."""
    guess = max(case.flops / 600e12, case.nbytes / 3e12, 3e-6)
    return copies * max(1, round(GRAPH_SECONDS / (guess * copies)))


Replay = Callable[[], float]
"""Replays a graph once; gives seconds a call."""


@contextlib.contextmanager
def graph_of_ours(
    device: tilert.Device, calls: Sequence[Callable[[], object]], count: int
) -> Iterator[Replay]:
    """A graph of so many calls in turn."""
    with tilert.capture(device, lambda: [calls[i % len(calls)]() for i in range(count)]) as graph:

        def replay() -> float:
            before = device.record_event(timing=True)
            graph.replay()
            after = device.record_event(timing=True)
            after.wait()
            return after.since(before) / count

        yield replay


@contextlib.contextmanager
def graph_of_theirs(
    torch: Any, calls: Sequence[Callable[[], object]], count: int
) -> Iterator[Replay]:
    """As `graph_of_ours`, of the peer."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for i in range(count):
            calls[i % len(calls)]()

    def replay() -> float:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3 / count

    yield replay


@contextlib.contextmanager
def prepared(memory: Memory, work: Work, variant: Variant) -> Iterator[tuple[float, Replay]]:
    """The error of one variant, and a graph of it.

    Raises:
        RuntimeError: for the peer, where none is installed; where the output is not written.
    """
    if variant.name in PEERS and memory.torch is None:
        raise RuntimeError("torch is not installed")
    switch(memory.device, variant)
    calls = [work.call(variant, i) for i in range(work.copies)]
    work.poison(variant)
    result = calls[0]()
    if variant.name in PEERS:
        work.settle(result)
    error = error_of(*work.check(variant))
    for call in calls[1:]:
        call()
    memory.synchronize()
    count = calls_of(work.case, work.copies)
    with (
        graph_of_theirs(memory.torch, calls, count)
        if variant.name in PEERS
        else graph_of_ours(memory.device, calls, count)
    ) as replay:
        yield error, replay


def measure(memory: Memory, work: Work, variants: Sequence[Variant]) -> list[Result]:
    """Times and error of each variant, or why it failed.

    They are replayed in turns, forwards and backwards: how fast a device runs depends on the power
    that it has just drawn.
    """
    results: list[Result] = [{} for _ in variants]
    with contextlib.ExitStack() as graphs:
        replays: list[tuple[Result, Replay]] = []
        for result, variant in zip(results, variants, strict=True):
            try:
                error, replay = graphs.enter_context(prepared(memory, work, variant))
            except Exception as reason:
                # Whatever it is belongs to this variant alone, unless the device is lost.
                result["failed"] = f"{type(reason).__name__}: {reason}"
            else:
                result |= {"times": [], "error": error}
                replays.append((result, replay))
        for turn in range(WARM_UP + REPLAYS):
            for result, replay in replays[:: -1 if turn % 2 else 1]:
                seconds = replay()
                if turn >= WARM_UP:
                    result["times"].append(seconds)
    return results


def error_of(got: Any, want: Any) -> float:
    """The largest difference over the largest value wanted.

    Raises:
        RuntimeError: if an output is no number.
    """
    if not np.isfinite(got).all():
        raise RuntimeError(f"{int((~np.isfinite(got)).sum())} of {got.size} outputs are no numbers")
    return float(np.abs(got - want).max() / max(np.abs(want).max(), 1e-30))


def work_through(device: tilert.Device, lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """What lines of JSON ask for: results of the variants of a case, or the read bandwidth."""
    memory = Memory(device, _torch())
    for line in lines:
        asked = json.loads(line)
        if asked.get("bandwidth"):
            yield {"read_bandwidth": read_bandwidth(device)}
            continue
        case, variants = case_of(asked["case"]), [variant_of(v) for v in asked["variants"]]
        answer: dict[str, Any]
        try:
            # A case's arrays are gone before the next one's are made.
            answer = {"results": measure(memory, work_of(memory, case, copies_of(case)), variants)}
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}
        lost = _lost(memory)
        if lost and len(variants) > 1:
            # Those behind the one that lost it have failed for no fault of theirs.
            answer = {"failed": "one of the variants lost the device"}
        yield {**answer, "restart": lost}
        if memory.torch is not None and device.kind == "cuda":
            memory.torch.cuda.empty_cache()


def _lost(memory: Memory) -> bool:
    try:
        memory.synchronize()
    except Exception:
        return True
    return False


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        return None
    return torch


def serve_steps(device: str) -> int:
    """The loop of the measuring process: a line of JSON in, a line out."""
    found = tilert.device(device)
    # What libraries print must not come between the lines.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch = _torch()
    info = {**found.info(), "torch": None if torch is None else str(torch.__version__)}
    print(json.dumps({"ready": info}), file=out, flush=True)
    for result in work_through(found, iter(sys.stdin.readline, "")):
        print(json.dumps(result), file=out, flush=True)
    return 0


# -- in the process that asks --------------------------------------------------------------------


class Worker:
    """A measuring process, started when it is needed and again after it has failed."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self.info: dict[str, Any] = {}

    def ask(self, request: dict[str, Any], limit: float) -> dict[str, Any]:
        """The answer, or {"failed": why} if the process dies or takes longer than `limit` s."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            started = self._read(START_SECONDS)
            if "ready" not in started:
                self.close()
                return {"failed": f"the process did not start: {started.get('failed')}"}
            self.info = started["ready"]
        process = self._process
        if process.stdin is None:
            raise RuntimeError("the process has no input")
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        answer = self._read(limit)
        if answer.get("restart"):
            self.close()
        return {k: v for k, v in answer.items() if k != "restart"}

    def _read(self, limit: float) -> dict[str, Any]:
        process = self._process
        if process is None or process.stdout is None:
            raise RuntimeError("the process is not running")
        ready, _, _ = select.select([process.stdout], [], [], limit)
        if not ready:
            return {"failed": f"no answer within {limit:.0f} s", "restart": True}
        line = process.stdout.readline()
        if not line:
            return {"failed": f"the process ended with status {process.wait()}", "restart": True}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def run(
    worker: Worker,
    groups: Sequence[str],
    seconds: float,
    note: Callable[[Result], None],
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[Result], float | None]:
    """Every step of the groups, and the read bandwidth in bytes a second.

    Args:
        seconds: after which no case is begun any more; those left are results that say so.
        note: called with every result as it comes.
    """
    end = clock() + seconds
    answer = worker.ask({"bandwidth": True}, STEP_SECONDS)
    results: list[Result] = []

    def ask(case: Case, variants: Sequence[Variant]) -> list[Result]:
        left = end - clock()
        if left <= 0:
            return [{"failed": "not run: the time was up"} for _ in variants]
        request = {"case": asdict(case), "variants": [asdict(v) for v in variants]}
        got = worker.ask(request, min(left, STEP_SECONDS))
        if "results" in got:
            return list(got["results"])
        if len(variants) == 1:
            return [got]
        # One of them took the others down.
        return [result for variant in variants for result in ask(case, [variant])]

    for group in groups:
        for case, variants in cases(group):
            for variant, got in zip(variants, ask(case, variants), strict=True):
                results.append({**step(case, variant), **got})
                note(results[-1])
    return results, answer.get("read_bandwidth")


def _show(result: Result) -> None:
    case = case_of(result["case"])
    head = f"{case.group} {case.label} {result['variant']['name']}"
    if "failed" in result:
        print(f"{head}: {result['failed']}", file=sys.stderr)
        return
    seconds = sorted(result["times"])[len(result["times"]) // 2]
    print(
        f"{head}: {1e6 * seconds:.1f} us, {case.flops / seconds / 1e12:.1f} TFLOP/s,"
        f" {case.nbytes / seconds / 1e12:.2f} TB/s, error {result['error']:.1e}",
        file=sys.stderr,
    )


def write_report(folder: Path, report: dict[str, Any]) -> None:
    """The report as JSON, as a table and as a plot."""
    found = rows(report["results"])
    title = f"kernels, {report['device'].get('name', 'unknown device')}, {report['date']}"
    (folder / "kernels.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "kernels.md").write_text(f"# {title}\n\n{table(found, report['read_bandwidth'])}\n")
    (folder / "kernels.svg").write_text(plot(found, title))


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="bench_kernels", description=__doc__.splitlines()[0])
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--device", default="cuda:0", help="(%(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=170, help="for all steps together (%(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("kernel-results"), help="folder (%(default)s)"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    groups = args.groups or list(GROUPS)
    if unknown := sorted(set(groups) - GROUPS.keys()):
        parser.error(f"no group {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    if args.worker:
        return serve_steps(args.device)
    try:
        tilert.device(args.device)
    except DeviceError as error:
        print(f"bench_kernels: error: {error}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "scripts.bench_kernels", "--worker", "--device", args.device]
    worker = Worker(command)
    with (args.out / "kernels.jsonl").open("w") as partial:

        def note(result: Result) -> None:
            print(json.dumps(result), file=partial, flush=True)
            _show(result)

        try:
            results, bandwidth = run(worker, groups, args.seconds, note)
        finally:
            worker.close()
    report = {
        "device": worker.info,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "command": " ".join(["python -m scripts.bench_kernels", *(argv or sys.argv[1:])]),
        "read_bandwidth": bandwidth,
        "summary": summary(rows(results)),
        "results": results,
    }
    write_report(args.out, report)
    print((args.out / "kernels.md").read_text())
    print(json.dumps({k: v for k, v in report.items() if k != "results"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
