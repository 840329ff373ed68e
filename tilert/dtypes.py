"""Element types of arrays and tiles."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

__all__ = [
    "DTYPES",
    "DType",
    "bf16",
    "bool_",
    "check_dtype",
    "dtype_of",
    "f8e4m3",
    "f8e5m2",
    "f16",
    "f32",
    "i8",
    "i32",
    "i64",
    "promote",
    "u8",
    "u32",
]


@dataclass(frozen=True)
class DType:
    """An element type.

    Attributes:
        name: its name in kernels and messages.
        kind: "f" float, "i" signed, "u" unsigned, "b" bool.
        bits: size of one element in memory (bool takes 8).
    """

    name: str
    kind: str
    bits: int

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.bits // 8

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype that stores it (bf16 and the 8-bit floats through ml_dtypes)."""
        return _NUMPY[self.name]

    @property
    def is_float(self) -> bool:
        """Whether it is a floating-point type."""
        return self.kind == "f"

    @property
    def is_narrow(self) -> bool:
        """Whether it is a float that operations widen to f32, rounding their result once."""
        return self.kind == "f" and self.bits < 32

    @property
    def largest(self) -> float:
        """The largest finite number of the type."""
        if self.kind == "f":
            info: Any = ml_dtypes.finfo  # It has no annotations.
            return float(info(self.numpy).max)
        return 1 if self.kind == "b" else (1 << (self.bits - (self.kind == "i"))) - 1

    @property
    def is_int(self) -> bool:
        """Whether it is an integer type (bool is not)."""
        return self.kind in "iu"

    def __repr__(self) -> str:
        return self.name


f32 = DType("f32", "f", 32)
bf16 = DType("bf16", "f", 16)
f16 = DType("f16", "f", 16)
f8e4m3 = DType("f8e4m3", "f", 8)
f8e5m2 = DType("f8e5m2", "f", 8)
i64 = DType("i64", "i", 64)
i32 = DType("i32", "i", 32)
i8 = DType("i8", "i", 8)
u32 = DType("u32", "u", 32)
u8 = DType("u8", "u", 8)
bool_ = DType("bool", "b", 8)

_NUMPY: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
    "f8e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "f8e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "i64": np.dtype(np.int64),
    "i32": np.dtype(np.int32),
    "i8": np.dtype(np.int8),
    "u32": np.dtype(np.uint32),
    "u8": np.dtype(np.uint8),
    "bool": np.dtype(np.bool_),
}
DTYPES = (f32, bf16, f16, f8e4m3, f8e5m2, i64, i32, i8, u32, u8, bool_)
_BY_NUMPY = {_NUMPY[dtype.name]: dtype for dtype in DTYPES}


def check_dtype(dtype: object) -> None:
    """Refuse what is no dtype.

    Raises:
        TypeError: naming the dtype that was meant, if it is a NumPy one.
    """
    if isinstance(dtype, DType):
        return
    try:
        meant = _BY_NUMPY.get(np.dtype(dtype)) if dtype is not None else None  # type: ignore[call-overload]
    except (TypeError, ValueError):
        meant = None
    hint = f"; use tilert.{meant.name}{'_' if meant.name == 'bool' else ''}" if meant else ""
    shown = dtype.__name__ if isinstance(dtype, type) else repr(dtype)
    raise TypeError(f"expected a dtype such as tilert.f32, got {shown}{hint}")


# By what arrays of a type that kernels have not are usually converted to.
_NEAR = {
    "float64": "np.float32",
    "longdouble": "np.float32",
    "int16": "np.int32",
    "uint16": "np.uint32",
    "uint64": "np.int64",
}


def dtype_of(dtype: np.dtype[Any]) -> DType:
    """The tilert dtype of a NumPy dtype.

    Raises:
        TypeError: if kernels have no such type.
    """
    try:
        return _BY_NUMPY[np.dtype(dtype)]
    except KeyError:
        known = ", ".join(sorted(d.name for d in _BY_NUMPY.values()))
        near = _NEAR.get(np.dtype(dtype).name)
        hint = f"; .astype({near}) converts" if near else ""
        raise TypeError(f"numpy dtype {dtype} has no tilert type; known: {known}{hint}") from None


def promote(a: DType, b: DType) -> DType | None:
    """The common type of two operands, or None where a cast must be written.

    Floats take the wider type, two of one width give f32; everything else must agree.
    """
    if a == b:
        return a
    if a.is_float and b.is_float:
        if a.bits == b.bits:
            return f32
        return a if a.bits > b.bits else b
    return None
