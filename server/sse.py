"""Server-sent events: one `data:` line of JSON an event, ended by `[DONE]`."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from json.encoder import encode_basestring
from typing import Any, Self

from fastapi import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from server.errors import timed_out
from server.generation import Generations, unless_disconnected

__all__ = ["DONE", "EventStream", "TextEvents", "event"]

_MARK = "the text of an event"
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))

DONE = b"data: [DONE]\n\n"

# Valid in JSON strings, but many clients split lines at them as well as at \n.
_LINE_BREAKS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """Return one event; its JSON never holds what any client takes for a line break."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {_line(_ENCODER.encode(data))}\n\n".encode()


class TextEvents:
    """Makes events that differ in one text alone, for what is sent once a token.

    The JSON around the text is written once; `event` is many times slower.
    """

    def __init__(self, make: Callable[[str], dict[str, Any]]) -> None:
        """make: returns the data of the event with a given text in it, at one place."""
        front, text, back = _ENCODER.encode(make(_MARK)).partition(f'"{_MARK}"')
        if not text:
            raise ValueError("the text is not in the event")
        self._front, self._back = f"data: {_line(front)}", f"{_line(back)}\n\n"

    def __call__(self, text: str) -> bytes:
        """Return the event with `text`."""
        return f"{self._front}{_line(encode_basestring(text))}{self._back}".encode()


def _line(text: str) -> str:
    return text if text.isascii() else text.translate(_LINE_BREAKS)


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
        deadline: float | None,
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
        self._deadline = deadline

    @classmethod
    async def begun(
        cls,
        events: AsyncGenerator[bytes, None],
        generations: Generations,
        receive: Receive,
        seconds: float | None = None,
    ) -> Self:
        """Return the response once there is a first delta.

        Whatever fails until then is raised and still becomes an HTTP status. seconds: how long
        the whole answer may take.
        """
        deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds
        try:
            await unless_disconnected(receive, generations.start(), seconds)
        except BaseException:
            await generations.aclose()
            raise
        return cls(events, generations, deadline)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Both: closing a generator that never started runs none of its code.
        async with contextlib.aclosing(self._generations), contextlib.aclosing(self._events):
            with contextlib.suppress(ClientDisconnect, OSError):
                await unless_disconnected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        try:
            async with asyncio.timeout_at(self._deadline):
                async for chunk in self._events:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except TimeoutError:
            last = event(timed_out().body()) + DONE
            await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
