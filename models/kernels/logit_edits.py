"""What requests change about logits before sampling: bias, penalties, a mask of allowed tokens."""

# mypy: disable-error-code="type-arg"

import tilert
from models.kernels.sampling import MINUS_INF
from tilert import Mut, Ref, f32, i32, u32
from tilert.language import iota, where, zeros

__all__ = ["PROMPT_BIT", "count_tokens", "edit_logits"]

PROMPT_BIT = 1 << 30
"""In a token's count: it occurs in the prompt. The bits below say how often it was produced."""


@tilert.kernel
def count_tokens(counts: Mut, ids: Ref) -> None:
    """Count one more of each slot's token.

    counts: i32[R, S, L] in pieces (1, n, L) at the slots' rows. ids: i32[B].
    """
    b, c, j = counts.index
    token = ids[b.number] - c.start * j.size
    if (token >= 0) & (token < c.size * j.size):
        places = (iota(c.size) * j.size)[:, None] + iota(j.size)[None, :]
        one = where(places == token, 1, zeros(places.shape, i32))
        counts.store(counts.load() + one.reshape(counts.shape))


@tilert.kernel
def edit_logits(
    edited: Mut,
    logits: Ref,
    counts: Ref,
    rows: Ref,
    presence: Ref,
    frequency: Ref,
    repetition: Ref,
    biases: Ref,
    bias_ids: Ref,
    bias_values: Ref,
    masked: Ref,
    allowed: Ref,
) -> None:
    """Logits with bias added, then penalties taken off, -inf where a mask forbids the token.

    In the order of vLLM. The repetition penalty r (Keskar et al. 2019) applies to tokens of prompt
    and reply: x / r for positive x, x * r for others. The others are OpenAI's, for tokens of the
    reply: minus count * frequency, minus presence once.

    edited: f32[B, S, L] in pieces (1, n, L). logits: f32[B, S, L]. counts: i32[R, S, L], see
    `PROMPT_BIT`; of each slot's row, rows: i32[B]. presence, frequency: f32[B], 0 is off.
    repetition: f32[B], 1 is off. biases: i32[B], how many of bias_ids: i32[B, N] and bias_values:
    f32[B, N] count. masked: i32[B], whether the slot has a mask. allowed: u32[B, S, L / 32], bit
    i % 32 of word i / 32 for token i.
    """
    b, c, _ = edited.index
    slot = b.number
    x = logits[slot, c, :]
    length = x.shape[1]
    places = (c.offsets * length)[:, None] + iota(length)[None, :]
    for i in range(biases[slot]):
        x = x + where(places == bias_ids[slot, i], bias_values[slot, i], zeros(x.shape, f32))
    p, f, r = presence[slot], frequency[slot], repetition[slot]
    if (p != 0.0) | (f != 0.0) | (r != 1.0):
        count = counts[rows[slot], c, :]
        produced = (count & (PROMPT_BIT - 1)).to(f32)
        x = where(count > 0, where(x > 0.0, x / r, x * r), x)
        x = x - produced * f - where(produced > 0.0, p, zeros(x.shape, f32))
    if masked[slot] > 0:
        words = allowed[slot, c, :]
        bit = iota(32).to(u32).reshape(1, 1, 32)
        bits = (words.reshape(x.shape[0], length // 32, 1) >> bit) & 1
        x = where(bits.reshape(x.shape) > 0, x, MINUS_INF)
    edited.store(x.reshape(edited.shape))
