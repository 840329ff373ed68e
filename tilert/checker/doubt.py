"""Doubt: for each element of a tile, the unwritten element of memory that it may depend on.

A tile without doubt has None, else i64 of the tile's shape: 0, or the number of an origin times
2^40 plus an element's place in its array. Where several come together the largest stands for all.
Doubt ends where a `where` does not choose it, so that padding may be loaded and left out.
"""

from collections.abc import Callable, Sequence

import numpy as np

from tilert.checker.operations import Tile
from tilert.dtypes import DType, i64
from tilert.ir import Op
from tilert.ops import ELEMENTWISE

__all__ = ["Doubt", "doubted", "mark", "origin"]

Doubt = Tile | None
_PLACES = 40
_MOVES = ("broadcast", "reshape", "transpose", "permute", "slice", "concat")


def mark(number: int, places: Tile) -> Tile:
    """Doubt of the elements at these places of an array, read by the origin of that number."""
    return np.int64(number << _PLACES) + places.astype(np.int64)


def origin(code: int) -> tuple[int, int]:
    """The number of the origin, and the place in its array."""
    return code >> _PLACES, code & (1 << _PLACES) - 1


def doubted(
    op: Op,
    values: Sequence[Tile],
    doubts: Sequence[Doubt],
    moved: Callable[[Op, DType], Callable[..., list[Tile]]],
) -> list[Doubt]:
    """Doubt of the results of an operation that touches no memory.

    Args:
        moved: as `operations.operation`.
    """
    if all(d is None for d in doubts):
        return [None] * len(op.results)
    known = [
        np.zeros(a.shape, np.int64) if d is None else d
        for a, d in zip(op.args, doubts, strict=True)
    ]
    return [_kept(d) for d in _spread(op, values, known, moved)]


def _kept(doubt: Tile) -> Doubt:
    return doubt if doubt.any() else None


def _spread(
    op: Op,
    values: Sequence[Tile],
    doubts: Sequence[Tile],
    moved: Callable[[Op, DType], Callable[..., list[Tile]]],
) -> list[Tile]:
    shapes = [r.shape for r in op.results]
    if op.name == "select":
        chosen = np.where(values[0], doubts[1], doubts[2])
        return [np.asarray(np.maximum(doubts[0], chosen))]
    if op.name in ELEMENTWISE:
        return [np.asarray(np.maximum.reduce(list(doubts)))]
    if op.name in _MOVES:
        return moved(op, i64)(*doubts)
    x = doubts[0]
    if op.name == "reduce":
        return [np.asarray(x.max(op.attrs["axis"]))]
    if op.name == "scan":
        return [np.maximum.accumulate(x, op.attrs["axis"])]
    if op.name == "sort":
        line = x.max(op.attrs["axis"], keepdims=True)
        return [np.broadcast_to(line, shape) for shape in shapes]
    if op.name == "mma":
        lines = np.maximum(x.max(1)[:, None], doubts[1].max(0)[None, :])
        return [np.maximum(lines, doubts[2])]
    if op.name == "take":
        axis, n = op.attrs["axis"], x.shape[op.attrs["axis"]]
        index = values[1].astype(np.int64)
        found = np.take_along_axis(x, np.clip(index, 0, n - 1), axis)
        return [np.maximum(np.where((index >= 0) & (index < n), found, 0), doubts[1])]
    worst = max(int(d.max()) for d in doubts)
    return [np.full(shape, worst, np.int64) for shape in shapes]
