"""What kernel tests share: dtypes, tolerances, random arrays, poisoned outputs."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tilert
from tilert import Array, Device, DType, bf16, f16, f32

Floats = NDArray[np.float64]

DTYPES = [pytest.param(dtype, id=dtype.name) for dtype in (f32, bf16, f16)]

# Largest error of one element over the largest expected size: a few units in the last place of the
# stored type, and of the inputs of a product where they are rounded once more.
TOLERANCE = {"f32": 2e-5, "bf16": 1.6e-2, "f16": 2e-3}


def rounded(values: Floats, dtype: DType) -> NDArray[Any]:
    """The values as the dtype stores them."""
    return values.astype(np.float32).astype(dtype.numpy)


def put(values: NDArray[Any], device: Device) -> Array:
    """An array on the device."""
    return tilert.from_numpy(values, device)


def draw(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: DType, device: Device, scale: float = 1
) -> tuple[Array, Floats]:
    """Normal values on the device, and what was stored in float64."""
    host = rounded(rng.standard_normal(shape) * scale, dtype)
    return put(host, device), host.astype(np.float64)


def poisoned(shape: tuple[int, ...], dtype: DType, device: Device) -> Array:
    """An output that shows what was not written."""
    value = float("nan") if dtype.is_float else -99
    return tilert.full(shape, value, dtype, device)


def close(actual: Array, expected: Floats, tolerance: float | None = None) -> None:
    """Assert that an output has the expected values, everywhere."""
    got = actual.numpy().astype(np.float64)
    assert got.shape == expected.shape
    limit = TOLERANCE[actual.dtype.name] if tolerance is None else tolerance
    scale = max(float(np.abs(expected).max(initial=0)), 1e-6)
    error = float(np.abs(got - expected).max(initial=0)) / scale
    assert error <= limit, f"relative error {error:.2e}, allowed {limit:.0e}"
