"""Devices: where arrays live and ops run. `device("auto")` picks the best one that works."""

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tilert import ir
from tilert.checks import Check, Checks
from tilert.errors import DeviceError, LaunchError
from tilert.event import Event
from tilert.order import Lane
from tilert.recording import CallList
from tilert.stream import Stream

if TYPE_CHECKING:
    from tilert.array import Array
    from tilert.order import Record
    from tilert.ownership import Region
    from tilert.rebind import Maker
    from tilert.recording import Executable, Piece, Recorder
    from tilert.storage import Storage
    from tilert.trail import Trail

__all__ = [
    "Block",
    "Call",
    "Device",
    "Launcher",
    "Use",
    "check_device",
    "device",
    "open_device",
    "standing_in",
]

Use = tuple["Storage", "Region", bool]
"""What submitted work touches of a storage, and whether it writes it."""

Read = Callable[[int, np.ndarray[Any, np.dtype[np.uint8]]], None]
"""Puts bytes from a place on into a buffer."""

Call = Callable[[Any], None]
"""Enqueues work on a queue of the device that it was made for; may be called any number of times.
The cpu device's queue is None: work is done at once."""


class Block(Protocol):
    """Memory that goes back to the device when the object dies."""

    @property
    def address(self) -> int:
        """Of the first byte, a multiple of 64."""

    @property
    def host(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]] | None:
        """The bytes, where the host may touch them."""

    @property
    def leases(self) -> "list[Record]":
        """The uses of it that may be in flight (rule O4); kept by devices with several queues."""


class Launcher(Protocol):
    """A specialised kernel compiled for one device."""

    def bind(
        self,
        arrays: "Sequence[Array]",
        index_maps: "Mapping[int, Array]",
        grid: tuple[int, ...],
        programs: int | None = None,
    ) -> Call:
        """A call that enqueues the kernel over `grid`.

        Args:
            arrays: one per `ir.Param`, by position.
            index_maps: i32 array of row numbers for each indexed `Mut`, by position.
            programs: how many programs walk the pieces of the grid, for kernels that walk them.
        """


class Device(ABC):
    """One processor with its memory and a queue of work, run in order.

    Every piece of work goes through `submit`, in program order; several host threads may use a
    device. Streams are more queues, for work that may run beside: what uses the same memory runs
    in program order all the same (rule O4). On the cpu work is done when it is enqueued, by the
    thread that enqueues it, so streams exist there and change nothing.

    Devices are equal only to themselves: `device(name)` gives the same object each time.

    Attributes:
        kind: "cpu" or "cuda".
        name: what `device(name)` takes, such as "cuda:0".
        arch: what kernels are compiled for, such as "sm_90a"; None where they are not compiled.
        concurrent: how many programs run at once, of kernels that walk their pieces.
        shared_bytes: most shared memory of a block; None where there are no blocks.
        checks: how much is checked while kernels run.
        queue: what calls are given, unless they are for a stream.
        lock: held while work is enqueued, and throughout a capture.
        recorder: set during a capture.
        trail: the ops enqueued last, on devices that report failures late.
        launchers: compiled kernels by what tells them apart.
        kept_launchers: how many of them are kept for certain, and at most twice as many in all;
            None to keep every one.
    """

    kind: str
    name: str
    arch: str | None = None
    concurrent: int = 1
    shared_bytes: int | None = None
    kept_launchers: int | None = None
    checks: Checks = Checks.NONE

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: Any = None
        self.lock = threading.RLock()
        self.recorder: Recorder | None = None
        self.trail: Trail | None = None
        self.launchers: dict[object, Launcher] = {}
        self._older: dict[object, Launcher] = {}
        # Of `launchers`, and of making text of kernels; who compiles one has a lock of its own.
        self._compiling = threading.Lock()
        self._turns: dict[object, threading.Lock] = {}

    @property
    def title(self) -> str:
        """The name, and whether kernels are checked on it: what tells devices of one name apart."""
        return f"checked {self.name}" if self.checks else self.name

    def __repr__(self) -> str:
        return f"device({self.name!r})"

    def launcher(self, key: object, specialize: Callable[[], ir.Function]) -> Launcher:
        """The compiled kernel for `key`, made by `specialize` at its first use.

        Threads may compile different kernels at the same time.
        """
        found = self.launchers.get(key)
        if found is not None:
            return found
        with self._compiling:
            turn = self._turns.setdefault(key, threading.Lock())
        with turn:
            try:
                with self._compiling:
                    found = self.launchers.get(key)
                    if found is not None:
                        return found
                    older = self._older.pop(key, None)
                    if older is not None:
                        self._keep(key, older)
                        return older
                    finish = self.begin_compile(specialize())
                made = finish()
                with self._compiling:
                    self._keep(key, made)
                return made
            finally:
                self._turns.pop(key, None)

    def _keep(self, key: object, launcher: Launcher) -> None:
        """Add to `launchers`; those not asked for since the last two times it was full go.

        Two generations and no order of use: a launch looks its key up in a plain dict.
        """
        if self.kept_launchers is not None and len(self.launchers) >= self.kept_launchers:
            self._older, self.launchers = self.launchers, {}
        self.launchers[key] = launcher

    def submit(
        self,
        call: Call,
        uses: Sequence[Use],
        maker: "Maker | None" = None,
        stream: Stream | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Enqueue `call`, or record it during a capture.

        Args:
            call: enqueues the work; may be called again by every replay of a graph.
            uses: memory that it touches, which lives as long as a graph that holds the work.
            maker: makes the call again, on other memory; without, a graph of it cannot be rebound.
            stream: where to enqueue it; by default the device's own queue.
            check: raises where it may not be enqueued as things are; called with the lock held,
                and again if another thread had the lock in between.

        Raises:
            LaunchError: if the stream is closed, or of another device.
        """
        with self.lock:
            if check is not None:
                check()
            lane = None if stream is None else stream.lane(self)
            if self.recorder is None:
                call(self.queue)
            else:
                self.recorder.note(call, tuple(uses), maker, lane)

    def submit_alone(self, call: Call) -> bool:
        """Enqueue `call` on the device's own queue, if nothing has to be known of it for that.

        Gives whether that was so: not during a capture, nor while there are other queues. Then
        nothing was done, and `submit` does it.
        """
        with self.lock:
            if self.recorder is not None:
                return False
            call(self.queue)
            return True

    def settled(self, uses: "Sequence[Use]") -> bool:
        """Whether no copy that another thread enqueues in parts conflicts with the uses.

        Called with the lock held. Where it gives False it has waited for one, without the lock, so
        that what was looked at before may have changed.
        """
        return True

    def stream(self) -> Stream:
        """A queue of its own beside the device's, behind everything enqueued so far."""
        return Stream(self, Lane(None))

    def close_lane(self, lane: Lane) -> None:  # noqa: B027
        """A stream has ended; called with the lock held."""

    def drop_lane(self, lane: Lane) -> None:  # noqa: B027
        """A stream was dropped while open. Called by finalisers."""

    def refuse_in_capture(self, what: str) -> None:
        """Raise if this thread is capturing a graph, which cannot hold `what`.

        Raises:
            LaunchError: during a capture.
        """
        with self.lock:
            if self.recorder is not None:
                raise LaunchError(
                    f"O6 graphs: {what} cannot be part of a captured graph; do it before"
                    " tilert.capture, or after a replay"
                )

    @abstractmethod
    def allocate(self, nbytes: int) -> Block:
        """Uninitialised memory.

        Raises:
            DeviceError: if there is not enough.
        """

    def allocate_zeros(self, nbytes: int) -> Block | None:
        """Memory of zeros, if that takes no work; not during a capture.

        Raises:
            DeviceError: as `allocate`.
        """
        return None

    @abstractmethod
    def compile(self, function: ir.Function) -> Launcher:
        """Compile a specialised kernel."""

    def begin_compile(self, function: ir.Function) -> Callable[[], Launcher]:
        """The part of `compile` that is done for one kernel at a time; gives the rest."""
        launcher = self.compile(function)
        return lambda: launcher

    @abstractmethod
    def upload(self, target: "Array", source: np.ndarray[Any, Any]) -> None:
        """Copy host data of the same shape and dtype; `source` may change once this returns."""

    @abstractmethod
    def download(self, source: "Array") -> np.ndarray[Any, Any]:
        """A host copy, after all earlier work."""

    def fill_bytes(self, target: "Array", read: Read) -> None:
        """See `tilert.fill_from`; of a contiguous array that is not empty."""
        data = np.empty(target.nbytes, np.uint8)
        read(0, data)
        self.upload(target, data.view(target.dtype.numpy).reshape(target.shape))

    def adopt(self, block: Block, nbytes: int) -> None:  # noqa: B027
        """Told of memory that work on the device's own queue may use from now on."""

    @abstractmethod
    def copy_call(self, target: "Array", source: "Array") -> Call:
        """A call that enqueues a copy between two arrays of one shape and dtype."""

    @abstractmethod
    def fill_call(self, target: "Array", value: np.ndarray[Any, Any]) -> Call:
        """A call that enqueues setting every element of a contiguous array to a 0-d value."""

    def lent(self, array: "Array") -> None:  # noqa: B027
        """Told that another library may write an array from now on."""

    @abstractmethod
    def pinned_block(self, nbytes: int) -> Block:
        """Host memory that the device copies to and from without the host's help."""

    @abstractmethod
    def pinned_call(self, target: np.ndarray[Any, Any], source: "Array") -> Call:
        """A call that enqueues a copy of a contiguous array to pinned memory."""

    @abstractmethod
    def record_event(self, timing: bool = False, stream: Stream | None = None) -> Event:
        """A mark after all work enqueued so far on the device's own queue, or on a stream.

        Args:
            timing: whether `Event.since` may be asked about it.

        Raises:
            LaunchError: if the stream is closed or of another device, or during a capture.
        """

    def end(self, stream: Stream | None) -> Event:
        """As `record_event`, of a stream that may be closed since, and for waiting only."""
        return _AtOnce(self)

    def after_work(self, done: Callable[[], None]) -> None:
        """Call `done` once all work enqueued so far is complete. May be called by finalisers."""
        done()

    def wait_for_stream(self, stream: int | None) -> None:
        """Wait for another library's work, on the stream of that address or number."""
        if stream is not None:
            self.synchronize()

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all enqueued work, on all streams.

        Raises:
            DeviceError: if some of it failed.
        """

    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """(bytes that can still be allocated, bytes in all)."""

    @abstractmethod
    def info(self) -> dict[str, Any]:
        """What the device is, for people and reports: at least `name` and `kind`."""

    def make_graph(self, pieces: "list[Piece]") -> "Executable":
        """Recorded work, ready to be enqueued as one."""
        return CallList(pieces)


class _AtOnce(Event):
    """The end of work on a device that has done it when it is enqueued."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def done(self) -> bool:
        """See `Event`."""
        self._device.synchronize()
        return True

    def wait(self) -> None:
        """See `Event`."""
        self._device.synchronize()

    def since(self, earlier: Event) -> float:
        """See `Event`."""
        return 0.0


def check_device(device: object) -> None:
    """Refuse what is no device.

    Raises:
        TypeError: saying how to get one.
    """
    if not isinstance(device, Device):
        raise TypeError(
            f'expected a device, got {type(device).__name__}; tilert.device("cpu") gives one'
        )


_devices: dict[str, Device] = {}
_devices_lock = threading.Lock()


def device(name: str = "auto") -> Device:
    """The device called "cpu", "cuda" (the first GPU), "cuda:<n>" or "auto".

    "auto" is the first GPU where one can be used and the cpu otherwise.

    Raises:
        DeviceError: if there is no such device; the message says why.
    """
    if name == "auto":
        try:
            return device("cuda")
        except DeviceError:
            return device("cpu")
    if name == "cuda":
        name = "cuda:0"
    with _devices_lock:
        found = _devices.get(name)
        if found is None:
            found = _devices[name] = open_device(name)
        return found


@contextlib.contextmanager
def standing_in(other: Device) -> Iterator[None]:
    """`device(other.name)` gives `other` for a while."""
    with _devices_lock:
        before = _devices.get(other.name)
        _devices[other.name] = other
    try:
        yield
    finally:
        with _devices_lock:
            del _devices[other.name]
            if before is not None:
                _devices[other.name] = before


def open_device(name: str, check: Check = None) -> Device:
    """A new device called "cpu" or "cuda:<n>"."""
    if name == "cpu":
        from tilert.cpu_device import CpuDevice

        return CpuDevice(check)
    kind, _, number = name.partition(":")
    if kind != "cuda" or not number.isascii() or not number.isdigit():
        raise DeviceError(f"unknown device '{name}'; use cpu, cuda, cuda:<number> or auto")
    # Reached only when a GPU is asked for: importing tilert needs no CUDA.
    from tilert.cuda_device import CudaDevice

    return CudaDevice(int(number), check)
