"""DLPack capsules: what the standard's structures hold, read and made through ctypes."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilert.dtypes import DTYPES, DType
from tilert.loan import Loan

__all__ = ["CPU", "CUDA", "Tensor", "make_capsule", "take_capsule"]

CPU, CUDA = 1, 2
"""Device types of the standard."""

_READ_ONLY, _COPIED = 1, 2
# Type codes of the standard: int, uint, float, bfloat, bool, float8.
_CODES = {
    "i": 0,
    "u": 1,
    "f": 2,
    "b": 6,
    "bf16": 4,
    "f8e4m3": 10,
    "f8e5m2": 12,
}
_KIND_NAMES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
_TYPES = {(_CODES.get(d.name, _CODES[d.kind]), d.bits): d for d in DTYPES}
_NAMES = {v: k for k, v in _TYPES.items()}


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    """DLManagedTensor, of before version 1."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_KINDS: dict[bytes, type[_Managed] | type[_Versioned]] = {
    b"dltensor_versioned": _Versioned,
    b"dltensor": _Managed,
}
_api = ctypes.pythonapi
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_GetPointer.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
_api.PyCapsule_IsValid.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
_api.PyCapsule_SetName.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
_api.PyCapsule_New.restype = ctypes.py_object
_api.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


@dataclass(frozen=True)
class Tensor:
    """What a capsule says.

    Attributes:
        device: device type and number of the standard.
        dtype: element type, or None where kernels have no such type; `shown` names it then.
        strides: in elements.
        release: tells the producer that the memory is not used any more. To be called once.
    """

    address: int
    device: tuple[int, int]
    dtype: DType | None
    shown: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    read_only: bool
    release: Callable[[], None]


def take_capsule(capsule: Any) -> Tensor:
    """Read a capsule and take over the memory that it manages.

    Raises:
        TypeError: if it is no capsule of the standard, was used before, or has a later version.
    """
    # The names that a capsule points to live as long as this module.
    name = next((n for n in _KINDS if _api.PyCapsule_IsValid(id(capsule), n)), None)
    if name is None:
        raise TypeError("__dlpack__() gave no DLPack capsule, or one that was used already")
    pointer = _api.PyCapsule_GetPointer(id(capsule), name)
    managed = _KINDS[name].from_address(pointer)
    if isinstance(managed, _Versioned) and managed.major != 1:
        raise TypeError(f"DLPack {managed.major}.{managed.minor} is not known; 1.x is")
    t = managed.tensor
    shape = tuple(t.shape[: t.ndim]) if t.ndim else ()
    steps = tuple(t.strides[: t.ndim]) if t.ndim and t.strides else _row_major(shape)
    read_only = isinstance(managed, _Versioned) and bool(managed.flags & _READ_ONLY)
    code, bits, lanes = t.dtype.code, t.dtype.bits, t.dtype.lanes
    tensor = Tensor(
        (t.data or 0) + t.byte_offset,
        (t.device.type, t.device.id),
        _TYPES.get((code, bits)) if lanes == 1 else None,
        _KIND_NAMES.get(code, f"type {code} of ")
        + str(bits)
        + (f" x {lanes}" if lanes > 1 else ""),
        shape,
        steps,
        read_only,
        _release(pointer, managed.deleter),
    )
    _api.PyCapsule_SetName(id(capsule), _USED[name])
    return tensor


_USED = {b"dltensor": b"used_dltensor", b"dltensor_versioned": b"used_dltensor_versioned"}


def _release(pointer: int, deleter: int | None) -> Callable[[], None]:
    return (lambda: _Deleter(deleter)(pointer)) if deleter else (lambda: None)


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


# What the structures that consumers have point to, and the loans behind them, by address.
_lent: dict[int, tuple[Any, ...]] = {}


def _let_go(pointer: int) -> None:
    _lent.pop(pointer, None)


def _drop(capsule: int) -> None:
    """A capsule dies; if nobody took it over, the memory comes back."""
    for name in _KINDS:
        if _api.PyCapsule_IsValid(capsule, name):
            _let_go(_api.PyCapsule_GetPointer(capsule, name))


# What C calls. They live as long as the process, like whoever may call them.
_deleter = _Deleter(_let_go)
_destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_drop)


def make_capsule(loan: Loan, device: tuple[int, int], versioned: bool, copied: bool) -> Any:
    """A capsule of a lent array. The loan ends when its taker lets go.

    Args:
        device: device type and number of the standard.
        versioned: whether the taker knows DLPack 1, which says whether it may write.
        copied: whether the array is a copy made for the taker.
    """
    array = loan.array
    extents = (ctypes.c_int64 * max(array.ndim, 1))(*array.shape)
    strides = (ctypes.c_int64 * max(array.ndim, 1))(*array.strides)
    managed: _Managed | _Versioned
    if versioned:
        managed = _Versioned(major=1, minor=0)
        managed.flags = (0 if loan.write else _READ_ONLY) | (_COPIED if copied else 0)
    else:
        managed = _Managed()
    managed.deleter = ctypes.cast(_deleter, ctypes.c_void_p).value
    t = managed.tensor
    t.data = array.address if array.size else None
    t.device = _Device(*device)
    t.ndim = array.ndim
    t.dtype = _Type(*_NAMES[array.dtype], 1)
    t.shape = ctypes.cast(extents, ctypes.POINTER(ctypes.c_int64))
    t.strides = ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64))
    pointer = ctypes.addressof(managed)
    _lent[pointer] = (managed, extents, strides, loan)
    name = next(n for n, kind in _KINDS.items() if isinstance(managed, kind))
    return _api.PyCapsule_New(pointer, name, ctypes.cast(_destructor, ctypes.c_void_p))
