"""Who waits for whom between the queues of a device (rule O4).

Work of one queue runs in order; work of several does not, unless a queue is told to wait. Every
piece of work gets a ticket, and memory remembers the tickets of the work that uses it. Before a
queue gets work, it waits for the conflicting tickets of other queues: those on overlapping memory
where one of the two writes. Clocks say what a queue is behind already, so no wait is made twice.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tilert.ownership import Region, covers, overlap

if TYPE_CHECKING:
    from tilert.device import Use
    from tilert.storage import Storage

__all__ = ["Lane", "Order", "Queues", "Record", "Ticket"]

# Records that a storage keeps before they are looked through.
_MOST = 32

Clock = dict["Lane", int]


class Queues(Protocol):
    """What the order needs of a device. Queues and marks are the device's own objects."""

    def mark(self, queue: Any) -> Any:
        """A mark behind everything enqueued on the queue so far."""

    def hold(self, queue: Any, mark: Any) -> None:
        """Make the queue wait for the mark, without waiting here."""

    def passed(self, mark: Any) -> bool:
        """Whether everything before the mark is complete."""

    def reuse(self, mark: Any) -> None:
        """Nobody needs the mark any more. Called by finalisers."""


class Lane:
    """A queue, and what it is known to be behind.

    Attributes:
        queue: the device's own object.
        clock: for other lanes the number of their newest ticket that this one is behind. Never
            changed in place, because tickets keep it.
        last: its newest ticket.
    """

    __slots__ = ("clock", "last", "queue")

    def __init__(self, queue: Any) -> None:
        self.queue = queue
        self.clock: Clock = {}
        self.last: Ticket | None = None

    def behind(self, ticket: "Ticket") -> bool:
        """Whether all later work of the lane runs after the ticket's."""
        return ticket.lane is self or self.clock.get(ticket.lane, 0) >= ticket.number


class Ticket:
    """One piece of work in a lane: later than all with smaller numbers there.

    Attributes:
        clock: that of the lane when the work was enqueued.
        mark: right behind the work.
    """

    __slots__ = ("_queues", "clock", "lane", "mark", "number")

    def __init__(self, queues: Queues, lane: Lane, number: int) -> None:
        self.lane = lane
        self.number = number
        self.clock = lane.clock
        self.mark = queues.mark(lane.queue)
        self._queues = queues

    def __del__(self) -> None:
        if hasattr(self, "_queues"):
            self._queues.reuse(self.mark)


class Record:
    """A use of a storage by work that may be in flight."""

    __slots__ = ("region", "ticket", "write")

    def __init__(self, region: Region, write: bool, ticket: Ticket) -> None:
        self.region = region
        self.write = write
        self.ticket = ticket

    def repeats(self, other: "Record") -> bool:
        """Whether whoever has to wait for `other` has to wait for this, which is behind it."""
        return (
            (self.write or not other.write)
            and covers(self.region, other.region)
            and (
                self.ticket.lane is other.ticket.lane
                or self.ticket.clock.get(other.ticket.lane, 0) >= other.ticket.number
            )
        )


def _own_records(storage: "Storage") -> list[Record]:
    return storage.leases


class Order:
    """The order of one device, or of one graph. Its user sees to it that one thread is in it.

    Args:
        records: where the records of a storage are.
    """

    def __init__(
        self, queues: Queues, records: "Callable[[Storage], list[Record]]" = _own_records
    ) -> None:
        self._queues = queues
        self._records = records
        self._numbers = itertools.count(1)

    def ticket(self, lane: Lane) -> Ticket:
        """A ticket for everything enqueued on the lane so far."""
        lane.last = ticket = Ticket(self._queues, lane, next(self._numbers))
        return ticket

    def wait(self, lane: Lane, ticket: Ticket) -> None:
        """Put all later work of the lane behind the ticket's."""
        if lane.behind(ticket):
            return
        self._queues.hold(lane.queue, ticket.mark)
        clock = dict(lane.clock)
        for other, number in (*ticket.clock.items(), (ticket.lane, ticket.number)):
            clock[other] = max(number, clock.get(other, 0))
        lane.clock = clock

    def before(self, lane: Lane, uses: "Iterable[Use]") -> None:
        """Put later work of the lane behind the work in flight that conflicts with the uses."""
        needed: dict[int, Ticket] = {}
        for storage, region, write in uses:
            for record in self._records(storage):
                ticket = record.ticket
                if (
                    (write or record.write)
                    and not lane.behind(ticket)
                    and overlap(record.region, region)
                ):
                    needed[ticket.number] = ticket
        # The newest first: it may be behind the others.
        for number in sorted(needed, reverse=True):
            self.wait(lane, needed[number])

    def after(self, lane: Lane, uses: "Iterable[Use]") -> Ticket:
        """The work with these uses has been enqueued."""
        ticket = self.ticket(lane)
        for storage, region, write in uses:
            self.note(self._records(storage), Record(region, write, ticket))
        return ticket

    def wait_for_all(self, lane: Lane, records: Sequence[Record]) -> None:
        """Put later work of the lane behind everything that the records tell of."""
        for record in sorted(records, key=lambda record: -record.ticket.number):
            self.wait(lane, record.ticket)

    def note(self, records: list[Record], new: Record) -> None:
        """Add a record, and let go of those that nobody needs beside it."""
        records[:] = [record for record in records if not new.repeats(record)]
        records.append(new)
        if len(records) > _MOST:
            records[:] = [r for r in records if not self._queues.passed(r.ticket.mark)]
            if len(records) > _MOST // 2:
                records[:] = _joined(records)


def _joined(records: Sequence[Record]) -> list[Record]:
    """A record for all writes and one for all reads of each lane: who has to wait for one of them
    waits for all, which takes longer than it must and is right."""
    groups: dict[tuple[Lane, bool], list[Record]] = {}
    for record in records:
        groups.setdefault((record.ticket.lane, record.write), []).append(record)
    joined: list[Record] = []
    for (_, write), group in groups.items():
        low = min(record.region.low for record in group)
        high = max(record.region.high for record in group)
        newest = max((record.ticket for record in group), key=lambda ticket: ticket.number)
        joined.append(Record(Region(low, (high - low,), (1,), 1), write, newest))
    return joined
