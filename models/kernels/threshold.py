"""The lowest logit that top-k and top-p keep.

The filters are those of transformers' logits warpers in the order temperature, top-k, top-p, min-p,
with one difference: tokens that tie with the last one kept are all kept, so that the result does
not depend on how a sort breaks ties. There is no sort: a filter is the largest threshold above
which enough lies, enough tokens or enough probability, found by narrowing an interval.

Chunk maxima alone already prove a lower bound: what lies above a threshold is at least the maxima
above it. Chunks whose maximum is below the bound are not read any more, and after it hardly any is.
"""

# mypy: disable-error-code="type-arg, operator"

from typing import Any

import tilert
from models.kernels.sampling import LARGEST, MINUS_INF, TINY, finite
from tilert import Const, Mut, Ref, f32, i32, u32
from tilert.language import (
    bitcast,
    cdiv,
    exp2,
    full,
    iota,
    log2,
    max,
    maximum,
    min,
    minimum,
    span,
    sum,
    where,
    zeros,
)

__all__ = ["threshold"]

LOG2_E = 1.4426950408889634
LOWEST_KEY = 0x00800000
"""`ordered(-LARGEST)`: no token lies below."""
ROUNDS = 40
"""Enough for three or more thresholds a round to narrow 2^32 keys to one on odd rounds alone."""


@tilert.inline
def ordered(x: Any) -> Any:
    """u32 keys in the order of f32 values other than -0."""
    bits = bitcast(x + 0.0, u32)
    return where(bits >= 0x80000000, ~bits, bits | 0x80000000)


@tilert.inline
def value_of(key: Any) -> Any:
    """The f32 value with a key."""
    return bitcast(where(key >= 0x80000000, key & 0x7FFFFFFF, ~key), f32)


@tilert.inline
def cuts(low: Any, high: Any, turn: Any, fan: Any) -> Any:
    """`fan` keys between low and high, both excluded, rising.

    Evenly spaced as values on even turns: quick where logits are spread evenly. Evenly spaced as
    keys on odd turns: that bounds the number of turns, whatever the logits.
    """
    i = iota(fan)
    by_key = low + (high - low) // (fan + 1) * (i.to(u32) + 1)
    bottom, top = value_of(low), value_of(high - 1)
    by_value = ordered(bottom + (top - bottom) * ((i.to(f32) + 1.0) * (1.0 / (fan + 1))))
    keys = where(turn % 2 == 0, by_value, by_key)
    return minimum(maximum(keys, low + 1), high - 1)


@tilert.inline
def weigh(x: Any, top: Any, scale: Any, by_mass: Any) -> Any:
    """What tokens count for: 1, or their probability relative to the top one's."""
    return where(by_mass > 0, exp2((x - top) * scale), full(x.shape, 1.0, f32))


@tilert.inline
def above(x: Any, weights: Any, keys: Any) -> Any:
    """For each key the weight of all values at or above it.

    It falls as the key rises, rounding included: every key's sum runs over the same tree.
    """
    return sum(where(x[None, :] >= value_of(keys)[:, None], weights[None, :], 0.0), axis=1)


@tilert.inline
def narrowed(state: Any, keys: Any, found: Any, need: Any) -> Any:
    """The interval between the last key that has enough above it and the first that has not.

    A state is low, high, and what lies at or above low, infinite where nobody has looked.
    """
    low, high, there = state
    met = found >= need
    low, high = max(where(met, keys, low)), min(where(met, high, keys))
    return low, high, min(where(met, found, there))


@tilert.inline
def is_open(state: Any, need: Any, by_mass: Any) -> Any:
    """Whether a search goes on.

    Just as many tokens as needed are the set that is wanted, whatever lies between. Of masses that
    cannot be said: a token may be too unlikely to change a sum.
    """
    return (state[1] - state[0] > 1) & ((state[2] > need) | (by_mass > 0))


@tilert.inline
def highest(x: Any, weights: Any, state: Any, need: Any, fan: Any, by_mass: Any) -> Any:
    """A state whose low keeps what the largest key with `need` at or above it keeps.

    Where no key has as much, the low that was given.
    """
    low, high, there = state
    for turn in range(ROUNDS):
        if is_open((low, high, there), need, by_mass):
            keys = cuts(low, high, turn, fan)
            found = above(x, weights, keys)
            low, high, there = narrowed((low, high, there), keys, found, need)
    return low


@tilert.inline
def groups_above(maxima: Any, low: Any, group: Any) -> Any:
    """How many groups of chunks, in the order of their maxima, hold all that lies above a key."""
    return cdiv(sum(where(maxima >= value_of(low), 1, zeros(maxima.shape, i32))), group)


@tilert.inline
def members(row: Any, number: Any, group: Any, by_mass: Any) -> Any:
    """All logits of a group of chunks, and what they count for."""
    logits, order, b, _, top, scale = row
    chunks = order.load(b, span(number * group, group), fill=-1)
    x = where((chunks >= 0)[:, None], finite(logits[b, chunks, :]), MINUS_INF)
    x = x.reshape(group * logits.shape[2])
    return x, weigh(x, top, scale, by_mass)


@tilert.inline
def mass_above(row: Any, low: Any, group: Any) -> Any:
    """Probability at or above a key, relative to the top token's."""
    mass = zeros((), f32)
    for i in range(groups_above(row[3], low, group)):
        x, weights = members(row, i, group, 1)
        mass = mass + sum(where(x >= value_of(low), weights, 0.0))
    return mass


@tilert.inline
def all_above(row: Any, keys: Any, low: Any, group: Any, by_mass: Any) -> Any:
    """`above` over a whole row, for keys above `low`."""
    found = zeros(keys.shape, f32)
    for i in range(groups_above(row[3], low, group)):
        x, weights = members(row, i, group, by_mass)
        found = found + above(x, weights, keys)
    return found


@tilert.inline
def search(row: Any, low: Any, high: Any, need: Any, group: Any, fan: Any, by_mass: Any) -> Any:
    """`highest` over a row of logits: first over chunk maxima, then over what may lie above."""
    _, _, _, maxima, top, scale = row
    unknown = full((), float("inf"), f32)
    if groups_above(maxima, low, group) > 1:
        least = weigh(maxima, top, scale, by_mass)
        low = maximum(low, where(sum(least) >= need, ordered(min(maxima)), low))
        low = highest(maxima, least, (low, high, unknown), need, fan, by_mass)
    if groups_above(maxima, low, group) <= 1:
        x, weights = members(row, 0, group, by_mass)
        low = highest(x, weights, (low, high, unknown), need, fan, by_mass)
    else:
        there = unknown
        for turn in range(ROUNDS):
            if is_open((low, high, there), need, by_mass):
                keys = cuts(low, high, turn, fan)
                found = all_above(row, keys, low, group, by_mass)
                low, high, there = narrowed((low, high, there), keys, found, need)
    return low


@tilert.kernel
def threshold(
    lowest: Mut,
    logits: Ref,
    best: Ref,
    order: Ref,
    temperature: Ref,
    top_k: Ref,
    top_p: Ref,
    wanted: Ref,
    group: Const[int],
    fan: Const[int],
) -> None:
    """A logit that all kept by top-k and then top-p reach, and no others: the lowest, or one below.

    lowest: f32[B] in pieces (1,). logits: f32[B, S, L]. best: of `chunk_best`. order: of
    `order_chunks`. temperature: f32[B], above 0. top_k: i32[B], below 1 is off. top_p: f32[B], 1 or
    above is off. wanted: i32[B], 0 where both are off. group: chunks a step. fan: keys a round.
    """
    assert fan >= 3, "ROUNDS is enough for three or more keys a round"
    b = lowest.index[0].number
    low = full((), LOWEST_KEY, u32)
    maxima = best[b, :]
    top = max(maxima)
    if (wanted[b] > 0) & (top > MINUS_INF):
        k, p = top_k[b], maximum(top_p[b], 0.0)
        scale = LOG2_E / maximum(temperature[b], TINY)
        row = logits, order, b, maxima, top, scale
        high = ordered(top) + 1
        # A loop, so that the code of the search is there once.
        for by_mass in range(2):
            if where(by_mass > 0, p < 1.0, k > 0):
                need = k.to(f32)
                if by_mass > 0:
                    mass = mass_above(row, low, group)
                    need = maximum(p * mass, TINY)
                    # Tokens below this hold at most half of what top-p may leave out.
                    share = 0.5 * (1.0 - p) * mass / (logits.shape[1] * logits.shape[2])
                    low = maximum(low, ordered(maximum(top + log2(share) / scale, -LARGEST)))
                low = search(row, low, high, need, group, fan, by_mass)
    lowest.store(value_of(low))
