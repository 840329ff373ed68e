"""The cuda device: streams, a memory pool, kernels from cubins, graphs by stream capture."""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tilert import disk_cache, driver, ir, kernel_launch
from tilert.array import empty, submit_copy
from tilert.checks import Check, checks_of
from tilert.copy_plan import copy_plan
from tilert.cuda_graph import CudaGraph, early_kernels, span
from tilert.device import Call, Launcher, Read
from tilert.errors import DeviceError, LaunchError
from tilert.event import Event
from tilert.fault import RECORD, Faults, Site, Watch
from tilert.order import Record
from tilert.queued_device import QueuedBlock, QueuedDevice
from tilert.recording import Executable, Piece
from tilert.staging import Staging
from tilert.tensor_map import TensorMap, packed

if TYPE_CHECKING:
    from tilert.array import Array
    from tilert.codegen.generate import CudaSource

__all__ = ["CudaDevice", "arch_of"]

# Below this the driver's own staging is quicker than ours; it never waits for the device.
_SMALL = 64 * 1024


class _Thread(threading.local):
    """What the calling thread has as the current device."""

    device: "CudaDevice | None" = None


_thread = _Thread()


def arch_of(capability: tuple[int, int]) -> str:
    """The architecture to compile for, given a compute capability.

    The newest of sm_80, sm_89, sm_90a, sm_100a and sm_120a whose machine code the device runs.
    """
    major, minor = capability
    if major == 8:
        return "sm_89" if minor == 9 else "sm_80"
    if capability in ((9, 0), (10, 0), (12, 0)):
        return f"sm_{major}{minor}a"
    return f"sm_{major}{minor}"


class _PinnedView:
    """Keeps a pinned block alive for as long as an ndarray views it."""

    def __init__(self, block: QueuedBlock, nbytes: int) -> None:
        self._block = block
        self.__array_interface__ = {
            "version": 3,
            "data": (block.address, False),
            "typestr": "|u1",
            "shape": (nbytes,),
        }


class _PinnedBlock:
    """Pinned memory whose host view owns it."""

    def __init__(self, block: QueuedBlock, nbytes: int) -> None:
        self.address = block.address
        self.leases = block.leases
        self.host: np.ndarray[tuple[int], np.dtype[np.uint8]] = np.asarray(
            _PinnedView(block, nbytes)
        )


class CudaEvent(Event):
    """A mark in a stream."""

    def __init__(self, device: "CudaDevice", queue: driver.Handle, timing: bool) -> None:
        self._device = device
        self._timing = timing
        self._handle = driver.create_event(timing)
        driver.record_event(self._handle, queue)

    def done(self) -> bool:
        """See `Event`."""
        self._device.enter()
        with self._device.watch:
            return driver.event_passed(self._handle)

    def wait(self) -> None:
        """See `Event`."""
        self._device.enter()
        with self._device.watch:
            driver.wait_event(self._handle)

    def since(self, earlier: Event) -> float:
        """See `Event`."""
        if not isinstance(earlier, CudaEvent) or not (self._timing and earlier._timing):
            raise DeviceError("both events must come from record_event(timing=True) of a GPU")
        self._device.enter()
        return driver.event_seconds(earlier._handle, self._handle)

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle is not None:
            self._device.garbage.append((driver.destroy_event, (handle,)))


class CudaLauncher:
    """A kernel loaded on one device."""

    def __init__(
        self, device: "CudaDevice", function: ir.Function, handle: driver.Handle, threads: int,
        shared_bytes: int, sites: tuple[Site, ...] | None = None, maps: tuple[TensorMap, ...] = (),
        walks: bool = False, waits: bool = False, early: tuple[int, ...] = (), whole: bool = False,
        cluster: int = 1, apart: bool = False,
    ) -> None:  # fmt: skip
        self._device = device
        faults = device.watch.faults
        self._after = faults.arguments(function, sites) if faults is not None else []
        self._maps = maps
        self._walks = walks
        self._waits = waits
        self._early = early
        self._whole = whole
        self._cluster = cluster
        self._apart = apart
        # Kernels that leave no room for others let them start early where they do so themselves to
        # read ahead: their blocks end at about the same time. Prefills take longer with it.
        self._leads = waits and (2 * shared_bytes <= device.shared_bytes or bool(early))
        self._handle = handle
        self._threads = threads
        self._shared_bytes = shared_bytes
        self._abi = [(arg.kind, arg.param, arg.axis) for arg in function.abi()]

    def bind(
        self,
        arrays: "Sequence[Array]",
        index_maps: "Mapping[int, Array]",
        grid: tuple[int, ...],
        programs: int | None = None,
    ) -> Call:
        """See `tilert.device.Launcher`."""
        values: list[int] = []
        for kind, param, axis in self._abi:
            if kind == "pointer":
                values.append(arrays[param].address)
            elif kind == "index":
                values.append(index_maps[param].address)
            elif kind == "dim":
                values.append(arrays[param].shape[axis])
            elif kind == "stride":
                values.append(arrays[param].strides[axis])
            else:
                values.append(grid[axis])
        values += self._after
        if self._waits:
            values.append(0)
        pieces = math.prod(grid)
        if self._walks:
            programs = self._device.concurrent
        if self._maps:
            self._device.enter()
        blocks = pieces if programs is None else min(programs, pieces)
        if self._cluster > 1:
            blocks = self._cluster * pieces
        elif self._early and self._leads and self._walks and pieces:
            # One on each multiprocessor, so that the next kernel's are spread in the same way.
            blocks = self._device.concurrent
        return kernel_launch.Launch(
            self._handle, blocks, self._threads, self._shared_bytes, values,
            [packed(spec, arrays[spec.param]) for spec in self._maps],
            self._waits, self._leads,
            [span(arrays[param]) for param in self._early], self._whole,
            # A kernel whose blocks are all there at once is over before the next can be told.
            self._apart and blocks * self._threads > self._device.resident,
        ).enqueue  # fmt: skip


class CudaDevice(QueuedDevice):
    """One NVIDIA GPU of compute capability 8.0 or newer.

    Attributes:
        arch: what kernels are compiled for.
        checks: which checks are compiled into kernels.
        early_kernels: whether kernels of graphs may start before the one before them is complete,
            and wait for it themselves; as TILERT_EARLY_KERNELS says when the device is made.
    """

    kind = "cuda"
    arch: str
    shared_bytes: int
    watch: Watch

    def __init__(self, index: int, check: Check = None) -> None:
        """
        Args:
            check: whether bounds checks are compiled into kernels; by default what TILERT_CHECK
                says when the device is made.
        """
        super().__init__(f"cuda:{index}")
        self.checks = checks_of(check)
        count = driver.device_count()
        if index >= count:
            raise DeviceError(
                f"there is no {self.name}: the driver shows {count} GPU{'s' if count != 1 else ''}"
            )
        self._handle, self._context = driver.open_device(index)
        self._capability = (
            self._attribute("COMPUTE_CAPABILITY_MAJOR"),
            self._attribute("COMPUTE_CAPABILITY_MINOR"),
        )
        if self._capability < (8, 0):
            raise DeviceError(
                f"{self.name} ({driver.device_name(self._handle)}) has compute capability"
                f" {self._capability[0]}.{self._capability[1]}; 8.0 or newer is needed"
            )
        self.arch = arch_of(self._capability)
        self.early_kernels = early_kernels(self._capability)
        self.shared_bytes = self._attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        self._max_pitch = self._attribute("MAX_PITCH")
        self.concurrent = self._attribute("MULTIPROCESSOR_COUNT")
        self.resident = self.concurrent * self._attribute("MAX_THREADS_PER_MULTIPROCESSOR")
        self.enter()
        self.open(driver.create_stream())
        # For recording graphs; nothing else is on them.
        self.recording: list[driver.Handle] = []
        pools = self._attribute("MEMORY_POOLS_SUPPORTED")
        self._pool = driver.keep_pool(self._handle) if pools else None
        self._staging = Staging(self)
        self.watch = Watch(Faults(self.pinned_block(RECORD.itemsize)) if self.checks else None)
        self.trail = self.watch.trail

    def _attribute(self, name: str) -> int:
        return driver.device_attribute(self._handle, name)

    def enter(self) -> None:
        """Make the device current for the calling thread; every driver call needs it."""
        if _thread.device is not self:
            driver.set_context(self._context)
            _thread.device = self

    # Queues

    def make_queue(self) -> driver.Handle:
        """See `QueuedDevice`."""
        return driver.create_stream()

    def wait_queue(self, queue: driver.Handle) -> None:
        """See `QueuedDevice`."""
        driver.synchronize_stream(queue)

    def make_mark(self) -> driver.Handle:
        """See `QueuedDevice`."""
        return driver.create_event(timing=False)

    def put_mark(self, mark: driver.Handle, queue: driver.Handle) -> None:
        """See `QueuedDevice`."""
        driver.record_event(mark, queue)

    def hold(self, queue: driver.Handle, mark: driver.Handle) -> None:
        """See `QueuedDevice`."""
        driver.hold_stream(queue, mark)

    def passed(self, mark: driver.Handle) -> bool:
        """See `QueuedDevice`."""
        return driver.event_passed(mark)

    def wait_mark(self, mark: driver.Handle) -> None:
        """See `QueuedDevice`."""
        driver.wait_event(mark)

    def make_event(self, queue: driver.Handle, timing: bool) -> Event:
        """See `QueuedDevice`."""
        return CudaEvent(self, queue, timing)

    # Memory

    def take_memory(self, nbytes: int) -> int:
        """See `QueuedDevice`.

        Raises:
            OutOfMemoryError: if the device has not enough, also when all that is free is free.
        """
        try:
            return self._take(nbytes)
        except driver.OutOfMemoryError:
            driver.synchronize_stream(self.queue)
            if self._pool is not None:
                driver.trim_pool(self._pool)
        try:
            return self._take(nbytes)
        except driver.OutOfMemoryError:
            free, total = driver.memory_info()
            raise driver.OutOfMemoryError(
                f"{self.name} is out of memory: {nbytes / 2**30:.2f} GiB were asked for,"
                f" {free / 2**30:.2f} of {total / 2**30:.2f} GiB are free"
            ) from None

    def _take(self, nbytes: int) -> int:
        if self._pool is None:
            return driver.allocate(nbytes)
        return driver.allocate_async(nbytes, self.queue)

    def give_memory(self, address: int) -> None:
        """See `QueuedDevice`."""
        if self._pool is None:
            driver.synchronize_stream(self.queue)
            driver.free(address)
        else:
            driver.free_async(address, self.queue)

    def _free_pinned(self, address: int, leases: list[Record]) -> None:
        self.finish(driver.free_host, address)

    def memory(self) -> tuple[int, int]:
        """See `Device`; memory that the pool keeps for reuse counts as free."""
        self.enter()
        self.collect()
        free, total = driver.memory_info()
        idle = 0 if self._pool is None else driver.pool_idle(self._pool)
        return free + idle, total

    def pinned_block(self, nbytes: int) -> _PinnedBlock:
        """See `Device`."""
        self.enter()
        self.collect()
        if self.garbage and self.recorder is None:
            # Before taking more: what has died is in use, and would add up.
            self._wait_for_all()
            self.collect()
        address = driver.allocate_host(max(nbytes, 1))
        return _PinnedBlock(QueuedBlock(address, None, self._free_pinned, self.garbage), nbytes)

    # Copies

    def upload(self, target: "Array", source: np.ndarray[Any, Any]) -> None:
        """See `Device`; large copies stream through pinned buffers."""
        if not target.is_contiguous:
            whole = self._temporary(target)
            self.upload(whole, source)
            submit_copy(target, whole)
            return
        self.enter()
        data = np.ascontiguousarray(source).reshape(-1).view(np.uint8)
        if data.size > _SMALL:
            self.collect()
            self._staging.upload(target, data)
            return
        # Pinned memory would be read later: a copy of our own is read before the call returns.
        data = data.copy()
        to, of, nbytes = target.address, data.ctypes.data, data.size
        self.submit(
            lambda queue: driver.copy_to_device(to, of, nbytes, queue),
            ((target.storage, target.region, True),),
        )

    def fill_bytes(self, target: "Array", read: Read) -> None:
        """See `Device`; read into pinned buffers, from which large ones are copied beside."""
        if target.nbytes <= _SMALL:
            super().fill_bytes(target, read)
            return
        self.enter()
        self.collect()
        self._staging.fill(target, read)

    def download(self, source: "Array") -> np.ndarray[Any, Any]:
        """See `Device`."""
        if not source.is_contiguous:
            whole = self._temporary(source)
            submit_copy(whole, source)
            return self.download(whole)
        self.enter()
        self.collect()
        host = np.empty(source.shape, source.dtype.numpy)
        with self.watch:
            self._staging.download(host.reshape(-1).view(np.uint8), source)
        return host

    def _temporary(self, like: "Array") -> "Array":
        return empty(like.shape, like.dtype, self)

    def copy_call(self, target: "Array", source: "Array") -> Call:
        """See `Device`."""
        size = target.dtype.itemsize
        plan = copy_plan(target.shape, target.strides, source.strides, size, self._max_pitch)
        to, of = target.address, source.address

        def call(queue: driver.Handle) -> None:
            for a, b in plan.starts:
                if plan.height == 1:
                    driver.copy_on_device(to + a, of + b, plan.width, queue)
                else:
                    driver.copy_rows(
                        (to + a, plan.pitches[0]), (of + b, plan.pitches[1]), plan.width,
                        plan.height, queue,
                    )  # fmt: skip

        return call

    def fill_call(self, target: "Array", value: np.ndarray[Any, Any]) -> Call:
        """See `Device`."""
        address, count, pattern = target.address, target.size, value.tobytes()
        return lambda queue: driver.fill(address, pattern, count, queue)

    def pinned_call(self, target: np.ndarray[Any, Any], source: "Array") -> Call:
        """See `Device`."""
        to, of, nbytes = target.ctypes.data, source.address, source.nbytes
        return lambda queue: driver.copy_to_host(to, of, nbytes, queue)

    # Kernels

    def compile(self, function: ir.Function) -> Launcher:
        """See `Device`; the cubin comes from the disk cache where it can."""
        return self.begin_compile(function)()

    def begin_compile(self, function: ir.Function) -> Callable[[], Launcher]:
        """See `Device`; where the kernel is known from earlier, nothing is generated."""
        from tilert import kernel_index
        from tilert.unsafe_kernel import cuda_source

        known = None if self.checks else kernel_index.find(function, self.arch)
        if known is not None:
            source, cubin = known
            self._check_shared(function, source)
            return lambda: self._load(function, source, cubin)
        source = cuda_source(function, self.arch, self.checks)
        self._check_shared(function, source)

        def finish() -> Launcher:
            cubin = disk_cache.cubin(source.text, source.entry, self.arch)
            if not self.checks:
                kernel_index.keep(function, self.arch, source)
            return self._load(function, source, cubin)

        return finish

    def _check_shared(self, function: ir.Function, source: "CudaSource") -> None:
        if source.shared_bytes > self.shared_bytes:
            raise LaunchError(
                f"kernel '{function.name}' needs {source.shared_bytes} bytes of shared memory,"
                f" {self.name} has {self.shared_bytes}; use smaller tiles"
            )

    def _load(self, function: ir.Function, source: "CudaSource", cubin: bytes) -> Launcher:
        self.enter()
        handle = kernel_launch.load_function(cubin, source.entry, source.shared_bytes)
        return CudaLauncher(
            self, function, handle, source.threads, source.shared_bytes, source.sites,
            source.maps, source.walks, source.waits, source.early, source.whole, source.cluster,
            source.apart,
        )  # fmt: skip

    # Order

    def wait_for_stream(self, stream: int | None) -> None:
        """See `Device`."""
        if stream is not None:
            self.enter()
            driver.synchronize_stream(driver.stream_of(stream))

    def synchronize(self) -> None:
        """See `Device`."""
        super().synchronize()
        self.watch.trail.clear()

    def info(self) -> dict[str, Any]:
        """See `Device`."""
        self.enter()
        return {
            "kind": self.kind,
            "name": driver.device_name(self._handle),
            "compute_capability": f"{self._capability[0]}.{self._capability[1]}",
            "arch": self.arch,
            "driver": driver.driver_version(),
            "multiprocessors": self._attribute("MULTIPROCESSOR_COUNT"),
            "shared_bytes_per_block": self.shared_bytes,
            "l2_bytes": self._attribute("L2_CACHE_SIZE"),
            "memory_bytes": driver.memory_info()[1],
        }

    # Graphs

    def make_graph(self, pieces: list[Piece]) -> Executable:
        """See `Device`."""
        return CudaGraph(self, pieces)
