"""Server-sent events: one `data:` line of JSON an event, ended by `[DONE]`."""

import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any, Self

from fastapi import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from server.generation import Generation, unless_disconnected

__all__ = ["DONE", "EventStream", "event"]

DONE = b"data: [DONE]\n\n"

# Valid in JSON strings, but many clients split lines at them as well as at \n.
_LINE_BREAKS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def event(data: dict[str, Any]) -> bytes:
    """Return one event; its JSON never holds what any client takes for a line break."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text.translate(_LINE_BREAKS)}\n\n".encode()


class EventStream(Response):
    """A streamed response that closes its generation before it returns, whatever ends it.

    Starlette's own leaves a generator suspended in `yield` to the garbage collector, and the
    engine would go on with a request nobody reads.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], generation: Generation) -> None:
        super().__init__(
            headers={
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
            }
        )
        del self.headers["content-length"]
        self._events = events
        self._generation = generation

    @classmethod
    async def begun(
        cls, events: AsyncGenerator[bytes, None], generation: Generation, receive: Receive
    ) -> Self:
        """Return the response once `generation` has its first delta.

        Whatever fails until then is raised and still becomes an HTTP status.
        """
        try:
            await unless_disconnected(receive, generation.start())
        except BaseException:
            await generation.aclose()
            raise
        return cls(events, generation)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Both: closing a generator that never started runs none of its code.
        async with contextlib.aclosing(self._generation), contextlib.aclosing(self._events):
            with contextlib.suppress(ClientDisconnect, OSError):
                await unless_disconnected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for chunk in self._events:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
