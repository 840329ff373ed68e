"""Pinned buffers: host memory that a device fills while the host does something else."""

import math
from typing import Any

import numpy as np

from tilert.array import Array
from tilert.device import Device, check_device
from tilert.dtypes import DType, check_dtype
from tilert.ownership import Region
from tilert.rebind import Maker
from tilert.storage import Storage

__all__ = ["Pinned", "pinned"]


class Pinned:
    """A host buffer of fixed shape and dtype.

    Attributes:
        numpy: the buffer as an ndarray. Its contents are those of a copy once an event recorded
            after that copy is done.
    """

    def __init__(self, shape: tuple[int, ...], dtype: DType, device: Device) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        nbytes = math.prod(shape) * dtype.itemsize
        self._storage = Storage(device, nbytes, device.pinned_block(nbytes))
        host = self._storage.host
        if host is None:
            raise TypeError(f"{device.name} gave pinned memory that the host cannot see")
        self.numpy: np.ndarray[Any, Any] = host.view(dtype.numpy).reshape(shape)

    def copy_from(self, source: Array) -> None:
        """Enqueue a copy from the device; may be captured. It does not wait.

        Args:
            source: a contiguous array of the same shape and dtype on the same device.

        Raises:
            TypeError: if the source is no Array.
            ValueError: if it differs otherwise.
            MovedError: if an op holds part of it.
        """
        if not isinstance(source, Array):
            raise TypeError(f"a pinned buffer copies from an Array, got {type(source).__name__}")
        if source.shape != self.shape or source.dtype != self.dtype:
            raise ValueError(
                f"cannot copy {source.dtype.name}{list(source.shape)} into a pinned buffer of"
                f" {self.dtype.name}{list(self.shape)}"
            )
        if source.device is not self.device or not source.is_contiguous:
            raise ValueError(f"the source must be a contiguous array on {self.device.name}")
        source.check_free()
        if source.size:
            device, numpy = self.device, self.numpy
            whole = Region(0, (self._storage.nbytes,), (1,), 1)
            uses = (source.storage, source.region, False), (self._storage, whole, True)
            maker = None
            if device.recorder is not None:
                maker = Maker("a copy", lambda of: device.pinned_call(numpy, of[0]), (source,))
            device.submit(device.pinned_call(numpy, source), uses, maker)


def pinned(shape: int | tuple[int, ...], dtype: DType, device: Device) -> Pinned:
    """A pinned host buffer for copies from `device`; contents undefined until the first one.

    Raises:
        DeviceError: if there is not enough memory.
        TypeError: if dtype or device are none.
    """
    check_dtype(dtype)
    check_device(device)
    return Pinned((shape,) if isinstance(shape, int) else tuple(shape), dtype, device)
