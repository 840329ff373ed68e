"""Graphs of the cuda device, recorded by stream capture (rule O6)."""

import os
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tilert import driver, kernel_launch
from tilert.codegen.early import APART, AT_ONCE, BEHIND_ONE
from tilert.errors import DeviceError, LaunchError
from tilert.order import Lane
from tilert.ownership import Region
from tilert.recording import Piece, enqueue, issue

if TYPE_CHECKING:
    from tilert.array import Array
    from tilert.cuda_device import CudaDevice

__all__ = ["CudaGraph", "Span", "early_kernels", "span"]

_SWITCH = "TILERT_EARLY_KERNELS"

Span = tuple[int, int]
"""Memory of the device: the first address, and that behind the last."""


def span(array: "Array") -> Span:
    """The memory between an array's first byte and its last."""
    return _span(array.storage.address, array.region)


def _span(base: int, region: Region) -> Span:
    return base + region.low, base + region.high


class _Written:
    """All that pieces write, as spans."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        found = {
            _span(storage.address, region)
            for piece in pieces
            for storage, region, write in piece.uses
            if write
        }
        self._starts, self._ends = list[int](), list[int]()
        for start, end in sorted(span for span in found if span[0] < span[1]):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)

    def __contains__(self, span: Span) -> bool:
        """Whether any of them writes a byte of it."""
        before = bisect_left(self._starts, span[1])
        return before > 0 and self._ends[before - 1] > span[0]


def early_kernels(capability: tuple[int, int]) -> bool:
    """Whether kernels of graphs start early: where the GPU can, and TILERT_EARLY_KERNELS is not 0.

    Raises:
        DeviceError: if TILERT_EARLY_KERNELS is neither 0 nor 1.
    """
    setting = os.environ.get(_SWITCH, "")
    if setting not in ("", "0", "1"):
        raise DeviceError(f"{_SWITCH}={setting!r}; use 0 or 1")
    return setting != "0" and capability >= (9, 0)


class CudaGraph:
    """An executable graph."""

    def __init__(self, device: "CudaDevice", pieces: list[Piece]) -> None:
        self._device = device
        self._handle: driver.Handle | None = None
        self._instantiate(pieces)

    def _instantiate(self, pieces: list[Piece]) -> None:
        graph = _record(self._device, pieces)
        self._handle = driver.instantiate(graph, self._device.queue)

    def enqueue(self, queue: driver.Handle) -> None:
        """See `Executable`."""
        if self._handle is None:
            raise LaunchError("O6 graphs: this graph was closed by another thread")
        driver.launch_graph(self._handle, queue)

    def update(self, pieces: list[Piece]) -> None:
        """See `Executable`."""
        if driver.update_graph(self._handle, _record(self._device, pieces)):
            return
        # Other memory may conflict elsewhere, and so the graph have another shape.
        before = self._handle
        self._instantiate(pieces)
        self._destroy(before)

    def close(self) -> None:
        """See `Executable`."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._destroy(handle)

    def _destroy(self, handle: driver.Handle) -> None:
        """Once its replays are complete."""
        device = self._device
        device.garbage.append((device.finish, (driver.destroy_graph, handle)))

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self.close()


class _Recording:
    """What stream capture is told: the pieces, and who waits for whom.

    Kernels that wait for earlier grids themselves may start early (programmatic dependent launch).
    That is sound where the kernel before in the stream, and it alone, comes before: it waits as
    well, so when it is complete, all that it is behind is. Whatever else comes between is a full
    edge: copies, fills, kernels that do not wait, waits for other branches, the graph's beginning.

    What no piece of the graph writes, a kernel may read before it waits: nothing else can write it
    before the graph is complete (rule O6). A kernel that reads nothing else, and writes nothing
    that the one before uses, stores before that is complete, too: its first block alone waits, and
    so it is complete after all before it. What is complete or not at that time, see `_words`.

    The events of a capture say nothing outside it, so they are not used again.
    """

    def __init__(self, early: bool, pieces: Sequence[Piece]) -> None:
        self._early = early
        # What each kernel may do before it waits, by the piece's identity.
        self._words = _words(pieces) if early else {}
        self._made: list[driver.Handle] = []
        # By identity, streams whose next node comes after one kernel that waits, and nothing else.
        self._behind_kernel: set[int] = set()

    def put(self, piece: Piece, queue: driver.Handle) -> None:
        """Enqueue a piece on a stream that is captured."""
        launch = _launch(piece)
        if launch is None or not launch.waits:
            self._behind_kernel.discard(id(queue))
            enqueue(piece, queue)
            return
        behind = self._early and id(queue) in self._behind_kernel
        launch.record(queue, behind, self._words.get(id(piece), 0))
        if launch.leads:
            self._behind_kernel.add(id(queue))
        else:
            self._behind_kernel.discard(id(queue))

    def mark(self, queue: driver.Handle) -> driver.Handle:
        """See `tilert.order.Queues`."""
        event = driver.create_event(timing=False)
        self._made.append(event)
        driver.record_event(event, queue)
        return event

    def hold(self, queue: driver.Handle, mark: driver.Handle) -> None:
        """See `tilert.order.Queues`."""
        self._behind_kernel.discard(id(queue))
        driver.hold_stream(queue, mark)

    def passed(self, mark: driver.Handle) -> bool:
        """See `tilert.order.Queues`; nothing runs while it is recorded."""
        return False

    def reuse(self, mark: driver.Handle) -> None:
        """See `tilert.order.Queues`."""

    def destroy(self) -> None:
        """Free the events."""
        for event in self._made:
            driver.destroy_event(event)


def _words(pieces: Sequence[Piece]) -> dict[int, int]:
    """For each kernel that waits, by its piece's identity, what it may do before it waits.

    It may read what no piece writes, and where the next kernel of its stream has something to read
    ahead, it makes way for it at once. Where that one reads nothing that any piece writes, and
    writes nothing that this one uses, it need not wait for this one, which then lets it start only
    when all before are complete: so two kernels are under way at most.
    """
    written = _Written(pieces)
    words: dict[int, int] = {}
    # Of each stream, the piece behind the present one where it reads ahead.
    readers: dict[Lane | None, Piece | None] = {}
    for piece in reversed(pieces):
        launch = _launch(piece)
        if launch is None or not launch.waits:
            readers[piece.lane] = None
            continue
        word = sum(1 << bit for bit, read in enumerate(launch.ahead) if read not in written)
        if launch.whole and word.bit_count() < len(launch.ahead):
            word = 0
        reads, reader = word != 0, readers.get(piece.lane)
        if reader is not None:
            word |= AT_ONCE
            if _apart(piece, reader):
                word |= BEHIND_ONE
                words[id(reader)] |= APART
        words[id(piece)] = word
        readers[piece.lane] = piece if reads else None
    return words


def _apart(piece: Piece, reader: Piece) -> bool:
    """Whether a kernel that reads all its operands ahead need not wait for the one before it."""
    before, launch = _launch(piece), _launch(reader)
    if before is None or launch is None or not (before.apart and launch.apart and launch.whole):
        return False
    written = _Written([reader])
    return all(_span(storage.address, region) not in written for storage, region, _ in piece.uses)


def _launch(piece: Piece) -> kernel_launch.Launch | None:
    """The launch that a piece is, if it is one."""
    launch = getattr(piece.call, "__self__", None)
    return launch if isinstance(launch, kernel_launch.Launch) else None


def _record(device: "CudaDevice", pieces: list[Piece]) -> driver.Handle:
    """A graph of the pieces."""
    device.enter()
    streams, used = device.recording, 0

    def take() -> driver.Handle:
        nonlocal used
        used += 1
        if used > len(streams):
            streams.append(driver.create_stream())
        return streams[used - 1]

    first, used = take(), 0
    recording = _Recording(device.early_kernels, pieces)
    driver.begin_capture(first)
    try:
        try:
            issue(recording, pieces, take, recording.put)
        except BaseException:
            driver.drop_capture(first)
            raise
        return driver.end_capture(first)
    finally:
        recording.destroy()
