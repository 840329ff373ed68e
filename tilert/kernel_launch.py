"""Launches of kernels through the CUDA driver: loaded functions, packed arguments, tensor maps."""

import ctypes
import functools
from collections.abc import Callable, Sequence

from tilert import driver
from tilert.driver import Handle

__all__ = ["Launch", "TensorMap", "load_function", "tensor_map"]


def load_function(cubin: bytes, name: str, shared_bytes: int) -> Handle:
    """Load a cubin and get its kernel, allowed `shared_bytes` of dynamic shared memory.

    The module stays loaded for the life of the process.
    """
    module = driver.call("cuModuleLoadData", cubin)
    function = driver.call("cuModuleGetFunction", module, name.encode())
    if shared_bytes > 48 * 1024:
        names = driver.bindings().CUfunction_attribute
        attribute = names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.call("cuFuncSetAttribute", function, attribute, shared_bytes)
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
    address, _ = driver.call("cuGetProcAddress", b"cuTensorMapEncodeTiled", 12000, 0)
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
    fetch: int = 256,
) -> TensorMap:
    """A packed tensor map with a swizzle of 128 bytes and zeros outside; see `tilert.tensor_map`.

    Args:
        kind: the element type in CUDA's spelling, such as "BFLOAT16".
        dims, strides, box: innermost first; `strides` in bytes, without the innermost.
        fetch: bytes that the second-level cache brings at once, 128 or 256.
    """
    cu, rank = driver.bindings(), len(dims)
    packed = TensorMap()
    modes = (
        cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        getattr(cu.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_L2_{fetch}B"),
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
        driver.fail("cuTensorMapEncodeTiled", cu.CUresult(status))
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
        apart: whether it need not wait for a kernel that it shares no memory with, once it has
            read all of that, and can keep the one behind it back until it has waited.
        values: the arguments, then the pointers to them and to the maps that the driver takes.
    """

    __slots__ = ("_blocks", "_enqueue", "_function", "_last", "_maps", "_pointers",
                 "_shared_bytes", "_threads", "ahead", "apart", "leads", "values", "waits",
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
        apart: bool = False,
    ) -> None:
        self.waits = waits
        self.leads = leads
        self.ahead = ahead
        self.whole = whole
        self.apart = apart
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
        self._enqueue = driver.bindings().cuLaunchKernel

    def enqueue(self, stream: Handle) -> None:
        """Enqueue it on a stream; may be called any number of times."""
        (status,) = self._enqueue(
            self._function, self._blocks, 1, 1, self._threads, 1, 1, self._shared_bytes, stream,
            self._pointers, 0,
        )  # fmt: skip
        # An enumeration of ints, in which success is 0.
        if status:
            driver.fail("cuLaunchKernel", status)

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
        cu = driver.bindings()
        attribute = cu.CUlaunchAttribute()
        attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self._blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self._threads, 1, 1
        config.sharedMemBytes = self._shared_bytes
        config.hStream = stream
        config.attrs, config.numAttrs = [attribute], 1
        driver.call("cuLaunchKernelEx", config, self._function, self._pointers, 0)
