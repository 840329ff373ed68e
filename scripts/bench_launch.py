"""What a launch costs on a GPU: an op from Python, a node of a graph, safe beside unsafe kernels.

    python -m scripts.bench_launch [--repeats N] [--out FILE]

Each is measured beside the same work through raw cuda-bindings (the same cubin with its arguments
packed beforehand) or, for the twins, beside CUDA C++ written by hand; they take turns, and medians
over the repeats are reported. Every result is compared with what it must be in the same run. The
last line printed is JSON. Exit status 2: there is no GPU.
"""

import argparse
import ctypes
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import tilert
from tilert import Const, Mut, Ref, f32, nvrtc
from tilert.target_device import TargetDevice

SIZE, TILE = 1024, 256
TARGETS = {"op_us": 15.0, "node_us": 0.9, "twins": 0.01}
"""Most microseconds of an op and of a node, and most that twins differ, as a share."""


@tilert.kernel
def step(y: Mut, x: Ref):  # type: ignore[no-untyped-def, type-arg]
    """Add x to y: little work, and the number of launches shows in the result."""
    y.store(y.load() + x.tile_like(y))


@tilert.kernel
def scaled(y: Mut, x: Ref, by: Const[float]):  # type: ignore[no-untyped-def, type-arg]
    """y = x * by, one pass over memory."""
    y.store(x.tile_like(y) * by)


TWIN = """
extern "C" __global__ void __launch_bounds__(256) scaled_by_hand(
    float* __restrict__ y, const float* __restrict__ x) {
  const int start = blockIdx.x * tilert::y_tile0;
  const int n = min(tilert::y_tile0, tilert::y_dim0 - start);
  const float by = (float)tilert::by;
#pragma unroll
  for (int i = threadIdx.x * 4; i < tilert::y_tile0; i += 1024) {
    if (i + 4 <= n) {
      float4 v = *(const float4*)(x + start + i);
      v.x *= by; v.y *= by; v.z *= by; v.w *= by;
      *(float4*)(y + start + i) = v;
    } else {
      for (int j = i; j < n; ++j) y[start + j] = x[start + j] * by;
    }
  }
}
"""


def _by_hand(y: np.ndarray[Any, Any], x: np.ndarray[Any, Any], by: float) -> None:
    np.multiply(x, np.float32(by), out=y)


@tilert.unsafe_kernel(
    source=TWIN,
    reference=_by_hand,
    reason="a benchmark: the twin of a safe kernel; one thread writes an element, inside its piece",
    threads=256,
)
def scaled_by_hand(y: Mut, x: Ref, by: Const[float]) -> None: ...  # type: ignore[type-arg]


Batch = Callable[[], float]
"""Does some work and gives the seconds of it."""


def clocked(work: Callable[[], object], count: int, wait: Callable[[], None]) -> float:
    """Seconds of `count` calls, without the wait before them and after them."""
    wait()
    start = time.perf_counter()
    for _ in range(count):
        work()
    seconds = time.perf_counter() - start
    wait()
    return seconds


def in_turns(batches: dict[str, Batch], repeats: int, units: int) -> dict[str, float]:
    """Median microseconds a unit of work of each batch; the first turn warms up and is dropped."""
    times: dict[str, list[float]] = {name: [] for name in batches}
    for turn in range(repeats + 1):
        for name, batch in batches.items():
            seconds = batch()
            if turn:
                times[name].append(seconds * 1e6 / units)
    return {name: statistics.median(found) for name, found in times.items()}


class Counter:
    """An array that grows by one a launch, and how often it was launched.

    Raises:
        RuntimeError: from `check`, if it has not grown by as much.
    """

    def __init__(self, device: tilert.Device) -> None:
        self.device = device
        self.array = tilert.zeros(SIZE, f32, device)
        self.one = tilert.full(SIZE, 1.0, f32, device)
        self.count = 0

    def launch(self) -> None:
        """One op, as users write it."""
        self.array = step(self.array.partition(TILE), self.one).run()

    def check(self, what: str) -> None:
        """Compare the array with the number of launches."""
        if not (self.array.numpy() == np.float32(self.count)).all():
            raise RuntimeError(f"{what}: the array is not what {self.count} launches make of it")


class Raw:
    """The kernel of `step` through cuda-bindings alone, on arrays and a stream of its own."""

    def __init__(self, counter: Counter, arch: str) -> None:
        from cuda.bindings import driver as cu

        self._cu = cu
        self.counter = counter
        target = TargetDevice(arch)
        Counter(target).launch()
        (kernel,) = target.kernels
        cubin = nvrtc.compile(kernel.text, kernel.entry, arch)
        counter.device.synchronize()
        module = self._call(cu.cuModuleLoadData(cubin))
        function = self._call(cu.cuModuleGetFunction(module, kernel.entry.encode()))
        flags = int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self.stream = self._call(cu.cuStreamCreate(flags))
        # The last argument: it does nothing before it has waited for earlier kernels.
        self._values = (ctypes.c_uint64 * 3)(counter.array.address, counter.one.address, 0)
        base = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * 3)(base, base + 8, base + 16)
        self._arguments = (
            function, SIZE // TILE, 1, 1, kernel.threads, 1, 1, kernel.shared_bytes, self.stream,
            ctypes.addressof(self._pointers), 0,
        )  # fmt: skip

    def _call(self, answer: Any) -> Any:
        status, *values = answer
        if status != self._cu.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"cuda-bindings: {status}")
        return values[0] if values else None

    def launch(self) -> None:
        """One launch."""
        self._call(self._cu.cuLaunchKernel(*self._arguments))

    def graph(self, nodes: int) -> Callable[[], None]:
        """A replay of so many launches."""
        mode = self._cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._call(self._cu.cuStreamBeginCapture(self.stream, mode))
        for _ in range(nodes):
            self.launch()
        graph = self._call(self._cu.cuStreamEndCapture(self.stream))
        executable = self._call(self._cu.cuGraphInstantiate(graph, 0))
        return lambda: self._call(self._cu.cuGraphLaunch(executable, self.stream))

    def wait(self) -> None:
        """Until all of it is done."""
        self._call(self._cu.cuStreamSynchronize(self.stream))


def bench_op(ours: Counter, raw: Raw | None, calls: int, repeats: int) -> dict[str, float]:
    """Host time of one launch: partition, call and run, in a steady state."""

    def batch(counter: Counter, launch: Callable[[], None], wait: Callable[[], None]) -> float:
        seconds = clocked(launch, calls, wait)
        counter.count += calls
        return seconds

    batches: dict[str, Batch] = {
        "tilert": lambda: batch(ours, ours.launch, ours.device.synchronize)
    }
    if raw is not None:
        batches["raw"] = lambda: batch(raw.counter, raw.launch, raw.wait)
    times = in_turns(batches, repeats, calls)
    for counter in (ours, *([raw.counter] if raw is not None else [])):
        counter.check("op")
    return times


def bench_node(ours: Counter, raw: Raw | None, nodes: int, repeats: int) -> dict[str, float]:
    """Time of one node of a graph of dependent launches: replay and wait, over the nodes.

    "tilert" is what users get; "full_edges" where each kernel starts when the one before is
    complete, as it does through cuda-bindings.
    """

    def record() -> None:
        for _ in range(nodes):
            ours.launch()

    device: Any = ours.device
    graphs = {"tilert": tilert.capture(device, record)}
    if raw is not None:
        early, device.early_kernels = device.early_kernels, False
        graphs["full_edges"] = tilert.capture(device, record)
        device.early_kernels = early

    def batch(counter: Counter, replay: Callable[[], None], wait: Callable[[], None]) -> float:
        def whole() -> None:
            replay()
            wait()

        seconds = clocked(whole, 1, wait)
        counter.count += nodes
        return seconds

    batches: dict[str, Batch] = {
        name: lambda graph=graph: batch(ours, graph.replay, device.synchronize)  # type: ignore[misc]
        for name, graph in graphs.items()
    }
    if raw is not None:
        replay = raw.graph(nodes)
        batches["raw"] = lambda: batch(raw.counter, replay, raw.wait)
    times = in_turns(batches, repeats, nodes)
    for counter in (ours, *([raw.counter] if raw is not None else [])):
        counter.check("graph")
    for graph in graphs.values():
        graph.close()
    return times


def bench_twins(device: tilert.Device, size: int, repeats: int) -> dict[str, float]:
    """Device time of a safe kernel and of its unsafe twin, on `size` floats.

    Both write two arrays in turn: which one a kernel writes is worth about a hundredth.
    """
    host = np.arange(size, dtype=np.float32)
    x = tilert.from_numpy(host, device)
    kernels = {"safe": scaled, "unsafe": scaled_by_hand}
    out = [tilert.zeros(size, f32, device) for _ in range(2)]

    def batch(name: str) -> float:
        before = device.record_event(timing=True)
        for at in range(2):
            out[at] = kernels[name](out[at].partition(4096), x, 0.5).run()
        after = device.record_event(timing=True)
        after.wait()
        return after.since(before)

    for name in kernels:
        out = [tilert.full(size, np.nan, f32, device) for _ in range(2)]
        batch(name)
        if not all(np.array_equal(array.numpy(), host * np.float32(0.5)) for array in out):
            raise RuntimeError(f"twins: the {name} kernel computed something else")
    batches: dict[str, Batch] = {name: functools.partial(batch, name) for name in kernels}
    return in_turns(batches, repeats, 2)


def report(op: dict[str, float], node: dict[str, float], twins: dict[str, float]) -> dict[str, Any]:
    """The measurements with what follows from them: microseconds, and shares."""

    def beside(times: dict[str, float]) -> dict[str, Any]:
        found: dict[str, Any] = {f"{name}_us": round(value, 3) for name, value in times.items()}
        if "raw" in times:
            found["price_us"] = round(times["tilert"] - times["raw"], 3)
        return found

    differ = twins["safe"] / twins["unsafe"] - 1
    return {
        "op": beside(op),
        "node": beside(node),
        "twins": beside(twins) | {"safe_over_unsafe": round(differ, 4)},
        "met": {
            "op": op["tilert"] <= TARGETS["op_us"],
            "node": node["tilert"] <= TARGETS["node_us"],
            "twins": differ <= TARGETS["twins"],
        },
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=51, help="of each figure (%(default)s)")
    parser.add_argument(
        "--calls", type=int, default=500, help="launches between waits (%(default)s)"
    )
    parser.add_argument("--nodes", type=int, default=1000, help="nodes of the graph (%(default)s)")
    parser.add_argument(
        "--size", type=int, default=1 << 26, help="floats of the twins (%(default)s)"
    )
    parser.add_argument("--out", type=Path, help="write the JSON to this file, too")
    options = parser.parse_args(argv)
    try:
        device = tilert.device("cuda")
    except tilert.DeviceError as error:
        print(f"nothing was measured, this needs a GPU: {error}", file=sys.stderr)
        return 2
    info = device.info()
    raw = Raw(Counter(device), info["arch"])
    result = report(
        bench_op(Counter(device), raw, options.calls, options.repeats),
        bench_node(Counter(device), raw, options.nodes, options.repeats),
        bench_twins(device, options.size, options.repeats),
    )
    text = json.dumps({"device": info, "settings": vars(options) | {"out": None}, **result})
    for name, values in result.items():
        print(f"{name}: {', '.join(f'{key} {value}' for key, value in values.items())}")
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
