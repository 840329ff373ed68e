"""Random programs of ops, copies, streams, graphs and mishaps, the same on every device."""

import asyncio
import gc
import random
from collections.abc import Callable
from typing import Any

import numpy as np

import tilert
from tilert import Const, Mut, Ref, i32

__all__ = ["play"]

ROWS, COLUMNS, PART = 12, 16, 4


@tilert.kernel
def mix(y: Mut, a: Ref, b: Ref, by: Const[int] = 3):
    y.store(a.tile_like(y) * by + b.tile_like(y))


@tilert.kernel
def onto(y: Mut, a: Ref):
    y.store(y.load() * 5 + a.tile_like(y))


@tilert.kernel
def cross(y: Mut, z: Mut, a: Ref):
    v = y.load()
    y.store(z.load() + a.tile_like(y))
    z.store(v - a.tile_like(y))


class Mishap(Exception):
    """Raised by a program on purpose."""


class Program:
    """One program. Every decision follows from the seed, and everything seen is noted.

    Attributes:
        seen: what must be the same on every device.
    """

    def __init__(self, device: tilert.Device, seed: int) -> None:
        self.device = device
        self.chance = random.Random(seed)
        self.seen: list[Any] = []
        self.streams: list[tilert.Stream] = []
        self.graphs: list[tuple[tilert.Graph, list[tilert.Array]]] = []
        self.pending: list[tilert.Work] = []
        self.pool: list[tilert.Array] = []
        for _ in range(5):
            self.pool.append(self.fresh())
        self.pinned = tilert.pinned((ROWS, COLUMNS), i32, device)

    def fresh(self) -> tilert.Array:
        """A whole buffer that something has written."""
        if self.chance.random() < 0.3:
            return tilert.full((ROWS, COLUMNS), self.chance.randrange(99), i32, self.device)
        array = tilert.empty((ROWS, COLUMNS), i32, self.device)
        if self.pool and self.chance.random() < 0.5:
            a, b = self.chance.choice(self.pool), self.chance.choice(self.pool)
            return self.on(mix(array.partition(2, COLUMNS), a, b)).run()
        array.copy_from(self.numbers(ROWS, COLUMNS))
        return array

    def numbers(self, *shape: int) -> np.ndarray:
        flat = [self.chance.randrange(1000) for _ in range(int(np.prod(shape)))]
        return np.array(flat, np.int32).reshape(shape)

    def view(self, columns: bool, array: tilert.Array | None = None) -> tilert.Array:
        if array is None:
            array = self.chance.choice(self.pool)
        row = self.chance.randrange(ROWS - PART + 1)
        view = array[row : row + PART]
        if columns:
            at = self.chance.choice((0, 8))
            return view[:, at : at + 8]
        return view

    def stream(self) -> tilert.Stream | None:
        return self.chance.choice([None, *self.streams])

    def op(self) -> tilert.Work:
        """An op on random views; OwnershipError where they overlap."""
        columns = self.chance.random() < 0.3
        y, z, a, b = (self.view(columns) for _ in range(4))
        tile = (self.chance.choice((1, 2)), 8 if columns else 16)
        kind = self.chance.randrange(3)
        if kind == 0:
            return mix(y.partition(*tile), a, b, by=self.chance.choice((3, 7)))
        if kind == 1:
            return onto(y.partition(*tile), a)
        return cross(y.partition(*tile), z.partition(*tile), a)

    def on(self, work: tilert.Work) -> tilert.Work:
        stream = self.stream()
        return work if stream is None else work.on(stream)

    def work(self, depth: int = 2) -> tilert.Work:
        """Composed work."""
        draw = self.chance.random()
        if depth == 0 or draw < 0.4:
            work = self.op()
        elif draw < 0.5:
            work = tilert.ready(self.chance.randrange(9))
        elif draw < 0.75:
            work = tilert.gather(
                *(self.work(depth - 1) for _ in range(self.chance.randrange(1, 5)))
            )
        else:
            work = self.work(depth - 1).then(self.follow(depth))
        return self.on(work) if self.chance.random() < 0.3 else work

    def follow(self, depth: int) -> Callable[[Any], Any]:
        kind = self.chance.random()

        def fn(result: Any) -> Any:
            if kind < 0.1:
                raise Mishap("between launches")
            if kind < 0.5:
                return result
            return self.work(depth - 1)

        return fn

    # Actions

    def run_op(self) -> None:
        self.on(self.op()).run()

    def run_work(self) -> None:
        getattr(self.work(), self.chance.choice(("run", "run", "run", "sync", "release")))()

    def run_part(self) -> None:
        self.work().run()

    def keep_work(self) -> None:
        self.pending.append(self.work())

    def run_kept(self) -> None:
        if self.pending:
            self.pending.pop(self.chance.randrange(len(self.pending))).run()

    def drop_kept(self) -> None:
        if self.pending:
            self.pending.pop(self.chance.randrange(len(self.pending)))

    def await_work(self) -> None:
        asyncio.run(self.tasks([self.work() for _ in range(2)], self.chance.random() < 0.5))

    async def tasks(self, works: list[tilert.Work], cancel: bool) -> None:
        """The second is cancelled before it begins, or when its work is enqueued."""

        async def one(work: tilert.Work) -> Any:
            return await work

        tasks = [asyncio.ensure_future(one(work)) for work in works]
        works.clear()
        if cancel:
            tasks[1].cancel()
        await asyncio.sleep(0)
        tasks[1].cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            # Whether the work was complete by then is not the same everywhere.
            if isinstance(result, tilert.TilertError | Mishap):
                self.seen.append(type(result).__name__)

    def write(self) -> None:
        view = self.view(self.chance.random() < 0.3)
        view.copy_from(self.numbers(*view.shape))

    def read(self) -> None:
        self.seen.append(self.view(self.chance.random() < 0.3).numpy())

    def copy(self) -> None:
        columns = self.chance.random() < 0.3
        self.view(columns).copy_from(self.view(columns))

    def to_pinned(self) -> None:
        self.pinned.copy_from(self.chance.choice(self.pool))
        if self.chance.random() < 0.5:
            self.device.record_event().wait()
            self.seen.append(self.pinned.numpy.copy())

    def replace(self) -> None:
        """Memory that is freed is used again at once."""
        at = self.chance.randrange(len(self.pool))
        self.pool[at] = self.pool[at - 1]
        self.pool[at] = self.fresh()

    def open_stream(self) -> None:
        if len(self.streams) < 8:
            self.streams.append(self.device.stream())

    def close_stream(self) -> None:
        if self.streams:
            stream = self.streams.pop(self.chance.randrange(len(self.streams)))
            how = self.chance.randrange(3)
            if how == 0:
                stream.close()
            elif how == 1:
                stream.synchronize()

    def record(self) -> None:
        pool = list(self.pool)

        def step() -> None:
            for _ in range(self.chance.randrange(1, 5)):
                self.attempt(Program.run_op if self.chance.random() < 0.5 else Program.run_part)
            if self.chance.random() < 0.3:
                self.attempt(Program.copy)
            if self.chance.random() < 0.2:
                self.pinned.copy_from(self.chance.choice(self.pool))

        self.graphs.append((tilert.capture(self.device, step), pool))

    def replay(self) -> None:
        if self.graphs:
            graph, _ = self.chance.choice(self.graphs)
            for _ in range(self.chance.randrange(1, 3)):
                graph.replay(self.stream())

    def rebind(self) -> None:
        if self.graphs:
            graph, pool = self.chance.choice(self.graphs)
            at = self.chance.randrange(len(pool))
            new = self.chance.choice(self.pool)
            graph.rebind({pool[at]: new})
            pool[at] = new

    def close_graph(self) -> None:
        if self.graphs:
            graph, _ = self.graphs.pop(self.chance.randrange(len(self.graphs)))
            if self.chance.random() < 0.5:
                graph.close()

    def wait(self) -> None:
        self.device.synchronize()

    ACTIONS = (
        (run_op, 12), (run_work, 8), (keep_work, 1), (run_kept, 1), (drop_kept, 1), (await_work, 1),
        (write, 4), (read, 2), (copy, 4), (to_pinned, 1), (replace, 3), (open_stream, 3),
        (close_stream, 1), (record, 3), (replay, 8), (rebind, 3), (close_graph, 1), (wait, 0.3),
    )  # fmt: skip

    def act(self) -> None:
        actions, weights = zip(*self.ACTIONS, strict=True)
        (action,) = self.chance.choices(actions, weights)
        self.attempt(action)

    def attempt(self, action: "Callable[[Program], None]") -> None:
        try:
            action(self)
        except (tilert.TilertError, Mishap) as error:
            # What an op says of its place in memory differs; which rule it is does not.
            self.seen.append((type(error).__name__, str(error).split(":")[0]))

    def finish(self) -> None:
        self.pending.clear()
        self.streams.clear()
        for array in self.pool:
            self.seen.append(array.numpy())
        self.device.synchronize()


def play(device: tilert.Device, seed: int, actions: int = 60) -> list[Any]:
    """Everything that a program sees: values read, and errors by kind."""
    program = Program(device, seed)
    for _ in range(actions):
        program.act()
    program.finish()
    return program.seen


def same(one: list[Any], other: list[Any]) -> bool:
    """Whether two programs saw the same."""
    if len(one) != len(other):
        return False
    return all(
        np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b
        for a, b in zip(one, other, strict=True)
    )


def collected(device: tilert.Device) -> None:
    """Free what the last program has left."""
    gc.collect()
    device.synchronize()
