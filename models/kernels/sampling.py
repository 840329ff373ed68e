"""Sampling: greedy, or temperature, top-k, top-p and min-p, then one draw. All on the device.

The filters are those of transformers' logits warpers in the order temperature, top-k, top-p, min-p,
with one difference: tokens that tie with the last one kept are all kept, so that the result does
not depend on how a sort breaks ties. There is no sort: a filter is a threshold, found by narrowing
an interval of logits with counts or masses.
"""

# mypy: disable-error-code="type-arg"

from typing import Any

import tilert
from models.kernels.random import exponential, random_bits, stream_key
from tilert import Const, Mut, Ref, f32, i32, u32
from tilert.language import (
    argmax,
    bitcast,
    exp,
    full,
    iota,
    log,
    max,
    maximum,
    minimum,
    span,
    sum,
    tiles,
    where,
    zeros,
)

__all__ = ["chunk_best", "sample"]

LARGEST = 3.4028234663852886e38
MINUS_INF = float("-inf")
LOWEST_KEY = 0x00800000
"""`ordered(-LARGEST)`: no token lies below, only padding."""
ROUNDS = 36
"""Enough to narrow 2^32 keys to one, whatever the number of thresholds a round."""


@tilert.inline
def finite(x: Any) -> Any:
    """Logits without NaN (the lowest), infinities (the finite ends) or -0.

    A model that overflows must give some token, not a search without end.
    """
    return where(x == x, minimum(maximum(x, -LARGEST), LARGEST), -LARGEST) + 0.0


@tilert.inline
def step_of(logits: Any, b: Any, j: Any) -> Any:
    """A block of a row of logits, finite; -inf beyond the vocabulary."""
    return where(j.offsets < logits.shape[1], finite(logits[b, j]), MINUS_INF)


@tilert.inline
def ordered(x: Any) -> Any:
    """u32 keys in the order of the f32 values."""
    bits = bitcast(x, u32)
    return where(bits >= 0x80000000, ~bits, bits | 0x80000000)


@tilert.kernel
def chunk_best(best: Mut, index: Mut, logits: Ref, chunk: Const[int]) -> None:
    """The largest logit of each chunk of the vocabulary, and its first place.

    best: f32[B, C], index: i32[B, C], in pieces (1, 1). logits: f32[B, V] with C = ceil(V / chunk).
    """
    b, c = best.index
    start = c.number * chunk
    x = logits[b.number, span(start, chunk)]
    x = where(start + iota(chunk) < logits.shape[1], finite(x), MINUS_INF)
    best.store(max(x))
    index.store(start + argmax(x, 0))


@tilert.inline
def weighed(x: Any, top: Any, temperature: Any, by_count: Any) -> Any:
    """Keys of tokens, and what each counts for: 1, or its mass relative to the top one's."""
    weights = full(x.shape, 1.0, f32) if by_count else exp((x - top) / temperature)
    return ordered(x), weights


@tilert.inline
def above(keys: Any, weights: Any, thresholds: Any) -> Any:
    """For each threshold the weight of all keys at or above it."""
    return sum(where(keys[None, :] >= thresholds[:, None], weights[None, :], 0.0), axis=1)


@tilert.inline
def all_above(
    logits: Any, b: Any, thresholds: Any, top: Any, temperature: Any, by_count: Any, block: Any
) -> Any:
    """`above` over a row of logits. It falls as the threshold rises, rounding included: every
    threshold's sum runs over the same tree."""
    total = zeros(thresholds.shape, f32)
    for j in tiles(logits, axis=1, size=block):
        keys, weights = weighed(step_of(logits, b, j), top, temperature, by_count)
        total = total + above(keys, weights, thresholds)
    return total


@tilert.inline
def highest(
    logits: Any,
    b: Any,
    low: Any,
    top: Any,
    temperature: Any,
    need: Any,
    by_count: Any,
    block: Any,
    fan: Any,
) -> Any:
    """The largest key at or above which at least `need` lies, between `low` and the key of `top`.

    `fan` thresholds a round cut the interval [low, high) into fan + 1 parts. Keys and weights are
    worked out once where a block holds the whole row.
    """
    high = ordered(top) + 1
    whole = block >= logits.shape[1]
    if whole:
        keys, weights = weighed(finite(logits[b, :]), top, temperature, by_count)
    for _ in range(ROUNDS):
        if high - low > 1:
            step = maximum((high - low) // (fan + 1), 1)
            thresholds = low + step * (iota(fan).to(u32) + 1)
            if whole:
                found = above(keys, weights, thresholds)
            else:
                found = all_above(logits, b, thresholds, top, temperature, by_count, block)
            met = sum(where(found >= need, 1, full((fan,), 0, i32)))
            low = low + step * met.to(u32)
            high = where(met < fan, minimum(high, low + step), high)
    return low


@tilert.inline
def draw(
    logits: Any,
    b: Any,
    low: Any,
    top: Any,
    temperature: Any,
    min_p: Any,
    key: Any,
    token: Any,
    block: Any,
) -> Any:
    """A token with key >= low and p >= min_p * p(top), with probability proportional to p.

    Gumbel-max: the largest of (x - top) / temperature + Gumbel noise; -log of an exponential
    deviate is Gumbel noise.
    """
    best = full((), MINUS_INF, f32)
    for j in tiles(logits, axis=1, size=block):
        x = step_of(logits, b, j)
        z = (x - top) / temperature
        noise = -log(exponential(random_bits(key, j.offsets.to(u32))))
        kept = (ordered(x) >= low) & (z >= log(min_p))
        score = where(kept, z + noise, MINUS_INF)
        here = max(score)
        token = where(here > best, j.start + argmax(score, 0), token)
        best = maximum(best, here)
    return token


@tilert.kernel
def sample(
    ids: Mut,
    positions: Mut,
    logits: Ref,
    best: Ref,
    index: Ref,
    rows: Ref,
    temperature: Ref,
    top_k: Ref,
    top_p: Ref,
    min_p: Ref,
    seeds: Ref,
    block: Const[int],
    fan: Const[int],
) -> None:
    """The next id of each slot; its position goes up by one where its row is not negative.

    The draw depends on seed, position and logits alone.

    ids, positions: i32[B] in pieces (1,). logits: f32[B, V]. best, index: of `chunk_best`.
    rows: i32[B]. temperature: f32[B]; 0 or below is greedy, the first of equal logits.
    top_k: i32[B], below 1 is off. top_p: f32[B], 1 or above is off. min_p: f32[B], 0 is off.
    seeds: u32[B, 2], low word first. block: logits a step. fan: thresholds a round.
    """
    b = ids.index[0].number
    position = sum(positions.load())
    chunks = best[b, :]
    top = max(chunks)
    token = index[b, argmax(chunks, 0)]
    t = temperature[b]
    if t > 0.0:
        low = full((), LOWEST_KEY, u32)
        k = top_k[b]
        if (k > 0) & (k < logits.shape[1]):
            low = highest(logits, b, low, top, t, k.to(f32), True, block, fan)
        p = top_p[b]
        if p < 1.0:
            mass = all_above(logits, b, low + zeros((1,), u32), top, t, False, block)
            low = highest(logits, b, low, top, t, p * sum(mass), False, block, fan)
        key = stream_key(seeds[b, 0], seeds[b, 1], position.to(u32))
        token = draw(logits, b, low, top, t, min_p[b], key, token, block)
    ids.store(token)
    positions.store(where(rows[b] >= 0, position + 1, position))
