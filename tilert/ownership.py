"""Memory regions, their exact overlap, and the host-side checks of rules O3 and O5."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tilert.errors import MovedError, OwnershipError

__all__ = ["Hold", "Place", "Region", "caller", "check_alias", "check_free", "overlap"]

# Work bound of NumPy's exact overlap solver. Views made by slicing and permuting arrays are solved
# within a handful of steps; what is harder than this is reported as overlapping.
_MAX_WORK = 10_000

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class Place(NamedTuple):
    """A line of the user's program."""

    filename: str
    line: int

    def __str__(self) -> str:
        return f"{self.filename}:{self.line}"


def caller() -> Place:
    """The innermost line outside this package that led here."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_PACKAGE) and frame.f_back is not None:
        frame = frame.f_back
    return Place(frame.f_code.co_filename, frame.f_lineno)


@dataclass(frozen=True, slots=True)
class Region:
    """The bytes that a strided view covers inside one storage.

    Attributes:
        start: byte offset of element (0, ..., 0).
        shape: extents in elements.
        strides: in bytes.
        itemsize: bytes of one element.
        low, high: half-open byte range that holds every element; equal when the view is empty.
        dense: whether every byte of [low, high) belongs to the view.
        overlaps_itself: whether two indices may name one byte; exact where strides nest, as those
            of views do.
    """

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    low: int = field(init=False, compare=False)
    high: int = field(init=False, compare=False)
    dense: bool = field(init=False, compare=False)
    overlaps_itself: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        low = high = self.start
        count = 1
        for n, stride in zip(self.shape, self.strides, strict=True):
            count *= n
            if stride >= 0:
                high += (n - 1) * stride
            else:
                low += (n - 1) * stride
        if count == 0:
            low = high = self.start
        else:
            high += self.itemsize
        twice = count > 0 and _overlaps_itself(self)
        object.__setattr__(self, "low", low)
        object.__setattr__(self, "high", high)
        object.__setattr__(self, "overlaps_itself", twice)
        object.__setattr__(self, "dense", high - low == count * self.itemsize and not twice)


def _overlaps_itself(region: Region) -> bool:
    reach = region.itemsize
    for stride, n in sorted(zip(map(abs, region.strides), region.shape, strict=True)):
        if n > 1:
            if stride < reach:
                return True
            reach += (n - 1) * stride
    return False


class _Geometry:
    """Gives a region to NumPy's overlap solver, which does not touch the memory."""

    def __init__(self, region: Region, base: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (base + region.start, False),
            "typestr": f"|V{region.itemsize}",
            "shape": region.shape,
            "strides": region.strides,
        }


def overlap(a: Region, b: Region) -> bool:
    """Whether two regions of one storage have a byte in common.

    Exact; only a pair beyond the solver's work bound is taken to overlap.
    """
    if a.high <= b.low or b.high <= a.low or a.low == a.high or b.low == b.high:
        return False
    if a.dense and b.dense:
        return True
    # Any base keeps the addresses positive: negative strides stay above `low`.
    base = 4096 - min(a.low, b.low)
    one: Any = np.asarray(_Geometry(a, base))
    two: Any = np.asarray(_Geometry(b, base))
    try:
        return bool(np.shares_memory(one, two, max_work=_MAX_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


@dataclass(eq=False, slots=True)
class Hold:
    """A region that has moved away from its array, and where it went.

    op: name of the kernel whose op holds it, or None while only a partition does.
    """

    region: Region
    op: str | None
    place: Place

    def __str__(self) -> str:
        if self.op is None:
            return (
                f"a partition made at {self.place}; pass it to a kernel and use what the op"
                " returns, or drop it"
            )
        return f"op '{self.op}' created at {self.place}; use what its .run() or .sync() returns"


def check_free(holds: Sequence[Hold], region: Region) -> None:
    """Rule O5: refuse to use memory that an op holds.

    Raises:
        MovedError: if one of `holds` overlaps `region`.
    """
    for hold in holds:
        if overlap(hold.region, region):
            raise MovedError(f"O5 move: array of shape {list(region.shape)} is held by {hold}")


def check_alias(kernel: str, written: str, mut: Region, name: str, other: Region) -> None:
    """Rule O3 for one `Mut` and one other argument on the same storage.

    Raises:
        OwnershipError: if they have a byte in common.
    """
    if overlap(mut, other):
        raise OwnershipError(
            f"O3 alias xor mutate: argument '{name}' of kernel '{kernel}' overlaps the memory"
            f" that '{written}' writes; copy one of them into its own array"
        )
