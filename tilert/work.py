"""Lazy work: what has not been enqueued yet, alone or composed of other work."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from tilert.errors import LaunchError, TilertError
from tilert.graph import Graph, capture
from tilert.stream import Stream

if TYPE_CHECKING:
    from tilert.device import Device
    from tilert.event import Event

__all__ = ["Work", "gather", "ready"]

# Streams that a gather takes at most; works beyond them take turns.
_MOST_STREAMS = 8

# Seconds between two looks at an event: first, at most, and what they grow by.
_FIRST_PAUSE, _LONGEST_PAUSE, _GROWTH = 2e-5, 1e-3, 1.5


class Work(ABC):
    """Work that runs once: `run`, `sync` or `await` it, or make it part of other work.

    Dropping work that never ran gives back the arrays that its ops hold.

    Attributes:
        device: where it begins, or None for work that needs no device.
    """

    __slots__ = ("__weakref__", "_stream", "device")

    device: "Device | None"
    _stream: Stream | None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        from tilert.array import Array

        hint = f"; call .sync() first: what it gives has .{name}" if hasattr(Array, name) else ""
        raise AttributeError(f"{self!r} has no attribute '{name}'{hint}")

    @abstractmethod
    def run(self) -> Any:
        """Enqueue the work, or record it during a capture, and do not wait; gives its result.

        Raises:
            LaunchError: if it has run already, or its stream is closed.
        """

    @property
    @abstractmethod
    def waiting(self) -> bool:
        """Whether it has neither run nor been released."""

    @abstractmethod
    def release(self) -> None:
        """Give the arrays back that its ops hold; it cannot run any more."""

    @abstractmethod
    def _ends(self) -> "Iterator[Event]":
        """Marks behind everything that it has enqueued."""

    def on(self, stream: Stream) -> "Work":
        """Let the work run on a stream: all of it that was not given a stream of its own.

        Gives the work itself.

        Raises:
            LaunchError: if the stream is closed, or one of another device.
        """
        if not isinstance(stream, Stream):
            raise LaunchError(
                f"O4 in flight: {self!r} runs on a stream of device.stream(), got"
                f" {type(stream).__name__}"
            )
        if self.device is not None and stream.device is not self.device:
            raise LaunchError(
                f"O4 in flight: {self!r} is on {self.device.name} and cannot run on a stream of"
                f" {stream.device.name}"
            )
        stream.lane(stream.device)
        self._stream = stream
        return self

    def then(self, fn: Callable[[Any], Any]) -> "Work":
        """Work that goes on with `fn(result)`, called once this is enqueued; it does not wait.

        Where `fn` gives work, that runs next, on the same stream, and its result is the result;
        otherwise what `fn` gives is. If `fn` raises, what is enqueued completes.
        """
        return _Then(self, fn)

    def sync(self) -> Any:
        """Run, and wait for this work alone; gives what `run` gives.

        Raises:
            As `run`, LaunchError during a capture, and DeviceError if the work fails.
        """
        self._refuse_in_capture()
        result = self.run()
        try:
            with _Naming(self):
                _wait(list(self._ends()))
            return result
        finally:
            # As in `Op.run`: whoever keeps the stack of a launch keeps no memory.
            del result

    def __await__(self) -> Generator[Any, None, Any]:
        """Run, and come back when this work is complete; other tasks go on meanwhile.

        A task that is cancelled while it waits leaves the work to complete; one that is cancelled
        before has not run it.
        """
        self._refuse_in_capture()
        result = self.run()
        try:
            with _Naming(self):
                ends = list(self._ends())
                yield from asyncio.sleep(0).__await__()
                pause = _FIRST_PAUSE
                for end in ends:
                    while not end.done():
                        yield from asyncio.sleep(pause).__await__()
                        pause = min(pause * _GROWTH, _LONGEST_PAUSE)
            return result
        finally:
            del result

    def capture(self) -> Graph:
        """Record the work as a graph; see `tilert.capture`.

        Raises:
            LaunchError: if it needs no device, and as `tilert.capture`.
        """
        if self.device is None:
            raise LaunchError(f"O6 graphs: {self!r} has no device, so there is nothing to record")
        return capture(self.device, self)

    def _refuse_in_capture(self) -> None:
        if self.device is not None:
            self.device.refuse_in_capture("waiting for an op")

    def _start(self, stream: Stream | None) -> Any:
        """Run as part of other work, on its stream where the device is the same."""
        if self._stream is None and stream is not None and self.device in (None, stream.device):
            self._stream = stream
        return self.run()


class _Naming:
    """Says in a note which work failed."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, TilertError):
            error.add_note(f"while waiting for {self._work!r}")


def _wait(ends: "list[Event]") -> None:
    """Wait for all of them; the first failure is raised."""
    failed: TilertError | None = None
    for end in ends:
        try:
            end.wait()
        except TilertError as error:
            if failed is None:
                failed = error
            elif str(error) != str(failed):
                failed.add_note(f"and: {error}")
    if failed is not None:
        raise failed


class _Composed(Work):
    """Work made of other work.

    Attributes:
        parts: the works, and those that came up as it ran.
    """

    __slots__ = ("_has_run", "_parts", "_released")

    def __init__(self, device: "Device | None", parts: list[Work]) -> None:
        self.device = device
        self._stream = None
        self._parts = parts
        self._has_run = False
        self._released = False

    def _begin(self) -> None:
        if self._has_run:
            raise LaunchError(f"{self!r} has already run; make it again from new ops")
        self._has_run = True

    @property
    def waiting(self) -> bool:
        """See `Work`."""
        return not self._has_run

    def release(self) -> None:
        """See `Work`."""
        # Once: a function of `then` may give what its work is part of.
        if not self._released:
            self._has_run = self._released = True
            for part in self._parts:
                part.release()

    def _ends(self) -> "Iterator[Event]":
        for part in self._parts:
            yield from part._ends()


class _Then(_Composed):
    """One work after another that follows from its result."""

    __slots__ = ("_fn",)

    def __init__(self, first: Work, fn: Callable[[Any], Any]) -> None:
        super().__init__(first.device, [first])
        if not callable(fn):
            raise LaunchError(f"then takes a function of the result, got {type(fn).__name__}")
        self._fn = fn

    def __repr__(self) -> str:
        return f"{self._parts[0]!r}.then({getattr(self._fn, '__qualname__', self._fn)})"

    def run(self) -> Any:
        """See `Work`."""
        self._begin()
        first = self._parts[0]
        try:
            result = self._fn(first._start(self._stream))
            if not isinstance(result, Work):
                return result
            self._parts.append(result)
            # Where the work so far had a stream of its own, what follows goes on there.
            return result._start(self._stream or first._stream)
        except BaseException:
            # It runs no more: what it did not come to gives its arrays back.
            self.release()
            raise


class _Ready(_Composed):
    """A value that is there already."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        super().__init__(None, [])
        self._value = value

    def __repr__(self) -> str:
        return f"ready({type(self._value).__name__})"

    def run(self) -> Any:
        """See `Work`."""
        self._begin()
        return self._value


class _Gather(_Composed):
    """Several works side by side."""

    __slots__ = ()

    def __init__(self, works: tuple[Work, ...]) -> None:
        for work in works:
            if not isinstance(work, Work):
                raise _no_work(work)
        if len({id(work) for work in works}) != len(works):
            raise LaunchError("gather was given one work twice; work runs once")
        devices = [work.device for work in works if work.device is not None]
        super().__init__(devices[0] if devices else None, list(works))

    def __repr__(self) -> str:
        return f"gather({', '.join([repr(part) for part in self._parts])})"

    def run(self) -> Any:
        """See `Work`."""
        self._begin()
        results: list[Any] = []
        try:
            with ExitStack() as closing:
                for work, stream in list(zip(self._parts, self._streams(closing), strict=True)):
                    results.append(work._start(stream))
        except BaseException as error:
            for at, left in enumerate(self._parts[len(results) :]):
                left.release()
                if at:
                    error.add_note(f"not run for that reason: {left!r}")
            raise
        return tuple(results)

    def _streams(self, closing: ExitStack) -> "Iterator[Stream | None]":
        """For each work the stream that it runs on, all of them begun before any work is.

        The first is on the stream of the whole; those with a stream of their own need none.
        """
        needing = [
            (work, work.device)
            for work in self._parts
            if work._stream is None and work.device is not None
        ][1:]
        taken = [closing.enter_context(device.stream()) for _, device in needing[:_MOST_STREAMS]]
        places = {id(work): taken[at % len(taken)] for at, (work, _) in enumerate(needing)}
        for work in self._parts:
            yield places.get(id(work), self._stream)


def _no_work(given: object) -> LaunchError:
    hint = "tilert.ready(value) makes work of a value"
    if isinstance(given, list | tuple):
        hint = "pass its items one by one: gather(*ops)"
    return LaunchError(f"gather takes ops and other lazy work, got {type(given).__name__}; {hint}")


def gather(*works: Work) -> Work:
    """Work that runs several works, each on a stream of its own where it was given none.

    So the device may run them at the same time; what uses the same memory keeps the order of the
    arguments. The first runs on the stream of the whole, and at most eight more streams are taken.
    On the cpu they run one after the other. The result is the tuple of their results.

    If one raises, those before it complete, those after it are released, and what it raised is
    raised.

    Raises:
        LaunchError: if a value is no work, or one is given twice.
    """
    return _Gather(works)


def ready(value: Any) -> Work:
    """Work that does nothing and gives a value, to stand among other works."""
    return _Ready(value)
