"""Devices whose queues run beside the host: order across streams, deferred frees (rule O4)."""

import contextlib
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tilert.device import Call, Device, Use
from tilert.errors import DeviceError
from tilert.event import DoneEvent, Event
from tilert.order import Lane, Order, Record, Ticket
from tilert.ownership import Region, overlap
from tilert.stream import Stream

if TYPE_CHECKING:
    from tilert.rebind import Maker

__all__ = ["QueuedBlock", "QueuedDevice"]

Free = Callable[[int, list[Record]], None]


class QueuedBlock:
    """Memory of the device or pinned memory; its death puts it on the device's list of garbage.

    Attributes:
        leases: the uses of it that may be in flight.
    """

    __slots__ = ("_free", "_garbage", "address", "host", "leases")

    def __init__(
        self,
        address: int,
        host: np.ndarray[tuple[int], np.dtype[np.uint8]] | None,
        free: Free,
        garbage: "deque[tuple[Callable[..., None], tuple[Any, ...]]]",
    ) -> None:
        self.address = address
        self.host = host
        self.leases: list[Record] = []
        self._free = free
        self._garbage = garbage

    def __del__(self) -> None:
        # Finalisers run anywhere, also where the lock must not be taken: only note the address.
        self._garbage.append((self._free, (self.address, self.leases)))


class _Moment(Event):
    """When the work of a ticket, and all before it on its queue, is complete."""

    def __init__(self, device: "QueuedDevice", ticket: Ticket) -> None:
        self._device = device
        self._ticket = ticket

    def done(self) -> bool:
        """See `Event`."""
        self._device.enter()
        with self._device.watch:
            return self._device.passed(self._ticket.mark)

    def wait(self) -> None:
        """See `Event`."""
        self._device.enter()
        with self._device.watch:
            self._device.wait_mark(self._ticket.mark)

    def since(self, earlier: Event) -> float:
        """See `Event`."""
        raise DeviceError("this event has no time; use record_event(timing=True)")


class QueuedDevice(Device):
    """A device with queues. Subclasses say how to enqueue, mark and wait, and call `open`.

    While no stream beside the device's own is open there is one queue, whose order is all the
    order there is, and nothing is written down. A stream begins behind everything on the device's
    own queue, which goes on behind it when it ends, so no record of the time before is needed.

    Attributes:
        queue: the device's own. Allocations and frees are always on it.
        garbage: what to free or to close, at the next call that may do so.
        order: who waits for whom, while streams are open.
        watch: around every wait that a user asks for, and no other: what a kernel did wrong is
            raised there, not where work is ordered or memory freed.
    """

    watch: contextlib.AbstractContextManager[None] = contextlib.nullcontext()

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.garbage: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        # What the host frees when marks have passed; and what it may free now, for which the driver
        # may wait.
        self._ending: deque[tuple[list[Any], Callable[..., None], tuple[Any, ...]]] = deque()
        self._over: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._marks: deque[Any] = deque()
        self._idle: list[Lane] = []
        self._open: dict[Lane, None] = {}
        self._transfers: list[tuple[Use, ...]] = []
        self._transferred = threading.Condition(self.lock)
        # Whether anything beside the device's own queue needs looking after.
        self._watched = False

    def open(self, queue: Any) -> None:
        """Begin, with the device's own queue."""
        self.queue = queue
        self.order = Order(self)
        self._main = Lane(queue)

    # What a device is

    @abstractmethod
    def enter(self) -> None:
        """Called before any of the below, by the calling thread."""

    @abstractmethod
    def make_queue(self) -> Any:
        """Another queue; it stays for the life of the process."""

    @abstractmethod
    def wait_queue(self, queue: Any) -> None:
        """Block until everything on the queue is complete."""

    @abstractmethod
    def make_mark(self) -> Any:
        """A mark that has not been put anywhere."""

    @abstractmethod
    def put_mark(self, mark: Any, queue: Any) -> None:
        """Put a mark behind everything on the queue; it leaves where it was."""

    @abstractmethod
    def hold(self, queue: Any, mark: Any) -> None:
        """See `Queues`; of the mark where it is at this moment."""

    @abstractmethod
    def passed(self, mark: Any) -> bool:
        """See `Queues`."""

    @abstractmethod
    def wait_mark(self, mark: Any) -> None:
        """Block until everything before the mark is complete."""

    @abstractmethod
    def make_event(self, queue: Any, timing: bool) -> Event:
        """An event behind everything on the queue."""

    @abstractmethod
    def take_memory(self, nbytes: int) -> int:
        """Address of memory for work enqueued on the device's own queue from now on."""

    @abstractmethod
    def give_memory(self, address: int) -> None:
        """Free memory behind everything on the device's own queue."""

    def host_bytes(
        self, address: int, nbytes: int
    ) -> np.ndarray[tuple[int], np.dtype[np.uint8]] | None:
        """The memory at an address, where the host can touch it."""
        return None

    # Order

    def mark(self, queue: Any) -> Any:
        """See `Queues`."""
        try:
            mark = self._marks.pop()
        except IndexError:
            mark = self.make_mark()
        self.put_mark(mark, queue)
        return mark

    def reuse(self, mark: Any) -> None:
        """See `Queues`."""
        self._marks.append(mark)

    def submit(
        self,
        call: Call,
        uses: Sequence[Use],
        maker: "Maker | None" = None,
        stream: Stream | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """See `Device`."""
        self.enter()
        if self.garbage:
            self.collect()
        with self.lock:
            if check is not None:
                check()
            if self._watched or stream is not None or self.recorder is not None:
                self._submit(call, uses, maker, stream, check)
            else:
                call(self.queue)

    def submit_alone(self, call: Call) -> bool:
        """See `Device`."""
        self.enter()
        if self.garbage:
            self.collect()
        lock = self.lock
        lock.acquire()
        try:
            if self._watched or self.recorder is not None:
                return False
            call(self.queue)
        finally:
            lock.release()
        return True

    def _submit(
        self,
        call: Call,
        uses: Sequence[Use],
        maker: "Maker | None",
        stream: Stream | None,
        check: Callable[[], None] | None,
    ) -> None:
        if self.recorder is not None:
            self.recorder.note(
                call, tuple(uses), maker, None if stream is None else stream.lane(self)
            )
            return
        while not self.settled(uses):
            if check is not None:
                check()
        # Only now: while this waited, another thread may have closed the stream.
        lane = self._main if stream is None else stream.lane(self)
        if not self._open:
            call(lane.queue)
            return
        self.order.before(lane, uses)
        try:
            call(lane.queue)
        except BaseException:
            # Some of it may have been enqueued.
            with contextlib.suppress(DeviceError):
                self.order.after(lane, uses)
            raise
        self.order.after(lane, uses)

    def settled(self, uses: Sequence[Use]) -> bool:
        """See `Device`."""
        if not self._transfers or not any(_conflict(uses, one) for one in self._transfers):
            return True
        self._transferred.wait()
        return False

    @contextlib.contextmanager
    def transfer(self, *uses: Use) -> Iterator[None]:
        """Enqueue a copy on the device's own queue in parts, with the lock held for each.

        In order as a whole: conflicting work of other threads comes before it or after it.
        """
        with self.lock:
            while not self.settled(uses):
                pass
            if self._open:
                self.order.before(self._main, uses)
            self._transfers.append(uses)
            self._watched = True
        try:
            yield
        finally:
            with self.lock:
                try:
                    self._transfers.remove(uses)
                    if self._open:
                        self.order.after(self._main, uses)
                finally:
                    self._watch()
                    self._transferred.notify_all()

    def _watch(self) -> None:
        self._watched = bool(self._open or self._transfers)

    # Streams

    def stream(self) -> Stream:
        """See `Device`."""
        self.enter()
        self.collect()
        with self.lock:
            lane = self._idle.pop() if self._idle else Lane(self.make_queue())
            self.order.wait(lane, self.order.ticket(self._main))
            self._open[lane] = None
            self._watched = True
            return Stream(self, lane)

    def close_lane(self, lane: Lane) -> None:
        """See `Device`."""
        self.enter()
        try:
            if lane.last is not None:
                self.order.wait(self._main, lane.last)
        finally:
            del self._open[lane]
            self._idle.append(lane)
            self._watch()

    def drop_lane(self, lane: Lane) -> None:
        """See `Device`."""
        self.garbage.append((self.close_lane, (lane,)))

    def record_event(self, timing: bool = False, stream: Stream | None = None) -> Event:
        """See `Device`."""
        self.enter()
        with self.lock:
            self.refuse_in_capture("recording an event")
            queue = self.queue if stream is None else stream.lane(self).queue
            return self.make_event(queue, timing)

    def end(self, stream: Stream | None) -> Event:
        """See `Device`."""
        self.enter()
        with self.lock:
            self.refuse_in_capture("waiting for work")
            ticket = self.order.ticket(self._main) if stream is None else stream.last
        return DoneEvent(0.0) if ticket is None else _Moment(self, ticket)

    def synchronize(self) -> None:
        """See `Device`."""
        self.refuse_in_capture("waiting for the device")
        self.enter()
        with self.watch:
            self.collect()
            self._wait_for_all()
        self.collect()

    def _wait_for_all(self) -> None:
        with self.lock:
            # The device's own queue is behind streams that are closed by now, not behind those that
            # other threads close while this waits.
            queues = [self.queue, *[lane.queue for lane in self._open]]
        for queue in queues:
            self.wait_queue(queue)

    def after_work(self, done: Callable[[], None]) -> None:
        """See `Device`."""
        self.garbage.append((self.finish, (done,)))

    def finish(self, done: Callable[..., None], *arguments: Any) -> None:
        """Have a later `collect` call `done` once all work is complete. Called with the lock held.

        Nobody waits for it: other threads want the lock to launch.
        """
        marks = [self.mark(queue) for queue in (self.queue, *[lane.queue for lane in self._open])]
        if not self._ending:
            self.garbage.append((self._end, ()))
        self._ending.append((marks, done, arguments))

    def _end(self) -> None:
        # During a capture, its thread has the lock all the time. What is in front is over first.
        while self._ending and self.recorder is None:
            marks, done, arguments = self._ending[0]
            if not all(self.passed(mark) for mark in marks):
                break
            self._ending.popleft()
            for mark in marks:
                self.reuse(mark)
            self._over.append((done, arguments))
        if self._ending:
            self.garbage.append((self._end, ()))

    # Memory

    def allocate(self, nbytes: int) -> QueuedBlock:
        """See `Device`."""
        self.enter()
        self.collect()
        nbytes = max(nbytes, 1)
        with self.lock:
            address = self.take_memory(nbytes)
            host = self.host_bytes(address, nbytes)
            block = QueuedBlock(address, host, self._free, self.garbage)
            self.adopt(block, nbytes)
        return block

    def adopt(self, block: Any, nbytes: int) -> None:
        """See `Device`."""
        self.enter()
        with self.lock:
            if self._open:
                whole = Region(0, (nbytes,), (1,), 1)
                block.leases.append(Record(whole, True, self.order.ticket(self._main)))

    def _free(self, address: int, leases: list[Record]) -> None:
        self.order.wait_for_all(self._main, leases)
        self.give_memory(address)

    def collect(self) -> None:
        """Free what has died. Its last use is enqueued already, and frees are ordered after it.

        What is freed by the host is left for another time while it may be in use. Nothing waits for
        the device with the lock held, except in a capture.
        """
        with self.lock:
            # Not what is put back meanwhile.
            for _ in range(len(self.garbage)):
                free, arguments = self.garbage.popleft()
                free(*arguments)
        while self._over:
            with contextlib.suppress(IndexError):
                done, arguments = self._over.popleft()
                done(*arguments)


def _conflict(some: Sequence[Use], others: Sequence[Use]) -> bool:
    return any(
        (write or other_write) and storage is other and overlap(region, other_region)
        for storage, region, write in some
        for other, other_region, other_write in others
    )
