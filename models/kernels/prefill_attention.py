"""Causal attention of many new tokens of one sequence over its pages of the KV cache."""

# mypy: disable-error-code="type-arg"

import tilert
from models.kernels.decode_attention import pages_of
from models.kernels.softmax import MASKED, UNSEEN, online, scores
from tilert import Const, Dyn, Mut, Ref, f32
from tilert.language import full, iota, minimum, tiles, where, zeros

__all__ = ["prefill_attention"]


@tilert.kernel
def prefill_attention(
    o: Mut[Dyn],
    q: Ref[Dyn],
    k: Ref[Dyn],
    v: Ref[Dyn],
    table: Ref[Dyn, Dyn],
    rows: Ref,
    positions: Ref[Dyn],
    scale: Const[float],
    pages: Const[int],
) -> None:
    """o[t] = attention of q[t] over positions 0..positions[t] of table row rows[0].

    The keys and values of the new tokens are in the cache already.

    o, q: [T, Hq, D], o in pieces (bm, 1, D). k, v: [pages, page_size, Hkv, D].
    table: i32[rows, pages a row]. rows: i32[1]. positions: i32[T], rising by one. pages: a step.
    """
    m, h, _ = o.index
    size = o.shape[0]
    width = pages * k.shape[1]
    head = h.number // (q.shape[1] // k.shape[2])
    row = rows[0]
    start = positions[0]
    qs = q[m, h.number, :]
    at = start + m.offsets
    best = full((size,), UNSEEN, f32)
    total = zeros((size,), f32)
    acc = zeros((size, q.shape[2]), f32)
    last = start + minimum(m.start + size, q.shape[0]) - 1
    for j in tiles(table, axis=1, size=pages, stop=last // width + 1):
        ks = pages_of(k, table, row, j, head, 1)
        seen = (iota(width) + j.number * width)[None, :] <= at[:, None]
        x = where(seen, scores(qs, ks, scale), MASKED)
        vs = pages_of(v, table, row, j, head, 1)
        best, total, acc = online(x, vs, best, total, acc)
    o.store((acc / total[:, None]).reshape(o.shape))
