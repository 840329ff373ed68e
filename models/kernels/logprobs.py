"""Log probabilities of the chosen token and of the likeliest ones, from a row of logits."""

# mypy: disable-error-code="type-arg"

import tilert
from models.kernels.sampling import MINUS_INF, finite
from tilert import Mut, Ref, f32, i32
from tilert.language import exp, full, iota, log, max, min, span, sum, where, zeros

__all__ = ["chunk_mass", "logprobs"]

NO_TOKEN = (1 << 31) - 1


@tilert.kernel
def chunk_mass(mass: Mut, logits: Ref, best: Ref, wanted: Ref) -> None:
    """Sum of exp(x - best of the chunk) of each chunk.

    mass: f32[B, S] in pieces (1, n), undefined where not wanted. logits: f32[B, S, L].
    best: f32[B, S]. wanted: i32[B].
    """
    b, c = mass.index
    found = zeros(mass.shape, f32)
    if wanted[b.number] > 0:
        top = best[b.number, c]
        # Padding, and -inf of a model, is no mass, also in a chunk of nothing else.
        shifted = finite(logits[b.number, c, :]) - where(top > MINUS_INF, top, 0.0)[:, None]
        found = sum(exp(shifted), axis=1).reshape(mass.shape)
    mass.store(found)


@tilert.kernel
def logprobs(
    chosen: Mut,
    top_ids: Mut,
    top_values: Mut,
    logits: Ref,
    best: Ref,
    mass: Ref,
    order: Ref,
    ids: Ref,
    wanted: Ref,
) -> None:
    """Natural log of the softmax at a token and at the likeliest ones, the lower id first if equal.

    The K chunks with the largest maxima hold the K likeliest tokens.

    chosen: f32[B] in pieces (1,). top_ids: i32[B, K], top_values: f32[B, K], in pieces (1, K);
    -1 and -inf where there are fewer tokens. logits: f32[B, S, L]. best, mass: f32[B, S], order:
    i32[B, S], of these logits. ids: i32[B]. wanted: i32[B], 0 leaves zeros.
    """
    b = chosen.index[0].number
    token_value = zeros((), f32)
    k = top_ids.shape[1]
    top_id, top_value = zeros((k,), i32), zeros((k,), f32)
    if wanted[b] > 0:
        maxima, length = best[b, :], logits.shape[2]
        top = max(maxima)
        total = top + log(sum(mass[b, :] * exp(maxima - top)))
        token_value = finite(logits[b, ids[b] // length, ids[b] % length]) - total
        chunks = order.load(b, span(0, k), fill=-1)
        x = where((chunks >= 0)[:, None], finite(logits[b, chunks, :]), MINUS_INF).reshape(-1)
        places = ((chunks * length)[:, None] + iota(length)[None, :]).reshape(-1)
        for i in range(k):
            value = max(x)
            first = min(where(x == value, places, full(places.shape, NO_TOKEN, i32)))
            x = where(places == first, MINUS_INF, x)
            here = iota(k) == i
            there = value > MINUS_INF
            top_id = where(here, where(there, first, -1), top_id)
            top_value = where(here, value - total, top_value)
    chosen.store(token_value)
    top_ids.store(top_id.reshape(top_ids.shape))
    top_values.store(top_value.reshape(top_values.shape))
