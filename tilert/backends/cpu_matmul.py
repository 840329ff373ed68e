"""Products of f32 matrices: BLAS on parts that fit a core's cache, shared out over threads.

How a product is cut depends on its shape alone. BLAS rounds differently for different shapes, so
this gives the same result on any number of cores.
"""

import time
from functools import lru_cache
from typing import Any

import numpy as np

from tilert.backends.cpu_plan import Plan
from tilert.backends.cpu_pool import shared_pool

__all__ = ["batch_matmul", "matmul"]

# Generated code passes f32 or 16-bit float arrays; their shapes are checked by tilert.ops.
Tile = Any

_F32 = np.dtype(np.float32)
_ITEM = 4
# Up to this many rows a product waits for memory: its cost is the f32 bytes of the right operand.
# Beyond, it grows with the rows.
_FREE_ROWS = 8
# Cost from which on two threads are worth waking one (tens of microseconds).
_SHARED = 1 << 20
# Cost of a part, about a tenth of a millisecond; a longer product takes up to _PARTS larger ones.
_PART = 1 << 19
_PARTS = 64
# Fewer columns would cost matrix products more for reading the left operand again.
_COLUMNS = 96
# Part boundaries are multiples of this: a cache line of the result.
_ALIGNED = 16
# Up to this many rows are matrix-vector products one by one: faster than BLAS's matrix product, and
# a row's result does not depend on the others.
_VECTORS = 4
# Prompts have many lengths.
_PLANS = 512


def _to_f32(x: Tile) -> Tile:
    """`x` in f32, in the same order of axes."""
    if x.dtype == _F32:
        return x
    if x.dtype.name == "bfloat16":
        # NumPy shifts much faster than it converts element by element.
        wide = x.view(np.uint16).astype(np.uint32)
        return np.left_shift(wide, 16, out=wide).view(_F32)
    return x.astype(_F32)


def _blas(x: Tile) -> Tile:
    """`x` in f32, copied if BLAS cannot read it in place."""
    x = _to_f32(x)
    s = x.strides
    if s[-1] == _ITEM and s[-2] >= _ITEM * x.shape[-1]:
        return x
    if s[-2] == _ITEM and s[-1] >= _ITEM * x.shape[-2]:
        return x
    return np.ascontiguousarray(x)


def _width(m: int, k: int, n: int) -> int:
    """Columns of a part of a product [m, k] @ [k, n]; n if it is not worth sharing."""
    cost = k * n * _ITEM * max(m, _FREE_ROWS) // _FREE_ROWS
    if cost < _SHARED:
        return n
    count = min(cost // _PART, _PARTS)
    least = _COLUMNS if m > _VECTORS else _ALIGNED
    return max(-(-n // (count * _ALIGNED)) * _ALIGNED, least)


def _multiply(a: Tile, b: Tile) -> Tile:
    """a @ b for an `a` that BLAS can read.

    By np.dot, which lets go of the interpreter lock for BLAS; np.matmul keeps it if the result has
    500 elements or fewer.
    """
    b = _blas(b)
    if len(a) > _VECTORS:
        return np.dot(a, b)
    rows = b.T
    out = np.empty((len(a), len(rows)), _F32)
    for x, y in zip(a, out, strict=True):
        np.dot(rows, x, y)
    return out


@lru_cache(maxsize=_PLANS)
def _plan(m: int, k: int, n: int, dtype: Any, by_columns: bool) -> Plan:
    """The plan for right operands of a dtype whose columns, or else rows, are contiguous."""
    return Plan(_width(m, k, n))


def _sums_alike(b: Tile, width: int) -> bool:
    """Whether matrix-vector products of all columns and of parts agree in every bit.

    Columns are independent sums; that BLAS adds them up in one order, wherever they stand, is seen,
    not known.
    """
    a = np.random.default_rng(0).standard_normal((1, len(b))).astype(_F32)
    parts = [_multiply(a, b[:, i : i + width]) for i in range(0, b.shape[1], width)]
    return bool(np.array_equal(np.concatenate(parts, axis=1), _multiply(a, b), equal_nan=True))


def matmul(a: Tile, b: Tile) -> Tile:
    """The product of two matrices, in f32."""
    a = _blas(a)
    (m, k), n = a.shape, b.shape[1]
    plan = _plan(m, k, n, b.dtype, b.strides[0] == b.itemsize)
    width = plan.width
    if width >= n:
        return _multiply(a, b)
    if plan.whole is None:
        # With more rows, a part is read from memory once for all of them.
        plan.whole = m == 1 and b.dtype == _F32 and _sums_alike(b, width)

    def part(number: int) -> Tile:
        return _multiply(a, b[:, number * width : (number + 1) * width])

    pool, count, start = shared_pool(), -(-n // width), time.perf_counter()
    shared = pool.threads > 1 and plan.shares()
    if shared:
        out = np.concatenate(pool.map(part, count), axis=1)
    elif plan.whole:
        out = _multiply(a, b)
    else:
        out = np.concatenate([part(number) for number in range(count)], axis=1)
    plan.note(shared, time.perf_counter() - start)
    return out


def batch_matmul(a: Tile, b: Tile) -> Tile:
    """Products of matrices over broadcast leading axes, in f32."""
    a, b = _blas(a), _blas(b)
    if a.shape[-2] <= _VECTORS:
        return np.matmul(a[..., None, :], b[..., None, :, :])[..., 0, :]
    return np.matmul(a, b)
