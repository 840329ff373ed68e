"""What names stand for while a kernel is traced, besides plain Python constants and IR values."""

from dataclasses import dataclass
from enum import Enum
from types import EllipsisType, ModuleType, NoneType
from typing import Any

import numpy as np

from tilert.dtypes import DType
from tilert.frontend.inline import Inline
from tilert.ir import Param, Value
from tilert.language import Builtin

__all__ = [
    "CONSTANTS",
    "PROXIES",
    "BoundMethod",
    "MutArg",
    "RefArg",
    "Span",
    "TileIndex",
    "as_tile",
    "describe",
    "shown",
]


@dataclass(frozen=True)
class TileIndex:
    """The number of a block of `size` elements along an axis."""

    number: "Value | int"
    size: int


@dataclass(frozen=True)
class Span:
    """A window of `size` elements that begins at any scalar `start`."""

    start: "Value | int"
    size: int


@dataclass(frozen=True)
class RefArg:
    """A `Ref` parameter."""

    param: Param


@dataclass(frozen=True)
class MutArg:
    """A `Mut` parameter."""

    param: Param


@dataclass(frozen=True)
class BoundMethod:
    """`value.name`, about to be called."""

    owner: Any
    name: str


PROXIES = (TileIndex, Span, RefArg, MutArg, BoundMethod, Builtin, Inline)
"""What takes no arithmetic, comparison or truth value."""

CONSTANTS = (
    int,
    float,
    complex,
    str,
    bytes,
    NoneType,
    tuple,
    frozenset,
    slice,
    type,
    DType,
    Enum,
    EllipsisType,
    np.generic,
)
"""What never changes, and so may be computed with while a kernel is compiled."""


def shown(number: float) -> str:
    """A number as text; Python refuses to write out very long ints."""
    if isinstance(number, int) and number.bit_length() > 256:
        return f"of {number.bit_length()} bits"
    return repr(number)


def as_tile(x: Any, mut: str = "y") -> str:
    """How an array would be made a tile, as the end of a message; "" for what has none."""
    if isinstance(x, MutArg):
        return f"; {x.param.name}.load() reads the piece"
    if not isinstance(x, RefArg):
        return ""
    name = x.param.name
    return (
        f"; {name}[...] reads a tile of it, {name}.tile_like({mut}) the one at the piece of a Mut"
        f" {mut}"
    )


def describe(x: Any) -> str:
    """What a person would call a traced value."""
    if isinstance(x, Value):
        article = "an" if x.dtype.name[0] == "i" else "a"
        return f"{article} {x.dtype.name} scalar" if not x.shape else f"a tile {x.type}"
    if isinstance(x, TileIndex):
        return f"a tile index of size {x.size}"
    if isinstance(x, Span):
        return "a span"
    if isinstance(x, RefArg):
        return f"the array '{x.param.name}'"
    if isinstance(x, MutArg):
        return f"the Mut '{x.param.name}'"
    if isinstance(x, BoundMethod):
        return f"the method .{x.name}"
    if isinstance(x, Builtin):
        return f"the function {x.name}"
    if isinstance(x, Inline):
        return f"the function {x.source.name}"
    if isinstance(x, ModuleType):
        return f"the module {x.__name__}"
    if isinstance(x, tuple):
        return f"a tuple of {len(x)}"
    if isinstance(x, slice):
        return "a slice"
    if x is None:
        return "None"
    if isinstance(x, int | float):
        return f"{type(x).__name__} {shown(x)}"
    if isinstance(x, str):
        return f"{type(x).__name__} {x!r}"
    if isinstance(x, list | dict | set):
        return f"a {type(x).__name__}"
    return f"'{getattr(x, '__name__', None) or getattr(x, 'name', None) or type(x).__name__}'"
