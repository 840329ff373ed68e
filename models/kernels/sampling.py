"""Sampling: what is largest where, one draw from what a threshold keeps, and the choice.

A row of logits is cut into chunks of equal length, f32[B, S, L]; what pads the last one is -inf.
-inf stands for tokens that cannot be: padding, and those that a mask forbids. The steps:

    chunk_best -> rank_chunks -> order_chunks -> threshold -> draw -> pick

The middle four do nothing for greedy slots, the three after the first nothing for unfiltered ones.
"""

# mypy: disable-error-code="type-arg"

from typing import Any

import tilert
from models.kernels.random import exponential, random_bits, stream_key
from tilert import Mut, Ref, f32, i32, u32
from tilert.language import argmax, full, iota, log, max, maximum, minimum, sum, where, zeros

__all__ = [
    "LARGEST",
    "MINUS_INF",
    "TINY",
    "chunk_best",
    "draw",
    "finite",
    "order_chunks",
    "pick",
    "rank_chunks",
]

LARGEST = 3.4028234663852886e38
MINUS_INF = float("-inf")
TINY = 1e-30
"""The least temperature that is divided by: differences of logits over it stay ordered."""


@tilert.inline
def finite(x: Any) -> Any:
    """Logits without NaN (the lowest number), +inf (the highest) or -0; -inf stays."""
    return where(x == x, minimum(x, LARGEST), -LARGEST) + 0.0


@tilert.kernel
def chunk_best(best: Mut, index: Mut, broken: Mut, logits: Ref) -> None:
    """The largest logit of each chunk, its first place, and whether the chunk holds a NaN.

    best: f32[B, S], index, broken: i32[B, S], in pieces (1, n). logits: f32[B, S, L].
    """
    b, c = best.index
    raw = logits[b.number, c, :]
    x = finite(raw)
    best.store(max(x, axis=1).reshape(best.shape))
    index.store((c.offsets * x.shape[1] + argmax(x, 1)).reshape(best.shape))
    broken.store(max(where(raw == raw, zeros(x.shape, i32), 1), axis=1).reshape(best.shape))


@tilert.kernel
def rank_chunks(rank: Mut, best: Ref, wanted: Ref) -> None:
    """Each chunk's place in the order of falling maxima; of equal ones the first comes first.

    rank: i32[B, S] in pieces (1, n), undefined where not wanted. best: f32[B, S]. wanted: i32[B].
    """
    b, c = rank.index
    found = zeros(rank.shape, i32)
    if wanted[b.number] > 0:
        mine, others = best[b.number, c][:, None], best[b.number, :][None, :]
        earlier = iota(best.shape[1])[None, :] < c.offsets[:, None]
        before = (others > mine) | ((others == mine) & earlier)
        found = sum(where(before, 1, zeros(before.shape, i32)), axis=1).reshape(rank.shape)
    rank.store(found)


@tilert.kernel
def order_chunks(order: Mut, rank: Ref, wanted: Ref) -> None:
    """The chunks in the order of `rank_chunks`.

    order: i32[B, S] in pieces (1, n), undefined where not wanted. rank: i32[B, S]. wanted: i32[B].
    """
    b, c = order.index
    found = zeros(order.shape, i32)
    if wanted[b.number] > 0:
        here = rank[b.number, :][None, :] == c.offsets[:, None]
        found = sum(where(here, iota(rank.shape[1])[None, :], 0), axis=1).reshape(order.shape)
    order.store(found)


@tilert.kernel
def draw(
    score: Mut,
    token: Mut,
    logits: Ref,
    best: Ref,
    index: Ref,
    lowest: Ref,
    positions: Ref,
    temperature: Ref,
    min_p: Ref,
    seeds: Ref,
) -> None:
    """Each chunk's candidate: the token with the largest perturbed logit, the largest where greedy.

    Gumbel-max: among tokens with logit >= lowest and p >= min_p * p(top), the largest of
    (x - top) / temperature + Gumbel noise is a draw with probability proportional to p; -log of an
    exponential deviate is Gumbel noise. It depends on seed, position and logits alone.

    score: f32[B, S], token: i32[B, S], in pieces (1, n). logits: f32[B, S, L]. best, index: of
    `chunk_best`. lowest: f32[B]. positions: i32[B]. temperature: f32[B]; 0 or below is greedy.
    min_p: f32[B], 0 is off. seeds: u32[B, 2], low word first.
    """
    b, c = score.index
    slot = b.number
    s, t = best[slot, c], index[slot, c]
    if temperature[slot] > 0.0:
        top = max(best[slot, :])
        if (max(s) >= lowest[slot]) & (top > MINUS_INF):
            x = finite(logits[slot, c, :])
            places = (c.offsets * x.shape[1])[:, None] + iota(x.shape[1])[None, :]
            key = stream_key(seeds[slot, 0], seeds[slot, 1], positions[slot].to(u32))
            noise = -log(exponential(random_bits(key, places.to(u32))))
            z = (x - top) / maximum(temperature[slot], TINY)
            kept = (x >= lowest[slot]) & (z >= log(min_p[slot]))
            value = where(kept, z + noise, MINUS_INF)
            s = max(value, axis=1)
            t = c.offsets * x.shape[1] + argmax(value, 1)
        else:
            s = full(s.shape, MINUS_INF, f32)
    score.store(s.reshape(score.shape))
    token.store(t.reshape(score.shape))


@tilert.kernel
def pick(
    ids: Mut, positions: Mut, bad: Mut, score: Ref, token: Ref, broken: Ref, rows: Ref
) -> None:
    """The next id of each slot; its position goes up by one where its row is not negative.

    ids, positions, bad: i32[B] in pieces (1,). bad becomes 1 where logits hold NaN, and stays.
    score: f32[B, S], token: i32[B, S]: candidates; the first of the best is taken. broken:
    i32[B, S]. rows: i32[B].
    """
    b = ids.index[0].number
    ids.store(token[b, argmax(score[b, :], 0)])
    position = positions.load()
    positions.store(where(rows[b] >= 0, position + 1, position))
    bad.store(maximum(bad.load(), max(broken[b, :])))
