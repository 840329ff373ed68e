"""Request parameters that Grout does not implement: refused by name, or known to be harmless.

A parameter that would change the answer is refused unless its value asks for what happens
anyway (`suffix: ""`, `best_of: 1`, ...). One that cannot change the answer is ignored.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from server.errors import invalid

__all__ = ["HARMLESS", "NEUTRAL", "RESPONSES_NEUTRAL", "Neutral", "implemented"]

HARMLESS = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
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


Neutral = Mapping[str, Callable[[Any], bool]]

NEUTRAL: Neutral = {
    "add_generation_prompt": lambda value: value is True,
    "audio": _is_empty,
    "best_of": _is_number(1),
    "continue_final_message": _is_false,
    "echo": _is_false,
    "enable_thinking": lambda _: False,
    "function_call": _is_word("none"),
    "functions": _is_empty,
    "guided_json_object": _is_false,
    "guided_whitespace_pattern": lambda _: False,
    "include_reasoning": lambda value: value is True,
    "include_stop_str_in_output": _is_false,
    "length_penalty": _is_number(1),
    "logprobs": _is_false,
    "modalities": lambda value: bool(value == ["text"]),
    "parallel_tool_calls": lambda value: isinstance(value, bool),
    "prompt_logprobs": lambda _: False,
    "reasoning_effort": _is_empty,
    "return_token_ids": _is_false,
    "skip_special_tokens": lambda value: value is True,
    "spaces_between_special_tokens": lambda value: value is True,
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

RESPONSES_NEUTRAL: Neutral = {
    "background": _is_false,
    "context_management": _is_empty,
    "conversation": lambda _: False,
    "max_tool_calls": lambda _: False,
    "previous_response_id": lambda _: False,
    "prompt": lambda _: False,
    "stream_options": lambda value: value in ({}, {"include_obfuscation": False}),
    "truncation": _is_word("disabled"),
}
"""The same for /v1/responses."""

_HINTS = {
    "conversation": "Nothing is stored here; send the conversation as 'input'.",
    "functions": "Use 'tools'.",
    "function_call": "Use 'tool_choice'.",
    "best_of": "Use 'n'.",
    "previous_response_id": "Nothing is stored here; send the earlier items as 'input'.",
}


def implemented(
    body: Mapping[str, Any], fields: Collection[str], neutral: Neutral | None = None
) -> dict[str, Any]:
    """Return the entries of `body` in `fields`; raise ApiError 400 for one that must be refused.

    neutral: `NEUTRAL` unless given.
    """
    tests = NEUTRAL if neutral is None else neutral
    kept = {}
    for name, value in body.items():
        if name in fields:
            kept[name] = value
        elif name in tests:
            if value is not None and not tests[name](value):
                hint = f" {_HINTS[name]}" if name in _HINTS else ""
                raise invalid(
                    name,
                    f"The parameter '{name}' with this value is not supported.{hint}",
                    "unsupported_parameter",
                )
        elif value is not None and name not in HARMLESS:
            shown = name if len(name) <= 80 else name[:77] + "..."
            raise invalid(shown, f"Unknown parameter: '{shown}'.", "unknown_parameter")
    return kept
