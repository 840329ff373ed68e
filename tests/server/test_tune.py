"""`grout tune`, on a device that passes for a GPU."""

import argparse
from pathlib import Path

import pytest

import tilert
from models import tuner, winners
from models.candidates import Problem
from models.tile_sizes import ProductTiles
from models.winners import Winner
from server.cli import main
from server.exceptions import CommandError
from server.tune import tune
from tests.models.tuning_support import FakeGpu
from tilert import bf16


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    device = FakeGpu()
    monkeypatch.setattr(tilert, "device", lambda name: device)
    monkeypatch.setenv("GROUT_CACHE", str(tmp_path))
    return device


def test_winners_are_kept_and_told_of(
    gpu: FakeGpu, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        """The second tile of each product is the quickest; the first is what is usual."""

        def __init__(self, device: tilert.Device) -> None:
            self._times = [3e-6, 2e-6, 2e-6, 3e-6] * 4

        def seconds(self, calls: object) -> float:
            return self._times.pop(0)

    monkeypatch.setattr(tuner, "GraphClock", Clock)
    assert main(["tune", "tiny-qwen3", "--tokens", "16", "--most", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("product of 16 x 256 x 64: ")
    assert lines[0].endswith(", 2.0 us, 1.50 times as quick as before")
    found = winners.identity(gpu, bf16)
    assert found is not None
    place = winners.path_of(found)
    assert lines[4] == f"4 of 4 products tuned, 4 quicker than before, kept in {place}"
    kept = winners.read(gpu, bf16)
    assert len(kept) == 4 and {winner.seconds for winner in kept.values()} == {2e-6}


def test_when_the_time_is_up(
    gpu: FakeGpu, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem("product", 16, 256, 64)
    given = []

    def some(device: object, dtype: object, work: object, *_: object) -> object:
        for task in work:  # type: ignore[attr-defined]
            given.append(task)
            yield Winner(problem, ProductTiles(64, 32, 64), 1e-6, 1e-6)

    monkeypatch.setattr(tuner, "tune", some)
    options = argparse.Namespace(model="tiny-qwen3", device="cuda", dtype="auto", tokens=[16, 32],
                                 most=2, seconds=3.5)  # fmt: skip
    ticks = iter(range(100))
    assert tune(options, lambda: float(next(ticks))) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    # The first look at the clock says when it began.
    assert len(given) == 3
    assert last.startswith("3 of 8 products tuned, 0 quicker than before, kept in ")
    assert last.endswith("; 5 not begun, the time was up")


def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "tiny-qwen3", "--device", "cpu"]) == 2
    assert capsys.readouterr().err == "grout: error: tiles are tuned on a GPU; cpu is none\n"


def test_a_folder_that_cannot_be_written(gpu: FakeGpu, tmp_path: Path) -> None:
    (tmp_path / "tiles").write_text("in the way")
    options = argparse.Namespace(model="tiny-qwen3", device="cuda", dtype="auto", tokens=[16],
                                 most=1, seconds=100.0)  # fmt: skip
    with pytest.raises(CommandError, match=r"the tiles cannot be kept: .*exists"):
        tune(options)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["--tokens", "0"], "'0' is not a whole number above 0"), (["--most", "-1"], "'-1' is not"),
     (["--seconds", "long"], "'long' is not a number of seconds")],
)  # fmt: skip
def test_options_that_make_no_sense(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "tiny-qwen3", *arguments]) == 2
    assert says in capsys.readouterr().err
