"""Tensors as they lie in a checkpoint, read piece by piece into memory of whoever wants them."""

import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.errors import LoadError
from models.files import reason
from models.weights import Shape

__all__ = ["FileTensor", "Held", "OpenFile", "Stored"]

Bytes = NDArray[np.uint8]


class Stored(ABC):
    """A tensor of a checkpoint. Any number of threads may read it.

    Attributes:
        shape: its extents.
        dtype: float32, float16 or bfloat16 (`ml_dtypes`).
    """

    shape: Shape
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @abstractmethod
    def read(self, start: int, buffer: Bytes) -> None:
        """Fill a buffer with bytes from `start` on, in row-major order. Raises LoadError."""

    def read_as(self, dtype: np.dtype[Any], start: int, buffer: Bytes) -> None:
        """As `read`, of the tensor rounded to another type; `start` counts bytes of that."""
        if dtype == self.dtype:
            self.read(start, buffer)
            return
        own, other = self.dtype.itemsize, dtype.itemsize
        raw = np.empty(buffer.size // other * own, np.uint8)
        self.read(start // other * own, raw)
        buffer.view(dtype)[:] = raw.view(self.dtype).astype(dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """All of it. Raises LoadError."""
        raw = np.empty(self.nbytes, np.uint8)
        self.read(0, raw)
        array = raw.view(self.dtype).reshape(self.shape)
        return array if dtype is None else array.astype(dtype, copy=False)


class Held(Stored):
    """A tensor that `make` gives when it is first read, such as one that is decoded."""

    def __init__(
        self, shape: Shape, dtype: np.dtype[Any], make: Callable[[], NDArray[Any]]
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self._make: Callable[[], NDArray[Any]] = make
        self._lock = threading.Lock()
        self._raw: Bytes | None = None

    def read(self, start: int, buffer: Bytes) -> None:
        """See `Stored`."""
        with self._lock:
            if self._raw is None:
                made = np.ascontiguousarray(self._make(), self.dtype)
                self._raw = made.reshape(-1).view(np.uint8)
        np.copyto(buffer, self._raw[start : start + buffer.size])


class OpenFile:
    """A file open for reading for as long as this object lives. Raises LoadError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise LoadError(f"{path}: cannot be read: {reason(error)}") from None

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


class FileTensor(Stored):
    """A tensor whose bytes lie in one piece in a file, at an offset."""

    def __init__(self, shape: Shape, dtype: np.dtype[Any], file: OpenFile, offset: int) -> None:
        self.shape, self.dtype = shape, dtype
        self._file, self._offset = file, offset

    def read(self, start: int, buffer: Bytes) -> None:
        """See `Stored`."""
        done = 0
        while done < buffer.size:
            try:
                # Not through a mapping: a file that is cut short meanwhile would end the process.
                count = os.preadv(
                    self._file.number, [buffer[done:].data], self._offset + start + done
                )
            except OSError as error:
                raise LoadError(f"{self._file.path}: cannot be read: {reason(error)}") from None
            if count == 0:
                raise LoadError(f"{self._file.path}: the file was cut short while it was in use")
            done += count
