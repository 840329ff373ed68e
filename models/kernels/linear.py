"""Projections: y = x @ w.T, alone, added to y, or of RMSNorm(x)."""

# mypy: disable-error-code="type-arg, assignment"

from typing import Any

import tilert
from models.kernels.terms import empty_sums, joined, rows_of
from tilert import Const, Dyn, Mut, Ref, f32
from tilert.language import cdiv, minimum, mma, rsqrt, sum, tiles, zeros

__all__ = ["add_shares", "linear", "linear_residual", "linear_shares", "norm_linear"]


@tilert.inline
def product(y: Any, x: Any, w: Any, bk: Any, terms: Any) -> Any:
    """The f32 tile of x @ w.T where y's piece is; of f32 where x is wider than w."""
    m, n = y.index
    rows = rows_of(m, y.shape[0], terms)
    acc = empty_sums(y.shape[0], y.shape[1], terms)
    for k in tiles(x, axis=1, size=bk):
        if x.dtype == w.dtype:
            acc = mma(x[rows, k], w[n, k].T, acc)
        else:
            acc = mma(x[rows, k].to(f32), w[n, k].to(f32).T, acc)
    return joined(acc, terms)


@tilert.kernel
def linear(y: Mut[Dyn], x: Ref[Dyn], w: Ref, bk: Const[int], terms: Const[int] = 1) -> None:
    """y = x @ w.T, accumulated in f32.

    y: [T, N] in pieces (bm, bn). x: [T, K], or [T terms, K], the terms of a token one below the
    other. w: [N, K]. bk: columns of K a step.
    """
    y.store(product(y, x, w, bk, terms))


@tilert.kernel
def linear_residual(
    y: Mut[Dyn], x: Ref[Dyn], w: Ref, bk: Const[int], terms: Const[int] = 1
) -> None:
    """y = y + x @ w.T, added in f32 and rounded once. Shapes as in `linear`."""
    y.store(y.load().to(f32) + product(y, x, w, bk, terms))


@tilert.kernel
def linear_shares(
    shares: Mut[Dyn],
    x: Ref[Dyn],
    w: Ref,
    bk: Const[int],
    count: Const[int],
    terms: Const[int] = 1,
) -> None:
    """x @ w.T with the columns of K shared out over S programs, each with `count` steps of `bk`.

    For products with too few output tiles to fill the device; `add_shares` completes them.

    shares: f32[T, S, N] in pieces (bm, 1, bn). x and w as in `linear`.
    """
    m, s, n = shares.index
    size, _, columns = shares.shape
    rows = rows_of(m, size, terms)
    acc = empty_sums(size, columns, terms)
    first = s.number * count
    last = minimum(first + count, cdiv(x.shape[1], bk))
    for k in tiles(x, axis=1, size=bk, start=first, stop=last):
        acc = mma(x[rows, k], w[n, k].T, acc)
    shares.store(joined(acc, terms).reshape(shares.shape))


@tilert.kernel
def add_shares(y: Mut[Dyn], shares: Ref[Dyn], residual: Const[bool]) -> None:
    """y = the sum of the shares, added to y where `residual`; in f32, rounded once.

    y: [T, N] in pieces (1, bn). shares: f32[T, S, N].
    """
    t, n = y.index
    total = sum(shares[t, :, n], axis=1)
    if residual:
        total = total + y.load().to(f32)
    y.store(total)


@tilert.kernel
def norm_linear(
    y: Mut[Dyn], x: Ref[Dyn], gain: Ref, w: Ref, eps: Const[float], bk: Const[int]
) -> None:
    """y = RMSNorm(x) @ w.T, with the norm's scale applied to the sum.

    The scale is one number a row, so it commutes with the product: the sum of squares is taken
    along with the product, and x is read once. Pieces of up to four rows round nothing before the
    sum, which costs nothing there; more are products of tensor cores, of w's dtype. Shapes as in
    `linear`; gain: [K].
    """
    m, n = y.index
    acc = zeros(y.shape, f32)
    squares = zeros((y.shape[0],), f32)
    for k in tiles(x, axis=1, size=bk):
        v = x[m, k].to(f32)
        squares = squares + sum(v * v, axis=1)
        scaled = v * gain[k][None, :].to(f32)
        if y.shape[0] > 4:
            acc = mma(scaled.to(w.dtype), w[n, k].T, acc)
        else:
            acc = mma(scaled, w[n, k].to(f32).T, acc)
    scale = rsqrt(squares / x.shape[1] + eps)
    y.store(acc * scale[:, None])
