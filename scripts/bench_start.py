"""From the start of a process to its first token: what takes how long.

Every start is a process of its own, which imports what `grout serve` does, makes the engine with
the server's defaults and asks it for one token. Stages follow each other and add up; work is what
was done within them, on whichever thread, so that two pieces may count the same second. With a
folder of its own for kernels (--fresh) the first start compiles everything and the others find it
there: "until all kernels were ready" counts from when the model has been opened. Weights are read,
or made up with dummy. The last line printed is JSON.

    python -m scripts.bench_start qwen3-4b --load-format dummy --repeats 3
"""

import argparse
import contextlib
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

BEGAN = time.monotonic()

PROMPT = 18
WEIGHTS = "read or make the weights"
"""The stage."""
WAIT_SECONDS = 600.0
"""For one start, compilation included."""


# -- in the process that is measured -------------------------------------------------------------


class Stages:
    """Names and ends of stages, in seconds since a time of `time.monotonic`."""

    def __init__(self, begin: float) -> None:
        self._last = begin
        self.seconds: dict[str, float] = {}
        self.kernels: tuple[int, float] | None = None

    def end(self, name: str, at: float | None = None) -> None:
        """Give the time since the last end to a stage."""
        now = time.monotonic() if at is None else at
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def line(self, line: str) -> None:
        """A line of progress of `create_engine`: it says what comes next, or how kernels went."""
        if ready := re.match(r"(\d+) kernels were ready after ([\d.]+) s", line):
            self.kernels = int(ready[1]), float(ready[2])
        ends = {
            "making weights up": "open the model and its tokenizer",
            "loading weights": "open the model and its tokenizer",
            "context ": WEIGHTS,
            "warming up": "allocate the KV cache",
        }
        for start, stage in ends.items():
            # Of lines about one load the first ends what was before.
            if line.startswith(start) and stage not in self.seconds:
                self.end(stage)


class Work:
    """Calls of some functions and the seconds that they took, on all threads."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}
        self._lock = threading.Lock()

    def watch(self, owner: Any, name: str, what: str) -> None:
        """Measure calls of `owner.name` from now on."""
        inner = getattr(owner, name)

        def timed(*args: Any, **named: Any) -> Any:
            start = time.monotonic()
            try:
                return inner(*args, **named)
            finally:
                seconds = time.monotonic() - start
                with self._lock:
                    one = self.found.setdefault(what, [0, 0.0])
                    one[0] += 1
                    one[1] += seconds

        setattr(owner, name, timed)


def watched() -> Work:
    """What a start does below the engine."""
    from grout.constraint import GrammarTokens
    from tilert import cuda_graph, disk_cache, driver, kernel_index, kernel_launch, nvrtc
    from tilert.kernel import Kernel

    # The package has a function of that name.
    sources = importlib.import_module("tilert.unsafe_kernel")

    work = Work()
    work.watch(kernel_index, "find", "look for kernels on disk")
    work.watch(Kernel, "traced", "trace kernels")
    work.watch(sources, "cuda_source", "generate CUDA C++")
    work.watch(disk_cache, "cubin", "get machine code, from disk or compiled")
    work.watch(nvrtc, "_compile", "of that, compile (NVRTC)")
    work.watch(kernel_launch, "load_function", "load kernels into the driver")
    work.watch(driver, "allocate_async", "allocate device memory")
    work.watch(GrammarTokens, "prepare", "prepare the vocabulary for grammars")
    work.watch(cuda_graph, "_record", "record graphs")
    work.watch(driver, "instantiate", "instantiate graphs")
    work.watch(driver, "wait_event", "wait for the device")
    return work


def start(options: dict[str, Any], began: float) -> dict[str, Any]:
    """One start, in this process."""
    stages = Stages(began)
    stages.end("start Python", BEGAN)
    import numpy as np

    import grout
    import server.http_server  # noqa: F401
    import tilert
    from grout.streams import BlockingStream

    stages.end("import modules")
    work = watched()
    device = tilert.device(options["device"])
    stages.end("open the device")
    engine = grout.create_engine(grout.EngineConfig(**options), stages.line)
    stages.end("warm up: rest of the kernels, graphs")
    with engine:
        stream = BlockingStream()
        prompt = np.random.default_rng(0).integers(0, engine.vocab_size, PROMPT)
        engine.add(prompt, grout.SamplingParams(temperature=0.0, max_tokens=2), stream)
        while not stream.get().token_ids:
            pass
        stages.end("first token")
        model = engine.runner.transformer
        nbytes = model.weight_bytes
    return {
        "model": engine.model_id,
        "device": device.info().get("name", device.name),
        "seconds": round(sum(stages.seconds.values()), 3),
        "stages": {name: round(seconds, 3) for name, seconds in stages.seconds.items()},
        "kernels": stages.kernels,
        "work": {n: [int(c), round(seconds, 3)] for n, (c, seconds) in work.found.items()},
        "weights_gb_s": round(nbytes / max(stages.seconds[WEIGHTS], 1e-9) / 1e9, 2),
    }


# -- in the process that asks --------------------------------------------------------------------


def run(options: dict[str, Any], variables: dict[str, str]) -> dict[str, Any]:
    """One start in a process of its own.

    Raises:
        RuntimeError: with what it wrote last, if it does not come to its first token.
    """
    command = [sys.executable, "-m", "scripts.bench_start", "--child", json.dumps(options)]
    began = time.monotonic()
    try:
        made = subprocess.run(
            [*command, str(began)], capture_output=True, text=True, check=False,
            timeout=WAIT_SECONDS, env={**os.environ, **variables},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no first token within {WAIT_SECONDS:.0f} s") from None
    if made.returncode:
        last = (made.stderr.strip() or "nothing on stderr").splitlines()[-1]
        raise RuntimeError(f"it ended with status {made.returncode}: {last}")
    result: dict[str, Any] = json.loads(made.stdout.splitlines()[-1])
    return result


def table(starts: Sequence[dict[str, Any]]) -> str:
    """Stages and what they add up to, then work, with a column of seconds a start."""
    stages = _rows(starts, "stages")
    stages["from start to first token"] = [one["seconds"] for one in starts]
    work = _rows(starts, "work")
    if any(one["kernels"] for one in starts):
        work["until all kernels were ready"] = [one["kernels"] for one in starts]
    headed = {
        "one after the other, seconds": {f"  {name}": cells for name, cells in stages.items()},
        "within that, on all threads, seconds (how many)": {
            f"  {name}": cells for name, cells in work.items()
        },
    }
    width = max(map(len, (*headed, *itertools.chain(*headed.values()))))
    numbers = [f"{f'start {number + 1}':>12s}      " for number in range(len(starts))]
    out = [" " * width + "".join(numbers)]
    for head, rows in headed.items():
        out.append(head)
        out += [name.ljust(width) + "".join(map(_cell, cells)) for name, cells in rows.items()]
    return "\n".join(line.rstrip() for line in out)


def _rows(starts: Sequence[dict[str, Any]], part: str) -> dict[str, list[Any]]:
    """A row for each name that any start has: what each has of it."""
    names = dict.fromkeys(name for one in starts for name in one[part])
    return {name: [one[part].get(name) for one in starts] for name in names}


def _cell(value: Any) -> str:
    """Seconds, or how many and the seconds of all of them; with the seconds below each other."""
    if value is None:
        return f"{'-':>12s}      "
    if isinstance(value, float):
        return f"{value:12.3f}      "
    count, seconds = value
    return f"{seconds:12.3f} {f'({count})':5s}"


@contextlib.contextmanager
def kernel_folder(fresh: bool) -> Iterator[dict[str, str]]:
    """Variables with which processes keep their kernels: in a folder of their own if `fresh`."""
    if not fresh:
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        yield {"GROUT_CACHE": folder}


def main(argv: Sequence[str] | None = None, once: Callable[..., dict[str, Any]] = run) -> int:
    """Measure; 1 if a start fails."""
    parser = argparse.ArgumentParser(prog="bench_start", description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="as for `grout serve`, or a preset with dummy")
    parser.add_argument("--device", default="auto", help="(%(default)s)")
    parser.add_argument("--dtype", default="auto", help="of weights (%(default)s)")
    parser.add_argument(
        "--load-format", default="auto", choices=("auto", "dummy"), help="(%(default)s)"
    )
    parser.add_argument("--max-num-seqs", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--max-model-len", type=int, help="(what fits)")
    parser.add_argument("--repeats", type=int, default=3, help="starts (%(default)s)")
    parser.add_argument(
        "--fresh", action="store_true", help="begin with no compiled kernels on disk"
    )
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        print(json.dumps(start(json.loads(args.child[0]), float(args.child[1]))))
        return 0
    if args.repeats < 1:
        parser.error("needs --repeats of at least 1")
    names = ("model", "device", "dtype", "load_format", "max_num_seqs", "max_model_len")
    options = {name: getattr(args, name) for name in names}
    starts = []
    with kernel_folder(args.fresh) as variables:
        for number in range(args.repeats):
            try:
                starts.append(once(options, variables))
            except RuntimeError as error:
                print(f"bench_start: error: start {number + 1}: {error}", file=sys.stderr)
                return 1
            print(f"start {number + 1}: {starts[-1]['seconds']:.2f} s", file=sys.stderr)
    print(table(starts))
    print(json.dumps({"options": options, "fresh": args.fresh, "starts": starts}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
