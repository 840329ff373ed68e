"""Graphs of the cuda device, recorded by stream capture (rule O6)."""

from typing import TYPE_CHECKING

from tilert import driver
from tilert.errors import LaunchError
from tilert.recording import Piece, issue

if TYPE_CHECKING:
    from tilert.cuda_device import CudaDevice

__all__ = ["CudaGraph"]


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


class _Marks:
    """Events inside a capture. They say nothing outside it, so they are not used again."""

    def __init__(self) -> None:
        self._made: list[driver.Handle] = []

    def mark(self, queue: driver.Handle) -> driver.Handle:
        """See `tilert.order.Queues`."""
        event = driver.create_event(timing=False)
        self._made.append(event)
        driver.record_event(event, queue)
        return event

    def hold(self, queue: driver.Handle, mark: driver.Handle) -> None:
        """See `tilert.order.Queues`."""
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
    marks = _Marks()
    driver.begin_capture(first)
    try:
        try:
            issue(marks, pieces, take)
        except BaseException:
            driver.drop_capture(first)
            raise
        return driver.end_capture(first)
    finally:
        marks.destroy()
