"""Loads as views where the addresses allow, else as copies.

Every axis of the array is one of
    affine  addresses are known when the code is generated, linear in the program's coordinates and
            inside the array: part of a strided view made when the launch is bound;
    pad     the same, but the last elements lie outside: a copy grown with the fill value;
    slide   one run-time start for all programs: a slice;
    gather  anything else: fancy indexing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tilert.backends.cpu_value import Form
from tilert.dtypes import i32

if TYPE_CHECKING:
    from tilert.backends.cpu_emit import Emitter

__all__ = ["Place", "load"]

# Elements from which on a copy that grows a whole array is worth a second launch.
_LARGE = 1 << 16
# Of an element of a computed index.
_INDEX_BYTES = 8

Moves = tuple[tuple[int, int], ...]


@dataclass
class Place:
    """How one axis of the array is addressed.

    Attributes:
        axis, extent: the array's axis and its extent.
        size: elements along it, 1 for a point.
        kept: whether the tile keeps the axis.
        index: the start in units of `scale` elements (elements themselves if `each`), or None
            for the whole axis.
        each: whether the index holds every element of the axis (a gather).
    """

    axis: int
    extent: int
    size: int
    kept: bool
    index: Form | None
    scale: int = 1
    each: bool = False
    kind: str = "affine"
    base: int = 0
    step: int = 1
    grid_steps: dict[int, int] = field(default_factory=dict)
    last: int = 0

    def gather(self) -> None:
        """Leaves the axis to fancy indexing."""
        self.kind, self.base, self.step, self.grid_steps = "gather", 0, 1, {}

    @property
    def start(self) -> Form:
        """The index of an axis that is not taken whole."""
        if self.index is None:
            raise ValueError("a whole axis has no start")
        return self.index


def _classify(em: "Emitter", p: Place) -> None:
    if p.index is None:
        p.last = p.extent - 1
        return
    if not p.index.is_known:
        p.kind = "slide" if p.index.uniform else "gather"
        return
    known = np.asarray(p.index.known, np.int64) * p.scale
    if p.each:
        known = np.broadcast_to(known, (*known.shape[:-1], p.size))
    corner = known[tuple(slice(0, 1) for _ in known.shape)]
    linear = corner
    steps = [0] * known.ndim
    for d, n in enumerate(known.shape):
        if n > 1:
            at = tuple(slice(1, 2) if e == d else slice(0, 1) for e in range(known.ndim))
            steps[d] = int((known[at] - corner).item())
            shape = [1] * known.ndim
            shape[d] = n
            linear = linear + steps[d] * np.arange(n).reshape(shape)
    if not np.array_equal(np.broadcast_to(linear, known.shape), known):
        p.gather()
        return
    if p.each:
        p.step = steps.pop()
    p.base = int(corner.item())
    p.grid_steps = {d: s for d, s in enumerate(steps) if s}
    low, p.last = int(known.min()), int(known.max())
    if not p.each:
        p.last += p.size - 1
    outside = low < 0 or p.last >= p.extent
    if outside and low >= 0 and p.kept and not p.each and min(steps, default=0) >= 0:
        p.kind = "pad"
    elif outside:
        p.gather()


def load(em: "Emitter", array: str, places: Sequence[Place], fill: str, dtype: Any) -> Form:
    """The tile that the places address in the array, in generated code.

    Args:
        fill: text of the scalar that stands for elements outside.
    """
    rank = sum(p.kept for p in places)
    if any(p.extent == 0 for p in places):
        return em.fill_form(fill, dtype, rank)
    for p in places:
        _classify(em, p)
    if any(p.kind == "pad" and p.base >= p.extent for p in places):
        return em.fill_form(fill, dtype, rank)
    if any(p.kind == "gather" for p in places):
        return _Gathered(em, array, places, fill, dtype, rank).emit()
    return _viewed(em, array, places, fill, dtype, rank)


def _view(em: "Emitter", array: str, places: Sequence[Place], dims: list[tuple[int, Moves]]) -> str:
    """A hoisted view; the array itself where nothing moves."""
    starts = tuple(p.base if p.kind in ("affine", "pad") else 0 for p in places)
    whole = [(p.extent, ((p.axis, 1),)) for p in places]
    if dims == whole and not any(starts):
        return array
    return em.hoist(f"affine_view({array}, {starts}, {tuple(dims)})")


def _dim(p: Place) -> tuple[int, Moves]:
    if p.kind == "affine":
        return p.size, ((p.axis, p.step),)
    return p.extent - (p.base if p.kind == "pad" else 0), ((p.axis, 1),)


def _grid_dims(em: "Emitter", places: Sequence[Place]) -> list[tuple[int, Moves]]:
    """Every grid axis as a dimension: extent 1 where none of the places moves with it."""
    dims: list[tuple[int, Moves]] = []
    for g, n in enumerate(em.grid.extents):
        moves = tuple((p.axis, p.grid_steps[g]) for p in places if g in p.grid_steps)
        dims.append((n if moves else 1, moves))
    return dims


def _slide(em: "Emitter", text: str, slides: list[tuple[int, Place]], rank: int, fill: str) -> str:
    """Slices at run-time starts: (dimension, place) pairs of an array with `rank` dimensions."""
    subscript = [":"] * rank
    proven = False
    for d, p in sorted(slides, key=lambda pair: -pair[0]):
        start, bounds = p.start.text, p.start.bounds
        if p.scale != 1:
            start = f"{start} * {p.scale}"
        if bounds and bounds[0] >= 0 and bounds[1] * p.scale + p.size <= p.extent:
            subscript[d] = f"{start}:{start} + {p.size}" if p.kept else start
            proven = True
        elif p.kept:
            text = em.let(f"window({text}, {d}, {start}, {p.size}, {fill})")
        else:
            text = em.let(f"pick({text}, {d}, {start}, {fill})")
            del subscript[d]
    if proven:
        while subscript and subscript[-1] == ":":
            subscript.pop()
        text = em.let(f"{text}[{', '.join(subscript)}]")
    return text


def _scalar(em: "Emitter", array: str, places: Sequence[Place], fill: str, dtype: Any) -> Form:
    """One element at a uniform place, as a scalar."""
    tests = []
    subscripts = []
    for p in places:
        if p.kind == "affine":
            subscripts.append(str(p.base))
            continue
        subscripts.append(p.start.text)
        bounds = p.start.bounds
        if not bounds or bounds[0] < 0 or bounds[1] >= p.extent:
            tests.append(f"0 <= {p.start.text} < {p.extent}")
    text = f"{array}[{', '.join(subscripts) or '()'}]"
    if dtype.kind != "f":
        text = f"{'bool' if dtype.kind == 'b' else 'int'}({text})"
    if tests:
        text = f"({text} if {' and '.join(tests)} else {fill})"
    return Form(em.let(text), (), dtype, 0)


def _viewed(
    em: "Emitter", array: str, places: Sequence[Place], fill: str, dtype: Any, rank: int
) -> Form:
    moving = [p for p in places if p.kind == "affine" and p.grid_steps]
    padded = [p for p in places if p.kind == "pad"]
    if rank == 0 and not moving:
        return _scalar(em, array, places, fill, dtype)
    varies = bool(moving) or any(p.grid_steps for p in padded)
    dims = _grid_dims(em, moving) if varies else []
    lead = len(dims)
    shown = [p for p in places if p.kept or p.kind == "slide"]
    dims += [_dim(p) for p in shown]
    text = _view(em, array, places, dims)
    slides = [(lead + i, p) for i, p in enumerate(shown) if p.kind == "slide"]
    text = _slide(em, text, slides, len(dims), fill) if slides else text
    kept = [p for p in places if p.kept]
    grid = [n for n, _ in dims[:lead]]
    if padded:
        extents = (*grid, *(p.last + 1 - p.base if p.kind == "pad" else p.size for p in kept))
        text = em.let(f"pad({text}, {extents}, {fill})", math.prod(extents) * dtype.itemsize)
        if any(p.grid_steps for p in padded):
            if math.prod(extents) > _LARGE:
                em.ragged |= {em.grid.axes[g] for p in padded for g in p.grid_steps}
            final: list[tuple[int, Moves]] = []
            for g, n in enumerate(em.grid.extents):
                steps = [
                    (lead + i, p.grid_steps[g])
                    for i, p in enumerate(kept)
                    if p.kind == "pad" and g in p.grid_steps
                ]
                if grid[g] != 1:
                    steps.append((g, 1))
                grid[g] = n if steps else 1
                final.append((grid[g], tuple(steps)))
            final += [(p.size, ((lead + i, 1),)) for i, p in enumerate(kept)]
            text = em.let(f"affine_view({text}, {(0,) * len(extents)}, {tuple(final)})")
    shape = (*grid, *(p.size for p in kept))
    return Form(text, shape, dtype, rank, hoisted=not slides and not padded)


class _Gathered:
    """A load some of whose axes need fancy indexing."""

    def __init__(
        self,
        em: "Emitter",
        array: str,
        places: Sequence[Place],
        fill: str,
        dtype: Any,
        rank: int,
    ) -> None:
        self.em, self.array, self.places, self.fill = em, array, places, fill
        self.dtype, self.rank = dtype, rank
        for p in places:
            if p.kind == "pad":
                p.gather()
        self.gathers = [p for p in places if p.kind == "gather"]

    def _axes(self, p: Place) -> list[int]:
        """Grid axes on which a place moves."""
        if p.kind == "affine":
            return sorted(p.grid_steps)
        return sorted(self.em.grid.varies(p.index)) if p.index is not None else []

    def emit(self) -> Form:
        if len(self.gathers) == 1 and self._whole():
            return self._one()
        return self._many()

    def _whole(self) -> bool:
        """Whether the places that move with the grid cover most of the elements they span.

        And none moves along with the gathered one: then the gather takes all they span at once,
        in long rows, and the grid's axes are cut out of its result.
        """
        moving = [p for p in self.places if p.kind == "affine" and p.grid_steps]
        taken = set(self._axes(self.gathers[0]))
        for p in moving:
            if taken & set(p.grid_steps) or min(p.step, *p.grid_steps.values()) < 0:
                return False
            used = p.size
            for g in p.grid_steps:
                used *= self.em.grid.extents[g]
            if p.last - p.base >= 2 * used:
                return False
        return True

    def _index(self, p: Place, shape: tuple[int, ...], blocks: bool) -> str:
        """Elements (or block numbers) along a gathered axis, its programs' axes as `shape`.

        A kept axis comes last unless its block numbers are asked for.
        """
        em = self.em
        form = p.start
        if p.each:
            tail = (p.size,)
            if form.is_known:
                known = np.broadcast_to(form.known, (*em.grid.of(form), p.size))
                return em.constant(np.ascontiguousarray(known).reshape(shape + tail))
            wide = len(form.shape) > 1
            before = (*em.grid.of(form), p.size) if wide else tail
            full = em.materialize(form, before)
            return full if before == shape + tail else em.let(f"{full}.reshape({shape + tail})")
        if form.is_known:
            starts = np.asarray(form.known).reshape(shape)
            if blocks:
                return em.constant(starts)
            starts = starts * p.scale
            return em.constant(starts[..., None] + np.arange(p.size) if p.kept else starts)
        if form.uniform:
            raise ValueError("a uniform index is a slide")
        text = form.text if form.shape == shape else em.let(f"{form.text}.reshape({shape})")
        if blocks or not p.kept:
            return text
        nbytes = math.prod(shape) * p.size * _INDEX_BYTES
        return em.let(f"{text}[..., None] * {p.scale} + {em.constant(np.arange(p.size))}", nbytes)

    def _one(self) -> Form:
        """One gathered axis, the others in order behind it."""
        em, g = self.em, self.gathers[0]
        axes = self._axes(g)
        blocks = g.kept and not g.each and g.scale == g.size and g.extent % g.size == 0
        step = g.size if blocks else 1
        dims: list[tuple[int, Moves]] = [(g.extent // step, ((g.axis, step),))]
        owners: list[Place] = []
        slides: list[tuple[int, Place]] = []
        for p in self.places:
            if p is g:
                if blocks:
                    owners.append(p)
                    dims.append((p.size, ((p.axis, 1),)))
            elif p.kind == "slide":
                slides.append((len(dims), p))
                dims.append((p.extent, ((p.axis, 1),)))
                owners += [p] if p.kept else []
            elif p.kept or p.grid_steps:
                owners.append(p)
                moves = bool(p.grid_steps)
                extent = p.last - p.base + 1 if moves else p.size
                dims.append((extent, ((p.axis, 1 if moves else p.step),)))
        text = _view(em, self.array, self.places, dims)
        text = _slide(em, text, slides, len(dims), self.fill) if slides else text
        shape = tuple(em.grid.extents[a] for a in axes)
        index = self._index(g, shape, blocks)
        tail = (g.size,) if g.kept and not blocks else ()
        sizes = [p.last - p.base + 1 if p.grid_steps else p.size for p in owners]
        gathered = (*shape, *tail, *sizes)
        nbytes = math.prod(gathered) * self.dtype.itemsize
        text = em.let(f"gather({text}, {index}, {self.fill})", nbytes)
        return self._cut(text, axes, tail, owners, gathered)

    def _cut(
        self,
        text: str,
        axes: list[int],
        tail: tuple[int, ...],
        owners: list[Place],
        gathered: tuple[int, ...],
    ) -> Form:
        """The grid's axes, then the tile's, as strides over the gathered rows.

        Args:
            axes: grid axes of the index. tail: its own axis, if that is kept apart.
            owners: the place of each axis behind those. gathered: the shape of all.
        """
        em = self.em
        steps = [math.prod(gathered[d + 1 :]) for d in range(len(gathered))]
        behind = len(axes) + len(tail)
        grid: list[tuple[int, int]] = []
        for g, n in enumerate(em.grid.extents):
            step = sum(steps[d] for d, a in enumerate(axes) if a == g)
            step += sum(p.grid_steps.get(g, 0) * steps[behind + d] for d, p in enumerate(owners))
            grid.append((n if step else 1, step))
        if all(n == 1 for n, _ in grid):
            grid = []
        tile = []
        for p in self.places:
            if p.kept and p in owners:
                step = steps[behind + owners.index(p)] * (p.step if p.grid_steps else 1)
                tile.append((p.size, step))
            elif p.kept:
                tile.append((p.size, steps[len(axes)]))
        shape = tuple(n for n, _ in grid + tile)
        if shape != gathered or tuple(s for n, s in grid + tile if n != 1) != tuple(
            s for n, s in zip(gathered, steps, strict=True) if n != 1
        ):
            item = self.dtype.itemsize
            strides = tuple(s * item for _, s in grid + tile)
            text = em.let(f"np.ndarray({shape}, T_{self.dtype.name}, {text}, 0, {strides})")
        return Form(text, shape, self.dtype, self.rank)

    def _many(self) -> Form:
        """Several gathered axes: index arrays over the programs for all that move."""
        em = self.em
        gathers = [p for p in self.places if p.kind == "gather" or p.grid_steps]
        for p in gathers:
            p.gather()
        others = [p for p in self.places if p.kept and p not in gathers]
        slides = [p for p in self.places if p.kind == "slide" and not p.kept]
        shown = gathers + others + slides
        dims = [_dim(p) for p in shown]
        text = _view(em, self.array, self.places, dims)
        moved = [(i, p) for i, p in enumerate(shown) if p.kind == "slide"]
        text = _slide(em, text, moved, len(dims), self.fill) if moved else text
        kept = [p for p in gathers if p.kept]
        axes: set[int] = set()
        texts = []
        for p in gathers:
            own = set(self._axes(p))
            axes |= own
            grid = tuple(n if g in own else 1 for g, n in enumerate(em.grid.extents))
            index = self._index(p, grid, False)
            tail = tuple(p.size if q is p else 1 for q in kept)
            texts.append(em.let(f"{index}.reshape({grid + tail})") if tail else index)
        grid = tuple(n if g in axes else 1 for g, n in enumerate(em.grid.extents))
        nbytes = math.prod((*grid, *(p.size for p in self.places if p.kept))) * self.dtype.itemsize
        text = em.let(f"gather_many({text}, ({', '.join(texts)},), {self.fill})", nbytes)
        labels = [("g", a) for a in range(em.grid.rank)]
        labels += [("t", p.axis) for p in kept + others]
        return self._arranged(text, labels, axes)

    def _arranged(self, text: str, labels: list[tuple[str, int]], axes: set[int]) -> Form:
        """The gathered array with the grid's axes first, then the tile's in order."""
        em = self.em
        order = sorted(range(len(labels)), key=lambda i: (labels[i][0] != "g", labels[i][1]))
        if order != list(range(len(labels))):
            text = em.let(f"{text}.transpose({', '.join(map(str, order))})")
        grid = tuple(n if g in axes else 1 for g, n in enumerate(em.grid.extents))
        shape = (grid if axes else ()) + tuple(p.size for p in self.places if p.kept)
        if len(shape) != len(labels):
            text = em.let(f"{text}.reshape({shape})")
        return Form(text, shape, self.dtype, self.rank)


def piece_places(
    extents: tuple[int, ...], tile: tuple[int, ...], numbers: Sequence[Form]
) -> list[Place]:
    """The places of a Mut's own piece, given its number on each axis."""
    return [
        Place(axis, n, size, True, number, size)
        for axis, (n, size, number) in enumerate(zip(extents, tile, numbers, strict=True))
    ]


def uniform_index(value: int) -> Form:
    """A constant index."""
    return Form(str(value), (), i32, 0, known=value, bounds=(value, value))
