"""Causal attention of many new tokens of several sequences over their pages of the KV cache."""

# mypy: disable-error-code="type-arg"

import tilert
from models.kernels.decode_attention import TINY, pages_of
from models.kernels.softmax import MASKED, UNSEEN, online_raw
from models.kernels.terms import both
from tilert import Const, Dyn, Mut, Ref, f32
from tilert.language import full, iota, maximum, minimum, mma, tiles, where, zeros

__all__ = ["prefill_attention"]


@tilert.kernel
def prefill_attention(
    o: Mut[Dyn],
    q: Ref[Dyn],
    k: Ref[Dyn],
    v: Ref[Dyn],
    table: Ref[Dyn, Dyn],
    rows: Ref,
    slots: Ref[Dyn],
    begins: Ref,
    starts: Ref,
    scale: Const[float],
    pages: Const[int],
) -> None:
    """o[t] = attention of q[t] over positions 0 up to its own of its slot's table row.

    The tokens of a slot lie side by side, slots in order, and tokens of no slot at the end: their
    output is 0. The keys and values of the new tokens are in the cache already. A program works on
    the slots that have tokens in its piece one after the other, each time with the others' masked.

    o, q: [T, Hq, D], o in pieces (bm, 1, D); or o [T, 2, Hq, D], of two terms (`terms`), in pieces
    (bm, 2, 1, D). k, v: [pages, page_size, Hkv, D], of q's dtype. table: i32[rows, pages a row].
    rows: i32[S], the table row of each slot. slots: i32[T], the slot of each token. begins:
    i32[S + 1], the first token of each slot and the number of tokens that have one. starts: i32[S],
    the position of each slot's first token. pages: a step.
    """
    m, h = o.index[0], o.index[-2]
    size = o.shape[0]
    width = pages * k.shape[1]
    head = h.number // (q.shape[1] // k.shape[2])
    qs = q[m, h.number, :]
    best = full((size,), UNSEEN, f32)
    total = zeros((size,), f32)
    acc = zeros((size, q.shape[2]), f32)
    end = minimum(m.start + size, begins[rows.shape[0]])
    for slot in range(slots[m.start], slots[end - 1] + 1):
        row = rows[slot]
        begin = begins[slot]
        past = starts[slot] - begin
        stop = minimum(end, begins[slot + 1])
        own = (m.offsets >= begin) & (m.offsets < stop)
        # How many positions each token sees.
        seen = where(own, m.offsets + (past + 1), 0)
        # How many all of them see.
        common = where((begin <= m.start) & (stop == m.start + size), m.start + past + 1, 0)
        for j in tiles(table, axis=1, size=pages, stop=(past + stop - 1) // width + 1):
            ks = pages_of(k, table, row, j, head, 1)
            x = mma(qs, ks.T, zeros((size, width), f32))
            if (j.number + 1) * width > common:
                x = where((iota(width) + j.number * width)[None, :] < seen[:, None], x, MASKED)
            vs = pages_of(v, table, row, j, head, 1)
            best, total, acc = online_raw(x, vs, best, total, acc, scale)
    out = acc * (1.0 / maximum(total, TINY))[:, None]
    if o.shape[3:] == ():
        o.store(out.reshape(o.shape))
    else:
        o.store(both(out, o.dtype).reshape(o.shape))
