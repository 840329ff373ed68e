"""What makes two compile-time constants the same."""

import struct
from collections.abc import Hashable
from typing import Any

import numpy as np

from tilert.dtypes import DType

__all__ = ["constant_key"]

_bits = struct.Struct("<d").pack


class _Identity:
    """Equal to another for the same object alone, which it keeps alive."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def constant_key(value: Any) -> Hashable:
    """A key that is equal for equal constants.

    1, 1.0 and True are equal to Python and different here; so are 0.0 and -0.0. A NaN equals one of
    the same bits. Numbers, strings, dtypes and tuples go by value, every other object by identity.
    """
    kind = type(value)
    if kind is int or kind is DType:
        key: Hashable = value
    elif kind is float:
        key = _bits(value)
    elif kind in (bool, str, bytes, type(None)):
        key = kind, value
    elif kind is complex:
        key = kind, _bits(value.real), _bits(value.imag)
    elif kind is slice:
        key = kind, *map(constant_key, (value.start, value.stop, value.step))
    elif isinstance(value, tuple):
        key = kind, *map(constant_key, value)
    elif isinstance(value, np.generic) and not value.dtype.hasobject:
        key = kind, value.dtype.str, value.tobytes()
    else:
        key = _Identity(value)
    return key
