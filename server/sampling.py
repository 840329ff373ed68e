"""Which sampling a request gets: its own values, then the model's, then OpenAI's defaults."""

from collections.abc import Mapping
from typing import Any

from grout.request import SamplingParams
from server.schemas import GenerationRequest

__all__ = ["sampling_params"]

MAX_TOP_K = 2**31 - 1
"""More than any vocabulary has, and what the device's sampler can hold."""

_OPENAI_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


def sampling_params(
    request: GenerationRequest, model_defaults: Mapping[str, Any], max_tokens: int
) -> SamplingParams:
    """Return the engine's sampling parameters; values of null count as absent."""

    def choose(name: str) -> Any:
        for value in (getattr(request, name), model_defaults.get(name)):
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
    )
