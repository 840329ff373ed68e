"""The bandwidth at which a device reads its memory."""

import statistics
import time

import numpy as np

import tilert
from tilert import Const, Mut, Ref, f32
from tilert.language import sum, tiles, zeros

__all__ = ["READ_BYTES", "read_bandwidth"]

READ_BYTES = {"cuda": 8 << 30, "cpu": 1 << 30}
"""Read by a bandwidth measurement: many times what a cache holds."""


@tilert.kernel
def read_all(out: Mut, x: Ref, width: Const[int]):  # type: ignore[no-untyped-def, type-arg]
    """out[i] = sum of row i of x: reads everything, writes next to nothing."""
    i = out.index[0].number
    total = zeros((width,), f32)
    for j in tiles(x, axis=1, size=width):
        total = total + x[i, j]
    out.store(sum(total, axis=0))


def read_bandwidth(device: tilert.Device, repeats: int = 7) -> float:
    """Bytes a second that the device reads from its memory; the median of some passes."""
    nbytes = min(READ_BYTES[device.kind], device.memory()[0] // 2)
    if device.kind == "cpu":
        return _read_bandwidth_cpu(nbytes, repeats)
    columns = 16384
    rows = nbytes // (4 * columns)
    x = tilert.full((rows, columns), 0.5, f32, device)
    out = tilert.empty((rows,), f32, device)
    times = []
    for _ in range(repeats + 2):
        before = device.record_event(timing=True)
        out = read_all(out.partition(1), x, width=4096).run()
        after = device.record_event(timing=True)
        after.wait()
        times.append(after.since(before))
    if not np.allclose(out.numpy(), 0.5 * columns):
        raise RuntimeError("the bandwidth kernel computed a wrong sum")
    return 4 * rows * columns / statistics.median(times[2:])


def _read_bandwidth_cpu(nbytes: int, repeats: int) -> float:
    """A matrix-vector product is what decoding does on the cpu, so it is what is timed."""
    matrix = np.ones((nbytes // (4 * 4096), 4096), np.float32)
    vector = np.ones(4096, np.float32)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        matrix @ vector
        times.append(time.perf_counter() - start)
    return matrix.nbytes / statistics.median(times)
