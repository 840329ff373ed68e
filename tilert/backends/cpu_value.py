"""What the cpu code generator knows about a value: its run-time form and when it exists."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilert.dtypes import DType

__all__ = ["UNKNOWN", "Form", "Grid"]


class _Unknown:
    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = _Unknown()


@dataclass(frozen=True)
class Form:
    """The run-time form of one IR value.

    Attributes:
        text: a name or literal in the generated code.
        shape: run-time shape: () for a uniform scalar (also standing for a tile of equal
            elements), the tile's axes, or the grid's axes before the tile's. An axis that is
            larger in the IR may have extent 1: its elements repeat.
        rank: axes of the tile in the IR.
        known: its value if the generator knows it, else UNKNOWN.
        hoisted: whether it is a view that exists when the launch is bound.
        fresh: number of the block whose code made it a new array that nothing else holds; or -1.
        bounds: inclusive range of a uniform integer, if known.
    """

    text: str
    shape: tuple[int, ...]
    dtype: DType
    rank: int
    known: Any = UNKNOWN
    hoisted: bool = False
    fresh: int = -1
    bounds: tuple[int, int] | None = None

    @property
    def is_known(self) -> bool:
        """Whether the value is a constant of the generated code."""
        return self.known is not UNKNOWN

    @property
    def nbytes(self) -> int:
        """Bytes of an array of this shape."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def uniform(self) -> bool:
        """Whether it is one Python or NumPy scalar."""
        return self.shape == ()


class Grid:
    """The launch grid as axes of run-time arrays: extents of 1 have no axis, factored ones two.

    A factored axis of n programs counts as [n // f, f], so that what is the same for f neighbours
    (the KV head of a group of heads, say) does not vary along the second.

    Attributes:
        full: programs on each grid axis. start: first coordinate on each.
        factors: f of the factored axes.
        extents: extent of each array axis.
        position: (first) array axis of each grid axis, -1 if dropped.
        axes: grid axis of each array axis.
    """

    def __init__(
        self, grid: tuple[int, ...], start: tuple[int, ...], factors: Mapping[int, int]
    ) -> None:
        self.full = grid
        self.start = start
        self.factors = factors
        self.position: list[int] = []
        self.axes: list[int] = []
        extents: list[int] = []
        for axis, n in enumerate(grid):
            self.position.append(-1 if n == 1 else len(extents))
            extents += self.split(axis) if n != 1 else ()
            self.axes += [axis] * (len(extents) - len(self.axes))
        self.extents = tuple(extents)

    def split(self, axis: int) -> tuple[int, ...]:
        """Extents of the array axes of a grid axis that has any."""
        f = self.factors.get(axis, 1)
        return (self.full[axis],) if f == 1 else (self.full[axis] // f, f)

    @property
    def rank(self) -> int:
        """Number of array axes that the grid takes."""
        return len(self.extents)

    def of(self, form: Form) -> tuple[int, ...]:
        """Extent of the value on every grid axis: 1 where it does not vary."""
        if self.rank and len(form.shape) == self.rank + form.rank:
            return form.shape[: self.rank]
        return (1,) * self.rank

    def tile(self, form: Form) -> tuple[int, ...]:
        """Run-time extent of every tile axis: 1 where elements repeat."""
        if form.rank == 0:
            return ()
        return form.shape[-form.rank :] if form.shape else (1,) * form.rank

    def varies(self, form: Form) -> set[int]:
        """Array axes of the grid on which the value differs."""
        return {axis for axis, n in enumerate(self.of(form)) if n != 1}

    def join(self, tile: tuple[int, ...], *extents: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of a value with all of `tile` that varies where any of `extents` does."""
        grid = tuple(max(column) for column in zip(*extents, strict=True)) if extents else ()
        return grid + tile if any(n != 1 for n in grid) else tile
