"""JSON that any other reader takes, too: finite numbers, and text that is Unicode."""

import json
import math
import re
from typing import Any, NoReturn, TypeAlias

__all__ = ["DECODER", "StrictJsonError", "finite", "lone_surrogate", "no_constant", "parse_strict"]

_Link: TypeAlias = tuple["_Link | None", str | int]
"""Where a value is: where what holds it is, and its key or index in that."""

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


class StrictJsonError(ValueError):
    """A number that is none elsewhere; the message says which."""


def no_constant(name: str) -> NoReturn:
    """Refuse NaN and infinities, which `json` takes."""
    raise StrictJsonError(f"{name} is not a JSON number")


def finite(text: str) -> float:
    """The number written as `text`; raises `StrictJsonError` for one that no double is."""
    value = float(text)
    if math.isinf(value):
        shown = text if len(text) <= 40 else text[:37] + "..."
        raise StrictJsonError(f"the number {shown} is too large")
    return value


DECODER = json.JSONDecoder(parse_constant=no_constant, parse_float=finite)


def parse_strict(text: str) -> Any:
    """The value of a JSON text, which may yet have a `lone_surrogate`.

    Raises ValueError, or RecursionError for one that is nested too deeply.
    """
    return DECODER.decode(text)


def lone_surrogate(value: Any, source: str | None = None) -> tuple[str | int, ...] | None:
    """The keys and indices that lead to the first lone surrogate found in a JSON value, if any.

    source: the text it was parsed from, in which there is none without its escape.
    """
    if source is not None and not (_SURROGATE_ESCAPE.search(source) or _SURROGATE.search(source)):
        return None
    # A stack and not recursion, and links and not paths: the nesting is the client's.
    stack: list[tuple[_Link | None, Any]] = [(None, value)]
    while stack:
        link, item = stack.pop()
        if isinstance(item, str):
            if _SURROGATE.search(item):
                return _path(link)
        elif isinstance(item, list):
            stack.extend(((link, i), child) for i, child in enumerate(item))
        elif isinstance(item, dict):
            for key, child in item.items():
                if _SURROGATE.search(key):
                    return _path((link, key))
                stack.append(((link, key), child))
    return None


def _path(link: "_Link | None") -> tuple[str | int, ...]:
    steps: list[str | int] = []
    while link is not None:
        link, step = link
        steps.append(step)
    return tuple(reversed(steps))
