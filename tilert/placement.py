"""Placements: the grid of a partition, the piece of each program, and the memory they cover.

Where programs do not simply write the piece of their own number, it is proven here that each
writes one inside the array, and no two the same (rules O2 and O7).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilert.errors import LaunchError, OwnershipError
from tilert.lattice import TooHardError, collision
from tilert.ownership import Region
from tilert.piece_map import PieceMap, Place

if TYPE_CHECKING:
    from tilert.array import Array

__all__ = ["Pieces", "Placement", "placed"]

Pieces = int | slice | tuple[int | slice, ...]
"""Pieces to write: one entry for each axis, the last ones may be missing."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the pieces of a partition lie.

    Attributes:
        grid: programs on each axis.
        place: the piece of each program, or None where it is the one of its own number.
        region: the memory that the pieces cover.
    """

    grid: tuple[int, ...]
    place: Place | None
    region: Region

    def run_time_axes(self, dyn: frozenset[int]) -> frozenset[int]:
        """Grid axes whose extent a specialisation need not know, if it knows all but `dyn`."""
        if self.place is None:
            return dyn
        fed = [[a for a, (_, steps) in enumerate(self.place) if steps[g]] for g in
               range(len(self.grid))]  # fmt: skip
        return frozenset(g for g, axes in enumerate(fed) if axes and dyn.issuperset(axes))


def placed(
    array: "Array",
    tile: tuple[int, ...],
    pieces: Pieces | None,
    map: PieceMap | Callable[..., Any] | None,
    grid: Sequence[int] | None,
) -> Placement:
    """The placement of a partition with `pieces` or `map`; see `Array.partition`.

    Raises:
        LaunchError: if they do not fit the array.
        OwnershipError: if a program would write outside the array, or two would write one piece.
    """
    counts = tuple([-(-n // size) for n, size in zip(array.shape, tile, strict=True)])
    if map is None:
        if grid is not None:
            raise LaunchError("O2 disjoint pieces: grid= belongs to map=; pieces give their own")
        place, extents = _chosen(() if pieces is None else pieces, counts)
    else:
        if pieces is not None:
            raise LaunchError(
                "O2 disjoint pieces: give pieces= or map=, not both; a map may add the first piece"
            )
        place, extents = _mapped(map, counts, grid)
    return Placement(extents, place, _covered(array, tile, place, extents))


def _chosen(pieces: Pieces, counts: tuple[int, ...]) -> tuple[Place, tuple[int, ...]]:
    """Pieces by slices, one for each axis."""
    keys = pieces if isinstance(pieces, tuple) else (pieces,)
    if len(keys) > len(counts):
        raise LaunchError(
            f"O2 disjoint pieces: pieces= names {len(keys)} axes, the array has {len(counts)}"
        )
    axes: list[tuple[int, tuple[int, ...]]] = []
    extents: list[int] = []
    for axis, count in enumerate(counts):
        key = keys[axis] if axis < len(keys) else slice(None)
        if isinstance(key, slice):
            chosen = range(*key.indices(count))
        elif isinstance(key, int) and not isinstance(key, bool) and -count <= key < count:
            chosen = range(key % count, key % count + 1)
        else:
            raise LaunchError(
                f"O2 disjoint pieces: pieces= takes slices and ints for axis {axis} with {count}"
                f" pieces, got {key!r}"
            )
        steps = [0] * len(counts)
        steps[axis] = chosen.step
        axes.append((chosen.start, tuple(steps)))
        extents.append(len(chosen))
    return tuple(axes), tuple(extents)


def _mapped(
    map: PieceMap | Callable[..., Any], counts: tuple[int, ...], grid: Sequence[int] | None
) -> tuple[Place, tuple[int, ...]]:
    found = map if isinstance(map, PieceMap) else PieceMap(map)
    if len(found.place) != len(counts):
        raise LaunchError(
            f"O7 indexed pieces: the map gives {len(found.place)} numbers, an array with"
            f" {len(counts)} axes needs {len(counts)}"
        )
    if grid is None:
        extents = _grid_of(found, counts)
    else:
        extents = tuple(grid)
        if len(extents) != found.rank or any(n < 0 for n in extents):
            raise LaunchError(
                f"O7 indexed pieces: the map takes {found.rank} coordinates, grid={list(extents)}"
                " does not give their extents"
            )
    if math.prod(extents):
        _check_inside(found.place, counts, extents)
        _check_injective(found.place, counts, extents)
    return found.place, extents


def _grid_of(map: PieceMap, counts: tuple[int, ...]) -> tuple[int, ...]:
    """All programs whose pieces lie in the array, where each axis follows one coordinate."""
    extents: list[int | None] = [None] * map.rank
    for (start, steps), count in zip(map.place, counts, strict=True):
        moving = [g for g, step in enumerate(steps) if step]
        if len(moving) > 1:
            raise LaunchError(
                "O7 indexed pieces: the map adds coordinates, so the grid does not follow from it;"
                " give grid=(...)"
            )
        for g in moving:
            room = count - 1 - start if steps[g] > 0 else start
            fits = max(room // abs(steps[g]) + 1, 0) if 0 <= start < count else 0
            known = extents[g]
            extents[g] = fits if known is None else min(known, fits)
    # A coordinate that no axis follows: its programs would all write the same pieces.
    if None in extents:
        raise LaunchError(
            f"O7 indexed pieces: no axis follows coordinate {extents.index(None)} of the map, so"
            " the programs along it would write one piece; leave it out, or give grid=(...)"
        )
    return tuple([n for n in extents if n is not None])


def _check_inside(place: Place, counts: tuple[int, ...], grid: tuple[int, ...]) -> None:
    for axis, ((start, steps), count) in enumerate(zip(place, counts, strict=True)):
        ends = [(step * (n - 1), n - 1) for step, n in zip(steps, grid, strict=True)]
        for extreme, at in (
            (start + sum(min(way, 0) for way, _ in ends), [n * (way < 0) for way, n in ends]),
            (start + sum(max(way, 0) for way, _ in ends), [n * (way > 0) for way, n in ends]),
        ):
            if not 0 <= extreme < count:
                raise OwnershipError(
                    f"O2 disjoint pieces: program {_shown(at)} would write piece {extreme} of axis"
                    f" {axis}, which has {count} pieces"
                )


def _check_injective(place: Place, counts: tuple[int, ...], grid: tuple[int, ...]) -> None:
    """Two programs write one piece exactly where its number in row-major order is the same."""
    strides = [0] * len(grid)
    weight = 1
    for (_, steps), count in zip(reversed(place), reversed(counts), strict=True):
        strides = [s + weight * step for s, step in zip(strides, steps, strict=True)]
        weight *= count
    try:
        pair = collision(strides, grid)
    except TooHardError:
        raise OwnershipError(
            f"O7 indexed pieces: it could not be proven that the map gives every program of the"
            f" grid {list(grid)} a piece of its own; use one whose steps nest"
        ) from None
    if pair is not None:
        one, two = pair
        piece = [s + sum(k * i for k, i in zip(ks, one, strict=True)) for s, ks in place]
        raise OwnershipError(
            f"O7 indexed pieces: the map is not injective: programs {_shown(one)} and"
            f" {_shown(two)} would both write piece {_shown(piece)}"
        )


def _shown(numbers: Sequence[int]) -> str:
    return f"({', '.join(map(str, numbers))}{',' if len(numbers) == 1 else ''})"


def _covered(array: "Array", tile: tuple[int, ...], place: Place, grid: tuple[int, ...]) -> Region:
    """The bytes of the pieces. Along an axis whose last piece is partial they count together with
    what lies between the first and the last, which matters only for steps of several pieces."""
    size = array.dtype.itemsize
    if not math.prod(grid) or not array.size:
        return Region(array.offset * size, (0,), (size,), size)
    start = array.offset
    shape: list[int] = []
    ways = [0] * len(grid)
    for (first, steps), extent, stride, length in zip(
        place, array.shape, array.strides, tile, strict=True
    ):
        ends = [k * (n - 1) for k, n in zip(steps, grid, strict=True)]
        stop = (first + sum(max(end, 0) for end in ends) + 1) * length
        if stop > extent:
            first += sum(min(end, 0) for end in ends)
            shape.append(extent - first * length)
        else:
            ways = [way + k * length * stride for way, k in zip(ways, steps, strict=True)]
            shape.append(length)
        start += first * length * stride
    moving = [(n, way) for n, way in zip(grid, ways, strict=True) if way]
    strides = (*[way for _, way in moving], *array.strides)
    extents = (*[n for n, _ in moving], *shape)
    return Region(start * size, extents, tuple([stride * size for stride in strides]), size)
