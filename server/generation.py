"""One request running in the engine: what it has produced, and its end whatever way it ends."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from grout.request import Delta, FinishReason, SamplingParams
from server.errors import from_engine
from server.exceptions import ServerError
from server.prompts import Prompt
from server.protocol import ServingEngine

__all__ = ["Generation", "unless_disconnected"]

T = TypeVar("T")


class Generation:
    """An answer in the making; iterate it for deltas and `aclose` it in every case.

    Errors leave as ApiError, the engine's refusals already from the constructor.
    `completion_tokens` and `finish_reason` grow with the iteration.
    """

    def __init__(self, engine: ServingEngine, prompt: Prompt, params: SamplingParams) -> None:
        self.prompt = prompt
        self.completion_tokens = 0
        self.finish_reason: FinishReason | None = None
        try:
            self._deltas = engine.generate(prompt.token_ids, params)
        except Exception as error:
            raise from_engine(error, prompt.param) from error
        self._first: list[Delta] = []

    async def start(self) -> None:
        """Wait for the first delta, so that a refusal still finds the status line unsent."""
        delta = await self._next()
        if delta is not None:
            self._first.append(delta)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while True:
            delta = self._first.pop() if self._first else await self._next()
            if delta is None:
                return
            self.completion_tokens += len(delta.token_ids)
            self.finish_reason = delta.finish_reason
            yield delta
            if delta.finish_reason is not None:
                return

    async def aclose(self) -> None:
        """End the request, aborting it where it still runs."""
        close = getattr(self._deltas, "aclose", None)
        if close is not None:
            await close()

    def usage(self) -> dict[str, int]:
        """Return OpenAI's token counts."""
        prompt_tokens = len(self.prompt.token_ids)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
        }

    async def _next(self) -> Delta | None:
        try:
            delta = await anext(self._deltas, None)
            if delta is None and self.finish_reason is None:
                raise ServerError("the engine's iterator ended without a finish reason")
        except Exception as error:
            raise from_engine(error, self.prompt.param) from error
        return delta


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; cancel it and raise ClientDisconnect if the client goes away."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
