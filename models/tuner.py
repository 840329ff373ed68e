"""Finds the tile with which each product of a model takes the least time on the device at hand.

Every tile that is tried computes a product whose output is compared with float64 before its time
counts. What won goes to disk at once (`winners.py`), so that a tuning may be cut short.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

import tilert
from models import kernels
from models.candidates import Problem, declared
from models.config import ModelConfig
from models.tile_sizes import ProductTiles, Tiling
from models.tiling import tiling, tiling_of
from models.winners import Winner
from tilert import Array, Device, DType, f32

__all__ = ["Clock", "GraphClock", "Task", "Tried", "recorded", "tasks", "tune"]

Call = Callable[[], object]
Floats = NDArray[np.float64]

ROTATED_BYTES = 256 << 20
"""Weights together: several times what a second-level cache holds."""
MOST_COPIES = 8
SAMPLED = 16
"""Rows and columns at each end, and as many between, of which the output is compared."""
MOST_ERROR = {2: 1e-2, 4: 1e-4}
"""Largest difference over the largest value, by the bytes of an element: what rounding explains."""
FINALISTS = 3
"""Tiles that are timed once more, in turns."""
GAIN = 0.01
"""Share of the time by which a tile must be quicker than the usual one."""


class Clock(Protocol):
    """Measures calls."""

    def seconds(self, calls: Sequence[Call]) -> float:
        """Of one call, as they follow each other."""


class GraphClock:
    """Times calls in a recorded graph between two events of the device.

    Args:
        graph_seconds: about how long a replay takes.
    """

    def __init__(self, device: Device, graph_seconds: float = 2e-3, replays: int = 5) -> None:
        self._device, self._graph_seconds, self._replays = device, graph_seconds, replays

    def seconds(self, calls: Sequence[Call]) -> float:
        """See `Clock`; the median of the replays behind the first."""
        once = self._replay(calls, len(calls), 2)[-1]
        turns = max(1, round(self._graph_seconds / max(once * len(calls), 1e-6)))
        return statistics.median(self._replay(calls, turns * len(calls), 1 + self._replays)[1:])

    def _replay(self, calls: Sequence[Call], count: int, replays: int) -> list[float]:
        def work() -> None:
            for i in range(count):
                calls[i % len(calls)]()

        times = []
        with tilert.capture(self._device, work) as graph:
            for _ in range(replays):
                before = self._device.record_event(timing=True)
                graph.replay()
                after = self._device.record_event(timing=True)
                after.wait()
                times.append(after.since(before) / count)
        return times


@dataclass(frozen=True)
class Tried:
    """What came of one tile.

    Attributes:
        seconds: None where `wrong` says why it cannot win.
    """

    problem: Problem
    tiles: ProductTiles
    seconds: float | None
    wrong: str = ""


@dataclass(frozen=True)
class Task:
    """A product of a model.

    Attributes:
        residual: whether it is added to the residual stream.
    """

    problem: Problem
    residual: bool


def tasks(config: ModelConfig, base: Tiling, dtype: DType, tokens: Sequence[int]) -> list[Task]:
    """The products of a model's layers for each of some numbers of tokens.

    Left out are tokens so few that the norm is done in the products: those have tiles of their own.
    """
    heads, dim = config.num_heads, config.head_dim
    hidden, wide = config.hidden_size, config.intermediate_size
    layer = [
        ("product", (heads + 2 * config.num_kv_heads) * dim, hidden, False),
        ("product", hidden, heads * dim, True),
        ("gate_up", wide, hidden, False),
        ("product", hidden, wide, True),
    ]
    return [
        Task(Problem(kind, count, outputs, inputs), residual)
        for count in tokens
        for kind, outputs, inputs, residual in layer
        if not base.fuses_norm(count, outputs * inputs * (1 + (kind == "gate_up")), dtype)
    ]


def recorded(base: Tiling, sequences: int, chunk: int) -> list[int]:
    """Numbers of tokens that serving records steps of: batches, and prefills up to a chunk."""
    batches = [1 << power for power in range(sequences.bit_length())]
    return sorted({*batches, *(n for n in base.prompts if n < chunk), chunk})


class _Bench:
    """One product on a device, with the inputs of some turns.

    The output starts as zeros or what is no number, and a tile adds to it or replaces it.
    """

    def __init__(self, device: Device, dtype: DType, task: Task) -> None:
        problem = self.problem = task.problem
        self._device, self._residual = device, task.residual
        tokens, outputs, inputs = problem.tokens, problem.outputs, problem.inputs
        both = 2 if problem.kind == "gate_up" else 1
        weights = both * outputs * inputs
        copies = max(1, min(MOST_COPIES, -(-ROTATED_BYTES // (weights * dtype.itemsize))))
        # Rows are of about length 1, as behind a norm, and so are the products.
        self._x = self._random((tokens, inputs), dtype, 0, 1.0)
        shape = (outputs, inputs) if both == 1 else (2, outputs, inputs)
        std = inputs**-0.5
        self._w = [self._random(shape, dtype, 1 + i, std) for i in range(copies)]
        self._y = tilert.empty((tokens, outputs), f32 if task.residual else dtype, device)
        self._shares: Array | None = None
        rows, columns = _sampled(tokens), _sampled(outputs)
        x = _picked(self._x, rows)
        w = self._w[0].reshape(both, outputs, inputs)
        found = [x @ _picked(w[i], columns).T for i in range(both)]
        self._want = found[0] if both == 1 else found[0] / (1 + np.exp(-found[0])) * found[1]
        self._rows, self._columns = rows, columns

    def _random(self, shape: tuple[int, ...], dtype: DType, stream: int, std: float) -> Array:
        key = tilert.from_numpy(np.array([1, 2, stream], np.uint32), self._device)
        made = tilert.empty(shape, dtype, self._device)
        fill = tiling(self._device.kind).fill
        kernels.fill_normal(made.reshape(-1).partition(fill), key, std=std).run()
        return made

    def calls(self, tiles: ProductTiles) -> list[Call]:
        """The product, with each of the weights."""
        return [self._call(tiles, w) for w in self._w]

    def _call(self, tiles: ProductTiles, w: Array) -> Call:
        x, y, depth = self._x, self._y, tiles.depth
        piece = tiles.rows, tiles.columns
        if self.problem.kind == "gate_up":
            return lambda: kernels.gate_up_silu(y.partition(*piece), x, w, bk=depth).run()
        if tiles.shares == 1:
            kernel = kernels.linear_residual if self._residual else kernels.linear
            return lambda: kernel(y.partition(*piece), x, w, bk=depth).run()
        tokens, outputs = y.shape
        size = tokens * tiles.shares * outputs
        if self._shares is None or self._shares.shape[0] < size:
            self._shares = tilert.empty(size, f32, self._device)
        shares = self._shares[:size].reshape(tokens, tiles.shares, outputs)
        steps = -(-x.shape[1] // depth)
        count = -(-steps // tiles.shares)

        def call() -> None:
            parts = shares.partition(tiles.rows, 1, tiles.columns)
            kernels.linear_shares(parts, x, w, bk=depth, count=count).run()
            whole = y.partition(1, min(outputs, 1024))
            kernels.add_shares(whole, shares, residual=self._residual).run()

        return call

    def error(self, tiles: ProductTiles) -> float:
        """Of the output of a tile: the largest difference over the largest value."""
        start = 0.0 if self._residual else float("nan")
        for i in self._rows.tolist():
            row = self._y[i : i + 1]
            row.copy_from(np.full(row.shape, start, row.dtype.numpy))
        self.calls(tiles)[0]()
        got = _picked(self._y, self._rows)[:, self._columns]
        difference = float(np.abs(got - self._want).max())
        return difference / max(float(np.abs(self._want).max()), 1e-30)


def _sampled(count: int) -> NDArray[np.int64]:
    """Indices at both ends, and some between."""
    between = np.random.default_rng(count).integers(0, count, SAMPLED)
    ends = [*range(SAMPLED), *range(count - SAMPLED, count)]
    return np.unique([i for i in (*ends, *between) if 0 <= i < count])


def _picked(array: Array, rows: NDArray[np.int64]) -> Floats:
    """Rows of an array in float64."""
    found = [array[int(i) : int(i) + 1].numpy().astype(np.float64) for i in rows]
    return np.concatenate(found)


def tune(
    device: Device,
    dtype: DType,
    work: Iterable[Task],
    clock: Clock,
    most: int,
    note: Callable[[Tried], None],
) -> Iterator[Winner]:
    """The winner of each product, as it is found.

    Products of which no tile computes what it should have none.

    Args:
        most: tiles that are tried for each.
        note: is told of every tile.
    """
    base = tiling_of(device, dtype)
    for task in work:
        tries = declared(base, task.problem)[:most]
        bench = _Bench(device, dtype, task)
        times: dict[ProductTiles, float] = {}
        for tiles in tries:
            tried = _try(bench, tiles, clock, MOST_ERROR[dtype.itemsize])
            note(tried)
            if tried.seconds is not None:
                times[tiles] = tried.seconds
        if times:
            yield _decided(bench, tries[0], times, clock)


def _try(bench: _Bench, tiles: ProductTiles, clock: Clock, limit: float) -> Tried:
    try:
        error = bench.error(tiles)
        if not error <= limit:
            wrong = f"its output is wrong by {error:.1e} of the largest value"
            return Tried(bench.problem, tiles, None, wrong)
        return Tried(bench.problem, tiles, clock.seconds(bench.calls(tiles)))
    except tilert.CompileError as refused:
        return Tried(bench.problem, tiles, None, f"it does not compile: {refused}")


def _decided(
    bench: _Bench, usual: ProductTiles, times: dict[ProductTiles, float], clock: Clock
) -> Winner:
    """The quickest, once the first few and the usual tile have been timed once more."""
    again = sorted(times, key=times.__getitem__)[:FINALISTS]
    for tiles in dict.fromkeys([*again, *({usual} & times.keys())]):
        times[tiles] = min(times[tiles], clock.seconds(bench.calls(tiles)))
    best = min(times, key=times.__getitem__)
    known = times.get(usual, times[best])
    if usual in times and times[best] > (1 - GAIN) * known:
        best = usual
    return Winner(bench.problem, best, times[best], known)
