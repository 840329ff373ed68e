"""Stores of pieces: assignments into strided views of the array, cut at ragged ends."""

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from tilert.backends.cpu_place import store_placed
from tilert.backends.cpu_value import Form
from tilert.ir import Param

if TYPE_CHECKING:
    from tilert.backends.cpu_emit import Emitter

__all__ = ["store"]


@dataclass(frozen=True)
class _Run:
    """Neighbouring blocks of one axis that hold equally many elements.

    first: offset of the first block from the grid's start. count: blocks. length: elements of
    each block that lie inside the array.
    """

    first: int
    count: int
    length: int


def _runs(em: "Emitter", axis: int, extent: int, size: int) -> list[_Run]:
    start = em.grid.start[axis] if axis < len(em.grid.start) else 0
    count = em.grid.full[axis] if axis < len(em.grid.full) else 1
    whole = min(max(extent // size - start, 0), count)
    runs = [_Run(0, whole, size)] if whole else []
    rest = extent - (start + whole) * size
    if whole < count and rest > 0:
        runs.append(_Run(whole, 1, rest))
    return runs


def store(em: "Emitter", param: Param, extents: tuple[int, ...], value: Form) -> None:
    """Writes `value` to every program's own piece, where the emitter's mask holds."""
    mask = "None"
    if em.mask is not None:
        mask = em.let(f"expand_mask({em.mask.text}, {em.grid.extents})")
    if param.place is not None:
        store_placed(em, param, extents, value, mask)
        return
    tile = param.tile or ()
    lead = 1 if param.indexed else 0
    axes = range(lead, len(tile))
    if param.indexed and extents[0] == 0:
        return
    for runs in product(*(_runs(em, a, extents[a], tile[a]) for a in axes)):
        _store_runs(em, param, extents, value, mask, dict(zip(axes, runs, strict=True)))


def _cuts(em: "Emitter", value: Form, runs: dict[int, _Run], tile: tuple[int, ...]) -> str:
    """The subscript that cuts the value to the runs, or ""."""
    grid = list(em.grid.of(value)) if len(value.shape) > value.rank else []
    cut = [":"] * len(grid)
    for axis, run in runs.items():
        p = em.grid.position[axis] if axis < len(em.grid.position) else -1
        if grid and p >= 0 and grid[p] != 1 and run.count != em.grid.full[axis]:
            cut[p] = f"{run.first}:{run.first + run.count}"
    for axis, n in enumerate(em.grid.tile(value)):
        short = axis in runs and runs[axis].length != tile[axis] and n != 1
        cut.append(f":{runs[axis].length}" if short else ":")
    return f"[{', '.join(cut)}]" if value.shape and any(c != ":" for c in cut) else ""


def _mask_cut(em: "Emitter", runs: dict[int, _Run]) -> str:
    """The mask's programs that the runs cover, as a tuple of slices."""
    cut = ["slice(None)"] * em.grid.rank
    for axis, run in runs.items():
        p = em.grid.position[axis] if axis < len(em.grid.position) else -1
        if p >= 0 and run.count != em.grid.full[axis]:
            cut[p] = f"slice({run.first}, {run.first + run.count})"
    return f"({', '.join(cut)},)" if cut else "()"


def _target(em: "Emitter", param: Param, extents: tuple[int, ...], runs: dict[int, _Run]) -> str:
    """A hoisted view of the pieces: [rows of an indexed Mut], the grid, the tile."""
    tile = param.tile or ()
    starts = [0] * len(extents)
    rows = em.grid.position[0] if param.indexed else -1
    grid: list[tuple[int, tuple[tuple[int, int], ...]]] = [
        (1, ()) for p in range(em.grid.rank) if p != rows
    ]
    for axis, run in runs.items():
        known = axis < len(em.grid.position)
        starts[axis] = ((em.grid.start[axis] if known else 0) + run.first) * tile[axis]
        p = em.grid.position[axis] if known else -1
        if p >= 0:
            at = p - (0 <= rows < p)
            f = em.grid.factors.get(axis, 1)
            grid[at] = (run.count // f, ((axis, tile[axis] * f),))
            if f > 1:
                grid[at + 1] = (f, ((axis, tile[axis]),))
    dims = grid + [(run.length, ((axis, 1),)) for axis, run in runs.items()]
    if param.indexed:
        dims.insert(0, (extents[0], ((0, 1),)))
    whole = [(n, ((axis, 1),)) for axis, n in enumerate(extents)]
    name = f"a{param.position}"
    if dims == whole and not any(starts):
        return name
    return em.hoist(f"affine_view({name}, {tuple(starts)}, {tuple(dims)})")


def _store_runs(
    em: "Emitter",
    param: Param,
    extents: tuple[int, ...],
    value: Form,
    mask: str,
    runs: dict[int, _Run],
) -> None:
    tile = param.tile or ()
    target = _target(em, param, extents, runs)
    where = _mask_cut(em, runs)
    if not param.indexed:
        text = value.text + _cuts(em, value, runs, tile)
        if em.mask is not None:
            em.line(f"assign({target}, {text}, {mask}, {len(tile)}, {where})")
        else:
            em.line(f"{target}[...] = {text}")
        return
    rows = em.grid.position[0]
    if rows < 0:
        text = value.text + _cuts(em, value, runs, tile)
        if value.shape:
            axis = len(value.shape) - len(tile)
            text += f"[{', '.join([':'] * axis + ['0'])}]"
        row = f"int(m{param.position}[{em.grid.start[0]}])"
        masked = f"{mask}, {len(tile) - 1}, {where}"
        em.line(f"assign_row({target}, {row}, {text}, {masked})")
        return
    full = Form(
        em.materialize(value, em.grid.extents + tile),
        em.grid.extents + tile,
        value.dtype,
        len(tile),
    )
    text = full.text + _cuts(em, full, runs, tile)
    text += f"[{', '.join([':'] * em.grid.rank + ['0'])}]"
    start = em.grid.start[0]
    index = f"m{param.position}[{start}:{start + em.grid.full[0]}]"
    em.line(f"assign_rows({target}, {index}, {text}, {mask}, {len(tile) - 1}, {where})")
