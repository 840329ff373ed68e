"""Which sampling a request gets: its own values, then the model's, then OpenAI's defaults."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from grout.grammar import Grammar
from grout.request import SamplingParams
from server.errors import ApiError, invalid
from server.protocol import ServingEngine
from server.schemas import GenerationRequest

__all__ = ["of_choice", "sampling_params"]

MAX_TOP_K = 2**31 - 1
"""More than any vocabulary has, and what the device's sampler can hold."""

_OPENAI_DEFAULTS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


def sampling_params(
    request: GenerationRequest,
    engine: ServingEngine,
    max_tokens: int,
    grammar: Grammar | None = None,
) -> SamplingParams:
    """Return the engine's sampling parameters; values of null count as absent.

    Raises ApiError 400 for token ids that the vocabulary has not, and for more `min_tokens` than
    `max_tokens`, which the request need not have said.
    """
    least = request.min_tokens or 0
    if least > max_tokens:
        raise invalid(
            "min_tokens",
            f"'min_tokens' is {least}, but this answer may have at most {max_tokens} tokens.",
        )
    defaults = engine.default_sampling

    def choose(name: str) -> Any:
        for value in (getattr(request, name), defaults.get(name)):
            if value is not None:
                return value
        return _OPENAI_DEFAULTS[name]

    return SamplingParams(
        temperature=float(choose("temperature")),
        top_p=float(choose("top_p")),
        top_k=min(max(int(choose("top_k")), 0), MAX_TOP_K),
        min_p=float(choose("min_p")),
        seed=request.seed,
        max_tokens=max_tokens,
        stop=tuple(request.stop or ()),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        presence_penalty=float(request.presence_penalty or 0),
        frequency_penalty=float(request.frequency_penalty or 0),
        repetition_penalty=float(choose("repetition_penalty")),
        logit_bias=_biases(request.logit_bias or {}, engine.vocab_size),
        min_tokens=least,
        logprobs=request.top_logprobs_wanted,
        prompt_logprobs=request.prompt_logprobs_wanted,
        grammar=grammar,
        priority=request.priority or 0,
    )


def of_choice(params: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of the answer `index` of several: a seed is one for each."""
    if params.seed is None or index == 0:
        return params
    return replace(params, seed=(params.seed + index + 2**63) % 2**64 - 2**63)


def _biases(given: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    out: dict[int, float] = {}
    for key, bias in given.items():
        # isdecimal takes digits of every script, of which only ASCII's are JSON's.
        if not (key.isascii() and key.isdecimal()) or len(key) > 10:
            raise _bad_bias(key, "is not a token id")
        if int(key) >= vocab_size:
            raise _bad_bias(key, f"is not in the vocabulary; token ids are 0..{vocab_size - 1}")
        if int(key) in out:
            raise _bad_bias(key, "is there twice")
        out[int(key)] = float(bias)
    return tuple(out.items())


def _bad_bias(key: str, what: str) -> ApiError:
    return invalid("logit_bias", f"Invalid 'logit_bias': the key {key[:40]!r} {what}.")
