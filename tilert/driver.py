"""The CUDA driver API: the only module that imports its bindings, loaded at first use.

Handles are opaque. Addresses and sizes are ints. Every function raises DeviceError when the driver
reports a failure; `OutOfMemoryError` is the one that callers tell apart.
"""

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from tilert.errors import DeviceError

__all__ = ["Handle", "LostError", "OutOfMemoryError"]

Handle: TypeAlias = Any


class OutOfMemoryError(DeviceError):
    """The device has not enough memory left."""


class LostError(DeviceError):
    """Earlier work has made the device unusable for this process."""


@functools.cache
def _cu() -> Any:
    """The bindings, initialised.

    Raises:
        DeviceError: if the bindings, the driver or a device is missing.
    """
    try:
        from cuda.bindings import driver as cu
    except ImportError as error:
        raise DeviceError(
            f"CUDA is not usable: the Python package cuda-bindings cannot be imported ({error});"
            " install it with `pip install cuda-bindings`"
        ) from None
    try:
        (status,) = cu.cuInit(0)
    except RuntimeError as error:
        raise DeviceError(
            f"CUDA is not usable: no NVIDIA driver is installed here ({error})"
        ) from None
    if status == cu.CUresult.CUDA_ERROR_NO_DEVICE:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hint = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
        raise DeviceError(f"CUDA is not usable: the driver finds no GPU{hint}")
    if status != cu.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"CUDA is not usable: {_describe(cu, status)} (from cuInit)")
    return cu


def _describe(cu: Any, status: Any) -> str:
    _, name = cu.cuGetErrorName(status)
    _, text = cu.cuGetErrorString(status)
    if not name or not text:
        return f"CUDA error {int(status)}"
    return f"{name.decode()}: {text.decode()}"


def _call(name: str, *args: Any) -> Any:
    """Call one driver function; its result without the status."""
    cu = _cu()
    status, *values = getattr(cu, name)(*args)
    if status != cu.CUresult.CUDA_SUCCESS:
        _fail(name, status)
    return values[0] if len(values) == 1 else tuple(values)


def _fail(name: str, status: Any) -> None:
    """The one place where a driver status becomes an exception."""
    cu = _cu()
    message = f"{_describe(cu, status)} (from {name})"
    if status == cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise OutOfMemoryError(message)
    sticky = (
        cu.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,
        cu.CUresult.CUDA_ERROR_LAUNCH_FAILED,
        cu.CUresult.CUDA_ERROR_ILLEGAL_INSTRUCTION,
        cu.CUresult.CUDA_ERROR_MISALIGNED_ADDRESS,
        cu.CUresult.CUDA_ERROR_LAUNCH_TIMEOUT,
    )
    if status in sticky:
        raise LostError(
            f"{message}; an op enqueued earlier caused it, and the process must be started again"
        )
    raise DeviceError(message)


# Devices and contexts


def device_count() -> int:
    """Number of GPUs that the process may use."""
    return int(_call("cuDeviceGetCount"))


def driver_version() -> str:
    """Newest CUDA version that the driver supports, such as "13.0"."""
    version = int(_call("cuDriverGetVersion"))
    return f"{version // 1000}.{version % 1000 // 10}"


def open_device(index: int) -> tuple[Handle, Handle]:
    """Handles of GPU `index` and of its primary context."""
    device = _call("cuDeviceGet", index)
    return device, _call("cuDevicePrimaryCtxRetain", device)


def device_name(device: Handle) -> str:
    """The marketing name."""
    name: bytes = _call("cuDeviceGetName", 256, device)
    return name.split(b"\0")[0].decode().strip()


def device_attribute(device: Handle, name: str) -> int:
    """Value of CU_DEVICE_ATTRIBUTE_`name`."""
    attribute = getattr(_cu().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(_call("cuDeviceGetAttribute", attribute, device))


def set_context(context: Handle) -> None:
    """Make a context current for the calling thread."""
    _call("cuCtxSetCurrent", context)


# Streams and events


def create_stream() -> Handle:
    """A stream that does not wait for the legacy default stream."""
    return _call("cuStreamCreate", int(_cu().CUstream_flags.CU_STREAM_NON_BLOCKING))


def stream_of(number: int) -> Handle:
    """Another library's stream by its address; 1 is the legacy default, 2 that of the thread."""
    return _cu().CUstream(number)


def pointer_device(address: int) -> int:
    """Number of the GPU that has the memory at an address."""
    attribute = _cu().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(_call("cuPointerGetAttribute", attribute, address))


def synchronize_stream(stream: Handle) -> None:
    """Wait for everything enqueued on a stream."""
    _call("cuStreamSynchronize", stream)


def create_event(timing: bool) -> Handle:
    """An event; it counts as passed until it is recorded."""
    flags = _cu().CUevent_flags
    return _call(
        "cuEventCreate", int(flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING)
    )


def record_event(event: Handle, stream: Handle) -> None:
    """Put the event after everything enqueued on the stream."""
    _call("cuEventRecord", event, stream)


def event_passed(event: Handle) -> bool:
    """Whether the event has passed."""
    cu = _cu()
    (status,) = cu.cuEventQuery(event)
    if status == cu.CUresult.CUDA_ERROR_NOT_READY:
        return False
    if status != cu.CUresult.CUDA_SUCCESS:
        _fail("cuEventQuery", status)
    return True


def wait_event(event: Handle) -> None:
    """Block the calling thread until the event has passed."""
    _call("cuEventSynchronize", event)


def event_seconds(start: Handle, end: Handle) -> float:
    """Device time between two timing events."""
    return float(_call("cuEventElapsedTime", start, end)) / 1e3


def hold_stream(stream: Handle, event: Handle) -> None:
    """Put all later work of the stream behind what the event is behind at this moment."""
    _call("cuStreamWaitEvent", stream, event, 0)


def destroy_event(event: Handle) -> None:
    """Free an event."""
    _call("cuEventDestroy", event)


# Memory


def keep_pool(device: Handle) -> Handle:
    """The device's memory pool, told to keep freed memory instead of returning it."""
    cu = _cu()
    pool = _call("cuDeviceGetDefaultMemPool", device)
    threshold = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    _call("cuMemPoolSetAttribute", pool, threshold, cu.cuuint64_t(2**64 - 1))
    return pool


def pool_idle(pool: Handle) -> int:
    """Bytes that a pool keeps and nobody uses."""
    names = _cu().CUmemPool_attribute
    reserved = _call("cuMemPoolGetAttribute", pool, names.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
    used = _call("cuMemPoolGetAttribute", pool, names.CU_MEMPOOL_ATTR_USED_MEM_CURRENT)
    return int(reserved) - int(used)


def trim_pool(pool: Handle) -> None:
    """Return a pool's idle memory to the device."""
    _call("cuMemPoolTrimTo", pool, 0)


def allocate_async(nbytes: int, stream: Handle) -> int:
    """Address of pool memory that work enqueued on the stream from now on may use."""
    return int(_call("cuMemAllocAsync", nbytes, stream))


def free_async(address: int, stream: Handle) -> None:
    """Give pool memory back after everything enqueued on the stream."""
    _call("cuMemFreeAsync", address, stream)


def allocate(nbytes: int) -> int:
    """Address of device memory."""
    return int(_call("cuMemAlloc", nbytes))


def free(address: int) -> None:
    """Free memory from `allocate`; nothing may be using it."""
    _call("cuMemFree", address)


def memory_info() -> tuple[int, int]:
    """(free, total) bytes of the current context's device."""
    free_bytes, total = _call("cuMemGetInfo")
    return int(free_bytes), int(total)


def allocate_host(nbytes: int) -> int:
    """Address of pinned host memory."""
    return int(_call("cuMemHostAlloc", nbytes, int(_cu().CU_MEMHOSTALLOC_PORTABLE)))


def free_host(address: int) -> None:
    """Free pinned host memory; nothing may be using it."""
    _call("cuMemFreeHost", address)


def copy_to_device(target: int, source: int, nbytes: int, stream: Handle) -> None:
    """Enqueue a copy from host memory; pageable memory has been read when this returns."""
    _call("cuMemcpyHtoDAsync", target, source, nbytes, stream)


def copy_to_host(target: int, source: int, nbytes: int, stream: Handle) -> None:
    """Enqueue a copy into pinned host memory."""
    _call("cuMemcpyDtoHAsync", target, source, nbytes, stream)


def copy_on_device(target: int, source: int, nbytes: int, stream: Handle) -> None:
    """Enqueue a copy inside the device."""
    _call("cuMemcpyDtoDAsync", target, source, nbytes, stream)


def copy_rows(
    target: tuple[int, int], source: tuple[int, int], width: int, height: int, stream: Handle
) -> None:
    """Enqueue a copy of `height` rows of `width` bytes; each side is (address, pitch in bytes)."""
    cu = _cu()
    copy = cu.CUDA_MEMCPY2D()
    copy.dstMemoryType = copy.srcMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.dstDevice, copy.srcDevice = cu.CUdeviceptr(target[0]), cu.CUdeviceptr(source[0])
    copy.dstPitch, copy.srcPitch = target[1], source[1]
    copy.WidthInBytes, copy.Height = width, height
    _call("cuMemcpy2DAsync", copy, stream)


def fill(address: int, value: bytes, count: int, stream: Handle) -> None:
    """Enqueue setting `count` elements to the bytes of one element (1, 2, 4 or 8 of them)."""
    number = int.from_bytes(value, "little")
    if len(value) == 8:
        for half, shift in ((0, 0), (4, 32)):
            word = number >> shift & 0xFFFFFFFF
            _call("cuMemsetD2D32Async", address + half, 8, word, 1, count, stream)
        return
    _call(f"cuMemsetD{8 * len(value)}Async", address, number, count, stream)


# Kernels


def load_function(cubin: bytes, name: str, shared_bytes: int) -> Handle:
    """Load a cubin and get its kernel, allowed `shared_bytes` of dynamic shared memory.

    The module stays loaded for the life of the process.
    """
    module = _call("cuModuleLoadData", cubin)
    function = _call("cuModuleGetFunction", module, name.encode())
    if shared_bytes > 48 * 1024:
        names = _cu().CUfunction_attribute
        attribute = names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _call("cuFuncSetAttribute", function, attribute, shared_bytes)
    return function


class TensorMap:
    """A packed tensor map: 128 bytes, aligned as many.

    Attributes:
        address: of the first byte, for as long as this lives.
    """

    __slots__ = ("_buffer", "address")

    def __init__(self) -> None:
        self._buffer = (ctypes.c_uint8 * 256)()
        self.address = -(-ctypes.addressof(self._buffer) // 128) * 128


@functools.cache
def _encode_tiled() -> Callable[..., int]:
    """cuTensorMapEncodeTiled by its address: the bindings' own objects are not aligned enough."""
    address, _ = _call("cuGetProcAddress", b"cuTensorMapEncodeTiled", 12000, 0)
    long, word = ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint32)
    return ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, long, long,
        word, word, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int,
    )(int(address))  # fmt: skip


def tensor_map(
    kind: str,
    address: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
) -> TensorMap:
    """A packed tensor map with a swizzle of 128 bytes and zeros outside; see `tilert.tensor_map`.

    Args:
        kind: the element type in CUDA's spelling, such as "BFLOAT16".
        dims, strides, box: innermost first; `strides` in bytes, without the innermost.
    """
    cu, rank = _cu(), len(dims)
    packed = TensorMap()
    modes = (
        cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    status = _encode_tiled()(
        packed.address,
        int(getattr(cu.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{kind}")),
        rank,
        address,
        (ctypes.c_uint64 * rank)(*dims),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        *(int(mode) for mode in modes),
    )
    if status:
        _fail("cuTensorMapEncodeTiled", cu.CUresult(status))
    return packed


class Launch:
    """A kernel launch with its arguments packed.

    Args:
        values: the kernel's arguments: addresses, int64 and int32, each in 8 bytes; a kernel reads
            the low ones (both CUDA's hosts and devices are little-endian).
        maps: tensor maps that it takes before them.

    Attributes:
        waits: whether the kernel waits for earlier grids itself, before it touches memory. Its last
            argument, 0 where it is not recorded, then says what it may do sooner.
        leads: whether it leaves room for the next kernel.
        ahead: memory that it can read before it waits, as (first address, address behind the last)
            for each bit of that argument, from the lowest on.
        whole: whether it does so with all of that or with nothing.
        values: the arguments, then the pointers to them and to the maps that the driver takes.
    """

    __slots__ = ("_blocks", "_enqueue", "_function", "_last", "_maps", "_pointers",
                 "_shared_bytes", "_threads", "ahead", "leads", "values", "waits",
                 "whole")  # fmt: skip

    def __init__(
        self,
        function: Handle,
        blocks: int,
        threads: int,
        shared_bytes: int,
        values: Sequence[int],
        maps: Sequence[TensorMap] = (),
        waits: bool = False,
        leads: bool = False,
        ahead: Sequence[tuple[int, int]] = (),
        whole: bool = False,
    ) -> None:
        self.waits = waits
        self.leads = leads
        self.ahead = ahead
        self.whole = whole
        n, first = len(values), len(maps)
        self._last = n - 1
        self._function = function
        self._blocks = blocks
        self._threads = threads
        self._shared_bytes = shared_bytes
        self._maps = maps
        self.values = (ctypes.c_int64 * (2 * n + first))(*values)
        base = ctypes.addressof(self.values)
        for i, packed in enumerate(maps):
            self.values[n + i] = packed.address
        for i in range(n):
            self.values[n + first + i] = base + 8 * i
        self._pointers = base + 8 * n
        self._enqueue = _cu().cuLaunchKernel

    def enqueue(self, stream: Handle) -> None:
        """Enqueue it on a stream; may be called any number of times."""
        (status,) = self._enqueue(
            self._function, self._blocks, 1, 1, self._threads, 1, 1, self._shared_bytes, stream,
            self._pointers, 0,
        )  # fmt: skip
        # An enumeration of ints, in which success is 0.
        if status:
            _fail("cuLaunchKernel", status)

    def record(self, stream: Handle, behind: bool, early: int) -> None:
        """Enqueue a kernel that waits itself on a stream that records a graph.

        Args:
            behind: whether it may start before the kernel enqueued last, which waits as well, is
                complete; the driver refuses no other.
            early: what it may do before that, see `tilert.codegen.early`.
        """
        self.values[self._last] = early
        try:
            if behind:
                self._enqueue_early(stream)
            else:
                self.enqueue(stream)
        finally:
            self.values[self._last] = 0

    def _enqueue_early(self, stream: Handle) -> None:
        cu = _cu()
        attribute = cu.CUlaunchAttribute()
        attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self._blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self._threads, 1, 1
        config.sharedMemBytes = self._shared_bytes
        config.hStream = stream
        config.attrs, config.numAttrs = [attribute], 1
        _call("cuLaunchKernelEx", config, self._function, self._pointers, 0)


# Graphs


def begin_capture(stream: Handle) -> None:
    """Record what is enqueued on the stream instead of running it."""
    # Relaxed: other streams may be used meanwhile, as when a kernel is loaded at its first use.
    _call("cuStreamBeginCapture", stream, _cu().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)


def end_capture(stream: Handle) -> Handle:
    """The recorded graph."""
    return _call("cuStreamEndCapture", stream)


def drop_capture(stream: Handle) -> None:
    """End a capture and forget what it recorded, whatever state it is in."""
    cu = _cu()
    status, graph = cu.cuStreamEndCapture(stream)
    if status == cu.CUresult.CUDA_SUCCESS and graph is not None and int(graph):
        cu.cuGraphDestroy(graph)


def instantiate(graph: Handle, stream: Handle) -> Handle:
    """An executable graph, already on the device; `graph` is destroyed."""
    try:
        executable = _call("cuGraphInstantiate", graph, 0)
    finally:
        _call("cuGraphDestroy", graph)
    _call("cuGraphUpload", executable, stream)
    return executable


def update_graph(executable: Handle, graph: Handle) -> bool:
    """Have an executable graph do what `graph` does, from its next launch on; gives whether that
    could be done. Where it could not, nothing has changed. `graph` is destroyed.
    """
    cu = _cu()
    try:
        status, _ = cu.cuGraphExecUpdate(executable, graph)
    finally:
        _call("cuGraphDestroy", graph)
    if status == cu.CUresult.CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE:
        return False
    if status != cu.CUresult.CUDA_SUCCESS:
        _fail("cuGraphExecUpdate", status)
    return True


def launch_graph(executable: Handle, stream: Handle) -> None:
    """Enqueue an executable graph."""
    _call("cuGraphLaunch", executable, stream)


def destroy_graph(executable: Handle) -> None:
    """Free an executable graph; it must not be running."""
    _call("cuGraphExecDestroy", executable)
