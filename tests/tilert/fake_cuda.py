"""The CUDA driver without a GPU: memory of the host, streams that run late and in any legal order.

It answers the calls that `tilert.driver` makes and refuses what the driver refuses: most calls of a
thread without a context, waiting for a stream that is being captured, asking about an event inside
a capture, ending a capture with a branch that was not joined. Kernels are functions of the host.
"""

import ctypes
import functools
import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.tilert.fake_graph import Node, Replay
from tests.tilert.simulated import Queue, Reached, run_one
from tilert import driver, ir, kernel_launch
from tilert.array import Array
from tilert.codegen.early import APART, BEHIND_ONE
from tilert.cpu_device import CpuDevice
from tilert.cuda_device import CudaDevice
from tilert.cuda_graph import span
from tilert.device import Call, Launcher
from tilert.unsafe_kernel import UnsafeFunction

__all__ = ["FakeCudaDevice", "FakeDriver", "fake_cuda"]


# What threads may call that have no context.
_ANYWHERE = {
    "cuDeviceGetCount", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent",
    "cuDeviceGetAttribute", "cuDeviceGetDefaultMemPool", "cuMemPoolSetAttribute",
}  # fmt: skip


class Capture:
    def __init__(self, origin: "Stream") -> None:
        self.origin = origin
        self.streams = [origin]
        self.nodes: list[Node] = []
        self.spoiled = False


class Stream:
    def __init__(self) -> None:
        self.queue = Queue()
        self.capture: Capture | None = None
        # In a capture, the nodes that the next one comes after.
        self.after: set[int] = set()


class Event:
    def __init__(self) -> None:
        self.now = Reached()
        self.now.done = True
        self.captured: tuple[Capture, set[int]] | None = None


class Executable:
    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes


class FakeDriver:
    """`cuda.bindings.driver`, as far as it is used. Types and names are the real ones.

    Attributes:
        calls: how often each function was called.
    """

    # The real one has no room for streams of ours.
    CUlaunchConfig = SimpleNamespace

    def __init__(self, real: Any, seed: int, late: float = 0.7) -> None:
        self.real = real
        self.ok = real.CUresult.CUDA_SUCCESS
        self.chance = random.Random(seed)
        self.late = late
        self.calls: Counter[str] = Counter()
        self.lock = threading.RLock()
        self.current = threading.local()
        self.streams: list[Stream] = []
        self.buffers: dict[int, np.ndarray] = {}
        self.sizes: dict[int, int] = {}
        self.unused: dict[int, list[int]] = {}
        self.pinned: set[int] = set()
        # What kernels do, whether they wait for earlier ones, and whether later ones may start.
        self.functions: dict[int, tuple[_Kernel, bool, bool]] = {}

    def __getattr__(self, name: str) -> Any:
        # What is not here is a type, or a mistake.
        if name.startswith("cu") and name[2].isupper():
            raise AttributeError(f"the fake driver has no {name}")
        return getattr(self.real, name)

    def counted(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            assert name in _ANYWHERE or hasattr(self.current, "context"), f"{name}: no context"
            with self.lock:
                self.calls[name] += 1
                return getattr(self, f"_{name}")(*arguments)

        return call

    # Running

    def put(
        self,
        stream: Stream,
        work: Callable[[], None],
        kind: str,
        early: bool = False,
        waits: bool = False,
        tells: bool = False,
        begin: Callable[[], None] = lambda: None,
        word: int = 0,
    ) -> tuple[Any]:
        if stream.capture is not None:
            flags = bool(word & APART), bool(word & BEHIND_ONE)
            node = Node(kind, work, set(stream.after), early, waits, tells, begin, *flags)
            stream.capture.nodes.append(node)
            stream.after = {len(stream.capture.nodes) - 1}
        else:
            stream.queue.put(work)
            while self.chance.random() > self.late and self.step():
                pass
        return (self.ok,)

    def step(self) -> bool:
        queues = [stream.queue for stream in self.streams]
        self.chance.shuffle(queues)
        return run_one(queues, self.chance)

    def until(self, over: Callable[[], bool]) -> tuple[Any]:
        while not over():
            assert self.step(), "streams wait for each other"
        return (self.ok,)

    # Devices

    def _cuDeviceGetCount(self) -> Any:
        return self.ok, 1

    def _cuDeviceGet(self, index: int) -> Any:
        return self.ok, index

    def _cuDeviceGetName(self, length: int, device: Any) -> Any:
        return self.ok, b"a driver that is not there\0"

    def _cuDriverGetVersion(self) -> Any:
        return self.ok, 13000

    def _cuMemGetInfo(self) -> Any:
        return self.ok, 1 << 34, 1 << 34

    def _cuDevicePrimaryCtxRetain(self, device: Any) -> Any:
        return self.ok, "context"

    def _cuCtxSetCurrent(self, context: Any) -> Any:
        self.current.context = context
        return (self.ok,)

    def _cuDeviceGetAttribute(self, attribute: Any, device: Any) -> Any:
        name = attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_")
        known = {"COMPUTE_CAPABILITY_MAJOR": 9, "COMPUTE_CAPABILITY_MINOR": 0}
        return self.ok, known.get(name, 1 << 20)

    def _cuDeviceGetDefaultMemPool(self, device: Any) -> Any:
        return self.ok, "pool"

    def _cuMemPoolSetAttribute(self, *_: Any) -> Any:
        return (self.ok,)

    # Streams and events

    def _cuStreamCreate(self, flags: int) -> Any:
        self.streams.append(Stream())
        return self.ok, self.streams[-1]

    def _cuStreamSynchronize(self, stream: Stream) -> Any:
        if stream.capture is not None:
            stream.capture.spoiled = True
            return (self.real.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,)
        return self.until(lambda: not stream.queue.items)

    def _cuEventCreate(self, flags: int) -> Any:
        return self.ok, Event()

    def _cuEventDestroy(self, event: Event) -> Any:
        return (self.ok,)

    def _cuEventRecord(self, event: Event, stream: Stream) -> Any:
        if stream.capture is not None:
            event.captured = stream.capture, set(stream.after)
            return (self.ok,)
        event.captured = None
        event.now = reached = Reached()
        return self.put(stream, lambda: setattr(reached, "done", True), "event")

    def _cuEventQuery(self, event: Event) -> Any:
        if event.captured is not None:
            return (self.real.CUresult.CUDA_ERROR_CAPTURED_EVENT,)
        self.step()
        ready = self.real.CUresult.CUDA_ERROR_NOT_READY
        return (self.ok if event.now.done else ready,)

    def _cuEventSynchronize(self, event: Event) -> Any:
        if event.captured is not None:
            return (self.real.CUresult.CUDA_ERROR_CAPTURED_EVENT,)
        now = event.now
        return self.until(lambda: now.done)

    def _cuEventElapsedTime(self, start: Event, end: Event) -> Any:
        if not (start.now.done and end.now.done):
            return self.real.CUresult.CUDA_ERROR_NOT_READY, 0.0
        return self.ok, 1.0

    def _cuStreamWaitEvent(self, stream: Stream, event: Event, flags: int) -> Any:
        if event.captured is not None:
            capture, after = event.captured
            if stream.capture not in (None, capture):
                return (self.real.CUresult.CUDA_ERROR_STREAM_CAPTURE_MERGE,)
            if stream.capture is None:
                stream.capture, stream.after = capture, set()
                capture.streams.append(stream)
            stream.after |= after
        elif stream.capture is not None:
            return (self.real.CUresult.CUDA_ERROR_STREAM_CAPTURE_ISOLATION,)
        else:
            stream.queue.items.append(event.now)
        return (self.ok,)

    # Memory

    def _new(self, nbytes: int) -> int:
        buffer = np.empty(nbytes + 256, np.uint8)
        address = -(-buffer.ctypes.data // 256) * 256
        self.buffers[address] = buffer[address - buffer.ctypes.data :][:nbytes]
        return address

    def _cuMemAllocAsync(self, nbytes: int, stream: Stream) -> Any:
        size = -(-nbytes // 256) * 256
        unused = self.unused.setdefault(size, [])
        address = unused.pop() if unused else self._new(size)
        self._spoil(address, stream)
        return self.ok, address

    def _cuMemFreeAsync(self, address: int, stream: Stream) -> Any:
        self.unused[self.buffers[address].size].append(address)
        return self._spoil(address, stream)

    def _spoil(self, address: int, stream: Stream) -> Any:
        assert stream.capture is None
        buffer, value = self.buffers[address], self.chance.randrange(256)
        return self.put(stream, lambda: buffer.fill(value), "spoil")

    def _cuMemHostAlloc(self, nbytes: int, flags: int) -> Any:
        address = self._new(nbytes)
        self.pinned.add(address)
        return self.ok, address

    def _cuMemFreeHost(self, address: int) -> Any:
        self.pinned.remove(address)
        # Nothing may use it any more.
        self.buffers[address].fill(0xEE)
        return (self.ok,)

    def bytes_at(self, address: int, nbytes: int) -> np.ndarray:
        return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)

    def _copy(self, to: int, of: int, nbytes: int, stream: Stream, kind: str) -> Any:
        target, source = self.bytes_at(int(to), nbytes), self.bytes_at(int(of), nbytes)
        return self.put(stream, lambda: np.copyto(target, source), kind)

    def _cuMemcpyHtoDAsync(self, to: int, of: int, nbytes: int, stream: Stream) -> Any:
        if of in self.pinned:
            return self._copy(to, of, nbytes, stream, "copy")
        data, target = self.bytes_at(of, nbytes).copy(), self.bytes_at(to, nbytes)
        return self.put(stream, lambda: np.copyto(target, data), "copy")

    def _cuMemcpyDtoHAsync(self, to: int, of: int, nbytes: int, stream: Stream) -> Any:
        return self._copy(to, of, nbytes, stream, "copy")

    def _cuMemcpyDtoDAsync(self, to: int, of: int, nbytes: int, stream: Stream) -> Any:
        return self._copy(to, of, nbytes, stream, "copy")

    def _cuMemcpy2DAsync(self, copy: Any, stream: Stream) -> Any:
        rows = [
            (
                self.bytes_at(int(copy.dstDevice) + i * copy.dstPitch, copy.WidthInBytes),
                self.bytes_at(int(copy.srcDevice) + i * copy.srcPitch, copy.WidthInBytes),
            )
            for i in range(copy.Height)
        ]
        return self.put(stream, lambda: [np.copyto(*row) for row in rows] and None, "copy 2D")

    def _cuMemsetD32Async(self, address: int, value: int, count: int, stream: Stream) -> Any:
        target = self.bytes_at(address, 4 * count).view(np.uint32)
        return self.put(stream, lambda: target.fill(value), "fill")

    # Kernels and graphs

    def _cuLaunchKernel(self, function: Any, *rest: Any) -> Any:
        return self._launch(rest[7], rest[8], early=False)

    def _cuLaunchKernelEx(self, config: Any, function: Any, parameters: int, extra: int) -> Any:
        (attribute,) = config.attrs
        serialization = "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"
        assert attribute.id.name == serialization
        assert attribute.value.programmaticStreamSerializationAllowed == 1
        stream = config.hStream
        assert stream.capture is not None, "a kernel starts early outside of a graph"
        (before,) = stream.after
        assert stream.capture.nodes[before].kind == "kernel"
        return self._launch(stream, parameters, early=True)

    def _launch(self, stream: Stream, parameters: int, early: bool) -> Any:
        pointer = ctypes.c_void_p.from_address(parameters).value
        assert pointer is not None
        number = ctypes.c_int64.from_address(pointer).value
        kernel, waits, tells = self.functions[number]
        # The word is the second argument of kernels that wait.
        second = ctypes.c_void_p.from_address(parameters + 8).value if waits else None
        word = ctypes.c_uint32.from_address(second).value if second else 0
        if stream.capture is None:
            assert not word, "a kernel reads ahead outside of a graph"
            return self.put(stream, lambda: kernel.call(None), "kernel", early, waits, tells)
        at_work = kernel.reading_ahead(word)
        return self.put(stream, at_work.run, "kernel", early, waits, tells, at_work.begin, word)

    def _cuStreamBeginCapture(self, stream: Stream, mode: Any) -> Any:
        assert stream.capture is None
        stream.capture, stream.after = Capture(stream), set()
        return (self.ok,)

    def _cuStreamEndCapture(self, stream: Stream) -> Any:
        capture = stream.capture
        assert capture is not None and capture.origin is stream
        reached, left = set[int](), list(stream.after)
        while left:
            at = left.pop()
            if at not in reached:
                reached.add(at)
                left += capture.nodes[at].after
        for one in capture.streams:
            one.capture = None
        if capture.spoiled:
            return self.real.CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, None
        if len(reached) != len(capture.nodes):
            return self.real.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNJOINED, None
        return self.ok, capture.nodes

    def _cuGraphDestroy(self, graph: Any) -> Any:
        return (self.ok,)

    def _cuGraphInstantiate(self, nodes: list[Node], flags: int) -> Any:
        return self.ok, Executable(nodes)

    def _cuGraphUpload(self, executable: Executable, stream: Stream) -> Any:
        return (self.ok,)

    def _cuGraphExecUpdate(self, executable: Executable, nodes: list[Node]) -> Any:
        before = [node.shape for node in executable.nodes]
        if before != [node.shape for node in nodes]:
            return self.real.CUresult.CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, None
        executable.nodes = nodes
        return self.ok, None

    def _cuGraphLaunch(self, executable: Executable, stream: Stream) -> Any:
        nodes = executable.nodes

        def run() -> None:
            replay = Replay(nodes)
            while replay.step(self.chance):
                pass
            assert len(replay.done) == len(nodes)

        return self.put(stream, run, "graph")

    def _cuGraphExecDestroy(self, executable: Executable) -> Any:
        executable.nodes = [Node("gone", lambda: None, set())]
        return (self.ok,)


class _Counting:
    """The fake driver, each call counted."""

    def __init__(self, fake: FakeDriver) -> None:
        self._fake = fake

    def __getattr__(self, name: str) -> Any:
        if hasattr(FakeDriver, f"_{name}"):
            return self._fake.counted(name)
        return getattr(self._fake, name)


class _Kernel:
    """A launch on the host.

    Args:
        ahead: memory that it reads when it starts, rather than when it is complete.
    """

    def __init__(self, fake: FakeDriver, call: Call, ahead: Sequence[tuple[int, int]]) -> None:
        self.fake = fake
        self.call = call
        self.ahead = ahead
        self.read: list[np.ndarray] = []

    def reading_ahead(self, word: int) -> "_Kernel":
        """The same, where only what has a bit in the word is read ahead."""
        some = [span for bit, span in enumerate(self.ahead) if word >> bit & 1]
        return _Kernel(self.fake, self.call, some)

    def _memory(self) -> list[np.ndarray]:
        return [self.fake.bytes_at(start, end - start) for start, end in self.ahead if start < end]

    def begin(self) -> None:
        """Read what may be read ahead."""
        self.read = [memory.copy() for memory in self._memory()]

    def run(self) -> None:
        """All the rest, with what was read."""
        now = [memory.copy() for memory in self._memory()]
        for memory, read in zip(self._memory(), self.read, strict=False):
            memory[:] = read
        self.call(None)
        for memory, held in zip(self._memory(), now, strict=True):
            memory[:] = held


class _Launcher:
    """Launches kernels whose first argument says which function of the host they are.

    Args:
        waits: whether the kernel waits for earlier ones itself. says: whether its launches say so.
        apart: whether it can do without where it shares no memory with the one before.
    """

    def __init__(
        self,
        fake: FakeDriver,
        inner: Launcher,
        function: ir.Function,
        waits: bool,
        says: bool,
        apart: bool,
    ) -> None:
        self.fake = fake
        self.inner = inner
        self.refs = [p.position for p in function.params if p.kind == "ref"]
        self.waits = waits
        self.says = says
        self.apart = apart

    def bind(
        self,
        arrays: Sequence[Array],
        index_maps: Mapping[int, Array],
        grid: tuple[int, ...],
        programs: int | None = None,
    ) -> Call:
        call = self.inner.bind(arrays, index_maps, grid)
        ahead = [span(arrays[ref]) for ref in self.refs] if self.waits else []
        number = len(self.fake.functions)
        self.fake.functions[number] = _Kernel(self.fake, call, ahead), self.waits, self.says
        launch = kernel_launch.Launch(
            "function", 1, 1, 0, [number, 0], waits=self.says, leads=self.says, ahead=ahead,
            **({"whole": True, "apart": True} if self.apart else {}),
        )  # fmt: skip
        return launch.enqueue


class FakeCudaDevice(CudaDevice):
    """The cuda device on the fake driver, with kernels of the cpu backend."""

    def __init__(self, fake: FakeDriver) -> None:
        self.fake = fake
        self.cpu = CpuDevice(check=False)
        super().__init__(0, check=False)

    def memory(self) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    def host_bytes(self, address: int, nbytes: int) -> Any:
        return self.fake.buffers[address][:nbytes]

    def waits(self, function: ir.Function) -> bool:
        """Whether the kernel waits for earlier ones itself."""
        return not isinstance(function, UnsafeFunction)

    def says(self, function: ir.Function) -> bool:
        """Whether the launches of a kernel say that it waits."""
        return self.waits(function)

    def apart(self, function: ir.Function) -> bool:
        """Whether a kernel need not wait for one that it shares no memory with."""
        return False

    def compile(self, function: ir.Function) -> Launcher:
        waits = self.waits(function)
        inner = self.cpu.compile(function)
        return _Launcher(
            self.fake, inner, function, waits, self.says(function), self.apart(function)
        )

    def begin_compile(self, function: ir.Function) -> Callable[[], Launcher]:
        return functools.partial(self.compile, function)


def fake_cuda(
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    late: float = 0.7,
    kind: type[FakeCudaDevice] = FakeCudaDevice,
) -> FakeCudaDevice:
    """A device on a fake driver, which stands for the real one for the length of the test."""
    real = pytest.importorskip("cuda.bindings.driver")
    fake = FakeDriver(real, seed, late)
    counting = _Counting(fake)
    monkeypatch.setattr(driver, "bindings", lambda: counting)
    return kind(fake)
