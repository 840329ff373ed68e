"""The cuda device: one stream, a memory pool, kernels from cubins, graphs by stream capture."""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tilert import disk_cache, driver, ir
from tilert.copy_plan import copy_plan
from tilert.device import Device, Launcher, Use
from tilert.errors import DeviceError, LaunchError
from tilert.event import Event
from tilert.staging import Staging

if TYPE_CHECKING:
    from tilert.array import Array
    from tilert.graph import Recorder

__all__ = ["CudaDevice", "arch_of"]

# Below this the driver's own staging is quicker than ours; it never waits for the device.
_SMALL = 64 * 1024

_thread = threading.local()


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


class _Block:
    """Memory of the device or pinned memory; its death puts it on the device's list of garbage."""

    __slots__ = ("_free", "_garbage", "address", "host")

    def __init__(
        self,
        address: int,
        host: np.ndarray[tuple[int], np.dtype[np.uint8]] | None,
        free: Callable[[int], None],
        garbage: "deque[tuple[Callable[[Any], None], Any]]",
    ) -> None:
        self.address = address
        self.host = host
        self._free = free
        self._garbage = garbage

    def __del__(self) -> None:
        # Finalisers run anywhere, also inside a capture: only note the address.
        self._garbage.append((self._free, self.address))


class _PinnedView:
    """Keeps a pinned block alive for as long as an ndarray views it."""

    def __init__(self, block: _Block, nbytes: int) -> None:
        self._block = block
        self.__array_interface__ = {
            "version": 3,
            "data": (block.address, False),
            "typestr": "|u1",
            "shape": (nbytes,),
        }


class _PinnedBlock:
    """Pinned memory whose host view owns it."""

    def __init__(self, block: _Block, nbytes: int) -> None:
        self.address = block.address
        self.host: np.ndarray[tuple[int], np.dtype[np.uint8]] = np.asarray(
            _PinnedView(block, nbytes)
        )


class CudaEvent(Event):
    """A mark in the device's stream."""

    def __init__(self, device: "CudaDevice", timing: bool) -> None:
        self._device = device
        self._timing = timing
        self._handle = driver.create_event(timing)
        driver.record_event(self._handle, device.stream)

    def done(self) -> bool:
        """See `Event`."""
        self._device.enter()
        return driver.event_passed(self._handle)

    def wait(self) -> None:
        """See `Event`."""
        self._device.enter()
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
            self._device.garbage.append((driver.destroy_event, handle))


class CudaLauncher:
    """A kernel loaded on one device."""

    def __init__(
        self, device: "CudaDevice", function: ir.Function, handle: driver.Handle, threads: int,
        shared_bytes: int,
    ) -> None:  # fmt: skip
        self._device = device
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
    ) -> Callable[[], None]:
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
        pieces = math.prod(grid)
        blocks = pieces if programs is None else min(programs, pieces)
        return driver.Launch(
            self._handle, blocks, self._threads, self._shared_bytes, self._device.stream,
            values,
        )  # fmt: skip


class CudaDevice(Device):
    """One NVIDIA GPU of compute capability 8.0 or newer.

    Attributes:
        stream: all work is on it, so everything is ordered (rule O4).
        arch: what kernels are compiled for.
        garbage: memory to free and events to destroy, at the next call that may do so.
    """

    kind = "cuda"

    def __init__(self, index: int) -> None:
        super().__init__(f"cuda:{index}")
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
        self._max_shared = self._attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        self._max_pitch = self._attribute("MAX_PITCH")
        self.concurrent = self._attribute("MULTIPROCESSOR_COUNT")
        self.garbage: deque[tuple[Callable[[Any], None], Any]] = deque()
        self.enter()
        self.stream = driver.create_stream()
        # For memory asked for during a capture, when the main stream cannot give any.
        self._side_stream = driver.create_stream()
        pools = self._attribute("MEMORY_POOLS_SUPPORTED")
        self._pool = driver.keep_pool(self._handle) if pools else None
        self._staging = Staging(self)

    def _attribute(self, name: str) -> int:
        return driver.device_attribute(self._handle, name)

    def enter(self) -> None:
        """Make the device current for the calling thread; every driver call needs it."""
        if getattr(_thread, "device", None) is not self:
            driver.set_context(self._context)
            _thread.device = self

    def submit(self, call: Callable[[], None], uses: Iterable[Use], keep: object = None) -> None:
        """See `Device`."""
        self.enter()
        if self.garbage:
            self._collect()
        super().submit(call, uses, keep)

    # Memory

    def allocate(self, nbytes: int) -> _Block:
        """See `Device`."""
        self.enter()
        self._collect()
        nbytes = max(nbytes, 1)
        with self.lock:
            try:
                address = self._allocate(nbytes)
            except driver.OutOfMemoryError:
                address = self._allocate_again(nbytes)
        return _Block(address, None, self._free, self.garbage)

    def _allocate(self, nbytes: int) -> int:
        if self._pool is None:
            return driver.allocate(nbytes)
        if self.recorder is None:
            return driver.allocate_async(nbytes, self.stream)
        address = driver.allocate_async(nbytes, self._side_stream)
        driver.synchronize_stream(self._side_stream)
        return address

    def _allocate_again(self, nbytes: int) -> int:
        """After the device refused: wait until freed memory is free, and ask once more."""
        if self.recorder is None:
            driver.synchronize_stream(self.stream)
            if self._pool is not None:
                driver.trim_pool(self._pool)
            try:
                return self._allocate(nbytes)
            except driver.OutOfMemoryError:
                pass
        free, total = driver.memory_info()
        raise driver.OutOfMemoryError(
            f"{self.name} is out of memory: {nbytes / 2**30:.2f} GiB were asked for,"
            f" {free / 2**30:.2f} of {total / 2**30:.2f} GiB are free"
        )

    def _free(self, address: int) -> None:
        if self._pool is None:
            driver.synchronize_stream(self.stream)
            driver.free(address)
        else:
            driver.free_async(address, self.stream)

    def _free_pinned(self, address: int) -> None:
        driver.synchronize_stream(self.stream)
        driver.free_host(address)

    def _destroy_graph(self, executable: driver.Handle) -> None:
        driver.synchronize_stream(self.stream)
        driver.destroy_graph(executable)

    def _collect(self) -> None:
        """Free what has died. Its last use is enqueued already, and frees are ordered after it."""
        with self.lock:
            while self.garbage and self.recorder is None:
                try:
                    free, handle = self.garbage.popleft()
                except IndexError:
                    return
                free(handle)

    def memory(self) -> tuple[int, int]:
        """See `Device`; memory that the pool keeps for reuse counts as free."""
        self.enter()
        self._collect()
        free, total = driver.memory_info()
        idle = 0 if self._pool is None else driver.pool_idle(self._pool)
        return free + idle, total

    def pinned_block(self, nbytes: int) -> _PinnedBlock:
        """See `Device`."""
        self.enter()
        self._collect()
        address = driver.allocate_host(max(nbytes, 1))
        return _PinnedBlock(_Block(address, None, self._free_pinned, self.garbage), nbytes)

    # Copies

    def upload(self, target: "Array", source: np.ndarray[Any, Any]) -> None:
        """See `Device`; large copies stream through pinned buffers."""
        if not target.is_contiguous:
            whole = self._temporary(target)
            self.upload(whole, source)
            self.submit(self.copy_call(target, whole), ())
            return
        self.enter()
        self._collect()
        data = np.ascontiguousarray(source).reshape(-1).view(np.uint8)
        if data.size > _SMALL:
            self._staging.upload(target.address, data)
            return
        with self.lock:
            driver.copy_to_device(target.address, data.ctypes.data, data.size, self.stream)

    def download(self, source: "Array") -> np.ndarray[Any, Any]:
        """See `Device`."""
        if not source.is_contiguous:
            whole = self._temporary(source)
            self.submit(self.copy_call(whole, source), ())
            return self.download(whole)
        self.enter()
        self._collect()
        host = np.empty(source.shape, source.dtype.numpy)
        self._staging.download(host.reshape(-1).view(np.uint8), source.address)
        return host

    def _temporary(self, like: "Array") -> "Array":
        from tilert.array import empty

        return empty(like.shape, like.dtype, self)

    def copy_call(self, target: "Array", source: "Array") -> Callable[[], None]:
        """See `Device`."""
        size = target.dtype.itemsize
        plan = copy_plan(target.shape, target.strides, source.strides, size, self._max_pitch)
        to, of, stream = target.address, source.address, self.stream

        def call() -> None:
            for a, b in plan.starts:
                if plan.height == 1:
                    driver.copy_on_device(to + a, of + b, plan.width, stream)
                else:
                    driver.copy_rows(
                        (to + a, plan.pitches[0]), (of + b, plan.pitches[1]), plan.width,
                        plan.height, stream,
                    )  # fmt: skip

        return call

    def fill_call(self, target: "Array", value: np.ndarray[Any, Any]) -> Callable[[], None]:
        """See `Device`."""
        address, count, pattern, stream = target.address, target.size, value.tobytes(), self.stream
        return lambda: driver.fill(address, pattern, count, stream)

    def pinned_call(self, target: np.ndarray[Any, Any], source: "Array") -> Callable[[], None]:
        """See `Device`."""
        to, of, nbytes, stream = target.ctypes.data, source.address, source.nbytes, self.stream
        return lambda: driver.copy_to_host(to, of, nbytes, stream)

    # Kernels

    def compile(self, function: ir.Function) -> Launcher:
        """See `Device`; the cubin comes from the disk cache where it can."""
        from tilert.unsafe_kernel import cuda_source

        source = cuda_source(function, self.arch)
        if source.shared_bytes > self._max_shared:
            raise LaunchError(
                f"kernel '{function.name}' needs {source.shared_bytes} bytes of shared memory,"
                f" {self.name} has {self._max_shared}; use smaller tiles"
            )
        cubin = disk_cache.cubin(source.text, source.entry, self.arch)
        self.enter()
        handle = driver.load_function(cubin, source.entry, source.shared_bytes)
        return CudaLauncher(self, function, handle, source.threads, source.shared_bytes)

    # Order

    def record_event(self, timing: bool = False) -> Event:
        """See `Device`."""
        self.enter()
        with self.lock:
            self.refuse_in_capture("recording an event")
            return CudaEvent(self, timing)

    def after_work(self, done: Callable[[], None]) -> None:
        """See `Device`."""
        self.garbage.append((self._finish, done))

    def _finish(self, done: Callable[[], None]) -> None:
        driver.synchronize_stream(self.stream)
        done()

    def wait_for_stream(self, stream: int | None) -> None:
        """See `Device`."""
        if stream is not None:
            self.enter()
            driver.synchronize_stream(driver.stream_of(stream))

    def synchronize(self) -> None:
        """See `Device`."""
        self.refuse_in_capture("waiting for the device")
        self.enter()
        driver.synchronize_stream(self.stream)
        self._collect()

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
            "shared_bytes_per_block": self._max_shared,
            "l2_bytes": self._attribute("L2_CACHE_SIZE"),
            "memory_bytes": driver.memory_info()[1],
        }

    # Graphs

    def begin_capture(self) -> None:
        """See `Device`."""
        self.enter()
        self._collect()
        driver.begin_capture(self.stream)

    def end_capture(self, recorder: "Recorder") -> tuple[Callable[[], None], Callable[[], None]]:
        """See `Device`."""
        executable = driver.instantiate(driver.end_capture(self.stream), self.stream)
        holder = _Executable(self, executable)

        def replay() -> None:
            self.enter()
            driver.launch_graph(executable, holder.device.stream)

        return replay, holder.close

    def abort_capture(self) -> None:
        """See `Device`."""
        driver.drop_capture(self.stream)

    def destroy_later(self, executable: driver.Handle) -> None:
        """Free an executable graph once its replays are complete."""
        self.garbage.append((self._destroy_graph, executable))


class _Executable:
    """Owns an executable graph."""

    def __init__(self, device: CudaDevice, handle: driver.Handle) -> None:
        self.device = device
        self._handle: driver.Handle | None = handle

    def close(self) -> None:
        """Free it once its replays are complete."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self.device.destroy_later(handle)

    def __del__(self) -> None:
        self.close()
