"""Inputs, framed outputs and tolerances that the tests of the kernel language share."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import tilert
from tilert import DType, bf16, f16, f32, i32, u32
from tilert.dtypes import dtype_of
from tilert.target_device import TargetDevice

FLOATS = (f32, bf16, f16)
INTS = (i32, u32)

# Half of the last place, relative: what rounding once to the dtype costs.
ROUNDING = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8, "f8e4m3": 2.0**-4, "f8e5m2": 2.0**-3}
# Half of the smallest subnormal: what rounding once costs near 0.
UNDERFLOW = {
    "f32": 2.0**-126,
    "f16": 2.0**-25,
    "bf16": 2.0**-126,
    "f8e4m3": 2.0**-10,
    "f8e5m2": 2.0**-17,
}
# Roundings in f32 that a computation without long sums may take. CUDA's functions of one argument
# stay below 4 (CUDA C++ programming guide, "Mathematical Functions").
STEPS = 8

OUTSIDE = {"f": -1234.5, "i": 77, "u": 77, "b": 1}
UNWRITTEN = {"f": math.nan, "i": 99, "u": 99, "b": 1}


def data(
    device: tilert.Device,
    shape: Sequence[int],
    dtype: DType = f32,
    low: float = -2,
    high: float = 2,
    seed: int = 0,
) -> tuple[tilert.Array, np.ndarray]:
    """Random values in [low, high) on a device, and the same in float64 (int64 for integers)."""
    rng = np.random.default_rng([seed, *shape])
    if dtype.is_float:
        host = rng.uniform(low, high, shape).astype(dtype.numpy)
        return tilert.from_numpy(host, device), host.astype(np.float64)
    host = rng.integers(int(low), int(high), shape).astype(dtype.numpy)
    return tilert.from_numpy(host, device), host.astype(np.int64)


def ints(device: tilert.Device, values: Any) -> tilert.Array:
    """An i32 array."""
    return tilert.from_numpy(np.asarray(values, np.int32), device)


class Frame:
    """An output inside a larger array: what lies around it must stay as it is.

    The output begins as NaN or garbage, or as `values` where it is updated in place.

    Args:
        margin: elements around it on every axis; 8 keeps 16-byte alignment, 1 breaks it.
    """

    def __init__(
        self,
        device: tilert.Device,
        shape: Sequence[int],
        dtype: DType = f32,
        margin: int = 8,
        values: np.ndarray | None = None,
    ) -> None:
        self.device, self.dtype = device, dtype
        self.cut = tuple(slice(margin, margin + n) for n in shape)
        host = np.full([n + 2 * margin for n in shape], OUTSIDE[dtype.kind]).astype(dtype.numpy)
        host[self.cut] = UNWRITTEN[dtype.kind] if values is None else values
        self.before = host
        self.array = tilert.from_numpy(host, device)
        self.view = self.array[self.cut]

    def piece(self, *tile: int) -> tilert.Partition:
        """The output's partition."""
        return self.view.partition(*tile)

    def check(self, want: Any, steps: float = STEPS, scale: Any = None) -> None:
        """Compare with what is wanted, and the surroundings with what they were."""
        if isinstance(self.device, TargetDevice):
            return
        close(self._inside(), want, steps, scale)

    def check_exact(self, want: np.ndarray) -> None:
        """As `check`, without any tolerance; one NaN is as good as another."""
        if not isinstance(self.device, TargetDevice):
            got = self._inside()
            if self.dtype.is_float:
                got, want = got.astype(np.float64), np.asarray(want).astype(np.float64)
            np.testing.assert_array_equal(got, want)

    def _inside(self) -> np.ndarray:
        got = self.array.numpy()
        after = got.copy()
        inside = got[self.cut].copy()
        after[self.cut] = self.before[self.cut]
        assert after.tobytes() == self.before.tobytes(), "wrote outside the output"
        return inside


def close(got: np.ndarray, want: Any, steps: float = STEPS, scale: Any = None) -> None:
    """Compare with a float64 result: exact for integers, rounding errors for floats.

    Args:
        steps: roundings in f32 that the computation takes.
        scale: magnitude that those are relative to, `abs(want)` by default; for a sum, the sum of
            the magnitudes of its terms.
    """
    dtype = dtype_of(got.dtype)
    want = np.broadcast_to(np.asarray(want), got.shape)
    if not dtype.is_float:
        np.testing.assert_array_equal(got, want.astype(dtype.numpy))
        return
    want = want.astype(np.float64)
    if dtype.bits == 8:
        # They saturate.
        want = np.clip(want, -dtype.largest, dtype.largest)
    largest = float(np.finfo(np.float16).max) if dtype == f16 else 3.4e38
    given = got.astype(np.float64)
    finite = np.isfinite(want) & (np.abs(want) < largest)
    with np.errstate(over="ignore"):
        rounded = want.astype(dtype.numpy).astype(np.float64)
    np.testing.assert_array_equal(given[~finite], rounded[~finite])
    size = np.abs(want) if scale is None else np.broadcast_to(np.asarray(scale), want.shape)
    allowed = (
        ROUNDING[dtype.name] * np.abs(want)
        + steps * ROUNDING["f32"] * size * (1 + ROUNDING[dtype.name])
        + UNDERFLOW[dtype.name]
    )
    with np.errstate(invalid="ignore"):
        wrong = finite & ~(np.abs(given - want) <= allowed)
    if wrong.any():
        at = tuple(int(i[0]) for i in np.nonzero(wrong))
        raise AssertionError(
            f"{wrong.sum()} of {wrong.size} wrong, first at {at}: got {given[at]!r}, want "
            f"{want[at]!r} within {allowed[at]:.3g}"
        )
