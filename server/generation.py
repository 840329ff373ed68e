"""Requests running in the engine: what they have produced, and their end whatever way they end."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from grout.request import Delta, FinishReason, SamplingParams
from grout.streams import merged
from server.errors import ApiError, from_engine, invalid
from server.exceptions import ServerError
from server.metrics import Metrics
from server.prompts import Prompt
from server.protocol import ServingEngine

__all__ = ["Generation", "Generations", "unless_disconnected"]

T = TypeVar("T")


class Generation:
    """An answer in the making; iterate it or `take` deltas, and `aclose` it in every case.

    Errors leave as ApiError, the engine's refusals already from the constructor.
    `completion_tokens`, `cached_tokens` and `finish_reason` are those of the deltas given to
    `count`; `error` is the code of what ended it.
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
        self.error: str | None = None
        self._grammar = params.grammar
        try:
            self._deltas = engine.generate(prompt.token_ids, params)
        except Exception as error:
            raise from_engine(error, prompt.param, params.grammar) from error
        self._timer = None if metrics is None else metrics.begin(len(prompt.token_ids))
        self._taken = self._take()
        self._first: Delta | None = None

    async def start(self) -> None:
        """Wait for the first delta, so that a refusal still finds the status line unsent."""
        self._first = await anext(self._taken)

    async def take(self) -> AsyncIterator[Delta]:
        """Yield the deltas, a `MergedDelta` where several have come."""
        if self._first is not None:
            first, self._first = self._first, None
            yield first
        async for delta in self._taken:
            yield delta

    async def _take(self) -> AsyncGenerator[Delta]:
        try:
            async for delta in self._deltas:
                if self._timer is not None:
                    self._timer.tokens(len(delta.token_ids))
                yield delta
                if delta.finish_reason is not None:
                    return
            raise ServerError("the engine's iterator ended without a finish reason")
        except Exception as error:
            shown = from_engine(error, self.prompt.param, self._grammar)
            self.error = shown.code
            raise shown from error

    def count(self, delta: Delta) -> None:
        """Take a delta into the figures of the answer."""
        self.completion_tokens += len(delta.token_ids)
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        self.finish_reason = delta.finish_reason

    async def __aiter__(self) -> AsyncIterator[Delta]:
        async for delta in self.take():
            self.count(delta)
            yield delta

    async def aclose(self) -> None:
        """End the request, aborting it where it still runs."""
        await self._taken.aclose()
        close = getattr(self._deltas, "aclose", None)
        if close is not None:
            await close()
        if self._timer is not None:
            self._timer.finished(self.finish_reason or "abort")
            self._timer = None


class Generations:
    """The answers to one request; iterate for (index, delta), which is to be counted.

    All of them run at once; what has come of an answer since it was last yielded is one
    `MergedDelta`. The first error of any ends the iteration.
    """

    def __init__(self, each: Sequence[Generation]) -> None:
        self.each = tuple(each)
        self._tasks: list[asyncio.Task[None]] = []
        self._ended: set[int] = set()
        # What the tasks have brought: deltas by answer, the first error, how many have ended.
        self._arrived: dict[int, list[Delta]] = {}
        self._error: ApiError | None = None
        self._done = 0
        self._news = asyncio.Event()

    @classmethod
    def begin(
        cls,
        engine: ServingEngine,
        wanted: Sequence[tuple[Prompt, SamplingParams]],
        metrics: Metrics | None = None,
    ) -> "Generations":
        """Submit every prompt; raises ApiError where the engine refuses any."""
        most = engine.max_requests
        if most is not None and len(wanted) > most:
            several = len({id(prompt) for prompt, _ in wanted}) < len(wanted)
            raise invalid(
                "n" if several else wanted[0][0].param,
                f"The request asks for {len(wanted)} answers, and this server takes {most} at "
                "once, running and waiting together (max_num_seqs and max_queue); ask for fewer.",
            )
        return cls([Generation(engine, prompt, params, metrics) for prompt, params in wanted])

    async def start(self) -> None:
        """Wait until there is a first delta of any answer; raises ApiError if that fails."""
        if len(self.each) == 1:
            await self.each[0].start()
            return
        self._run_all()
        await self._news.wait()
        if self._error is not None:
            raise self._error

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        if len(self.each) == 1:
            async for delta in self.each[0].take():
                yield 0, delta
                if self._ended:
                    return
            return
        self._run_all()
        while self._arrived or self._done < len(self.each):
            await self._news.wait()
            self._news.clear()
            arrived, self._arrived = self._arrived, {}
            for index, deltas in arrived.items():
                if index not in self._ended:
                    yield index, merged(deltas)
            if self._error is not None:
                raise self._error

    async def end(self, index: int) -> None:
        """End one answer early: nothing more of it will come."""
        self._ended.add(index)
        self.each[index].finish_reason = "stop"
        if self._tasks:
            self._tasks[index].cancel()
            await asyncio.wait([self._tasks[index]])
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
            async for delta in generation.take():
                self._arrived.setdefault(index, []).append(delta)
                self._news.set()
        except ApiError as error:
            self._error = self._error or error
        finally:
            self._done += 1
            self._news.set()


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
