"""What a caller asks for (`SamplingParams`) and what it gets back (`Delta`)."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from grout.errors import InvalidSamplingParams, PromptTooLong

FinishReason = Literal["stop", "length"]

SEED_LIMIT = 2**63
"""Seeds are any 64-bit signed integer; the sampler sees them folded to 32 bits."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue a prompt.

    temperature: >= 0; 0 is greedy. top_k: 0 is off (-1 is accepted as off too).
    top_p: in (0, 1]. min_p: in [0, 1]. seed: None draws a fresh one for each request.
    max_tokens: >= 1, or None for as many as the context holds. stop: texts that end the reply
    and are never part of it. stop_token_ids: ids that end the reply as an end-of-sequence id
    does. ignore_eos: go on past the model's end-of-sequence ids (`stop_token_ids` still count).

    Raises `InvalidSamplingParams` naming the field.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        self._normalise()
        _require(
            _is_number(self.temperature) and self.temperature >= 0,
            "temperature",
            self.temperature,
            "a finite number >= 0 (0 is greedy)",
        )
        _require(
            _is_int(self.top_k) and self.top_k >= 0, "top_k", self.top_k, "an integer >= 0 (0: off)"
        )
        _require(
            _is_number(self.top_p) and 0 < self.top_p <= 1,
            "top_p",
            self.top_p,
            "a number in (0, 1]",
        )
        _require(
            _is_number(self.min_p) and 0 <= self.min_p <= 1,
            "min_p",
            self.min_p,
            "a number in [0, 1]",
        )
        _require(
            self.seed is None or (_is_int(self.seed) and -SEED_LIMIT <= self.seed < SEED_LIMIT),
            "seed",
            self.seed,
            "a 64-bit signed integer or null",
        )
        _require(
            self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1),
            "max_tokens",
            self.max_tokens,
            "an integer >= 1 or null",
        )
        _require(
            all(isinstance(text, str) and text for text in self.stop),
            "stop",
            self.stop,
            "texts of at least one character",
        )
        _require(
            all(_is_int(token) and token >= 0 for token in self.stop_token_ids),
            "stop_token_ids",
            self.stop_token_ids,
            "token ids >= 0",
        )
        _require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "true or false")

    def _normalise(self) -> None:
        """Spell equal settings equally, so that nothing below handles two spellings."""
        stop: object = self.stop
        if isinstance(stop, str):
            raise InvalidSamplingParams("stop", "stop must be a tuple of texts, not one text")
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if _is_int(self.top_k) and self.top_k == -1:
            object.__setattr__(self, "top_k", 0)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class Delta:
    """The next piece of a reply.

    text: never holds half a character, nor any part of a stop text; all deltas' texts joined are
    the reply. token_ids: the ids produced since the last delta, end-of-sequence ids included.
    finish_reason: set on the last delta only.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return (_is_int(value) or isinstance(value, float)) and math.isfinite(value)


def _require(ok: bool, param: str, value: object, wanted: str) -> None:
    if not ok:
        raise InvalidSamplingParams(param, f"{param} must be {wanted}, not {value!r}")


__all__ = ["Delta", "FinishReason", "PromptTooLong", "SamplingParams"]
