"""A device on which work is rehearsed: nothing runs, and its kernels are compiled for another."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from tilert import entries, ir
from tilert.device import Call, Device, Launcher
from tilert.target_device import StandIn

if TYPE_CHECKING:
    from tilert.array import Array

__all__ = ["Rehearsal"]

_MOST_THREADS = 16


class Rehearsal(StandIn):
    """Stands in for a GPU whose kernels are to be ready before they are needed.

    What is launched here is compiled for the GPU, or loaded from what is on disk, on several
    threads: the compiler runs beside Python. A kernel that does not compile is left to the launch
    that needs it, which is told why.

    Args:
        device: whose kernels are made.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._pool = ThreadPoolExecutor(
            min(_MOST_THREADS, len(os.sched_getaffinity(0))), thread_name_prefix="tilert-compile"
        )
        self._made: dict[object, Future[Launcher]] = {}

    def launcher(self, key: object, specialize: Callable[[], ir.Function]) -> Launcher:
        """See `Device`; one that does nothing, while the GPU's is made on another thread."""
        with self._compiling:
            if key not in self._made and key not in self.device.launchers:
                with contextlib.suppress(RuntimeError):  # cancelled
                    self._made[key] = self._pool.submit(self.device.launcher, key, specialize)
        self.launchers[key] = _SILENT
        return _SILENT

    def cancel(self) -> None:
        """Make no kernels any more but those that are being made."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def finish(self) -> None:
        """Wait until all kernels so far are made, and end the threads."""
        self._pool.shutdown()
        entries.bundle()

    @property
    def made(self) -> int:
        """How many kernels have been made."""
        ended = [one for one in self._made.values() if one.done() and not one.cancelled()]
        return sum(one.exception() is None for one in ended)


class _Silent:
    def bind(
        self,
        arrays: "Sequence[Array]",
        index_maps: "Mapping[int, Array]",
        grid: tuple[int, ...],
        programs: int | None = None,
    ) -> Call:
        """A call that does nothing."""
        return _nothing


def _nothing(queue: Any) -> None:
    """The work of a launch that is only rehearsed."""


_SILENT = _Silent()
