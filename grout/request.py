"""What a caller asks for (`SamplingParams`) and what it gets back (`Delta`)."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from grout.errors import InvalidSamplingParams, PromptTooLong
from grout.grammar import Grammar
from models.slot import MAX_BIASES

FinishReason = Literal["stop", "length"]

SEED_LIMIT = 2**63
"""Seeds are any 64-bit signed integer; the sampler sees them folded to 32 bits."""

MAX_LOGPROBS = 20
"""Most alternatives reported for a token, as in OpenAI's API."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue a prompt.

    temperature: >= 0; 0 is greedy. top_k: 0 is off (-1 is accepted as off too).
    top_p: in (0, 1]. min_p: in [0, 1]. seed: None draws a fresh one for each request.
    max_tokens: >= 0, or None for as many as the context holds; 0 runs the prompt alone.
    stop: texts that end the reply and are never part of it. stop_token_ids: ids that end the reply
    as an end-of-sequence id does. ignore_eos: go on past the model's end-of-sequence ids
    (`stop_token_ids` still count).
    presence_penalty, frequency_penalty: in [-2, 2], subtracted from the logits of produced tokens
    once, and once for each time. repetition_penalty: > 0; divides positive logits of tokens of
    prompt and reply, and multiplies negative ones (Keskar et al. 2019); 1 is off.
    logit_bias: pairs of a token id and what is added to its logit, in [-100, 100].
    min_tokens: ids that would end the reply are not chosen before as many tokens, and stop texts
    among these do not count.
    logprobs: None for none, or how many of the likeliest tokens to report beside the chosen one,
    at most `MAX_LOGPROBS`. prompt_logprobs: the same for the tokens of the prompt, which are all
    run then, cached or not. grammar: what the reply must match. priority: smaller goes first.

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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    priority: int = 0

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
            self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 0),
            "max_tokens",
            self.max_tokens,
            "an integer >= 0 or null",
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
        self._check_logits()
        _require(
            _is_int(self.min_tokens) and self.min_tokens >= 0,
            "min_tokens",
            self.min_tokens,
            "an integer >= 0",
        )
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            self.min_tokens,
            f"at most max_tokens ({self.max_tokens})",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(
                value is None or (_is_int(value) and 0 <= value <= MAX_LOGPROBS),
                name,
                value,
                f"an integer from 0 to {MAX_LOGPROBS} or null",
            )
        _require(
            self.grammar is None or isinstance(self.grammar, Grammar),
            "grammar",
            self.grammar,
            "a Grammar or null",
        )
        _require(
            _is_int(self.priority) and -SEED_LIMIT <= self.priority < SEED_LIMIT,
            "priority",
            self.priority,
            "a 64-bit signed integer",
        )

    def _check_logits(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(_is_number(value) and -2 <= value <= 2, name, value, "a number in [-2, 2]")
        _require(
            _is_number(self.repetition_penalty) and self.repetition_penalty > 0,
            "repetition_penalty",
            self.repetition_penalty,
            "a finite number > 0 (1: off)",
        )
        if len(self.logit_bias) > MAX_BIASES:
            raise InvalidSamplingParams(
                "logit_bias",
                f"logit_bias holds {len(self.logit_bias)} entries, more than {MAX_BIASES}",
            )
        seen: set[int] = set()
        for token, bias in self.logit_bias:
            _require(
                _is_int(token) and token >= 0 and token not in seen,
                "logit_bias",
                token,
                "of distinct token ids >= 0",
            )
            _require(
                _is_number(bias) and -100 <= bias <= 100,
                "logit_bias",
                bias,
                "of numbers in [-100, 100]",
            )
            seen.add(token)

    def _normalise(self) -> None:
        """Spell equal settings equally, so that nothing below handles two spellings."""
        stop: object = self.stop
        if isinstance(stop, str):
            raise InvalidSamplingParams("stop", "stop must be a tuple of texts, not one text")
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", self._bias_pairs())
        if _is_int(self.top_k) and self.top_k == -1:
            object.__setattr__(self, "top_k", 0)

    def _bias_pairs(self) -> tuple[tuple[int, float], ...]:
        try:
            return tuple((token, bias) for token, bias in self.logit_bias)
        except (TypeError, ValueError):
            raise InvalidSamplingParams(
                "logit_bias", f"logit_bias must be pairs (token id, bias), not {self.logit_bias!r}"
            ) from None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalises(self) -> bool:
        """Whether the choice of a token depends on which ones came before."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely a token was after those before it.

    logprob: natural logarithm of its probability under the model, before temperature and filters.
    top: the likeliest tokens with theirs, likeliest first, as many as were asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


# Not frozen, because that makes it four times slower to make, once a token.
@dataclass(slots=True)
class Delta:
    """The next piece of a reply.

    text: never holds half a character, nor any part of a stop text; all deltas' texts joined are
    the reply. It begins with the whole of a character that the prompt ends within.
    token_ids: the ids produced since the last delta, end-of-sequence ids included.
    finish_reason: set on the last delta only. logprobs: one for each of `token_ids`, if asked for.
    cached_tokens: on the first delta, how many tokens of the prompt were found in the cache.
    prompt_logprobs: on the first delta, one for each token of the prompt, if asked for; None for
    the first, which follows nothing.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return (_is_int(value) or isinstance(value, float)) and math.isfinite(value)


def _require(ok: bool, param: str, value: object, wanted: str) -> None:
    if not ok:
        raise InvalidSamplingParams(param, f"{param} must be {wanted}, not {value!r}")


__all__ = [
    "MAX_LOGPROBS",
    "Delta",
    "FinishReason",
    "PromptTooLong",
    "SamplingParams",
    "TokenLogprob",
]
