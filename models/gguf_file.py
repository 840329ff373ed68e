"""The GGUF container: metadata and where each tensor lies, over a memory-mapped file.

Layout: the GGUF specification (ggml repository, docs/gguf.md). The `gguf` package's own reader
makes an object for every string of a vocabulary and takes seconds for what takes milliseconds
here; its constants and its dequantisation are used as they are.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize
from numpy.typing import NDArray

from models.errors import LoadError
from models.fields import integer, naming
from models.files import is_file, reason

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_RANK = 4
_SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}
_NATIVE: dict[GGMLQuantizationType, np.dtype[Any]] = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class GGUFTensor:
    """A stored tensor: NumPy shape (GGUF lists it reversed), type and raw bytes of each row."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    rows: NDArray[np.uint8]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of what `numpy` returns."""
        return _NATIVE.get(self.type, np.dtype(np.float32))

    @property
    def nbytes(self) -> int:
        """Bytes of what `numpy` returns."""
        return math.prod(self.shape) * self.dtype.itemsize

    def numpy(self, order: NDArray[np.intp] | None = None) -> NDArray[Any]:
        """The values: F32, F16 and BF16 as they are stored, anything else dequantised to float32.

        `order` lists row numbers and picks the rows of a matrix in that order.
        """
        rows = self.rows if order is None else self.rows[order]
        if self.type in _NATIVE:
            return rows.view(_NATIVE[self.type]).reshape(self.shape)
        return np.asarray(dequantize(rows, self.type), np.float32).reshape(self.shape)


class GGUFFile:
    """Reads a GGUF file's metadata (`metadata`) and tensor list (`tensors`).

    Raises LoadError naming the file: not GGUF, unknown version, big-endian, truncated, or a tensor
    of a type that cannot be dequantised.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        if not is_file(path):
            raise LoadError(f"{path}: there is no such file")
        try:
            self._data: NDArray[np.uint8] = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        except (OSError, ValueError) as error:
            raise LoadError(f"{path}: cannot be read: {reason(error)}") from None
        self._bytes = memoryview(self._data)  # type: ignore[arg-type]
        self._at = 0
        try:
            self._read()
        except (struct.error, ValueError, OverflowError, KeyError, RecursionError) as error:
            raise LoadError(f"{path}: truncated or damaged GGUF file ({reason(error)})") from None

    def _read(self) -> None:
        if self._take(4) != _MAGIC:
            raise LoadError(f"{self.path}: this is not a GGUF file")
        version = self._scalar("<I")
        if version not in _VERSIONS:
            hint = " (big-endian?)" if version & 0xFFFF == 0 else ""
            raise LoadError(f"{self.path}: GGUF version {version}{hint} is not supported")
        tensors, pairs = self._scalar("<Q"), self._scalar("<Q")
        for _ in range(pairs):
            key = self._string()
            self.metadata[key] = self._value(GGUFValueType(self._scalar("<I")))
        described = [self._describe() for _ in range(tensors)]
        with naming(self.path):
            alignment = integer(self.metadata, "general.alignment", _DEFAULT_ALIGNMENT)
        start = -(-self._at // alignment) * alignment
        for name, shape, kind, offset in described:
            if name in self.tensors:
                raise LoadError(f"{self.path}: tensor {name} is there twice")
            self.tensors[name] = self._tensor(name, shape, kind, start + offset)

    def _describe(self) -> tuple[str, tuple[int, ...], int, int]:
        name, rank = self._string(), self._scalar("<I")
        if rank > _MAX_RANK:
            raise ValueError(f"tensor {name} has {rank} dimensions")
        shape = tuple(self._scalar("<Q") for _ in range(rank))[::-1]
        return name, shape, self._scalar("<I"), self._scalar("<Q")

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
        try:
            type_ = GGMLQuantizationType(kind)
        except ValueError:
            raise LoadError(f"{self.path}: tensor {name} has unknown type {kind}") from None
        block, size = GGML_QUANT_SIZES[type_]
        width = shape[-1] if shape else 1
        if width % block:
            raise ValueError(f"tensor {name}: rows of {width} do not divide into {block}s")
        row_bytes = width // block * size
        total = math.prod(shape[:-1]) * row_bytes
        raw = self._data[offset : offset + total]
        if raw.nbytes != total:
            raise ValueError(
                f"tensor {name} ends at byte {offset + total}, the file at {self._data.nbytes}"
            )
        return GGUFTensor(name, shape, type_, raw.reshape(-1, row_bytes))

    def _value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind != GGUFValueType.ARRAY:
            return self._scalar(_SCALARS[kind])
        item, count = GGUFValueType(self._scalar("<I")), self._scalar("<Q")
        if item in _SCALARS:
            dtype = np.dtype(_SCALARS[item])
            return np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()
        return [self._value(item) for _ in range(count)]

    def _string(self) -> str:
        return str(self._take(self._scalar("<Q")), "utf-8")

    def _scalar(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._bytes):
            raise ValueError(f"{count} bytes expected at {self._at} of {len(self._bytes)}")
        taken, self._at = self._bytes[self._at : end].tobytes(), end
        return taken
