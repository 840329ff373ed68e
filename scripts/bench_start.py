"""From the start of a process to its first token: what takes how long.

Every start is a process of its own, which imports what `grout serve` does, makes the engine with
the server's defaults and asks it for one token. Stages follow each other; work is what was done
within them, on whichever thread. With a folder of its own for kernels (--fresh) the first start
compiles everything and the others find it there: "all kernels" is the time until they were ready,
beside the rest. The last line printed is JSON.

    python -m scripts.bench_start qwen3-4b --load-format dummy --repeats 3
"""

import argparse
import contextlib
import importlib
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
            "making weights up": "open the model",
            "loading weights": "weights" if "weights" in self.seconds else "open the model",
            "context ": "weights",
            "warming up": "KV cache",
        }
        for start, stage in ends.items():
            if line.startswith(start):
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
    work.watch(kernel_index, "find", "find known kernels")
    work.watch(Kernel, "traced", "trace kernels")
    work.watch(sources, "cuda_source", "generate CUDA C++")
    work.watch(disk_cache, "cubin", "get machine code")
    work.watch(nvrtc, "_compile", "of that, compile")
    work.watch(kernel_launch, "load_function", "load machine code")
    work.watch(driver, "allocate_async", "allocate")
    work.watch(GrammarTokens, "prepare", "prepare grammars")
    work.watch(cuda_graph, "_record", "record graphs")
    work.watch(driver, "instantiate", "instantiate graphs")
    work.watch(driver, "wait_event", "wait for the device")
    return work


def start(options: dict[str, Any], began: float) -> dict[str, Any]:
    """One start, in this process."""
    stages = Stages(began)
    stages.end("interpreter", BEGAN)
    import numpy as np

    import grout
    import server.http_server  # noqa: F401
    import tilert
    from grout.streams import BlockingStream

    stages.end("imports")
    work = watched()
    device = tilert.device(options["device"])
    stages.end("device")
    engine = grout.create_engine(grout.EngineConfig(**options), stages.line)
    stages.end("kernels and recordings")
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
        "weights_gb_s": round(nbytes / max(stages.seconds["weights"], 1e-9) / 1e9, 2),
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
    """Stages, then work, with a column of seconds a start."""
    out = []
    for part in ("stages", "work"):
        names = list(dict.fromkeys(name for one in starts for name in one[part]))
        for name in names:
            cells = []
            for one in starts:
                value = one[part].get(name)
                if isinstance(value, list):
                    cells.append(f"{value[1]:9.3f} ({value[0]})")
                else:
                    cells.append("         -" if value is None else f"{value:9.3f}")
            indent = "  " if part == "work" else ""
            out.append(f"{indent + name:26s}" + "".join(f"{cell:>18s}" for cell in cells))
        if part == "stages":
            totals = "".join(f"{one['seconds']:18.3f}" for one in starts)
            out.append(f"{'to the first token':26s}{totals}")
            ready = [one["kernels"] for one in starts if one["kernels"] is not None]
            if ready:
                shown = "".join(f"{f'{seconds:9.3f} ({count})':>18s}" for count, seconds in ready)
                out.append(f"{'all kernels, beside that':26s}{shown}")
    return "\n".join(out)


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
