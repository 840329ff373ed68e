"""The CUDA driver API: the only module that imports its bindings, loaded at first use.

Handles are opaque. Addresses and sizes are ints. Every function raises DeviceError when the driver
reports a failure; `OutOfMemoryError` is the one that callers tell apart.
"""

import functools
import os
from typing import Any, TypeAlias

from tilert.errors import DeviceError

__all__ = ["Handle", "LostError", "OutOfMemoryError", "bindings", "call", "fail"]

Handle: TypeAlias = Any


class OutOfMemoryError(DeviceError):
    """The device has not enough memory left."""


class LostError(DeviceError):
    """Earlier work has made the device unusable for this process."""


@functools.cache
def bindings() -> Any:
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


def call(name: str, *args: Any) -> Any:
    """Call one driver function; its result without the status."""
    cu = bindings()
    status, *values = getattr(cu, name)(*args)
    if status != cu.CUresult.CUDA_SUCCESS:
        fail(name, status)
    return values[0] if len(values) == 1 else tuple(values)


def fail(name: str, status: Any) -> None:
    """The one place where a driver status becomes an exception."""
    cu = bindings()
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
    return int(call("cuDeviceGetCount"))


def driver_version() -> str:
    """Newest CUDA version that the driver supports, such as "13.0"."""
    version = int(call("cuDriverGetVersion"))
    return f"{version // 1000}.{version % 1000 // 10}"


def open_device(index: int) -> tuple[Handle, Handle]:
    """Handles of GPU `index` and of its primary context."""
    device = call("cuDeviceGet", index)
    return device, call("cuDevicePrimaryCtxRetain", device)


def device_name(device: Handle) -> str:
    """The marketing name."""
    name: bytes = call("cuDeviceGetName", 256, device)
    return name.split(b"\0")[0].decode().strip()


def device_attribute(device: Handle, name: str) -> int:
    """Value of CU_DEVICE_ATTRIBUTE_`name`."""
    attribute = getattr(bindings().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(call("cuDeviceGetAttribute", attribute, device))


def set_context(context: Handle) -> None:
    """Make a context current for the calling thread."""
    call("cuCtxSetCurrent", context)


# Streams and events


def create_stream() -> Handle:
    """A stream that does not wait for the legacy default stream."""
    return call("cuStreamCreate", int(bindings().CUstream_flags.CU_STREAM_NON_BLOCKING))


def stream_of(number: int) -> Handle:
    """Another library's stream by its address; 1 is the legacy default, 2 that of the thread."""
    return bindings().CUstream(number)


def pointer_device(address: int) -> int:
    """Number of the GPU that has the memory at an address."""
    attribute = bindings().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(call("cuPointerGetAttribute", attribute, address))


def synchronize_stream(stream: Handle) -> None:
    """Wait for everything enqueued on a stream."""
    call("cuStreamSynchronize", stream)


def create_event(timing: bool) -> Handle:
    """An event; it counts as passed until it is recorded."""
    flags = bindings().CUevent_flags
    return call(
        "cuEventCreate", int(flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING)
    )


def record_event(event: Handle, stream: Handle) -> None:
    """Put the event after everything enqueued on the stream."""
    call("cuEventRecord", event, stream)


def event_passed(event: Handle) -> bool:
    """Whether the event has passed."""
    cu = bindings()
    (status,) = cu.cuEventQuery(event)
    if status == cu.CUresult.CUDA_ERROR_NOT_READY:
        return False
    if status != cu.CUresult.CUDA_SUCCESS:
        fail("cuEventQuery", status)
    return True


def wait_event(event: Handle) -> None:
    """Block the calling thread until the event has passed."""
    call("cuEventSynchronize", event)


def event_seconds(start: Handle, end: Handle) -> float:
    """Device time between two timing events."""
    return float(call("cuEventElapsedTime", start, end)) / 1e3


def hold_stream(stream: Handle, event: Handle) -> None:
    """Put all later work of the stream behind what the event is behind at this moment."""
    call("cuStreamWaitEvent", stream, event, 0)


def destroy_event(event: Handle) -> None:
    """Free an event."""
    call("cuEventDestroy", event)


# Memory


def keep_pool(device: Handle) -> Handle:
    """The device's memory pool, told to keep freed memory instead of returning it."""
    cu = bindings()
    pool = call("cuDeviceGetDefaultMemPool", device)
    threshold = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    call("cuMemPoolSetAttribute", pool, threshold, cu.cuuint64_t(2**64 - 1))
    return pool


def pool_idle(pool: Handle) -> int:
    """Bytes that a pool keeps and nobody uses."""
    names = bindings().CUmemPool_attribute
    reserved = call("cuMemPoolGetAttribute", pool, names.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
    used = call("cuMemPoolGetAttribute", pool, names.CU_MEMPOOL_ATTR_USED_MEM_CURRENT)
    return int(reserved) - int(used)


def trim_pool(pool: Handle) -> None:
    """Return a pool's idle memory to the device."""
    call("cuMemPoolTrimTo", pool, 0)


def allocate_async(nbytes: int, stream: Handle) -> int:
    """Address of pool memory that work enqueued on the stream from now on may use."""
    return int(call("cuMemAllocAsync", nbytes, stream))


def free_async(address: int, stream: Handle) -> None:
    """Give pool memory back after everything enqueued on the stream."""
    call("cuMemFreeAsync", address, stream)


def allocate(nbytes: int) -> int:
    """Address of device memory."""
    return int(call("cuMemAlloc", nbytes))


def free(address: int) -> None:
    """Free memory from `allocate`; nothing may be using it."""
    call("cuMemFree", address)


def memory_info() -> tuple[int, int]:
    """(free, total) bytes of the current context's device."""
    free_bytes, total = call("cuMemGetInfo")
    return int(free_bytes), int(total)


def allocate_host(nbytes: int) -> int:
    """Address of pinned host memory."""
    return int(call("cuMemHostAlloc", nbytes, int(bindings().CU_MEMHOSTALLOC_PORTABLE)))


def free_host(address: int) -> None:
    """Free pinned host memory; nothing may be using it."""
    call("cuMemFreeHost", address)


def copy_to_device(target: int, source: int, nbytes: int, stream: Handle) -> None:
    """Enqueue a copy from host memory; pageable memory has been read when this returns."""
    call("cuMemcpyHtoDAsync", target, source, nbytes, stream)


def copy_to_host(target: int, source: int, nbytes: int, stream: Handle) -> None:
    """Enqueue a copy into pinned host memory."""
    call("cuMemcpyDtoHAsync", target, source, nbytes, stream)


def copy_on_device(target: int, source: int, nbytes: int, stream: Handle) -> None:
    """Enqueue a copy inside the device."""
    call("cuMemcpyDtoDAsync", target, source, nbytes, stream)


def copy_rows(
    target: tuple[int, int], source: tuple[int, int], width: int, height: int, stream: Handle
) -> None:
    """Enqueue a copy of `height` rows of `width` bytes; each side is (address, pitch in bytes)."""
    cu = bindings()
    copy = cu.CUDA_MEMCPY2D()
    copy.dstMemoryType = copy.srcMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.dstDevice, copy.srcDevice = cu.CUdeviceptr(target[0]), cu.CUdeviceptr(source[0])
    copy.dstPitch, copy.srcPitch = target[1], source[1]
    copy.WidthInBytes, copy.Height = width, height
    call("cuMemcpy2DAsync", copy, stream)


def fill(address: int, value: bytes, count: int, stream: Handle) -> None:
    """Enqueue setting `count` elements to the bytes of one element (1, 2, 4 or 8 of them)."""
    number = int.from_bytes(value, "little")
    if len(value) == 8:
        for half, shift in ((0, 0), (4, 32)):
            word = number >> shift & 0xFFFFFFFF
            call("cuMemsetD2D32Async", address + half, 8, word, 1, count, stream)
        return
    call(f"cuMemsetD{8 * len(value)}Async", address, number, count, stream)


# Graphs


def begin_capture(stream: Handle) -> None:
    """Record what is enqueued on the stream instead of running it."""
    # Relaxed: other streams may be used meanwhile, as when a kernel is loaded at its first use.
    mode = bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    call("cuStreamBeginCapture", stream, mode)


def end_capture(stream: Handle) -> Handle:
    """The recorded graph."""
    return call("cuStreamEndCapture", stream)


def drop_capture(stream: Handle) -> None:
    """End a capture and forget what it recorded, whatever state it is in."""
    cu = bindings()
    status, graph = cu.cuStreamEndCapture(stream)
    if status == cu.CUresult.CUDA_SUCCESS and graph is not None and int(graph):
        cu.cuGraphDestroy(graph)


def instantiate(graph: Handle, stream: Handle) -> Handle:
    """An executable graph, already on the device; `graph` is destroyed."""
    try:
        executable = call("cuGraphInstantiate", graph, 0)
    finally:
        call("cuGraphDestroy", graph)
    call("cuGraphUpload", executable, stream)
    return executable


def update_graph(executable: Handle, graph: Handle) -> bool:
    """Have an executable graph do what `graph` does, from its next launch on; gives whether that
    could be done. Where it could not, nothing has changed. `graph` is destroyed.
    """
    cu = bindings()
    try:
        status, _ = cu.cuGraphExecUpdate(executable, graph)
    finally:
        call("cuGraphDestroy", graph)
    if status == cu.CUresult.CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE:
        return False
    if status != cu.CUresult.CUDA_SUCCESS:
        fail("cuGraphExecUpdate", status)
    return True


def launch_graph(executable: Handle, stream: Handle) -> None:
    """Enqueue an executable graph."""
    call("cuGraphLaunch", executable, stream)


def destroy_graph(executable: Handle) -> None:
    """Free an executable graph; it must not be running."""
    call("cuGraphExecDestroy", executable)
