"""Graphs of the cuda device, recorded by stream capture (rule O6)."""

import os
from typing import TYPE_CHECKING

from tilert import driver
from tilert.errors import DeviceError, LaunchError
from tilert.recording import Piece, enqueue, issue

if TYPE_CHECKING:
    from tilert.cuda_device import CudaDevice

__all__ = ["CudaGraph", "early_kernels"]

_SWITCH = "TILERT_EARLY_KERNELS"


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

    The events of a capture say nothing outside it, so they are not used again.
    """

    def __init__(self, early: bool) -> None:
        self._early = early
        self._made: list[driver.Handle] = []
        # By identity, streams whose next node comes after one kernel that waits, and nothing else.
        self._behind_kernel: set[int] = set()

    def put(self, piece: Piece, queue: driver.Handle) -> None:
        """Enqueue a piece on a stream that is captured."""
        launch = getattr(piece.call, "__self__", None)
        if not isinstance(launch, driver.Launch) or not launch.waits:
            self._behind_kernel.discard(id(queue))
            enqueue(piece, queue)
            return
        if self._early and id(queue) in self._behind_kernel:
            launch.enqueue_early(queue)
        else:
            launch.enqueue(queue)
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
    recording = _Recording(device.early_kernels)
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
