"""Helpers that generated cpu code calls: windows, gathers, masks; products are in cpu_matmul.

Run-time values are ndarrays, except uniform scalars: Python int and bool, NumPy float scalars.
`NAMESPACE` holds every name that generated code may use.
"""

from typing import Any

import numpy as np

from tilert.backends.cpu_debug import show, verify
from tilert.backends.cpu_matmul import batch_matmul, matmul
from tilert.backends.cpu_numbers import erf, fma, normal, philox, to_integer, to_narrow
from tilert.backends.cpu_tiles import accumulate, concat, order, take
from tilert.dtypes import DTYPES

__all__ = ["NAMESPACE"]

# Generated code passes whatever its operands are; the shapes and dtypes are checked by tilert.ops.
Tile = Any


def affine_view(
    a: Tile,
    starts: tuple[int, ...],
    dims: tuple[tuple[int, tuple[tuple[int, int], ...]], ...],
) -> Tile:
    """The view whose axis d has extent dims[d][0] and moves by `step` on each (axis, step).

    `starts` is the element of `a` that the view begins at.
    """
    shape = tuple(extent for extent, _ in dims)
    base = a[tuple(slice(s, None) for s in starts)]
    strides = tuple(sum(a.strides[axis] * step for axis, step in moves) for _, moves in dims)
    if a.itemsize > 1:
        return np.lib.stride_tricks.as_strided(base, shape, strides)
    # NumPy has no name for some types of one byte.
    return np.lib.stride_tricks.as_strided(base.view(np.uint8), shape, strides).view(a.dtype)


def window(v: Tile, axis: int, start: int, size: int, fill: Tile) -> Tile:
    """v[start : start + size] along `axis`; elements outside are `fill`."""
    n = v.shape[axis]
    lead = (slice(None),) * axis
    if start >= 0 and start + size <= n:
        return v[(*lead, slice(start, start + size))]
    out = np.empty((*v.shape[:axis], size, *v.shape[axis + 1 :]), v.dtype)
    lo, hi = min(max(start, 0), n), min(max(start + size, 0), n)
    if lo >= hi:
        out.fill(fill)
        return out
    out[(*lead, slice(0, lo - start))] = fill
    out[(*lead, slice(hi - start, size))] = fill
    out[(*lead, slice(lo - start, hi - start))] = v[(*lead, slice(lo, hi))]
    return out


def pad(v: Tile, extents: tuple[int, ...], fill: Tile) -> Tile:
    """A copy of `v` grown at its far ends to `extents`, with `fill` in the new elements."""
    out = np.empty(extents, v.dtype)
    inner = tuple(slice(0, min(n, e)) for n, e in zip(v.shape, extents, strict=True))
    if v.shape != extents:
        out.fill(fill)
    out[inner] = v[inner]
    return out


def pick(v: Tile, axis: int, index: int, fill: Tile) -> Tile:
    """v[index] along `axis`, which goes away; `fill` where the index is outside."""
    if 0 <= index < v.shape[axis]:
        return v[(slice(None),) * axis + (index,)]
    return full(v.shape[:axis] + v.shape[axis + 1 :], fill, v.dtype)


def full(shape: tuple[int, ...], value: Tile, dtype: Any) -> Tile:
    """An array of one value."""
    out = np.empty(shape, dtype)
    out.fill(value)
    return out


def expand(x: Tile, shape: tuple[int, ...]) -> Tile:
    """`x` repeated to `shape`; a read-only view where a copy would be large."""
    size = 1
    for n in shape:
        size *= n
    if size > 1 << 16:
        return np.broadcast_to(x, shape)
    out = np.empty(shape, x.dtype)
    out[...] = x
    return out


def _inside(index: Tile, n: int) -> Tile:
    """None where every index lies in 0..n-1, else the mask of those that do."""
    if index.size == 0:
        return None
    if index.dtype == np.int32:
        if int(np.maximum.reduce(index.view(np.uint32), None)) < n:
            return None
    elif index.min() >= 0 and index.max() < n:
        return None
    return (index >= 0) & (index < n)


def gather(v: Tile, index: Tile, fill: Tile) -> Tile:
    """v[index] along axis 0, contiguous; `fill` where the index is outside."""
    ok = _inside(index, v.shape[0])
    if ok is None:
        return np.ascontiguousarray(v[index])
    out = np.ascontiguousarray(v[np.where(ok, index, 0)])
    out[~ok] = fill
    return out


def gather_many(v: Tile, indices: tuple[Tile, ...], fill: Tile) -> Tile:
    """v[i0, i1, ...] over the leading axes for indices that broadcast together."""
    ok = None
    safe = []
    for axis, index in enumerate(indices):
        inside = _inside(index, v.shape[axis])
        if inside is not None:
            ok = inside if ok is None else ok & inside
            index = np.where(inside, index, 0)
        safe.append(index)
    out = v[tuple(safe)]
    if ok is not None:
        trailing = v.ndim - len(indices)
        lead = out.shape[: out.ndim - trailing]
        out[~np.broadcast_to(ok, lead)] = fill
    return out


def matrix(x: Tile, columns: int) -> Tile:
    """`x` with every axis but the last collapsed into rows; a view where strides allow."""
    return x.reshape(-1, columns)


def right_matrix(x: Tile) -> Tile:
    """[*g, k, n] as the matrix (k, g*n); a view if `x` is row-major in either order of k and n."""
    k = x.shape[-2]
    swapped = x.swapaxes(-1, -2)
    if swapped.strides[-1] == x.itemsize or k == 1:
        return swapped.reshape(-1, k).T
    return np.moveaxis(x, -2, 0).reshape(k, -1)


def if_view(y: Tile, x: Tile) -> Tile:
    """`y` if it lies in the memory of `x`, else None."""
    return y if np.may_share_memory(x, y) else None


def _bits(x: Tile) -> Tile:
    return x.view(np.int32)


def choose(c: Tile, a: Tile, b: Tile) -> Tile:
    """`a` where c holds, else `b`, of one 32-bit dtype; either may be a scalar.

    Bits are masked without a branch: np.where takes several times as long on irregular masks.
    """
    mask = c.view(np.int8).astype(np.int32)
    np.negative(mask, mask)
    low = _bits(b)
    change = np.bitwise_xor(_bits(a), low)
    fits = change.shape in ((), mask.shape)
    out = np.bitwise_and(change, mask, mask if fits else None)
    if not np.isscalar(low) or low != 0:
        np.bitwise_xor(out, low, out)
    return out.view(a.dtype)


def both(a: Tile, b: Tile) -> Tile:
    """Conjunction of a mask (None: everywhere) with another."""
    return b if a is None else a & b


def merge(mask: Tile, new: Tile, old: Tile, rank: int) -> Tile:
    """`new` where the mask over programs holds, else `old`; tiles have `rank` axes."""
    if mask is None:
        return new
    return np.where(mask.reshape(mask.shape + (1,) * rank), new, old)


def expand_mask(mask: Tile, extents: tuple[int, ...]) -> Tile:
    """The mask over all programs; None stays None."""
    return None if mask is None else np.broadcast_to(mask, extents)


def assign(view: Tile, value: Tile, mask: Tile, rank: int, where: Tile) -> None:
    """view[...] = value for the programs of the mask; `where` cuts the mask to the view."""
    if mask is None:
        view[...] = value
        return
    cut = mask[where]
    np.copyto(view, value, where=cut.reshape(cut.shape + (1,) * rank))


def assign_row(view: Tile, row: int, value: Tile, mask: Tile, rank: int, where: Tile) -> None:
    """view[row] = value if there is such a row, for the programs of the mask."""
    if 0 <= row < view.shape[0]:
        assign(view[row : row + 1][0], value, mask, rank, where)


def assign_rows(view: Tile, index: Tile, value: Tile, mask: Tile, rank: int, where: Tile) -> None:
    """view[index[i]] = value[i] for indices inside axis 0, for the programs of the mask.

    `value` has the shape of the view with axis 0 as long as the index; rows are distinct by
    construction of the index map.
    """
    ok = _inside(index, view.shape[0])
    if ok is not None:
        index, value = index[ok], value[ok]
    if mask is not None:
        cut = mask[where] if ok is None else mask[where][ok]
        value = np.where(cut.reshape(cut.shape + (1,) * rank), value, view[index])
    view[index] = value


def assign_pieces(a: Tile, numbers: Tile, tile: tuple[int, ...], value: Tile, mask: Tile) -> None:
    """Write value[program] to piece numbers[program] of `a`, as far as the array reaches."""
    for program in np.ndindex(numbers.shape[:-1]):
        if mask is None or mask[program]:
            starts = [int(n) * size for n, size in zip(numbers[program], tile, strict=True)]
            view = a[tuple(slice(s, s + size) for s, size in zip(starts, tile, strict=True))]
            view[...] = value[program][tuple(slice(0, n) for n in view.shape)]


def trips(lo: Tile, hi: Tile, step: Tile, mask: Tile) -> Tile:
    """Iterations of range(lo, hi, step) for each program; none where the mask is off."""
    low, high, by = (np.asarray(x, np.int64) for x in (lo, hi, step))
    n = np.maximum(-((low - high) // by), 0)
    return n if mask is None else np.where(mask, n, 0)


def int_floordiv(a: int, b: int) -> int:
    """a // b; 0 for a zero divisor, which only programs that are masked off meet."""
    return a // b if b else 0


def int_mod(a: int, b: int) -> int:
    """a % b with the divisor's sign; 0 for a zero divisor."""
    return a % b if b else 0


NAMESPACE: dict[str, Any] = {
    f.__name__: f
    for f in (
        affine_view,
        window,
        pad,
        pick,
        full,
        expand,
        gather,
        gather_many,
        matrix,
        right_matrix,
        matmul,
        batch_matmul,
        if_view,
        choose,
        both,
        merge,
        expand_mask,
        assign,
        assign_row,
        assign_pieces,
        assign_rows,
        trips,
        int_floordiv,
        int_mod,
        to_integer,
        to_narrow,
        erf,
        fma,
        philox,
        normal,
        show,
        verify,
        accumulate,
        concat,
        take,
        order,
    )
}
NAMESPACE |= {
    "np": np,
    "ONE": np.float32(1),
    **{f"T_{dtype.name}": dtype.numpy for dtype in DTYPES},
}
NAMESPACE |= {
    f.__name__: f
    for f in (
        np.add,
        np.subtract,
        np.multiply,
        np.divide,
        np.minimum,
        np.maximum,
        np.exp,
        np.exp2,
        np.expm1,
        np.log,
        np.log2,
        np.log10,
        np.log1p,
        np.sqrt,
        np.sin,
        np.cos,
        np.tan,
        np.arcsin,
        np.arccos,
        np.arctan,
        np.arctan2,
        np.sinh,
        np.cosh,
        np.tanh,
        np.floor,
        np.ceil,
        np.trunc,
        np.rint,
        np.absolute,
        np.power,
        np.isnan,
        np.isinf,
        np.isfinite,
        np.where,
        np.argmax,
        np.argmin,
    )
}
NAMESPACE |= {
    "reduce_sum": np.add.reduce,
    "reduce_prod": np.multiply.reduce,
    "reduce_max": np.maximum.reduce,
    "reduce_min": np.minimum.reduce,
    "reduce_any": np.logical_or.reduce,
    "reduce_all": np.logical_and.reduce,
    "scan_sum": np.add.accumulate,
    "scan_prod": np.multiply.accumulate,
    "scan_max": np.maximum.accumulate,
    "scan_min": np.minimum.accumulate,
    "take_along": np.take_along_axis,
}
