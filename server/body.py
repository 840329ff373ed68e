"""Reading a request's JSON body: UTF-8, finite numbers, no key twice, no lone surrogates."""

import asyncio
import json
import math
import re
from collections import Counter
from typing import Any, NoReturn, TypeAlias

from fastapi import Request

from server.errors import ApiError, invalid
from server.paths import join_path
from server.request_log import note_body
from server.settings import Settings

__all__ = ["parse_json", "read_json"]

_Link: TypeAlias = tuple["_Link | None", str | int]
"""Where a value is: where what holds it is, and its key or index in that."""

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


async def read_json(request: Request, settings: Settings) -> dict[str, Any]:
    """Return the request's body, a JSON object.

    Raises ApiError: 415 without a JSON content type (which also keeps a web page from posting
    here unasked), 413 beyond `max_body_bytes`, 408 for one that does not come to its end, 400 for
    what `parse_json` refuses.
    """
    content_type = request.headers.get("content-type", "")
    media = content_type.partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        raise ApiError(
            415,
            f"The content type is {content_type or 'missing'!r}; "
            "send 'Content-Type: application/json'.",
            code="unsupported_media_type",
        )
    try:
        async with asyncio.timeout(settings.receive_seconds):
            raw = await _read(request, settings.max_body_bytes)
    except TimeoutError:
        raise ApiError(
            408,
            f"The body was not complete after {settings.receive_seconds:g} seconds.",
            code="timeout",
            headers={"Connection": "close"},
        ) from None
    value = parse_json(raw)
    if settings.log_requests == "text":
        note_body(request, raw.decode())
    return value


async def _read(request: Request, limit: int) -> bytes:
    too_large = ApiError(413, f"The body is over {limit} bytes.", code="request_too_large")
    # Where the size is told, nothing is read, nor asked for with 100-continue.
    told = request.headers.get("content-length", "")
    if told.isdecimal() and int(told) > limit:
        raise too_large
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > limit:
            raise too_large
    return bytes(raw)


def parse_json(raw: bytes) -> dict[str, Any]:
    """Return the JSON object in `raw`; raises ApiError 400 saying what is wrong and where."""
    try:
        text = raw.decode("utf-8")
        value = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_without_repeats,
        )
    except UnicodeDecodeError as error:
        raise _malformed(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _malformed(f"{error.msg} at line {error.lineno} column {error.colno}") from None
    except RecursionError:
        raise _malformed("it is nested too deeply") from None
    except ValueError:  # an integer of more digits than Python converts
        raise _malformed("a number has too many digits") from None
    if not isinstance(value, dict):
        raise _malformed(f"it is {_json_kind(value)}, not an object")
    if _SURROGATE_ESCAPE.search(text):
        _refuse_surrogates(value)
    return value


def _malformed(reason: str) -> ApiError:
    return invalid(None, f"The body is not usable JSON: {reason}.", "invalid_json")


def _refuse_constant(name: str) -> NoReturn:
    raise _malformed(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        shown = text if len(text) <= 40 else text[:37] + "..."
        raise _malformed(f"the number {shown} is too large")
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        shown = key if len(key) <= 100 else key[:97] + "..."
        raise _malformed(f"the key {shown!r} comes more than once in one object")
    return value


def _json_kind(value: Any) -> str:
    names = {str: "a string", list: "an array", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _refuse_surrogates(value: dict[str, Any]) -> None:
    # A stack and not recursion, and links and not paths: the nesting is the client's.
    stack: list[tuple[_Link | None, Any]] = [(None, value)]
    while stack:
        link, item = stack.pop()
        if isinstance(item, str):
            _refuse_surrogate(item, link)
        elif isinstance(item, list):
            stack.extend(((link, i), child) for i, child in enumerate(item))
        elif isinstance(item, dict):
            for key, child in item.items():
                _refuse_surrogate(key, (link, key))
                stack.append(((link, key), child))


def _refuse_surrogate(text: str, link: "_Link | None") -> None:
    if not _SURROGATE.search(text):
        return
    steps: list[str | int] = []
    while link is not None:
        link, step = link
        steps.append(step)
    where = _SURROGATE.sub("\ufffd", join_path(tuple(reversed(steps))))
    shown = where if len(where) <= 200 else where[:197] + "..."
    raise invalid(
        shown,
        f"The text at {shown!r} has a lone surrogate (half of a \\uD83D\\uDE42 style "
        "pair), which is not valid Unicode.",
        "invalid_unicode",
    )
