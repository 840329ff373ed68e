"""What a capture records: pieces of work, in program order, and what becomes of them (rule O6)."""

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tilert.errors import LaunchError, TilertError
from tilert.order import Lane, Order, Queues, Record
from tilert.ownership import Place
from tilert.pending import Pending

if TYPE_CHECKING:
    from tilert.device import Call, Use
    from tilert.ownership import At
    from tilert.rebind import Maker
    from tilert.storage import Storage

__all__ = ["CallList", "Executable", "Piece", "Recorder", "enqueue", "issue"]


class Piece:
    """One piece of recorded work.

    Attributes:
        call: enqueues it, where that is still needed.
        uses: the memory that it touches.
        maker: makes the call again, on other memory.
        lane: of the stream that it was enqueued on, or None for the device's own.
    """

    __slots__ = ("call", "lane", "maker", "uses")

    def __init__(
        self,
        call: "Call | None",
        uses: "tuple[Use, ...]",
        maker: "Maker | None",
        lane: Lane | None,
    ) -> None:
        self.call = call
        self.uses = uses
        self.maker = maker
        self.lane = lane


class Recorder:
    """What a capture has seen.

    Attributes:
        pieces: the work, in program order.
        first_op: kernel of the first op that was made, and where that was.
    """

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.first_op: tuple[str, At] | None = None
        # Weakly: what the recorded function itself drops gives its array back at once.
        self._pending: list[weakref.ref[Pending]] = []

    def watch(self, made: Pending, op: "tuple[str, At] | None") -> None:
        """Remember a partition or an op that is made during the capture."""
        self.first_op = self.first_op or op
        self._pending.append(weakref.ref(made))

    def check_recorded(self) -> None:
        """Refuse a capture of ops that were made and did not run.

        Raises:
            LaunchError: if nothing was recorded all the same.
        """
        if self.first_op is not None and not self.pieces:
            kernel, at = self.first_op
            raise LaunchError(
                f"O6 graphs: the capture recorded nothing: op '{kernel}' created at {Place(*at)}"
                " was made in it and never run; call .run() on it, or return it from the function"
            )

    def drop(self) -> None:
        """The capture has failed: give back every array that was moved in it.

        Whoever keeps the exception keeps the frames of the failed function, and so what they hold.
        """
        for reference in self._pending:
            made = reference()
            if made is not None:
                made.release()

    def note(
        self,
        call: "Call",
        uses: "tuple[Use, ...]",
        maker: "Maker | None",
        lane: Lane | None,
    ) -> None:
        """Remember one piece of work."""
        self.pieces.append(Piece(call, uses, maker, lane))


class Executable(Protocol):
    """Recorded work as a device enqueues it."""

    def enqueue(self, queue: Any) -> None:
        """Enqueue all of it on a queue, as one piece of work."""

    def update(self, pieces: list[Piece]) -> None:
        """Be other pieces from the next time on; nothing changes where this raises."""

    def close(self) -> None:
        """Forget the work; what is enqueued completes."""


class CallList:
    """Recorded work of a device that has one queue: its calls, one after the other."""

    def __init__(self, pieces: list[Piece]) -> None:
        self.update(pieces)

    def enqueue(self, queue: Any) -> None:
        """See `Executable`."""
        for call in self._calls:
            call(queue)

    def update(self, pieces: list[Piece]) -> None:
        """See `Executable`."""
        self._calls = [piece.call for piece in pieces if piece.call is not None]

    def close(self) -> None:
        """See `Executable`."""
        self._calls = []


class _Records:
    """The records of the storages of one graph, beside those of work in flight."""

    def __init__(self) -> None:
        self._of: dict[Storage, list[Record]] = {}

    def __call__(self, storage: "Storage") -> list[Record]:
        return self._of.setdefault(storage, [])


def enqueue(piece: Piece, queue: Any) -> None:
    """Enqueue one piece by its call."""
    if piece.call is None:
        raise AssertionError("a graph enqueues work that it has recorded before")
    piece.call(queue)


def issue(
    queues: Queues,
    pieces: Sequence[Piece],
    take: Callable[[], Any],
    put: Callable[[Piece, Any], None] = enqueue,
) -> None:
    """Enqueue pieces on queues that record a graph: on one, or on one for each stream.

    A piece depends on earlier ones of its stream, and on earlier ones that use the same memory
    where either writes it; on nothing else, so that the device may run the rest at the same time.

    Args:
        take: gives the first queue, where recording has begun, and then others.
        put: enqueues a piece on a queue.
    """
    main = Lane(take())
    sides = {piece.lane for piece in pieces if piece.lane is not None}
    if not sides:
        for piece in pieces:
            _put(put, piece, main.queue)
        return
    order = Order(queues, _Records())
    origin = order.ticket(main)
    lanes: dict[Lane | None, Lane] = {None: main}
    for piece in pieces:
        lane = lanes.get(piece.lane)
        if lane is None:
            lane = lanes[piece.lane] = Lane(take())
            order.wait(lane, origin)
        order.before(lane, piece.uses)
        _put(put, piece, lane.queue)
        order.after(lane, piece.uses)
    # The newest first: it may be behind the others.
    ends = [lane.last for lane in lanes.values() if lane.last is not None]
    for end in sorted(ends, key=lambda end: -end.number):
        order.wait(main, end)


def _put(put: Callable[[Piece, Any], None], piece: Piece, queue: Any) -> None:
    try:
        put(piece, queue)
    except TilertError as error:
        error.add_note(f"while recording {piece.maker}")
        raise
