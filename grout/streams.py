"""Where a request's deltas are picked up: by a coroutine, or by a waiting thread."""

import asyncio
import contextlib
import queue
from collections.abc import Iterable
from dataclasses import dataclass

from grout.errors import GroutError
from grout.request import Delta
from grout.sequence import Sequence

Event = Delta | GroutError


@dataclass(slots=True)
class MergedDelta(Delta):
    """Deltas that came faster than they were taken, as one; `parts`: each of them, in order."""

    parts: tuple[Delta, ...] = ()


def merged(deltas: list[Delta]) -> Delta:
    """The one that says the same as `deltas`, at least one, in order."""
    if len(deltas) == 1:
        return deltas[0]
    return MergedDelta(
        "".join([delta.text for delta in deltas]),
        tuple(token for delta in deltas for token in delta.token_ids),
        deltas[-1].finish_reason,
        tuple(entry for delta in deltas for entry in delta.logprobs),
        max(delta.cached_tokens for delta in deltas),
        deltas[0].prompt_logprobs,
        tuple(part for delta in deltas for part in parts(delta)),
    )


def parts(delta: Delta) -> tuple[Delta, ...]:
    """The deltas that `delta` was merged from: itself alone, where it was not."""
    return delta.parts if isinstance(delta, MergedDelta) else (delta,)


class AsyncStream:
    """Deltas for one coroutine of `loop`. `put` only on that loop's thread; see `deliver`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._deltas: list[Delta] = []
        self._error: GroutError | None = None
        self._arrival: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        if isinstance(event, GroutError):
            self._error = event
        else:
            self._deltas.append(event)
        arrival, self._arrival = self._arrival, None
        if arrival is not None and not arrival.done():
            arrival.set_result(None)

    async def get(self) -> Delta:
        """All that has come since the last call, waiting for it. Raises what ended the request."""
        while not self._deltas:
            if self._error is not None:
                raise self._error
            self._arrival = self.loop.create_future()
            await self._arrival
        deltas, self._deltas = self._deltas, []
        return merged(deltas)


class BlockingStream:
    """Deltas for another thread, or for the caller of `Engine.step` itself."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def put(self, event: Event) -> None:
        self._events.put(event)

    @property
    def empty(self) -> bool:
        return self._events.empty()

    def get(self) -> Delta:
        """The next delta, waiting for it. Raises the error that ended the request."""
        return _unwrap(self._events.get())


def deliver(events: Iterable[tuple[Sequence, Event]]) -> list[Sequence]:
    """Hand a step's events over, waking each asyncio loop once.

    Returns the sequences no one listens to any more, because their loop has been closed.
    """
    loops: dict[asyncio.AbstractEventLoop, list[tuple[AsyncStream, Event]]] = {}
    lost: list[Sequence] = []
    for sequence, event in events:
        sink = sequence.sink
        if not isinstance(sink, AsyncStream):
            sink.put(event)
        elif sink.loop.is_closed():
            lost.append(sequence)
        else:
            loops.setdefault(sink.loop, []).append((sink, event))
    for loop, batch in loops.items():
        # The loop may be closed between the check above and this call: then no one listens, and
        # the next step's check finds out.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_put_all, batch)
    return lost


def _put_all(batch: list[tuple[AsyncStream, Event]]) -> None:
    for stream, event in batch:
        stream.put(event)


def _unwrap(event: Event) -> Delta:
    if isinstance(event, GroutError):
        raise event
    return event


__all__ = ["AsyncStream", "BlockingStream", "Event", "deliver"]
