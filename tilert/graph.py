"""Graphs: work recorded once and enqueued again at each replay (rule O6)."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tilert.device import Device, Use
from tilert.errors import LaunchError
from tilert.ownership import At, Place, where
from tilert.rebind import Swap
from tilert.recording import Piece, Recorder

if TYPE_CHECKING:
    from tilert.array import Array
    from tilert.ownership import Region
    from tilert.storage import Storage
    from tilert.stream import Stream
    from tilert.work import Work

__all__ = ["Graph", "capture"]


class Graph:
    """Recorded work on one device. It keeps every array it touches alive until it is closed."""

    def __init__(self, device: Device, pieces: list[Piece], at: At) -> None:
        self.device = device
        self._captured = None, at
        self._executable = device.make_graph(pieces)
        self._open = True
        # One list for good: a replay that waits for others uses what it is then.
        self._uses: list[Use] = []
        self._adopt(pieces)

    def _adopt(self, pieces: list[Piece]) -> None:
        """Keep what the pieces use, and what is needed to make them again."""
        used: dict[Storage, dict[Region, bool]] = {}
        for piece in pieces:
            piece.call = None
            for storage, region, write in piece.uses:
                regions = used.setdefault(storage, {})
                regions[region] = write or regions.get(region, False)
        self._pieces = pieces
        self._regions = [(storage, list(regions.items())) for storage, regions in used.items()]
        self._holds = [storage.holds for storage in used]
        self._uses[:] = [
            (storage, region, write)
            for storage, regions in self._regions
            for region, write in regions
        ]

    def __repr__(self) -> str:
        state = "" if self._open else "closed "
        count = len(self._pieces)
        holds = f", {count} piece{'' if count == 1 else 's'} of work" if self._open else ""
        place = Place(*self._captured[1])
        return f"<{state}graph of {self.device.name} captured at {place}{holds}>"

    def replay(self, stream: "Stream | None" = None) -> None:
        """Enqueue everything again: one piece of work, which reads and writes what was recorded.

        Args:
            stream: where; by default the device's own. The streams of the capture do not matter.

        Raises:
            LaunchError: if the graph or the stream is closed, the stream is of another device, or
                during a capture.
            MovedError: if an op, or a borrower who may write, holds memory that the graph uses
                (O5), or anybody memory that it writes.
        """
        self.device.submit(self._enqueue, self._uses, None, stream, self._check_replay)

    def _enqueue(self, queue: Any) -> None:
        if self.device.trail is not None:
            self.device.trail.add(self._captured)
        self._executable.enqueue(queue)

    def _check_replay(self) -> None:
        self._check_open()
        if self.device.recorder is not None:
            self.device.refuse_in_capture("the replay of another graph")
        if any(self._holds):
            for storage, regions in self._regions:
                for region, write in regions:
                    storage.check_free(region, write)

    def rebind(self, arrays: "Mapping[Array, Array]") -> None:
        """From the next replay on, use other memory in the place of some.

        Every use of the memory of a key, also through views of it made in the capture, goes to the
        same place of its value. Replays that are enqueued already keep to the memory they had, and
        the graph holds what it uses now, until it is closed. Where this raises, nothing changes.

        Args:
            arrays: of one shape, strides and dtype each. The keys are what the graph uses at
                present: the recorded arrays, or what they were bound to since.

        Raises:
            LaunchError: if two arrays of a pair differ, or the graph uses no memory of a key, or
                only together with memory beside it; if the graph is closed; during a capture.
            OwnershipError: if a piece of work would reach what it writes through two of its
                arguments (O3), write what may not be written, or find its pieces by an index map
                that others have not proven (O7).
        """
        with self.device.lock:
            self._check_open()
            self.device.refuse_in_capture("rebinding a graph")
            swap = Swap(self.device, arrays)
            pieces = [swap.piece(piece) for piece in self._pieces]
            swap.check_used()
            self._executable.update(pieces)
            self._adopt(pieces)

    def _check_open(self) -> None:
        if not self._open:
            raise LaunchError("O6 graphs: this graph is closed; capture it again")

    def close(self) -> None:
        """Forget the recorded work and let go of its arrays; enqueued replays still complete."""
        with self.device.lock:
            if self._open:
                self._open = False
                self._executable.close()
                self._adopt([])

    def __enter__(self) -> "Graph":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def capture(device: Device, fn: "Callable[[], Any] | Work") -> Graph:
    """Call `fn()` once and record the ops it runs and the device copies it makes.

    Work that `fn` returns and has not run is run as the last of it, as the function of `then` may
    give work. In the place of a function that only does so, `fn` may be the work.

    Nothing is executed. Other threads' work on the device waits for the end of the capture. What a
    later replay reads and writes are the recorded arrays: change inputs by copying into them, or
    with `Graph.rebind`. Work on streams becomes branches of the graph, which may run at the same
    time; what uses the same memory keeps its order.

    Raises:
        LaunchError: if `fn` does what a graph cannot hold: read on the host, copy from the host,
            wait, or capture; if it makes ops and nothing is recorded; if it is work of another
            device, or neither a function nor work. What `fn` raises passes through. The recording
            is dropped then, and with it the partitions and ops made in it: their arrays are free
            again.
    """
    # Work is captured by graphs, and so is above them.
    from tilert.work import Work

    at = where(2)
    start = fn.run if isinstance(fn, Work) else fn
    if not callable(start):
        raise LaunchError(
            f"O6 graphs: capture takes a function without parameters, or work, got"
            f" {type(fn).__name__}"
        )
    if isinstance(fn, Work):
        _check_place(fn, device)
    with device.lock:
        device.refuse_in_capture("another capture")
        device.recorder = recorder = Recorder()
        try:
            made = start()
            if isinstance(made, Work) and made.waiting:
                _check_place(made, device)
                made.run()
            recorder.check_recorded()
            device.recorder = None
            return Graph(device, recorder.pieces, at)
        except BaseException:
            device.recorder = None
            recorder.drop()
            raise


def _check_place(work: "Work", device: Device) -> None:
    if work.device is not device and work.device is not None:
        raise LaunchError(
            f"O6 graphs: {work!r} is on {work.device.title} and cannot be captured on"
            f" {device.title}"
        )
