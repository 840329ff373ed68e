"""Server-sent events: one `data:` line of JSON an event, ended by `[DONE]`."""

import contextlib
import json
from collections.abc import AsyncGenerator
from json.encoder import encode_basestring
from typing import Any, Self

from fastapi import Response
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from server.generation import Generations, unless_disconnected
from server.json_response import utf8

__all__ = ["DONE", "NUMBER", "TEXT", "DirectSend", "EventStream", "TextEvents", "event"]

# In no text that comes from outside: UTF-8 has no lone surrogates.
TEXT, NUMBER = "\ud800text", "\ud800number"
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))

DONE = b"data: [DONE]\n\n"

# Valid in JSON strings, but many clients split lines at them as well as at \n.
_LINE_BREAKS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """Return one event; its JSON never holds what any client takes for a line break."""
    return utf8(f"{_head(name)}data: {_line(_ENCODER.encode(data))}\n\n")


class TextEvents:
    """Makes events that differ in a text alone, or in a text and a number, for what is sent often.

    The JSON around them is written once; `event` is many times slower.
    """

    def __init__(self, data: dict[str, Any], name: str | None = None) -> None:
        """data: an event's, with `TEXT` in it once, and after it `NUMBER` once or not at all."""
        front, text, rest = _ENCODER.encode(data).partition(f'"{TEXT}"')
        if not text:
            raise ValueError("the text is not in the event")
        middle, self._number, back = rest.partition(f'"{NUMBER}"')
        self._front = f"{_head(name)}data: {_line(front)}"
        self._middle, self._back = _line(middle), f"{_line(back)}\n\n"

    def __call__(self, text: str, number: int = 0) -> bytes:
        """Return the event with `text` and `number`."""
        shown = number if self._number else ""
        return utf8(
            f"{self._front}{_line(encode_basestring(text))}{self._middle}{shown}{self._back}"
        )


def _head(name: str | None) -> str:
    return "" if name is None else f"event: {name}\n"


def _line(text: str) -> str:
    return text if text.isascii() else text.translate(_LINE_BREAKS)


_DIRECT = "grout.send"


class DirectSend:
    """ASGI middleware, the outermost: keeps the server's own `send` for what a stream sends.

    Every middleware passes each message of an answer through a coroutine of its own, and none here
    looks at more than the start: past them a token costs less.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_DIRECT] = send
        await self._app(scope, receive, send)


class EventStream(Response):
    """A streamed response that closes its generation before it returns, whatever ends it.

    Starlette's own leaves a generator suspended in `yield` to the garbage collector, and the
    engine would go on with a request nobody reads.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        generations: Generations,
    ) -> None:
        super().__init__(
            headers={
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
            }
        )
        del self.headers["content-length"]
        self._events = events
        self._generations = generations

    @classmethod
    async def begun(
        cls,
        events: AsyncGenerator[bytes, None],
        generations: Generations,
        receive: Receive,
    ) -> Self:
        """Return the response once there is a first delta.

        Whatever fails until then is raised and still becomes an HTTP status.
        """
        try:
            await unless_disconnected(receive, generations.start())
        except BaseException:
            await generations.aclose()
            raise
        return cls(events, generations)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Both: closing a generator that never started runs none of its code.
        async with contextlib.aclosing(self._generations), contextlib.aclosing(self._events):
            with contextlib.suppress(ClientDisconnect, OSError):
                await unless_disconnected(receive, self._send(send, scope.get(_DIRECT, send)))

    async def _send(self, send: Send, direct: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for chunk in self._events:
            await direct({"type": "http.response.body", "body": chunk, "more_body": True})
        await direct({"type": "http.response.body", "body": b"", "more_body": False})
