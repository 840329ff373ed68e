"""Tensors of `bench_kernels`, which are ours and the peer's at once."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import tilert
from tilert import Array, Device, bf16, f16, f32

__all__ = ["DTYPES", "Floats", "Memory", "Tensor"]

Floats = NDArray[np.float64]
DTYPES = {"bf16": bf16, "f16": f16, "f32": f32}


@dataclass
class Tensor:
    """An array, and the same memory as the peer's tensor where there is a peer."""

    ours: Array
    theirs: Any


class Memory:
    """Makes tensors on a device.

    Args:
        torch: the module, None where it is not installed.
    """

    def __init__(self, device: Device, torch: Any) -> None:
        self.device, self.torch = device, torch
        self._rng = np.random.default_rng(0)

    def random(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Normal values, only read."""
        if self.torch is None:
            values = self._rng.standard_normal(shape, np.float32)
            host = values.astype(DTYPES[dtype].numpy)
            return Tensor(tilert.from_numpy(host, self.device), None)
        made = self.torch.randn(shape, dtype=self._dtype(dtype), device=self._place())
        return Tensor(tilert.from_dlpack(made, self.device, readonly=True), made)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """An output of NaN."""
        if self.torch is None:
            return Tensor(tilert.full(shape, math.nan, DTYPES[dtype], self.device), None)
        made = self.torch.full(shape, math.nan, dtype=self._dtype(dtype), device=self._place())
        self.synchronize()
        return Tensor(tilert.from_dlpack(made, self.device), made)

    def poison(self, tensor: Tensor) -> None:
        """Make an output NaN again."""
        self.synchronize()
        if tensor.theirs is None:
            tensor.ours.copy_from(np.full(tensor.ours.shape, math.nan, tensor.ours.dtype.numpy))
        else:
            tensor.theirs.fill_(math.nan)
        self.synchronize()

    def ints(self, values: Any) -> Array:
        """An i32 array of ours."""
        return tilert.from_numpy(np.asarray(values, np.int32), self.device)

    def sample(self, tensor: Tensor, *index: Any) -> Floats:
        """Some elements in float64, by one index array an axis."""
        self.synchronize()
        if tensor.theirs is None:
            return np.asarray(tensor.ours.numpy()[np.ix_(*index)], np.float64)
        part = tensor.theirs
        for axis, i in enumerate(index):
            rows = self.torch.as_tensor(np.asarray(i), device=part.device)
            part = part.index_select(axis, rows)
        return np.asarray(part.double().cpu().numpy(), np.float64)

    def synchronize(self) -> None:
        """Wait for both sides."""
        if self.torch is not None and self.device.kind == "cuda":
            self.torch.cuda.synchronize()
        self.device.synchronize()

    def _dtype(self, dtype: str) -> Any:
        names = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
        return getattr(self.torch, names[dtype])

    def _place(self) -> str:
        return self.device.name if self.device.kind == "cuda" else "cpu"
