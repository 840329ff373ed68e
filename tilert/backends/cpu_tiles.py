"""Helpers that generated cpu code calls: scans, order, elements by index; tile axes come last."""

from typing import Any

import numpy as np

__all__ = ["accumulate", "concat", "order", "take"]

Tile = Any


def accumulate(
    ufunc: Any, a: Tile, starts: tuple[Tile, ...], tile: tuple[int, ...], value: Tile, mask: Tile
) -> None:
    """Updates `a` by ufunc with value[program] from the element starts[...][program] on.

    `value` has the axes of the grid before those of the tile, `starts` and the mask over programs
    those of the grid. What lies outside the array is dropped.
    """
    unit = (1,) * len(tile)
    ok = np.asarray(True) if mask is None else mask.reshape(mask.shape + unit)
    places = []
    for axis, (start, size) in enumerate(zip(starts, tile, strict=True)):
        first = np.asarray(start)
        steps = np.arange(size).reshape((size, *unit[axis + 1 :]))
        place = first.reshape(first.shape + unit) + steps
        ok = ok & (place >= 0) & (place < a.shape[axis])
        places.append(place)
    value = np.asarray(value)
    ok = np.broadcast_to(ok, value.shape)
    index = tuple([np.broadcast_to(place, value.shape)[ok] for place in places])
    ufunc.at(a, index, value[ok])


def concat(axis: int, *parts: tuple[Tile, tuple[int, ...], Any]) -> Tile:
    """Tiles one after the other along `axis`, each spread to its shape first."""
    spread = [np.broadcast_to(np.asarray(x, dtype), shape) for x, shape, dtype in parts]
    return np.concatenate(spread, axis)


def take(x: Tile, index: Tile, axis: int) -> Tile:
    """x[index] along a negative `axis`, both of all axes; 0 where the index is outside."""
    n = x.shape[axis]
    ok = (index >= 0) & (index < n)
    safe = np.where(ok, index, 0)
    grid = x.ndim + axis
    lead = np.broadcast_shapes(x.shape[:grid], safe.shape[:grid])
    rest = np.broadcast_shapes(x.shape[grid + 1 :], safe.shape[grid + 1 :])
    x = np.broadcast_to(x, (*lead, n, *rest))
    safe = np.broadcast_to(safe, (*lead, safe.shape[axis], *rest))
    return np.where(ok, np.take_along_axis(x, safe, axis), np.zeros((), x.dtype))


def order(x: Tile, axis: int, descending: bool) -> Tile:
    """Where the elements in order were, i32; equal ones keep theirs and NaN is the largest."""
    if not descending:
        return np.argsort(x, axis, kind="stable").astype(np.int32)
    n = x.shape[axis]
    back = np.flip(np.argsort(np.flip(x, axis), axis, kind="stable"), axis)
    return (n - 1 - back).astype(np.int32)
