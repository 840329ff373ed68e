"""Reading a request's JSON body: UTF-8, finite numbers, no key twice, no lone surrogates."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request

from server.errors import ApiError, invalid, not_unicode
from server.request_log import note_body
from server.settings import Settings
from server.strict_json import (
    MAX_VALUES,
    StrictJsonError,
    finite,
    has_more_values,
    lone_surrogate,
    no_constant,
)

__all__ = ["parse_json", "read_json"]

T = TypeVar("T")

LONG_BYTES = 64 * 1024
"""A body from which on the loop's other work would notice."""


async def read_json(request: Request, settings: Settings, take: Callable[[dict[str, Any]], T]) -> T:
    """Return what `take` makes of the request's body, a JSON object.

    Both happen in a thread where the body is long.

    Raises ApiError: 415 without a JSON content type (which also keeps a web page from posting
    here unasked), 413 beyond `max_body_bytes` or `MAX_VALUES`, 408 for one that does not come to
    its end, 400 for what `parse_json` refuses, and what `take` raises.
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
    if len(raw) > LONG_BYTES:
        value = await asyncio.to_thread(lambda: take(parse_json(raw)))
    else:
        value = take(parse_json(raw))
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
    if has_more_values(raw):
        raise ApiError(
            413, f"The body has more than {MAX_VALUES} JSON values.", code="request_too_large"
        )
    try:
        text = raw.decode("utf-8")
        value = json.loads(
            text,
            parse_constant=no_constant,
            parse_float=finite,
            object_pairs_hook=_without_repeats,
        )
    except UnicodeDecodeError as error:
        raise _malformed(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _malformed(f"{error.msg} at line {error.lineno} column {error.colno}") from None
    except StrictJsonError as error:
        raise _malformed(str(error)) from None
    except RecursionError:
        raise _malformed("it is nested too deeply") from None
    except ValueError:  # an integer of more digits than Python converts
        raise _malformed("a number has too many digits") from None
    if not isinstance(value, dict):
        raise _malformed(f"it is {_json_kind(value)}, not an object")
    if (path := lone_surrogate(value, text)) is not None:
        raise not_unicode(path)
    return value


def _malformed(reason: str) -> ApiError:
    return invalid(None, f"The body is not usable JSON: {reason}.", "invalid_json")


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
