"""A tile runtime: kernels written over tiles, ownership rules O1..O9, cpu and CUDA backends."""

from tilert.annotations import Accumulate, Const, Dyn, Mut, Ref
from tilert.array import Array, empty, from_numpy, full, zeros
from tilert.checker import checking
from tilert.device import Device, device
from tilert.dtypes import DType, bf16, bool_, f8e4m3, f8e5m2, f16, f32, i8, i32, i64, u8, u32
from tilert.errors import (
    CheckError,
    CompileError,
    DeviceError,
    KernelError,
    LaunchError,
    MovedError,
    OwnershipError,
    TilertError,
)
from tilert.event import Event
from tilert.exchange import from_cuda_array, from_dlpack
from tilert.explain import Explanation, explain
from tilert.filling import fill_from
from tilert.graph import Graph, capture
from tilert.index_map import IndexMap, UniqueIndex
from tilert.kernel import Kernel, inline, kernel
from tilert.loan import Loan
from tilert.op import Op
from tilert.opt_out import IndexProof, OptOut, audit
from tilert.paged_index import DecodeIndex, PageTable
from tilert.partition import Partition
from tilert.piece_map import PieceMap
from tilert.pinned import Pinned, pinned
from tilert.repeated_index import RepeatedIndex
from tilert.stream import Stream
from tilert.unsafe_kernel import UnsafeKernel, unsafe_kernel
from tilert.work import Work, gather, ready

__all__ = [
    "Accumulate",
    "Array",
    "CheckError",
    "CompileError",
    "Const",
    "DType",
    "DecodeIndex",
    "Device",
    "DeviceError",
    "Dyn",
    "Event",
    "Explanation",
    "Graph",
    "IndexMap",
    "IndexProof",
    "Kernel",
    "KernelError",
    "LaunchError",
    "Loan",
    "MovedError",
    "Mut",
    "Op",
    "OptOut",
    "OwnershipError",
    "PageTable",
    "Partition",
    "PieceMap",
    "Pinned",
    "Ref",
    "RepeatedIndex",
    "Stream",
    "TilertError",
    "UniqueIndex",
    "UnsafeKernel",
    "Work",
    "audit",
    "bf16",
    "bool_",
    "capture",
    "checking",
    "device",
    "empty",
    "explain",
    "f8e4m3",
    "f8e5m2",
    "f16",
    "f32",
    "fill_from",
    "from_cuda_array",
    "from_dlpack",
    "from_numpy",
    "full",
    "gather",
    "i8",
    "i32",
    "i64",
    "inline",
    "kernel",
    "pinned",
    "ready",
    "u8",
    "u32",
    "unsafe_kernel",
    "zeros",
]
