"""How a server stops: what runs may finish, for a while; what comes then, or stays, is a 503."""

import asyncio
import contextlib

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import error_response, stopping

__all__ = ["RefuseWhenStopping", "Stopping"]

BODY_SECONDS = 1.0
"""Longest wait for the body of a request that is refused."""


class Stopping:
    """Where a server stands with stopping, and its requests that have not begun to answer."""

    def __init__(self) -> None:
        self.begun = False
        self.unanswered: set[asyncio.Timeout] = set()

    def begin(self) -> None:
        """Refuse requests from now on."""
        self.begun = True

    def end(self) -> None:
        """Refuse, too, the requests that have not begun to answer.

        Those that have are streams; closing the engine ends them with an error of their own form.
        """
        now = asyncio.get_running_loop().time()
        while self.unanswered:
            self.unanswered.pop().reschedule(now)


class RefuseWhenStopping:
    """ASGI middleware: 503 to what `Stopping` refuses, and no connection kept for another."""

    def __init__(self, app: ASGIApp, state: Stopping) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._state.begun:
            await _read(receive)
            await error_response(stopping())(scope, receive, send)
            return
        unanswered = self._state.unanswered

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start":
                if limit not in unanswered:
                    # Refused in the same turn of the loop: the cancellation is on its way.
                    await asyncio.get_running_loop().create_future()
                unanswered.remove(limit)
                if self._state.begun:
                    MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        try:
            async with asyncio.timeout(None) as limit:
                unanswered.add(limit)
                try:
                    await self._app(scope, receive, watch)
                finally:
                    unanswered.discard(limit)
        except TimeoutError:
            if not limit.expired():
                raise
            await error_response(stopping())(scope, receive, send)


async def _read(receive: Receive) -> None:
    """Take in a body: closing the connection on a client that still sends loses the answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(BODY_SECONDS):
            while (await receive()).get("more_body"):
                pass
