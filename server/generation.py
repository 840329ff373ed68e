"""Requests running in the engine: what they have produced, and their end whatever way they end."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from grout.request import Delta, FinishReason, SamplingParams
from server.errors import ApiError, from_engine, timed_out
from server.exceptions import ServerError
from server.metrics import Metrics
from server.prompts import Prompt
from server.protocol import ServingEngine

__all__ = ["Generation", "Generations", "unless_disconnected"]

T = TypeVar("T")


class Generation:
    """An answer in the making; iterate it for deltas and `aclose` it in every case.

    Errors leave as ApiError, the engine's refusals already from the constructor.
    `completion_tokens`, `cached_tokens` and `finish_reason` grow with the iteration.
    """

    def __init__(
        self,
        engine: ServingEngine,
        prompt: Prompt,
        params: SamplingParams,
        metrics: Metrics | None = None,
    ) -> None:
        self.prompt = prompt
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        try:
            self._deltas = engine.generate(prompt.token_ids, params)
        except Exception as error:
            raise from_engine(error, prompt.param) from error
        self._timer = None if metrics is None else metrics.begin(len(prompt.token_ids))
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
            self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
            self.finish_reason = delta.finish_reason
            yield delta
            if delta.finish_reason is not None:
                return

    async def aclose(self) -> None:
        """End the request, aborting it where it still runs."""
        close = getattr(self._deltas, "aclose", None)
        if close is not None:
            await close()
        if self._timer is not None:
            self._timer.finished(self.finish_reason or "abort")
            self._timer = None

    async def _next(self) -> Delta | None:
        try:
            delta = await anext(self._deltas, None)
            if delta is None and self.finish_reason is None:
                raise ServerError("the engine's iterator ended without a finish reason")
        except Exception as error:
            raise from_engine(error, self.prompt.param) from error
        if delta is not None and self._timer is not None:
            self._timer.tokens(len(delta.token_ids))
        return delta


class Generations:
    """The answers to one request; iterate for (index, delta) in order of arrival.

    All of them run at once. The first error of any ends the iteration.
    """

    def __init__(self, each: Sequence[Generation]) -> None:
        self.each = tuple(each)
        self._arrived: asyncio.Queue[tuple[int, Delta | BaseException | None]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._ended: set[int] = set()

    @classmethod
    def begin(
        cls,
        engine: ServingEngine,
        wanted: Sequence[tuple[Prompt, SamplingParams]],
        metrics: Metrics | None = None,
    ) -> "Generations":
        """Submit every prompt; raises ApiError where the engine refuses any."""
        return cls([Generation(engine, prompt, params, metrics) for prompt, params in wanted])

    async def start(self) -> None:
        """Wait until there is a first delta of any answer; raises ApiError if that fails."""
        if len(self.each) == 1:
            await self.each[0].start()
            return
        self._run_all()
        index, first = await self._arrived.get()
        if isinstance(first, BaseException):
            raise first
        # Back in front: nothing else reads the queue before the iteration begins.
        rest = [self._arrived.get_nowait() for _ in range(self._arrived.qsize())]
        for item in [(index, first), *rest]:
            self._arrived.put_nowait(item)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        if len(self.each) == 1:
            async for delta in self.each[0]:
                yield 0, delta
                if self._ended:
                    return
            return
        self._run_all()
        left = len(self.each)
        while left:
            index, item = await self._arrived.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            elif index not in self._ended:
                yield index, item

    async def end(self, index: int) -> None:
        """End one answer early: nothing more of it will come."""
        self._ended.add(index)
        if self._tasks:
            self._tasks[index].cancel()
            await asyncio.wait([self._tasks[index]])
            self._arrived.put_nowait((index, None))
        await self.each[index].aclose()

    async def aclose(self) -> None:
        """End every request that still runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for generation in self.each:
            await generation.aclose()

    def _run_all(self) -> None:
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(self._pump(i, generation))
                for i, generation in enumerate(self.each)
            ]

    async def _pump(self, index: int, generation: Generation) -> None:
        try:
            async for delta in generation:
                self._arrived.put_nowait((index, delta))
        except ApiError as error:
            self._arrived.put_nowait((index, error))
        else:
            self._arrived.put_nowait((index, None))


async def unless_disconnected(
    receive: Receive, work: Coroutine[Any, Any, T], seconds: float | None = None
) -> T:
    """Return the result of `work`; cancel it and raise ClientDisconnect if the client goes away.

    Raises ApiError 504 once `seconds` have passed.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        done, _ = await asyncio.wait(
            {task, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            raise timed_out()
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
