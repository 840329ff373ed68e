"""Request parameters that Grout does not implement: refused by name, or known to be harmless.

A parameter that would change the answer is refused unless its value asks for what happens
anyway (`logprobs: false`, `n: 1`, ...). One that cannot change the answer is ignored.
"""

from collections.abc import Callable, Collection
from typing import Any

from server.errors import invalid

__all__ = ["HARMLESS", "NEUTRAL", "implemented"]

HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)


def _is_false(value: Any) -> bool:
    return value is False


def _is_empty(value: Any) -> bool:
    return value in ([], {}, "") and not isinstance(value, bool | int | float)


def _is_number(number: float) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and value == number

    return check


def _is_word(*words: str) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        return isinstance(value, str) and value in words

    return check


NEUTRAL: dict[str, Callable[[Any], bool]] = {
    "add_generation_prompt": lambda value: value is True,
    "audio": _is_empty,
    "best_of": _is_number(1),
    "continue_final_message": _is_false,
    "echo": _is_false,
    "frequency_penalty": _is_number(0),
    "function_call": _is_word("none"),
    "functions": _is_empty,
    "include_stop_str_in_output": _is_false,
    "logit_bias": _is_empty,
    "logprobs": _is_false,
    "min_tokens": _is_number(0),
    "modalities": lambda value: bool(value == ["text"]),
    "n": _is_number(1),
    "presence_penalty": _is_number(0),
    "reasoning_effort": _is_empty,
    "repetition_penalty": _is_number(1),
    "response_format": lambda value: bool(value == {"type": "text"}),
    "skip_special_tokens": lambda value: value is True,
    "suffix": _is_empty,
    "tool_choice": _is_word("none"),
    "tools": _is_empty,
    "top_logprobs": _is_number(0),
    "use_beam_search": _is_false,
    "verbosity": _is_word("medium"),
    "web_search_options": lambda _: False,
}
"""Parameters that are not implemented, each with the test of a value that asks for nothing;
null always asks for nothing."""

_HINTS = {
    "n": "Send one request for each answer.",
    "reasoning_effort": 'Use chat_template_kwargs, for example {"enable_thinking": false}.',
}


def implemented(body: dict[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """Return the entries of `body` in `fields`; raise ApiError 400 for one that must be refused."""
    kept = {}
    for name, value in body.items():
        if name in fields:
            kept[name] = value
        elif name in NEUTRAL:
            if value is not None and not NEUTRAL[name](value):
                hint = f" {_HINTS[name]}" if name in _HINTS else ""
                raise invalid(
                    name,
                    f"The parameter '{name}' with this value is not supported.{hint}",
                    "unsupported_parameter",
                )
        elif name not in HARMLESS:
            shown = name if len(name) <= 80 else name[:77] + "..."
            raise invalid(shown, f"Unknown parameter: '{shown}'.", "unknown_parameter")
    return kept
