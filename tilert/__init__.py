"""A tile runtime: kernels written over tiles, ownership rules O1..O9, cpu and CUDA backends."""

from tilert.annotations import Const, Dyn, Mut, Ref
from tilert.array import Array, empty, from_numpy, full, zeros
from tilert.device import Device, device
from tilert.dtypes import DType, bf16, bool_, f16, f32, i32, i64, u8, u32
from tilert.errors import (
    CompileError,
    DeviceError,
    KernelError,
    LaunchError,
    MovedError,
    OwnershipError,
    TilertError,
)
from tilert.event import Event
from tilert.graph import Graph, capture
from tilert.index_map import IndexMap, UniqueIndex
from tilert.kernel import Kernel, inline, kernel
from tilert.op import Op
from tilert.paged_index import DecodeIndex, PageTable
from tilert.partition import Partition
from tilert.pinned import Pinned, pinned

__all__ = [
    "Array",
    "CompileError",
    "Const",
    "DType",
    "DecodeIndex",
    "Device",
    "DeviceError",
    "Dyn",
    "Event",
    "Graph",
    "IndexMap",
    "Kernel",
    "KernelError",
    "LaunchError",
    "MovedError",
    "Mut",
    "Op",
    "OwnershipError",
    "PageTable",
    "Partition",
    "Pinned",
    "Ref",
    "TilertError",
    "UniqueIndex",
    "bf16",
    "bool_",
    "capture",
    "device",
    "empty",
    "f16",
    "f32",
    "from_numpy",
    "full",
    "i32",
    "i64",
    "inline",
    "kernel",
    "pinned",
    "u8",
    "u32",
    "zeros",
]
