"""A device that compiles for a GPU that is not there: kernels are built, memory is only counted.

Running a program on it shows, without a GPU, every kernel that the program would launch, in the
very specialisations that it would launch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tilert import ir, nvrtc
from tilert.checks import Check, checks_of
from tilert.device import Call, Device, Launcher
from tilert.event import DoneEvent, Event
from tilert.recording import CallList, Executable, Piece
from tilert.stream import Stream
from tilert.tensor_map import TensorMap, encoding

if TYPE_CHECKING:
    from tilert.array import Array
    from tilert.order import Record

__all__ = ["CompiledKernel", "StandIn", "TargetDevice"]

_ALIGNMENT = 512
# KiB of shared memory that a block may have.
_SHARED = {"sm_80": 163, "sm_89": 99, "sm_90a": 227, "sm_100a": 227, "sm_120a": 99}
_MEMORY = 128 << 30


@dataclass(frozen=True)
class CompiledKernel:
    """One specialisation.

    Attributes:
        name: of the kernel.
        text: CUDA C++, in which the kernel is called `entry`.
        threads: threads of a block.
        shared_bytes: dynamic shared memory of a block.
        schedule: what the code generator chose; see `tilert.codegen.generate`.
        cubin: what it compiles to.
        resources: what the assembler says that uses.
        early: parameters that it can read before it waits for earlier kernels.
        apart: whether it need not wait at all behind a kernel that it shares no memory with.
    """

    name: str
    text: str
    entry: str
    threads: int
    shared_bytes: int
    schedule: str
    cubin: bytes
    resources: nvrtc.Resources
    early: tuple[int, ...] = ()
    apart: bool = False


class _Block:
    def __init__(self, address: int) -> None:
        self.address = address
        self.leases: list[Record] = []
        self.host: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = None


class _HostBlock:
    def __init__(self, nbytes: int) -> None:
        self.host: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = np.zeros(nbytes, np.uint8)
        self.address: int = self.host.ctypes.data
        self.leases: list[Record] = []


@dataclass
class _Launcher:
    launches: list[str] = field(default_factory=list)
    name: str = ""
    maps: tuple[TensorMap, ...] = ()

    def bind(
        self,
        arrays: "Sequence[Array]",
        index_maps: "Mapping[int, Array]",
        grid: tuple[int, ...],
        programs: int | None = None,
    ) -> Call:
        """A call that only counts."""
        for spec in self.maps:
            a = arrays[spec.param]
            encoding(spec, a.dtype, a.address, a.shape, a.strides)
        return lambda queue: self.launches.append(self.name)


class TargetDevice(Device):
    """A compile-only GPU.

    Attributes:
        arch: what kernels are compiled for, such as "sm_90a".
        checks: which checks are compiled in.
        kernels: everything compiled so far, in order.
        launches: names of the kernels launched so far, in order.
    """

    kind = "cuda"
    arch: str

    def __init__(self, arch: str, check: Check = False) -> None:
        super().__init__(f"target:{arch}")
        self.checks = checks_of(check)
        self.arch = arch
        self.shared_bytes = _SHARED[arch] << 10 if arch in _SHARED else None
        self.kernels: list[CompiledKernel] = []
        self.launches: list[str] = []
        self._next = 1 << 40
        self._built: dict[str, tuple[bytes, nvrtc.Resources]] = {}

    def allocate(self, nbytes: int) -> _Block:
        """See `Device`; addresses are distinct and lead nowhere."""
        address = self._next
        self._next += -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        return _Block(address)

    def compile(self, function: ir.Function) -> Launcher:
        """See `Device`."""
        from tilert.unsafe_kernel import cuda_source

        source = cuda_source(function, self.arch, self.checks)
        # Of many specialisations: their text does not say all that tells them apart.
        if source.text not in self._built:
            self._built[source.text] = nvrtc.build(source.text, source.entry, self.arch)
        cubin, used = self._built[source.text]
        self.kernels.append(
            CompiledKernel(
                function.name, source.text, source.entry, source.threads, source.shared_bytes,
                source.schedule, cubin, used, source.early, source.apart,
            )
        )  # fmt: skip
        return _Launcher(self.launches, function.name, source.maps)

    def upload(self, target: "Array", source: np.ndarray[Any, Any]) -> None:
        """See `Device`; the data is dropped."""

    def download(self, source: "Array") -> np.ndarray[Any, Any]:
        """See `Device`; zeros."""
        return np.zeros(source.shape, source.dtype.numpy)

    def copy_call(self, target: "Array", source: "Array") -> Call:
        """See `Device`."""
        return lambda queue: None

    def fill_call(self, target: "Array", value: np.ndarray[Any, Any]) -> Call:
        """See `Device`."""
        return lambda queue: None

    def pinned_block(self, nbytes: int) -> _HostBlock:
        """See `Device`."""
        return _HostBlock(nbytes)

    def pinned_call(self, target: np.ndarray[Any, Any], source: "Array") -> Call:
        """See `Device`."""
        return lambda queue: None

    def record_event(self, timing: bool = False, stream: Stream | None = None) -> Event:
        """See `Device`."""
        return DoneEvent(0.0)

    def synchronize(self) -> None:
        """See `Device`."""

    def memory(self) -> tuple[int, int]:
        """See `Device`."""
        return _MEMORY, _MEMORY

    def info(self) -> dict[str, Any]:
        """See `Device`."""
        return {"kind": self.kind, "name": f"compile-only {self.arch}", "arch": self.arch}

    def make_graph(self, pieces: list[Piece]) -> Executable:
        """See `Device`; the work counts once, and replays do not."""
        CallList(pieces).enqueue(None)
        return CallList([])


class StandIn(TargetDevice):
    """Runs nothing, with the tiles and schedules of a device.

    Attributes:
        device: what it stands in for.
    """

    def __init__(self, device: Device) -> None:
        check: Check = False
        super().__init__(device.arch or "", check)
        # What tiles and schedules follow from.
        self.checks, self.shared_bytes = device.checks, device.shared_bytes
        self.concurrent = device.concurrent
        self.device = device

    def info(self) -> dict[str, Any]:
        """See `Device`; that of the device, by which its tuned tiles are found."""
        return self.device.info()
