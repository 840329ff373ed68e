"""Attention of one new token of each sequence over its pages of the KV cache."""

# mypy: disable-error-code="type-arg"

from typing import Any

import tilert
from models.kernels.softmax import MASKED, UNSEEN, online, scores
from tilert import Const, Dyn, Mut, Ref, f32
from tilert.language import (
    cdiv,
    exp2,
    full,
    iota,
    max,
    maximum,
    span,
    sum,
    tiles,
    where,
    zeros,
)

__all__ = ["decode_attention", "decode_attention_split", "merge_splits"]

TINY = 1e-30
"""Divisor of a padding slot, which attends to nothing: its output is 0, not NaN."""


@tilert.inline
def pages_of(cache: Any, table: Any, row: Any, j: Any, first: Any, heads: Any) -> Any:
    """Some heads of some pages as a [pages * page_size * heads, D] tile; j: block of the row's
    page numbers."""
    dim = cache.shape[3]
    if heads == 1:
        if j.size == 1:
            return cache[table[row, j.number], :, first, :]
        # A block may reach past the row: what is no page is 0, and not what page 0 holds.
        return cache[table.load(row, j, fill=-1), :, first, :].reshape(-1, dim)
    return cache[table.load(row, j, fill=-1), :, span(first, heads), :].reshape(-1, dim)


@tilert.inline
def attend(
    q: Any,
    k: Any,
    v: Any,
    table: Any,
    b: Any,
    first: Any,
    row: Any,
    length: Any,
    split: Any,
    splits: Any,
    scale: Any,
    heads: Any,
    pages: Any,
) -> Any:
    """The online softmax of `heads` KV heads from `first` on, over one of `splits` shares.

    With several KV heads in one program, every query meets the keys of all of them, and those of
    the other heads are masked: more arithmetic in fewer operations.
    """
    group = q.shape[1] // k.shape[2]
    rows = heads * group
    page = k.shape[1]
    qs = q[b, span(first * group, rows), :]
    columns = iota(pages * page * heads)
    place = columns // heads
    if heads > 1:
        own = (iota(rows) // group)[:, None] == (columns % heads)[None, :]
    best = full((rows,), UNSEEN, f32)
    total = zeros((rows,), f32)
    acc = zeros((rows, q.shape[2]), f32)
    steps = cdiv(length, pages * page)
    begin, end = split * steps // splits, (split + 1) * steps // splits
    for j in tiles(table, axis=1, size=pages, start=begin, stop=end):
        ks = pages_of(k, table, row, j, first, heads)
        seen = (place + j.number * (pages * page) < length)[None, :]
        if heads > 1:
            seen = seen & own
        x = where(seen, scores(qs, ks, scale), MASKED)
        vs = pages_of(v, table, row, j, first, heads)
        best, total, acc = online(x, vs, best, total, acc)
    return best, total, acc


@tilert.kernel
def decode_attention(
    o: Mut,
    q: Ref,
    k: Ref[Dyn],
    v: Ref[Dyn],
    table: Ref[Dyn, Dyn],
    rows: Ref,
    positions: Ref,
    scale: Const[float],
    heads: Const[int],
    pages: Const[int],
) -> None:
    """o[b] = attention of q[b] over positions 0..positions[b] of table row rows[b].

    A negative row is a padding slot; its output is 0.

    o, q: [B, Hq, D], o in pieces (1, heads * Hq / Hkv, D). k, v: [pages, page_size, Hkv, D].
    table: i32[rows, pages a row]. rows, positions: i32[B]. heads: KV heads a program.
    pages: pages a step.
    """
    b, h, _ = o.index
    row = rows[b.number]
    length = where(row >= 0, positions[b.number] + 1, 0)
    first = h.number * heads
    _, total, acc = attend(q, k, v, table, b.number, first, row, length, 0, 1, scale, heads, pages)
    o.store((acc / maximum(total, TINY)[:, None]).reshape(o.shape))


@tilert.kernel
def decode_attention_split(
    acc: Mut,
    best: Mut,
    total: Mut,
    q: Ref,
    k: Ref[Dyn],
    v: Ref[Dyn],
    table: Ref[Dyn, Dyn],
    rows: Ref,
    positions: Ref,
    scale: Const[float],
    heads: Const[int],
    pages: Const[int],
) -> None:
    """As `decode_attention`, each sequence's pages shared out over S programs; see `merge_splits`.

    acc: f32[B, S, Hq, D] in pieces (1, 1, heads * Hq / Hkv, D), weighted sums of v.
    best, total: f32[B, S, Hq], largest score (in units of log 2) and sum of weights.
    """
    b, s, h = best.index
    row = rows[b.number]
    length = where(row >= 0, positions[b.number] + 1, 0)
    splits = acc.array_shape[1]
    first = h.number * heads
    top, sums, out = attend(
        q, k, v, table, b.number, first, row, length, s.number, splits, scale, heads, pages
    )
    acc.store(out.reshape(acc.shape))
    best.store(top.reshape(best.shape))
    total.store(sums.reshape(total.shape))


@tilert.kernel
def merge_splits(o: Mut, acc: Ref, best: Ref, total: Ref) -> None:
    """o[b, h] from the shares of `decode_attention_split`. o: [B, Hq, D] in pieces (1, bh, D)."""
    b, h, _ = o.index
    # All loads come first, for each takes as long as everything else does.
    parts = acc[b.number, :, h, :]
    tops, sums = best[b.number, :, h], total[b.number, :, h]
    weights = exp2(tops - max(tops, axis=0, keepdims=True))
    sums = sum(sums * weights, axis=0)
    out = sum(parts * weights[:, :, None], axis=0)
    o.store((out / maximum(sums, TINY)[:, None]).reshape(o.shape))
