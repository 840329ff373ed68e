"""A device whose queues run late and in any legal order, on the cpu.

Work is put in lists and done when the host waits, and at random moments before: each queue in
order, queues among each other as chance has it. Freed memory is handed out again at once, and
filled with garbage when the free and the allocation are reached. So an order that somebody forgot
to ask for shows as a wrong result.
"""

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tests.tilert.host_fakes import FakeLauncher
from tilert import ir
from tilert.array import Array
from tilert.cpu_device import CpuDevice, host_view
from tilert.device import Call, Launcher
from tilert.event import Event
from tilert.order import Record
from tilert.queued_device import QueuedBlock, QueuedDevice
from tilert.recording import Piece, issue

__all__ = ["Forgetful", "SimulatedDevice"]

_PAGE = 256


class Reached:
    """One placing of a mark."""

    done = False


class Mark:
    now = Reached()


class Queue:
    """Work that has not been done. Each item is a function, or something to wait for."""

    def __init__(self) -> None:
        self.items: deque[Callable[[], None] | Reached] = deque()

    def put(self, work: Callable[[], None]) -> None:
        self.items.append(work)

    def ready(self) -> bool:
        return bool(self.items) and (not isinstance(self.items[0], Reached) or self.items[0].done)

    def step(self) -> None:
        item = self.items.popleft()
        if not isinstance(item, Reached):
            item()


def run_one(queues: Sequence[Queue], chance: random.Random) -> bool:
    """Do one piece of work of any queue that can go on; whether there was one."""
    ready = [queue for queue in queues if queue.ready()]
    if ready:
        # Some queues are far ahead of others.
        (chance.choice(ready) if chance.random() < 0.3 else ready[-1]).step()
    return bool(ready)


class SimulatedLauncher:
    def __init__(self, inner: Launcher) -> None:
        self.inner = inner

    def bind(
        self,
        arrays: Sequence[Array],
        index_maps: Mapping[int, Array],
        grid: tuple[int, ...],
        programs: int | None = None,
    ) -> Call:
        call = self.inner.bind(arrays, index_maps, grid)
        return lambda queue: queue.put(lambda: call(None))


class SimulatedEvent(Event):
    def __init__(self, device: "SimulatedDevice", queue: Queue) -> None:
        self.device = device
        self.mark = Mark()
        device.put_mark(self.mark, queue)

    def done(self) -> bool:
        return self.device.passed(self.mark)

    def wait(self) -> None:
        self.device.wait_mark(self.mark)

    def since(self, earlier: Event) -> float:
        return 0.0


class SimulatedDevice(QueuedDevice):
    """See the module.

    Attributes:
        waits: how often a queue was told to wait for another. marks: how often one was marked.
        late: the chance that nothing is done while work is enqueued.
    """

    kind = "simulated"

    def __init__(self, seed: int = 0, late: float = 0.7) -> None:
        super().__init__("simulated")
        self.chance = random.Random(seed)
        self.late = late
        self.waits = 0
        self.marks = 0
        self.cpu = CpuDevice(check=False)
        self.queues: list[Queue] = []
        self.buffers: dict[int, np.ndarray] = {}
        self.unused: dict[int, list[int]] = {}
        self.open(self.make_queue())

    def enter(self) -> None:
        """See `QueuedDevice`."""

    # Running

    def advance(self) -> None:
        """Let the device do something, perhaps."""
        with self.lock:
            while self.chance.random() > self.late and run_one(self.queues, self.chance):
                pass

    def run_until(self, over: Callable[[], bool]) -> None:
        with self.lock:
            while not over():
                self.chance.shuffle(self.queues)
                assert run_one(self.queues, self.chance), "the queues wait for each other"

    def make_queue(self) -> Queue:
        queue = Queue()
        self.queues.append(queue)
        return queue

    def wait_queue(self, queue: Queue) -> None:
        self.run_until(lambda: not queue.items)

    def make_mark(self) -> Mark:
        return Mark()

    def put_mark(self, mark: Mark, queue: Queue) -> None:
        self.marks += 1
        mark.now = reached = Reached()
        queue.put(lambda: setattr(reached, "done", True))

    def hold(self, queue: Queue, mark: Mark) -> None:
        self.waits += 1
        queue.items.append(mark.now)

    def passed(self, mark: Mark) -> bool:
        with self.lock:
            # Whoever asks again and again sees it pass.
            run_one(self.queues, self.chance)
        return mark.now.done

    def wait_mark(self, mark: Mark) -> None:
        now = mark.now
        self.run_until(lambda: now.done)

    def make_event(self, queue: Queue, timing: bool) -> Event:
        return SimulatedEvent(self, queue)

    # Memory

    def take_memory(self, nbytes: int) -> int:
        size = -(-nbytes // _PAGE) * _PAGE
        unused = self.unused.setdefault(size, [])
        if unused:
            address = unused.pop()
        else:
            buffer = self.cpu.allocate(size).host
            address = buffer.ctypes.data
            self.buffers[address] = buffer
        self._spoil(address)
        return address

    def give_memory(self, address: int) -> None:
        self._spoil(address)
        self.unused[self.buffers[address].size].append(address)

    def _spoil(self, address: int) -> None:
        buffer, value = self.buffers[address], self.chance.randrange(256)
        self.queue.put(lambda: buffer.fill(value))

    def host_bytes(self, address: int, nbytes: int) -> Any:
        return self.buffers[address][:nbytes]

    def pinned_block(self, nbytes: int) -> QueuedBlock:
        block = self.cpu.allocate(nbytes)

        def free(address: int, leases: list[Record], held: object = block) -> None:
            self.finish(lambda held: None, held)

        return QueuedBlock(block.address, block.host, free, self.garbage)

    # Work

    def _submit(self, *arguments: Any) -> None:
        super()._submit(*arguments)
        self.advance()

    def submit_alone(self, call: Call) -> bool:
        done = super().submit_alone(call)
        if done:
            self.advance()
        return done

    def compile(self, function: ir.Function) -> Launcher:
        fake = function.options.get("fake")
        return SimulatedLauncher(
            FakeLauncher(fake.body) if fake is not None else self.cpu.compile(function)
        )

    def upload(self, target: Array, source: np.ndarray) -> None:
        """In halves, as large copies come in parts."""
        view, data = host_view(target), np.array(source)
        half = len(view) // 2 if view.ndim else 0
        with self.transfer((target.storage, target.region, True)):
            for part in (slice(None, half), slice(half, None)):
                with self.lock:
                    at = part if view.ndim else ...
                    self.queue.put(lambda at=at: np.copyto(view[at], data[at]))

    def download(self, source: Array) -> np.ndarray:
        view = host_view(source)
        host = np.empty(view.shape, view.dtype)
        with self.transfer((source.storage, source.region, False)):
            with self.lock:
                self.queue.put(lambda: np.copyto(host, view))
                event = self.make_event(self.queue, False)
            event.wait()
        return host

    def copy_call(self, target: Array, source: Array) -> Call:
        call = self.cpu.copy_call(target, source)
        return lambda queue: queue.put(lambda: call(None))

    def fill_call(self, target: Array, value: np.ndarray) -> Call:
        call = self.cpu.fill_call(target, value)
        return lambda queue: queue.put(lambda: call(None))

    def pinned_call(self, target: np.ndarray, source: Array) -> Call:
        call = self.cpu.pinned_call(target, source)
        return lambda queue: queue.put(lambda: call(None))

    def memory(self) -> tuple[int, int]:
        return self.cpu.memory()

    def info(self) -> dict[str, Any]:
        return {"kind": self.kind, "name": self.name}

    def make_graph(self, pieces: list[Piece]) -> "SimulatedGraph":
        return SimulatedGraph(self, pieces)


class Forgetful(SimulatedDevice):
    """Queues that do not wait for each other."""

    def hold(self, queue: Queue, mark: Mark) -> None:
        self.waits += 1


class SimulatedGraph:
    """Queues that are run from their beginning at every replay.

    Attributes:
        queues: the first is the one that recording began on. waits, marks: in all of them.
    """

    def __init__(self, device: SimulatedDevice, pieces: list[Piece]) -> None:
        self.device = device
        self.updates = 0
        self._record(pieces)

    def _record(self, pieces: list[Piece]) -> None:
        queues: list[Queue] = []
        self.waits = self.marks = 0

        def take() -> Queue:
            queues.append(Queue())
            return queues[-1]

        issue(self, pieces, take)
        self.queues = queues

    # What is recorded

    def mark(self, queue: Queue) -> Mark:
        mark = Mark()
        mark.now = Reached()
        queue.items.append(_Place(mark.now))  # type: ignore[arg-type]
        self.marks += 1
        return mark

    def hold(self, queue: Queue, mark: Mark) -> None:
        self.waits += 1
        if not isinstance(self.device, Forgetful):
            queue.items.append(mark.now)

    def passed(self, mark: Mark) -> bool:
        return False

    def reuse(self, mark: Mark) -> None:
        pass

    # Executable

    def enqueue(self, queue: Queue) -> None:
        recorded = self.queues
        queue.put(lambda: self._run(recorded))

    def _run(self, recorded: list[Queue]) -> None:
        fresh: dict[Reached, Reached] = {}
        queues = []
        for one in recorded:
            queues.append(Queue())
            for item in one.items:
                if isinstance(item, _Place):
                    reached = fresh.setdefault(item.reached, Reached())
                    queues[-1].put(lambda reached=reached: setattr(reached, "done", True))
                elif isinstance(item, Reached):
                    queues[-1].items.append(fresh.setdefault(item, Reached()))
                else:
                    queues[-1].put(item)
        first = queues[0]
        while first.items:
            self.device.chance.shuffle(queues)
            assert run_one(queues, self.device.chance), "branches wait for each other"
        if not isinstance(self.device, Forgetful):
            assert not any(queue.items for queue in queues), "a branch was not joined"
        while run_one(queues, self.device.chance):
            pass

    def update(self, pieces: list[Piece]) -> None:
        self._record(pieces)
        self.updates += 1

    def close(self) -> None:
        self.queues = []


class _Place:
    """Where a mark is in a recorded queue."""

    def __init__(self, reached: Reached) -> None:
        self.reached = reached
