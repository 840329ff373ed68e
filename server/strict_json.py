"""JSON that any other reader takes, too: finite numbers, and text that is Unicode."""

import json
import math
import re
from typing import Any, NoReturn, TypeAlias

__all__ = [
    "DECODER",
    "MAX_VALUES",
    "StrictJsonError",
    "finite",
    "has_more_values",
    "lone_surrogate",
    "no_constant",
    "parse_strict",
]

MAX_VALUES = 500_000
"""Most values in a text, those within arrays and objects counted: a second's work, in which no
other thread runs. A prompt of token ids has one a token."""

_Link: TypeAlias = tuple["_Link | None", str | int]
"""Where a value is: where what holds it is, and its key or index in that."""

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


class StrictJsonError(ValueError):
    """A number that is none elsewhere, or too many values; the message says which."""


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
    if len(text) > MAX_VALUES and has_more_values(text.encode("utf-8", "surrogatepass")):
        raise StrictJsonError(f"it has more than {MAX_VALUES} values")
    return DECODER.decode(text)


def has_more_values(raw: bytes, limit: int = MAX_VALUES) -> bool:
    """Whether a JSON text has more values, without parsing it: that may take seconds."""
    if _separators(raw) < limit:
        return False
    # Those within strings do not count. Each step goes through the text once, in C.
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') > 4 * limit:
        return True
    return _separators(b'"'.join(plain.split(b'"')[::2])) >= limit


def _separators(raw: bytes) -> int:
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{")


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
