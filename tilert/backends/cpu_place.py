"""Pieces of a Mut whose programs do not write the piece of their own number."""

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tilert.backends.cpu_value import Form
from tilert.dtypes import i32
from tilert.ir import Param

if TYPE_CHECKING:
    from tilert.backends.cpu_emit import Emitter

__all__ = ["accumulate", "piece_number", "store_placed"]


def piece_number(em: "Emitter", param: Param, axis: int) -> Form:
    """The number of each program's piece along an axis of the array."""
    if param.place is None:
        return em.program(axis)
    start, steps = param.place[axis]
    known: NDArray[np.int32] = np.asarray(start, np.int32)
    for g, step in enumerate(steps):
        if step:
            known = known + np.int32(step) * np.asarray(em.program(g).known, np.int32)
    if known.ndim == 0:
        return Form(str(int(known)), (), i32, 0, known=int(known))
    return Form(em.constant(known), known.shape, i32, 0, known=known)


def store_placed(
    em: "Emitter", param: Param, extents: tuple[int, ...], value: Form, mask: str
) -> None:
    """Writes `value` to every program's own piece: one assignment where all pieces are whole."""
    tile, grid = param.tile or (), em.grid.extents
    numbers = [np.asarray(piece_number(em, param, axis).known) for axis in range(len(tile))]
    name = f"a{param.position}"
    whole = all(
        (int(n.max(initial=0)) + 1) * size <= extent
        for n, size, extent in zip(numbers, tile, extents, strict=True)
    )
    if whole:
        target = em.hoist(f"affine_view({name}, {_starts(numbers, tile)}, {_dims(em, param)})")
        if em.mask is None:
            em.line(f"{target}[...] = {value.text}")
        else:
            em.line(f"assign({target}, {value.text}, {mask}, {len(tile)}, ())")
        return
    full = em.materialize(value, grid + tile)
    places = em.constant(np.stack([np.broadcast_to(n, grid) for n in numbers], -1))
    em.line(f"assign_pieces({name}, {places}, {tile}, {full}, {mask})")


def accumulate(em: "Emitter", param: Param, value: Form, rows: Form | None) -> None:
    """Updates every program's own piece, one program after the other: pieces may be the same."""
    tile, grid = param.tile or (), em.grid.extents
    mask = "None"
    if em.mask is not None:
        mask = em.let(f"expand_mask({em.mask.text}, {grid})")
    starts = []
    for axis, size in enumerate(tile):
        number = rows if axis == 0 and rows is not None else piece_number(em, param, axis)
        starts.append(f"{number.text} * {size}" if size > 1 else number.text)
    ufunc = {"add": "add", "max": "maximum", "min": "minimum"}[param.accumulate]
    full = em.materialize(value, grid + tile)
    # Scalars have no shape to broadcast from: then the value is that of one program.
    places = f"({''.join(f'{s}, ' for s in starts)})"
    # An index for each axis, the value and whether it counts, of every element.
    passing = math.prod(grid + tile) * (8 * len(tile) + value.dtype.itemsize + 1)
    em.line(f"accumulate({ufunc}, a{param.position}, {places}, {tile}, {full}, {mask})", passing)


def _starts(numbers: list[NDArray[np.int32]], tile: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([int(n.flat[0]) * size for n, size in zip(numbers, tile, strict=True)])


def _dims(em: "Emitter", param: Param) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
    """The grid's axes, moving through the array as the map says, then the tile's."""
    tile, place = param.tile or (), param.place or ()
    grid = [
        (n, tuple([(axis, place[axis][1][g] * size) for axis, size in enumerate(tile)
                   if g < len(place[axis][1]) and place[axis][1][g]]))
        for g, n in zip(em.grid.axes, em.grid.extents, strict=True)
    ]  # fmt: skip
    return (*grid, *[(size, ((axis, 1),)) for axis, size in enumerate(tile)])
