"""Memory regions, their exact overlap, and the host-side checks of rules O3 and O5."""

import math
import os
import weakref
from collections.abc import Iterable
from sys import _getframe
from types import CodeType
from typing import Protocol, TypeAlias

from tilert.errors import MovedError, OwnershipError
from tilert.lattice import TooHardError, collision, solve

__all__ = [
    "At", "Hold", "Holder", "Place", "Region", "caller", "check_alias", "check_free", "covers",
    "overlap", "where",
]  # fmt: skip

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


At: TypeAlias = tuple[CodeType, int]
"""What a `Place` is made of, for what few ever ask the place of: code, and how far it had come."""


class Place:
    """A line of the user's program. Which line it is, is found out when somebody asks."""

    __slots__ = ("_at", "_code")

    def __init__(self, code: CodeType, at: int) -> None:
        self._code = code
        self._at = at

    @property
    def filename(self) -> str:
        """The file."""
        return self._code.co_filename

    @property
    def line(self) -> int:
        """The line, from 1."""
        for start, end, line in self._code.co_lines():
            if start <= self._at < end and line is not None:
                return line
        return self._code.co_firstlineno

    def __str__(self) -> str:
        return f"{self.filename}:{self.line}"


# Files of programs, as far as they are known.
_other_files: set[str] = set()


def where(skip: int = 1) -> At:
    """Where the innermost line outside this package is that led here; see `caller`."""
    frame = _getframe(skip)
    code = frame.f_code
    while (name := code.co_filename) not in _other_files:
        if not name.startswith(_PACKAGE):
            _other_files.add(name)
        elif frame.f_back is None:
            break
        else:
            frame = frame.f_back
            code = frame.f_code
    return code, frame.f_lasti


def caller(skip: int = 1) -> Place:
    """The innermost line outside this package that led here, without looking at `skip` frames."""
    return Place(*where(skip + 1))


class Region:
    """The bytes that a strided view covers inside one storage.

    Attributes:
        start: byte offset of element (0, ..., 0).
        shape: extents in elements.
        strides: in bytes.
        itemsize: bytes of one element.
        low, high: half-open byte range that holds every element; equal when the view is empty.
        dense: whether every byte of [low, high) belongs to the view.
        overlaps_itself: whether two indices name one byte; exact, and True where that is too much
            work to find out.
    """

    __slots__ = (
        "dense",
        "high",
        "itemsize",
        "low",
        "overlaps_itself",
        "shape",
        "start",
        "strides",
    )

    def __init__(
        self, start: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
    ) -> None:
        self.start = start
        self.shape = shape
        self.strides = strides
        self.itemsize = itemsize
        self.low = start
        self.dense = True
        self.overlaps_itself = False
        if 0 in shape:
            self.high = start
            return
        # Most views are row-major, without gaps.
        reach = itemsize
        for n, stride in zip(shape[::-1], strides[::-1], strict=True):
            if n != 1:
                if stride != reach:
                    self._measure()
                    return
                reach *= n
        self.high = start + reach

    def _measure(self) -> None:
        low = high = self.start
        for n, stride in zip(self.shape, self.strides, strict=True):
            if stride >= 0:
                high += (n - 1) * stride
            else:
                low += (n - 1) * stride
        self.low = low
        self.high = high + self.itemsize
        self.overlaps_itself = _overlaps_itself(self)
        size = math.prod(self.shape) * self.itemsize
        self.dense = self.high - low == size and not self.overlaps_itself

    def _key(self) -> tuple[object, ...]:
        return self.start, self.shape, self.strides, self.itemsize

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Region) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"Region{self._key()}"


def _overlaps_itself(region: Region) -> bool:
    try:
        return collision(region.strides, region.shape, region.itemsize) is not None
    except TooHardError:
        return True


def overlap(a: Region, b: Region) -> bool:
    """Whether two regions of one storage have a byte in common.

    Exact; only a pair beyond the bound on work of `tilert.lattice` is taken to overlap.
    """
    if a.high <= b.low or b.high <= a.low or a.low == a.high or b.low == b.high:
        return False
    if a.dense and b.dense:
        return True
    # Counted from opposite ends, the steps of both add up to the way between those ends.
    way = b.high - 1 - a.low
    steps = [(abs(s), n - 1) for s, n in zip(a.strides, a.shape, strict=True) if s and n > 1]
    steps += [(abs(s), n - 1) for s, n in zip(b.strides, b.shape, strict=True) if s and n > 1]
    size = a.itemsize
    if size == b.itemsize and (way + 1) % size == 0 and all(s % size == 0 for s, _ in steps):
        # Elements coincide or are apart: count in elements.
        steps = [(s // size, most) for s, most in steps]
        way = (way + 1) // size - 1
    else:
        steps.append((1, size - 1 + b.itemsize - 1))
    try:
        return solve(steps, way) is not None
    except TooHardError:
        return True


def covers(whole: Region, part: Region) -> bool:
    """Whether every byte of `part` is one of `whole`, as far as that is simple to see.

    Of regions of one storage. Where `whole` has gaps: whether `part` is made of it by indexing.
    """
    if part.low == part.high or whole == part:
        return True
    if part.low < whole.low or part.high > whole.high:
        return False
    if whole.dense:
        return True
    if part.itemsize != whole.itemsize:
        return False
    # The index in each axis of `whole` where `part` begins, and how far it goes from there.
    axes = [(s, n) for s, n in zip(whole.strides, whole.shape, strict=True) if n > 1 and s]
    axes.sort(reverse=True)
    left = part.start - whole.start
    if left < 0 or any(stride < 0 for stride, _ in axes):
        return False
    low: list[int] = []
    for stride, n in axes:
        low.append(min(left // stride, n - 1))
        left -= low[-1] * stride
    if left:
        return False
    high = list(low)
    for step, n in zip(part.strides, part.shape, strict=True):
        if n == 1 or not step:
            continue
        found = [at for at, (stride, _) in enumerate(axes) if step % stride == 0]
        if not found:
            return False
        at = found[0]
        way = step // axes[at][0] * (n - 1)
        low[at] += min(way, 0)
        high[at] += max(way, 0)
    return all(a >= 0 and b < n for a, b, (_, n) in zip(low, high, axes, strict=True))


class Holder(Protocol):
    """Who has memory that has moved away from its array: a partition, or a loan."""

    @property
    def region(self) -> Region:
        """The memory."""

    @property
    def reading(self) -> bool:
        """Whether others may read it meanwhile, because the holder only reads it."""

    @property
    def whose(self) -> str:
        """Who has it and how it comes back, for messages."""


Hold: TypeAlias = "weakref.ref[Holder]"
"""That somebody holds memory, for as long as they live."""


def check_free(holds: Iterable[Hold], region: Region, write: bool = True) -> None:
    """Rule O5: refuse to use memory that an op, a partition or a borrower holds.

    Args:
        write: whether the use may write; memory that is lent to be read may be read.

    Raises:
        MovedError: if one of `holds` is in the way.
    """
    for hold in holds:
        whose = _in_the_way(hold(), region, write)
        if whose:
            raise MovedError(f"O5 move: array of shape {list(region.shape)} is held by {whose}")


def _in_the_way(holder: Holder | None, region: Region, write: bool) -> str:
    """Whose it is, or "". A function: the traceback of the error must not keep the holder."""
    if holder is None or (holder.reading and not write) or not overlap(holder.region, region):
        return ""
    return holder.whose


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
