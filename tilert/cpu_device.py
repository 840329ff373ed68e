"""The cpu device: NumPy buffers, ops run when they are enqueued."""

import os
import platform
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tilert import ir
from tilert.backends.cpu_pool import thread_count
from tilert.checks import Check, Checks, checks_of
from tilert.device import Call, Device, Launcher, Read
from tilert.errors import DeviceError
from tilert.event import DoneEvent, Event
from tilert.host_memory import host_memory
from tilert.stream import Stream

if TYPE_CHECKING:
    from tilert.array import Array
    from tilert.backends.cpu import CpuKernel
    from tilert.checker.checker import Checker
    from tilert.order import Record
    from tilert.unsafe_kernel import UnsafeFunction

__all__ = ["CpuDevice", "host_view"]

_ALIGNMENT = 64


class HostBlock:
    """A NumPy buffer whose address is a multiple of 64.

    Args:
        zeros: whether it holds zeros, which take no memory until something is written to them.
    """

    def __init__(self, nbytes: int, zeros: bool = False) -> None:
        raw = (np.zeros if zeros else np.empty)(nbytes + _ALIGNMENT, np.uint8)
        shift = -raw.ctypes.data % _ALIGNMENT
        self.host = raw[shift : shift + nbytes]
        self.address = raw.ctypes.data + shift
        self.leases: list[Record] = []


def host_view(array: "Array") -> np.ndarray[Any, Any]:
    """A cpu array as an ndarray on the same memory."""
    itemsize = array.dtype.itemsize
    return np.ndarray(
        array.shape,
        array.dtype.numpy,
        array.storage.host,
        array.offset * itemsize,
        tuple(stride * itemsize for stride in array.strides),
    )


class CpuLauncher:
    """A kernel for the cpu backend."""

    def __init__(self, kernel: "CpuKernel | UnsafeFunction") -> None:
        self._kernel = kernel

    def bind(
        self,
        arrays: "Sequence[Array]",
        index_maps: "Mapping[int, Array]",
        grid: tuple[int, ...],
        programs: int | None = None,
    ) -> Call:
        """See `tilert.device.Launcher`."""
        maps = {position: host_view(index) for position, index in index_maps.items()}
        return self._kernel.bind([host_view(array) for array in arrays], maps, grid)


class CpuDevice(Device):
    """The host's processor."""

    kind = "cpu"
    # Where tiles are as long as what comes in, each length has kernels of its own, with tens of
    # kilobytes of code and constants, which are soon made again.
    kept_launchers = 1024

    def __init__(self, check: Check = None) -> None:
        """
        Args:
            check: whether launches are checked (rule O8); by default what TILERT_CHECK says.

        Raises:
            DeviceError: if TILERT_CHECK or TILERT_CPU_THREADS has a value that it does not take.
        """
        # Nothing uses the number yet: a wrong one is to be told before a model has been loaded.
        thread_count()
        super().__init__("cpu")
        self._checker: Checker | None = None
        self.checks = checks_of(check)
        if self.checks:
            from tilert.checker import checker

            self._checker = checker.Checker(strict=self.checks == Checks.STRICT)

    def allocate(self, nbytes: int, zeros: bool = False) -> HostBlock:
        """See `Device`."""
        try:
            return HostBlock(nbytes, zeros)
        except MemoryError:
            raise DeviceError(
                f"cpu is out of memory: {nbytes / 2**30:.2f} GiB were asked for"
            ) from None

    def allocate_zeros(self, nbytes: int) -> HostBlock | None:
        """See `Device`."""
        if self._checker is not None:
            return None  # It has to be told what is written.
        return self.allocate(nbytes, zeros=True)

    def compile(self, function: ir.Function) -> Launcher:
        """See `Device`."""
        if self._checker is not None:
            return self._checker.launcher(function)
        from tilert.backends import cpu
        from tilert.unsafe_kernel import UnsafeFunction

        if isinstance(function, UnsafeFunction):
            return CpuLauncher(function)
        return CpuLauncher(cpu.compile(function))

    def upload(self, target: "Array", source: np.ndarray[Any, Any]) -> None:
        """See `Device`."""
        with self.lock:
            np.copyto(host_view(target), source)
            if self._checker is not None:
                self._checker.note(target)

    def fill_bytes(self, target: "Array", read: Read) -> None:
        """See `Device`; read to where it is to be."""
        read(0, host_view(target).reshape(-1).view(np.uint8))
        if self._checker is not None:
            with self.lock:
                self._checker.note(target)

    def download(self, source: "Array") -> np.ndarray[Any, Any]:
        """See `Device`."""
        with self.lock:
            return host_view(source).copy()

    def copy_call(self, target: "Array", source: "Array") -> Call:
        """See `Device`."""
        to, of = host_view(target), host_view(source)
        checker = self._checker
        if checker is None:
            return lambda queue: np.copyto(to, of)

        def copy(queue: Any) -> None:
            np.copyto(to, of)
            checker.note_copy(target, source)

        return copy

    def fill_call(self, target: "Array", value: np.ndarray[Any, Any]) -> Call:
        """See `Device`."""
        to = host_view(target)
        checker = self._checker
        if checker is None:
            return lambda queue: to.fill(value[()])

        def fill(queue: Any) -> None:
            to.fill(value[()])
            checker.note(target)

        return fill

    def lent(self, array: "Array") -> None:
        """See `Device`."""
        if self._checker is not None:
            self._checker.note(array)

    def pinned_block(self, nbytes: int) -> HostBlock:
        """See `Device`."""
        return self.allocate(nbytes)

    def pinned_call(self, target: np.ndarray[Any, Any], source: "Array") -> Call:
        """See `Device`."""
        of = host_view(source)
        return lambda queue: np.copyto(target, of)

    def record_event(self, timing: bool = False, stream: Stream | None = None) -> Event:
        """See `Device`."""
        if stream is not None:
            stream.lane(self)
        self.refuse_in_capture("recording an event")
        return DoneEvent(time.perf_counter())

    def synchronize(self) -> None:
        """See `Device`."""
        with self.lock:
            self.refuse_in_capture("waiting for the device")

    def memory(self) -> tuple[int, int]:
        """See `Device`."""
        return host_memory()

    def info(self) -> dict[str, Any]:
        """See `Device`."""
        return {
            "kind": self.kind,
            "name": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "numpy": np.__version__,
        }
