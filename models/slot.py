"""What a step does for one sequence, and which parts of the sampler a batch of them needs."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["MAX_BIASES", "PLAIN", "Features", "Slot"]

MAX_BIASES = 300
"""Most entries of a slot's `logit_bias`; OpenAI's limit."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One sequence's place in a batch.

    row: of the KV cache, or -1 for a padding slot. token: id that the next step reads.
    position: of that token. temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off.
    min_p: 0 is off. seed: any integer, taken modulo 2^64.
    presence_penalty, frequency_penalty: 0 is off. repetition_penalty: above 0, 1 is off. All three
    go by `KVCache.history` of the row. logit_bias: (id, value) pairs, at most `MAX_BIASES`; -inf
    forbids a token. masked: only tokens given to `Batch.allow` may be chosen. logprobs: whether the
    step leaves log probabilities.
    """

    row: int
    token: int
    position: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    masked: bool = False
    logprobs: bool = False

    @property
    def draws(self) -> bool:
        """Whether its token is drawn."""
        return self.temperature > 0

    @property
    def filters(self) -> bool:
        """Whether a threshold has to be found for its draw."""
        return self.draws and (self.top_k > 0 or self.top_p < 1)

    @property
    def edits(self) -> bool:
        """Whether its logits are changed before sampling."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
            or bool(self.logit_bias)
            or self.masked
        )


@dataclass(frozen=True, slots=True)
class Features:
    """Parts of the sampler that a step runs; a recorded step runs those it was recorded with.

    draws: random draws. edits: bias, penalties and masks. logprobs: log probabilities.
    """

    draws: bool = True
    edits: bool = False
    logprobs: bool = False

    @classmethod
    def of(cls, slots: Sequence[Slot]) -> "Features":
        """What these slots need."""
        return cls(
            any(slot.draws for slot in slots),
            any(slot.edits for slot in slots),
            any(slot.logprobs for slot in slots),
        )

    def cover(self, needed: "Features") -> bool:
        """Whether a step with these parts has all that is needed."""
        return (
            self.draws >= needed.draws
            and self.edits >= needed.edits
            and self.logprobs >= needed.logprobs
        )


PLAIN = Features()
"""Greedy and random sampling."""
