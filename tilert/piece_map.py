"""Piece maps: which piece of an array each program writes, where it is not the one of its own
number. They are affine, so that whether two programs share a piece is decided exactly (rule O7)."""

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from tilert.errors import OwnershipError

__all__ = ["Coordinate", "PieceMap", "Place"]

Place: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]
"""For each axis of the array: piece 0 + steps, as (start, a step for each program coordinate)."""


class Coordinate:
    """A program's coordinate, or a sum of coordinates times ints, while a map is read."""

    __slots__ = ("start", "steps")

    def __init__(self, start: int, steps: tuple[int, ...]) -> None:
        self.start = start
        self.steps = steps

    def __add__(self, other: Any) -> "Coordinate":
        if isinstance(other, Coordinate):
            steps = tuple([a + b for a, b in zip(self.steps, other.steps, strict=True)])
            return Coordinate(self.start + other.start, steps)
        return Coordinate(self.start + _whole(other, "+"), self.steps)

    def __mul__(self, other: Any) -> "Coordinate":
        by = _whole(other, "*")
        return Coordinate(self.start * by, tuple([step * by for step in self.steps]))

    def __neg__(self) -> "Coordinate":
        return self * -1

    def __sub__(self, other: Any) -> "Coordinate":
        return self + (-other if isinstance(other, Coordinate) else -_whole(other, "-"))

    def __rsub__(self, other: Any) -> "Coordinate":
        return (-self).__add__(other)

    __radd__ = __add__
    __rmul__ = __mul__

    def _refuse(self, *_: object) -> Any:
        raise _not_affine("//, % or a comparison")

    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __mod__ = __rmod__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __index__ = __and__ = __or__ = __xor__ = _refuse
    __lshift__ = __rshift__ = __pow__ = _refuse


class PieceMap:
    """An affine map from the coordinates of a program to the piece that it writes.

    Args:
        fn: takes the coordinates, gives one number for each axis of the array; it may add,
            subtract, and multiply by ints: `lambda i, j: (j, 2 * i + 1)`.

    Attributes:
        rank: number of coordinates.
        place: the map.

    Raises:
        OwnershipError: if the function computes anything else.
    """

    __slots__ = ("place", "rank")

    def __init__(self, fn: Callable[..., Any]) -> None:
        names = list(inspect.signature(fn).parameters)
        self.rank = len(names)
        units = [tuple([int(j == i) for j in range(self.rank)]) for i in range(self.rank)]
        given = fn(*[Coordinate(0, unit) for unit in units])
        numbers = given if isinstance(given, tuple) else (given,)
        axes = [n if isinstance(n, Coordinate) else Coordinate(0, (0,) * self.rank) + n for n in
                numbers]  # fmt: skip
        self.place: Place = tuple([(axis.start, axis.steps) for axis in axes])

    def __repr__(self) -> str:
        return f"PieceMap({self.place})"


def _whole(value: Any, what: str) -> int:
    if isinstance(value, Coordinate):
        raise _not_affine("a product of two coordinates")
    if isinstance(value, bool) or not isinstance(value, int):
        raise _not_affine(f"{what} with {type(value).__name__} {value!r}")
    return value


def _not_affine(what: str) -> OwnershipError:
    return OwnershipError(
        "O7 indexed pieces: a piece map adds coordinates, and multiplies them by ints; it has"
        f" {what}. What depends on data goes through partition_at and an index map"
    )
