"""Graphs: work recorded once and enqueued again at each replay (rule O6)."""

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tilert.device import Device, Use
from tilert.errors import LaunchError
from tilert.pending import Pending

if TYPE_CHECKING:
    from tilert.ownership import Region
    from tilert.storage import Storage

__all__ = ["Graph", "Recorder", "capture"]


class Recorder:
    """What a capture has seen: the memory that its work touches and what must stay alive.

    Attributes:
        calls: recorded work, on devices that do not record it themselves.
        regions: for each storage the regions used.
        kept: what else must stay alive.
    """

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self.regions: dict[Storage, dict[Region, None]] = {}
        self.kept: list[object] = []
        # Weakly: what the recorded function itself drops gives its array back at once.
        self._pending: list[weakref.ref[Pending]] = []

    def watch(self, made: Pending) -> None:
        """Remember a partition or an op that is made during the capture."""
        self._pending.append(weakref.ref(made))

    def drop(self) -> None:
        """The capture has failed: give back every array that was moved in it.

        Whoever keeps the exception keeps the frames of the failed function, and so what they hold.
        """
        for reference in self._pending:
            made = reference()
            if made is not None:
                made.release()

    def note(self, uses: Iterable[Use], keep: object) -> None:
        """Remember one piece of work."""
        for array, _ in uses:
            self.regions.setdefault(array.storage, {})[array.region] = None
        if keep is not None:
            self.kept.append(keep)


class Graph:
    """Recorded work on one device. It keeps every array it touches alive until it is closed."""

    def __init__(
        self,
        device: Device,
        recorder: Recorder,
        enqueue: Callable[[], None],
        free: Callable[[], None],
    ) -> None:
        self.device = device
        self._enqueue = enqueue
        self._free = free
        self._kept = recorder.kept
        self._regions = [(storage, list(used)) for storage, used in recorder.regions.items()]
        self._open = True

    def replay(self) -> None:
        """Enqueue everything again, in the recorded order.

        Raises:
            LaunchError: if the graph is closed, or during a capture.
            MovedError: if an op holds memory that the graph uses (O5).
        """
        device = self.device
        with device.lock:
            if not self._open:
                raise LaunchError("O6 graphs: this graph is closed; capture it again")
            if device.recorder is not None:
                device.refuse_in_capture("the replay of another graph")
            for storage, regions in self._regions:
                if storage.holds:
                    for region in regions:
                        storage.check_free(region)
            self._enqueue()

    def close(self) -> None:
        """Forget the recorded work and let go of its arrays; enqueued replays still complete."""
        with self.device.lock:
            if self._open:
                self._open = False
                self._free()
                self._regions = []
                self._kept = []

    def __enter__(self) -> "Graph":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def capture(device: Device, fn: Callable[[], Any]) -> Graph:
    """Call `fn()` once and record the ops it runs and the device copies it makes.

    Nothing is executed. Other threads' work on the device waits for the end of the capture. What a
    later replay reads and writes are the recorded arrays: change inputs by copying into them.

    Raises:
        LaunchError: if `fn` does what a graph cannot hold: read on the host, copy from the host,
            wait, or capture. What `fn` raises passes through. The recording is dropped then, and
            with it the partitions and ops made in it: their arrays are free again.
    """
    with device.lock:
        device.refuse_in_capture("another capture")
        recorder = Recorder()
        device.begin_capture()
        device.recorder = recorder
        try:
            fn()
        except BaseException:
            device.recorder = None
            device.abort_capture()
            recorder.drop()
            raise
        device.recorder = None
        try:
            enqueue, free = device.end_capture(recorder)
        except BaseException:
            recorder.drop()
            raise
        return Graph(device, recorder, enqueue, free)
