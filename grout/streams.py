"""Where a request's deltas are picked up: by a coroutine, or by a waiting thread."""

import asyncio
import contextlib
import queue
from collections.abc import Iterable

from grout.errors import GroutError
from grout.request import Delta
from grout.sequence import Sequence

Event = Delta | GroutError


class AsyncStream:
    """Deltas for a coroutine of `loop`. `put` only on that loop's thread; see `deliver`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    def put(self, event: Event) -> None:
        self._events.put_nowait(event)

    async def get(self) -> Delta:
        """The next delta. Raises the error that ended the request."""
        return _unwrap(await self._events.get())


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
