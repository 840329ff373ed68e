"""Attention of one new token of each sequence over its pages of the KV cache."""

# mypy: disable-error-code="type-arg"

from typing import Any

import tilert
from models.kernels.rope_append import kept, rotated
from models.kernels.softmax import MASKED, UNSEEN, begin, online, scores
from tilert import Const, Dyn, Mut, Ref, f32
from tilert.language import (
    broadcast_to,
    cdiv,
    concatenate,
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
    qs: Any,
    k: Any,
    v: Any,
    table: Any,
    row: Any,
    first: Any,
    length: Any,
    split: Any,
    splits: Any,
    scale: Any,
    heads: Any,
    pages: Any,
    best: Any,
    total: Any,
    acc: Any,
) -> Any:
    """The online softmax of queries qs [heads * group, D], those of `heads` KV heads from `first`
    on, over one of `splits` shares of the first `length` keys of a row, from the state best, total,
    acc on.

    With several KV heads in one program, every query meets the keys of all of them, and those of
    the other heads are masked: more arithmetic in fewer operations.
    """
    rows = qs.shape[0]
    page = k.shape[1]
    columns = iota(pages * page * heads)
    place = columns // heads
    if heads > 1:
        own = (iota(rows) // (rows // heads))[:, None] == (columns % heads)[None, :]
    steps = cdiv(length, pages * page)
    start, stop = split * steps // splits, (split + 1) * steps // splits
    for j in tiles(table, axis=1, size=pages, start=start, stop=stop):
        ks = pages_of(k, table, row, j, first, heads)
        seen = (place + j.number * (pages * page) < length)[None, :]
        if heads > 1:
            seen = seen & own
        x = where(seen, scores(qs, ks, scale), MASKED)
        vs = pages_of(v, table, row, j, first, heads)
        best, total, acc = online(x, vs, best, total, acc)
    return best, total, acc


@tilert.inline
def repeated(x: Any, rows: Any) -> Any:
    """What each KV head has, [heads, D], for its query heads: [rows, D], or [1, D] of one head."""
    heads, dim = x.shape
    if heads == 1:
        return x
    return broadcast_to(x[:, None, :], (heads, rows // heads, dim)).reshape(rows, dim)


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
    first, queries = h.number * heads, o.shape[1]
    qs = q[b.number, span(h.number * queries, queries), :]
    best = full((queries,), UNSEEN, f32)
    total = zeros((queries,), f32)
    acc = zeros(qs.shape, f32)
    _, total, acc = attend(
        qs, k, v, table, row, first, length, 0, 1, scale, heads, pages, best, total, acc
    )
    o.store((acc / maximum(total, TINY)[:, None]).reshape(o.shape))


@tilert.kernel
def decode_attention_split(
    acc: Mut,
    best: Mut,
    total: Mut,
    key_lo: Mut,
    key_hi: Mut,
    q: Ref,
    new_k: Ref,
    new_v: Ref,
    k: Ref[Dyn],
    v: Ref[Dyn],
    table: Ref[Dyn, Dyn],
    rows: Ref,
    positions: Ref,
    q_gain: Ref,
    k_gain: Ref,
    cos: Ref[Dyn],
    sin: Ref[Dyn],
    scale: Const[float],
    heads: Const[int],
    pages: Const[int],
    eps: Const[float],
    norm: Const[bool],
) -> None:
    """Norm and rotation as in `qk_norm_rope_append`, then attention as in `decode_attention`, each
    sequence's pages shared out over S programs. `merge_splits` does the rest.

    The cache has the keys and values before the new ones, which the first share adds, rounded as
    the cache will have them.

    acc: f32[B, S, Hq, D] in pieces (1, 1, heads * Hq / Hkv, D), weighted sums of v.
    best, total: f32[B, S, Hq], largest score (in units of log 2) and sum of weights.
    key_lo, key_hi: [B, S, Hkv, D/2] of the cache's dtype, in pieces (1, 1, heads, D/2), halves of
    the new keys, from each share again. q: [B, Hq, 2, D/2], new_k: [B, Hkv, 2, D/2], new_v:
    [B, Hkv, D], projections. q_gain, k_gain: [2, D/2], read if `norm`. cos, sin:
    f32[positions, D/2].
    """
    b, s, h = best.index
    own = key_lo.index[2]
    queries = best.shape[2]
    row, position = rows[b.number], positions[b.number]
    c, w = cos[position, :][None, :], sin[position, :][None, :]
    q_lo, q_hi = rotated(q, b.number, h, q_gain, c, w, eps, norm)
    q_lo, q_hi = kept(q_lo, k.dtype), kept(q_hi, k.dtype)
    qs = concatenate((q_lo, q_hi), axis=1)
    k_lo, k_hi = rotated(new_k, b.number, own, k_gain, c, w, eps, norm)
    k_lo, k_hi = kept(k_lo, k.dtype), kept(k_hi, k.dtype)
    key_lo.store(k_lo.reshape(key_lo.shape))
    key_hi.store(k_hi.reshape(key_hi.shape))
    key = repeated(k_lo, queries), repeated(k_hi, queries)
    value = repeated(kept(new_v[b.number, own, :], v.dtype).to(f32), queries)
    seen = (row >= 0) & (s.number == 0)
    top, sums, out = begin((q_lo, q_hi), key, value, seen, scale)
    length, first = where(row >= 0, position, 0), own.number * heads
    top, sums, out = attend(
        qs,
        k,
        v,
        table,
        row,
        first,
        length,
        s.number,
        acc.array_shape[1],
        scale,
        heads,
        pages,
        top,
        sums,
        out,
    )
    acc.store(out.reshape(acc.shape))
    best.store(top.reshape(best.shape))
    total.store(sums.reshape(total.shape))


@tilert.kernel
def merge_splits(
    o: Mut,
    k: Mut[Dyn],
    v: Mut[Dyn],
    acc: Ref,
    best: Ref,
    total: Ref,
    keys: Ref,
    values: Ref,
) -> None:
    """o[b] from the shares of `decode_attention_split`, and the new keys and values to their place
    in the cache.

    o: [B, Hq, D] in pieces (1, Hq / Hkv, d). k, v: [slots, Hkv, D] of the cache, in pieces
    (1, 1, d), placed by an index map of length B (O7). keys: [B, S, Hkv, D].
    values: [B, Hkv, D].
    """
    b, h, d = o.index
    # All loads come first, for each takes as long as everything else does.
    parts = acc[b.number, :, h, d]
    tops, sums = best[b.number, :, h], total[b.number, :, h]
    k.store(keys[b.number, 0, h.number, d].reshape(k.shape))
    v.store(kept(values[b.number, h.number, d], v.dtype).reshape(v.shape))
    weights = exp2(tops - max(tops, axis=0, keepdims=True))
    sums = sum(sums * weights, axis=0)
    out = sum(parts * weights[:, :, None], axis=0)
    o.store((out / maximum(sums, TINY)[:, None]).reshape(o.shape))
