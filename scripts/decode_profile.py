"""How long each kernel of a decode step takes on the device, beside what its bytes need.

The launches of a step are recorded. All of one kind (a kernel with arrays of one shape) go into a
graph, which is replayed between two events: in order over the layers, so that weights are out of
the cache when their turn comes again, and starting early behind each other where the step has them
start early. Bytes are counted in the tile IR of the same launches on a device that runs nothing.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import tilert
from models.prompt import PromptChunk
from models.slot import Slot
from models.transformer import Transformer
from tilert import Array, Device, ir
from tilert.device import Call
from tilert.estimate import Estimate, estimate
from tilert.recording import Piece, Recorder
from tilert.target_device import StandIn

__all__ = ["Part", "Profile", "profile"]

REPLAYS, WARM_UP = 9, 2
GRAPH_NODES = 256
"""About how many launches a graph has, so that its own start and end do not count."""


@dataclass(frozen=True)
class Launch:
    """What one launch is, and moves at least.

    Attributes:
        shape: of its largest array.
        written: bytes of the arrays that it writes.
    """

    kernel: str
    shape: tuple[int, ...]
    moved: Estimate
    written: int

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.kernel} {' x '.join(map(str, self.shape))}"


@dataclass(frozen=True)
class Part:
    """All launches of one kind in a step.

    Attributes:
        count: launches a step.
        seconds: of one launch.
        nbytes: that one launch moves at least.
    """

    label: str
    count: int
    seconds: float
    nbytes: int

    def floor(self, bandwidth: float) -> float:
        """Seconds that the bytes of one launch take at a bandwidth in bytes a second."""
        return self.nbytes / bandwidth

    def lost(self, bandwidth: float) -> float:
        """Seconds of a step above that."""
        return self.count * (self.seconds - self.floor(bandwidth))


@dataclass(frozen=True)
class Profile:
    """A decode step of one sequence.

    Attributes:
        context: tokens it attends to.
        parts: the longest first.
        seconds: of the whole step in one graph.
        copies: copies and fills of the step, which are not timed one by one.
    """

    context: int
    parts: tuple[Part, ...]
    seconds: float
    copies: int

    def json(self, bandwidth: float) -> dict[str, Any]:
        """For reports; times in microseconds."""
        return {
            "context": self.context,
            "step_us": round(1e6 * self.seconds, 2),
            "sum_us": round(1e6 * sum(p.count * p.seconds for p in self.parts), 2),
            "floor_us": round(1e6 * sum(p.count * p.floor(bandwidth) for p in self.parts), 2),
            "copies": self.copies,
            "parts": [
                {
                    "kernel": part.label,
                    "count": part.count,
                    "us": round(1e6 * part.seconds, 3),
                    "bytes": part.nbytes,
                    "floor_us": round(1e6 * part.floor(bandwidth), 3),
                    "step_us": round(1e6 * part.count * part.seconds, 2),
                }
                for part in self.parts
            ],
        }


def profile(model: Transformer, prompt: np.ndarray[Any, np.dtype[np.int32]]) -> Profile:
    """Time the step that follows a prompt.

    Raises:
        tilert.DeviceError: where there is no GPU to time.
    """
    device = model.device
    if device.kind != "cuda":
        raise tilert.DeviceError(
            f"a profile times kernels on a GPU by its events; {device.name} is none"
        )
    step = _Step(model, prompt)
    pieces = _record(device, step.run)
    launched = [piece for piece in pieces if str(piece.maker).startswith("op ")]
    counted = _count(model, len(prompt))
    if len(launched) != len(counted):
        raise RuntimeError(f"{len(launched)} launches were recorded, {len(counted)} were counted")
    kinds: dict[tuple[str, int], tuple[Launch, list[Piece]]] = {}
    for piece, launch in zip(launched, counted, strict=True):
        if f"'{launch.kernel}'" not in str(piece.maker):
            raise RuntimeError(f"{launch.kernel} was counted where {piece.maker} was recorded")
        kinds.setdefault((launch.label, launch.moved.least), (launch, []))[1].append(piece)
    seconds = _time(device, pieces, 1, step.reset)
    parts = []
    for launch, same in kinds.values():
        turns = max(1, round(GRAPH_NODES / len(same)))
        each = _time(device, same * turns, len(same) * turns, step.reset)
        parts.append(Part(launch.label, len(same), each, _bytes(model, launch, len(prompt) + 1)))
    step.close()
    parts.sort(key=lambda part: -part.count * part.seconds)
    return Profile(len(prompt) + 1, tuple(parts), seconds, len(pieces) - len(launched))


class _Step:
    """A sequence behind its prompt, in a cache of its own."""

    def __init__(self, model: Transformer, prompt: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        self._model = model
        self._place = len(prompt)
        pages = -(-model.max_len // model.page_size)
        self._cache = model.new_cache(pages, 1)
        self._cache.set_pages(0, list(range(pages)))
        self._batch = model.new_batch(self._cache, 1)
        self._batch.set([Slot(row=0, token=0, position=0)])
        # A long prompt in the chunks in which it is served.
        for start in range(0, len(prompt), 1024):
            part = prompt[start : start + 1024]
            model.prefill(self._cache, self._batch, [PromptChunk(part, start)])

    def run(self) -> None:
        """The step."""
        self._model.decode(self._cache, self._batch)

    def reset(self) -> None:
        """Be at the first token behind the prompt again: steps and parts of steps move on."""
        self._batch.set([Slot(row=0, token=1, position=self._place)])

    def close(self) -> None:
        """Wait until nothing uses the memory."""
        self._model.device.synchronize()


def _record(device: Device, work: Callable[[], None]) -> list[Piece]:
    """What `work` enqueues, in order, each piece with the call that enqueues it."""
    with device.lock:
        device.refuse_in_capture("another recording")
        device.recorder = recorder = Recorder()
        try:
            work()
        finally:
            device.recorder = None
    return recorder.pieces


def _time(
    device: Device, pieces: Sequence[Piece], launches: int, reset: Callable[[], None]
) -> float:
    """Seconds of one of so many launches of pieces in a graph; the median of the replays."""
    # What stands several times in a graph is several pieces.
    graph = device.make_graph([Piece(p.call, p.uses, p.maker, p.lane) for p in pieces])
    uses = [use for piece in {id(p): p for p in pieces}.values() for use in piece.uses]
    times = []
    try:
        for _ in range(WARM_UP + REPLAYS):
            reset()
            before = device.record_event(timing=True)
            device.submit(graph.enqueue, uses)
            after = device.record_event(timing=True)
            after.wait()
            times.append(after.since(before) / launches)
    finally:
        graph.close()
    return statistics.median(times[WARM_UP:])


def _bytes(model: Transformer, launch: Launch, context: int) -> int:
    """Bytes that a launch moves at least.

    How many pages of the cache attention reads follows from what arrays hold: all of the context.
    """
    if not launch.kernel.startswith("decode_attention"):
        return launch.moved.least
    token = model.page_bytes() // model.page_size // model.config.num_layers
    return launch.written + token * context


# -- counting ------------------------------------------------------------------------------------


class _Counter(StandIn):
    """A device that runs and compiles nothing, and notes what is launched."""

    def __init__(self, like: Device) -> None:
        super().__init__(like)
        self.noted: list[Launch] = []

    def compile(self, function: ir.Function) -> "_Noting":
        """See `Device`."""
        return _Noting(self, function)


class _Noting:
    """Stands for a compiled kernel."""

    def __init__(self, counter: _Counter, function: ir.Function) -> None:
        self._counter, self._function = counter, function
        self._known: dict[object, Launch] = {}

    def bind(
        self,
        arrays: Sequence[Array],
        index_maps: Mapping[int, Array],
        grid: tuple[int, ...],
        programs: int | None = None,
    ) -> Call:
        """A call that notes the launch."""
        launch = self._known.get(alike := (tuple(array.shape for array in arrays), grid))
        if launch is None:
            moved = estimate(self._function, arrays, grid)
            largest = max(arrays, key=lambda array: array.nbytes)
            muts = [p.position for p in self._function.params if p.kind == "mut"]
            written = sum(arrays[position].nbytes for position in muts)
            launch = Launch(self._function.name, largest.shape, moved, written)
            self._known[alike] = launch
        return lambda queue: self._counter.noted.append(launch)


def _count(model: Transformer, prompt: int) -> list[Launch]:
    """The launches of a step of the model, in order."""
    counter = _Counter(model.device)
    twin = Transformer.random(model.config, counter, model.dtype, max_len=model.max_len)
    step = _Step(twin, np.zeros(min(prompt, 1), np.int32))
    counter.noted.clear()
    step.run()
    return counter.noted
