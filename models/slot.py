"""What a step does for one sequence, and which parts of the sampler a batch of them needs."""

import struct
from dataclasses import dataclass
from typing import Final

__all__ = [
    "FROM_SLOT",
    "GIVEN",
    "KEPT",
    "MAX_BIASES",
    "PADDING",
    "PLAIN",
    "WORDS",
    "Features",
    "Slot",
]

MAX_BIASES = 300
"""Most entries of a slot's `logit_bias`; OpenAI's limit."""

KEPT: Final = 0
GIVEN: Final = 1
FROM_SLOT: Final = 2
"""Values of `Slot.source`; see there."""

DRAWS, EDITS, LOGPROBS = 1, 2, 4
"""Bits of `Slot.needs`."""

WORDS: Final = {
    "source": "i", "id": "i", "start": "i", "needs": "i",
    "temperature": "f", "top_k": "i", "top_p": "f", "min_p": "f", "filters": "i", "seeds": "II",
    "presence": "f", "frequency": "f", "repetition": "f", "biases": "i", "masked": "i",
    "wanted": "i",
}  # fmt: skip
"""A slot as 32-bit words: what they are called, in order, and their `struct` formats."""

_INT_MAX, _FLOAT_MAX = 2**31 - 1, 3.4028234663852886e38

_PACK = struct.Struct("=" + "".join(WORDS.values()))


@dataclass(frozen=True, slots=True)
class Slot:
    """One sequence's place in a batch.

    row: of the KV cache, or -1 for a padding slot. token: id that the next step reads.
    position: of that token.
    source: where the token is. `GIVEN`: it is `token`. `KEPT`: in this slot, with its position, as
    the steps so far have left them. `from_slot(k)`: in slot k of the batch before the change.
    `from_fresh(k)`: entry k of the array that the change is given.
    temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off.
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
    source: int = GIVEN

    @staticmethod
    def from_slot(slot: int) -> int:
        """A `source`."""
        return FROM_SLOT + slot

    @staticmethod
    def from_fresh(entry: int) -> int:
        """A `source`."""
        return -1 - entry

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

    @property
    def needs(self) -> int:
        """Which parts of the sampler it needs, as `Features.of` has it."""
        return DRAWS * self.draws | EDITS * self.edits | LOGPROBS * self.logprobs

    def words(self) -> bytes:
        """What the device is told of it, as `WORDS` has it.

        Raises:
            ValueError: if it has more than `MAX_BIASES` biases.
        """
        if len(self.logit_bias) > MAX_BIASES:
            raise ValueError(
                f"a slot takes at most {MAX_BIASES} biases, got {len(self.logit_bias)}"
            )
        return _PACK.pack(
            self.source, self.token, self.position, self.needs,
            min(self.temperature, _FLOAT_MAX), min(self.top_k, _INT_MAX), self.top_p, self.min_p,
            self.filters,
            self.seed & 0xFFFFFFFF, self.seed >> 32 & 0xFFFFFFFF,
            self.presence_penalty, self.frequency_penalty, min(self.repetition_penalty, _FLOAT_MAX),
            len(self.logit_bias), self.masked, self.logprobs,
        )  # fmt: skip


PADDING = Slot(row=-1, token=0, position=0)
"""A slot that nobody has."""


@dataclass(frozen=True, slots=True)
class Features:
    """Parts of the sampler that a step runs; a recorded step runs those it was recorded with.

    draws: random draws. edits: bias, penalties and masks. logprobs: log probabilities.
    """

    draws: bool = True
    edits: bool = False
    logprobs: bool = False

    @classmethod
    def of(cls, bits: int) -> "Features":
        """What slots need whose `Slot.needs`, or-ed together, are `bits`."""
        return cls(bool(bits & DRAWS), bool(bits & EDITS), bool(bits & LOGPROBS))

    def cover(self, needed: "Features") -> bool:
        """Whether a step with these parts has all that is needed."""
        return (
            self.draws >= needed.draws
            and self.edits >= needed.edits
            and self.logprobs >= needed.logprobs
        )


PLAIN = Features()
"""Greedy and random sampling."""
