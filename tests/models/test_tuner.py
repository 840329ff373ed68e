"""The tuner, on the cpu and with a clock that says what it is told."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import tilert
from models import kernels, tuner
from models.candidates import Problem, declared
from models.hopper_tiling import HopperTiling
from models.presets import PRESETS
from models.tile_sizes import ProductTiles
from models.tiling import tiling_of
from models.tuner import GraphClock, Task, Tried, recorded, tasks, tune
from models.winners import Winner
from tests.models.tuning_support import FakeGpu
from tilert import CompileError, bf16, f16, f32

PRODUCT = Task(Problem("product", 70, 96, 512), residual=False)
RESIDUAL = Task(Problem("product", 70, 96, 512), residual=True)
GATED = Task(Problem("gate_up", 70, 96, 128), residual=False)


class FakeClock:
    """Times in the order in which they are asked for; every call that is timed is made."""

    def __init__(self, *seconds: float) -> None:
        self._left = list(seconds)
        self.asked = 0

    def seconds(self, calls: Sequence[Callable[[], object]]) -> float:
        for call in calls:
            call()
        self.asked += 1
        return self._left.pop(0) if self._left else 1.0


def run(
    task: Task, clock: tuner.Clock, most: int = 4, dtype: tilert.DType = bf16
) -> tuple[list[Winner], list[Tried]]:
    notes: list[Tried] = []
    return list(tune(FakeGpu(), dtype, [task], clock, most, notes.append)), notes


@pytest.mark.parametrize("dtype", [bf16, f16, f32])
@pytest.mark.parametrize("task", [PRODUCT, RESIDUAL, GATED], ids=["product", "residual", "gated"])
def test_the_quickest_wins(task: Task, dtype: tilert.DType) -> None:
    # Four tries, then three finalists and the usual one, in the order of their times.
    clock = FakeClock(4.0, 2.0, 3.0, 5.0, 2.1, 3.1, 3.5)
    (winner,), notes = run(task, clock, dtype=dtype)
    tries = declared(tiling_of(FakeGpu(), dtype), task.problem)[:4]
    assert [note.tiles for note in notes] == tries
    assert [note.seconds for note in notes] == [4.0, 2.0, 3.0, 5.0]
    assert winner == Winner(task.problem, tries[1], 2.0, 3.5)
    assert clock.asked == 7


def test_shares_are_computed_too() -> None:
    _, notes = run(RESIDUAL, FakeClock(), most=100)
    assert {note.tiles.shares for note in notes} == {1, 2}
    assert all(note.seconds == 1.0 for note in notes)


def test_the_usual_tile_stays_where_another_is_hardly_quicker() -> None:
    (winner,), _ = run(PRODUCT, FakeClock(1.0, 0.995, 2.0, 2.0, 0.996, 1.0, 2.0))
    assert winner.tiles == declared(HopperTiling(), PRODUCT.problem)[0]
    assert winner.seconds == winner.usual == 1.0


def wrong_for(
    monkeypatch: pytest.MonkeyPatch, tiles: ProductTiles, make: Callable[..., Any]
) -> None:
    """The kernel is another one where it is asked for that tile."""
    right = kernels.linear

    def linear(y: Any, x: Any, w: Any, bk: int) -> Any:
        asked = (*y.tile, bk) == (tiles.rows, tiles.columns, tiles.depth)
        return make(y, x, w, bk=bk) if asked else right(y, x, w, bk=bk)

    monkeypatch.setattr(kernels, "linear", linear)


@tilert.kernel
def forgets_the_end(y: tilert.Mut, x: tilert.Ref, w: tilert.Ref, bk: tilert.Const[int]):  # type: ignore[no-untyped-def, type-arg]
    m, n = y.index
    acc = tilert.language.zeros(y.shape, f32)
    for k in tilert.language.tiles(x, axis=1, size=64, start=0, stop=7):
        acc = tilert.language.mma(x[m, k], w[n, k].T, acc)
    y.store(acc)


@tilert.kernel
def writes_nothing(y: tilert.Mut, x: tilert.Ref, w: tilert.Ref, bk: tilert.Const[int]):  # type: ignore[no-untyped-def, type-arg]
    if x.shape[0] < 0:
        y.store(tilert.language.zeros(y.shape, f32))


@pytest.mark.parametrize("kernel", [forgets_the_end, writes_nothing], ids=["end", "nothing"])
def test_a_tile_with_a_wrong_output_never_wins(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = declared(HopperTiling(), PRODUCT.problem)[:4]
    single = next(t for t in tries[1:] if t.shares == 1)
    wrong_for(monkeypatch, single, kernel)
    clock = FakeClock()
    (winner,), notes = run(PRODUCT, clock)
    (note,) = [note for note in notes if note.tiles == single]
    assert note.seconds is None and note.wrong.startswith("its output is wrong by ")
    assert winner.tiles == tries[0]
    # Three that were right, and the same once more.
    assert clock.asked == 6


def test_the_usual_tile_may_be_the_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = declared(HopperTiling(), PRODUCT.problem)[:3]
    assert tries[0].shares == 1
    wrong_for(monkeypatch, tries[0], writes_nothing)
    (winner,), _ = run(PRODUCT, FakeClock(3.0, 2.0, 2.0, 3.0), most=3)
    assert winner.tiles == tries[2] and winner.usual == winner.seconds


def test_a_tile_that_does_not_compile_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise CompileError("too many registers")

    tries = declared(HopperTiling(), PRODUCT.problem)[:4]
    wrong_for(monkeypatch, tries[0], refuse)
    (winner,), notes = run(PRODUCT, FakeClock())
    assert notes[0].wrong == "it does not compile: too many registers"
    assert winner.tiles != tries[0]


def test_products_of_which_no_tile_is_right_have_no_winner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuner._Bench, "error", lambda *_: float("nan"))
    found, notes = run(PRODUCT, FakeClock())
    assert found == [] and len(notes) == 4


def test_problems_are_those_of_the_engine() -> None:
    config, base = PRESETS["qwen3-4b"], HopperTiling()
    found = tasks(config, base, bf16, [2, 512])
    # At 2 tokens the norm is done within the products.
    assert found == [
        Task(Problem("product", 512, 6144, 2560), False),
        Task(Problem("product", 512, 2560, 4096), True),
        Task(Problem("gate_up", 512, 9728, 2560), False),
        Task(Problem("product", 512, 2560, 9728), True),
    ]
    assert recorded(base, 8, 100) == [1, 2, 4, 8, 16, 32, 48, 64, 96, 100]


def test_a_clock_of_recorded_calls() -> None:
    device = tilert.device("cpu")
    y = tilert.empty((8,), f32, device)
    x = tilert.from_numpy(np.arange(8, dtype=np.float32), device)
    counted = []

    def call() -> None:
        counted.append(1)
        y.copy_from(x)

    found = GraphClock(device, graph_seconds=0.0, replays=3).seconds([call, call])
    assert found >= 0
    # Each is recorded twice: to see how long it takes, and for the replays.
    assert len(counted) == 4
