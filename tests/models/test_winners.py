"""Winners on disk: what is found again, and that nothing else is."""

import json
import logging
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilert
from models import winners
from models.candidates import Problem, declared
from models.hopper_tiling import HopperTiling
from models.tile_sizes import ProductTiles
from models.tiling import tiling_of
from models.winners import Winner, keep, path_of, read, tuned_tiling
from tests.models.tuning_support import FakeGpu
from tilert import bf16, f16, f32
from tilert.target_device import TargetDevice

PRODUCT = Problem("product", 512, 6144, 2560)
OTHER = Problem("product", 512, 2560, 4096)
GATED = Problem("gate_up", 512, 9728, 2560)
TILES = ProductTiles(128, 96, 64)
GATED_TILES = ProductTiles(64, 64, 64)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GROUT_CACHE", str(tmp_path))
    return tmp_path / "tiles"


def won(problem: Problem = PRODUCT, tiles: ProductTiles = TILES) -> Winner:
    return Winner(problem, tiles, 25e-6, 30e-6)


def test_what_is_kept_is_found_again_and_chosen(folder: Path) -> None:
    device = FakeGpu()
    path = keep(device, bf16, [won(), won(GATED, GATED_TILES)])
    assert path.parent == folder
    assert read(FakeGpu(), bf16) == {PRODUCT: won(), GATED: won(GATED, GATED_TILES)}
    tiling, base = tuned_tiling(device, bf16), HopperTiling()
    assert base.product(512, 6144, 2560) != TILES != base.gate_up(512, 9728, 2560)
    assert tiling.product(512, 6144, 2560) == TILES
    assert tiling.gate_up(512, 9728, 2560) == GATED_TILES
    # Of one question the answer to the other is not taken, and all else is as it was.
    assert tiling.gate_up(512, 6144, 2560) == base.gate_up(512, 6144, 2560)
    assert tiling.product(513, 6144, 2560) == base.product(513, 6144, 2560)
    assert tiling.prefill_attention(512, 64, 1, 128) == base.prefill_attention(512, 64, 1, 128)
    assert tiling.prompts == base.prompts


def test_later_winners_join_earlier_ones_or_take_their_place() -> None:
    device = FakeGpu()
    keep(device, bf16, [won(), won(OTHER)])
    newer = won(OTHER, ProductTiles(128, 80, 64))
    keep(device, bf16, [newer])
    assert read(device, bf16) == {PRODUCT: won(), OTHER: newer}


@pytest.mark.parametrize(
    "other", [FakeGpu("NVIDIA Other"), FakeGpu(driver="590.2")], ids=["device", "driver"]
)
def test_of_another_device_or_driver_nothing_is_found(other: FakeGpu) -> None:
    keep(FakeGpu(), bf16, [won()])
    assert read(other, bf16) == {}
    assert isinstance(tuned_tiling(other, bf16), HopperTiling)


def test_of_another_compiler_dtype_or_generator_nothing_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = FakeGpu()
    keep(device, bf16, [won()])
    assert read(device, f16) == {} == read(device, f32)
    with monkeypatch.context() as patch:
        patch.setattr("tilert.nvrtc.version", lambda: "99.0")
        assert read(device, bf16) == {}
    with monkeypatch.context() as patch:
        patch.setattr(winners, "_own_version", lambda: "changed")
        assert read(device, bf16) == {}
    assert read(device, bf16) == {PRODUCT: won()}


@pytest.mark.parametrize("device", [tilert.device("cpu"), TargetDevice("sm_90a")], ids=str)
def test_devices_without_times_have_no_winners(device: tilert.Device) -> None:
    assert read(device, bf16) == {}
    assert type(tuned_tiling(device, bf16)) is type(tiling_of(device, bf16))
    with pytest.raises(ValueError, match="not tuned"):
        keep(device, bf16, [won()])


def damaged(held: dict[str, Any], change: str) -> str:
    entry = held["winners"][0]
    match change:
        case "half":
            return json.dumps(held)[:-40]
        case "list":
            return json.dumps([held])
        case "format":
            held["format"] = 2
        case "foreign":
            held["made_on"]["driver"] = "1.0"
        case "binary":
            return "\x00\x01"
        case "nested":
            return "[" * 100_000
        case "no list":
            held["winners"] = 7
        case "tile":
            entry["tiles"]["columns"] = 100_000
        case "shares":
            entry["tiles"]["shares"] = 3
        case "word":
            entry["problem"]["tokens"] = "512"
        case "bool":
            entry["problem"]["tokens"] = True
        case "time":
            entry["seconds"] = float("nan")
        case "kind":
            entry["problem"]["kind"] = "other"
        case "missing":
            del entry["usual"]
        case "more":
            entry["tiles"]["more"] = 1
        case "no entry":
            held["winners"][0] = None
    return json.dumps(held)


WHOLE = {
    "half": "it is no JSON",
    "list": "it is not of format 1",
    "format": "it is not of format 1",
    "foreign": "it was made on another device",
    "binary": "it is no JSON",
    "nested": "it is no JSON",
    "no list": "it is not of format 1",
}
ENTRIES = ("tile", "shares", "word", "bool", "time", "kind", "missing", "more", "no entry")


@pytest.mark.parametrize("change", WHOLE)
def test_a_file_that_is_not_ours_is_ignored_with_a_warning(
    change: str, caplog: pytest.LogCaptureFixture
) -> None:
    device = FakeGpu()
    path = keep(device, bf16, [won()])
    path.write_text(damaged(json.loads(path.read_text()), change))
    with caplog.at_level(logging.WARNING):
        assert isinstance(tuned_tiling(device, bf16), HopperTiling)
    (warning,) = caplog.messages
    assert warning.startswith(f"tuned tiles in {path} are not used: {WHOLE[change]}")
    assert warning.endswith("delete it, or tune again")
    # The next tuning puts a whole one in its place.
    keep(device, bf16, [won()])
    assert read(device, bf16) == {PRODUCT: won()}


@pytest.mark.parametrize("change", ENTRIES)
def test_an_entry_that_cannot_be_is_left_out_with_a_warning(
    change: str, caplog: pytest.LogCaptureFixture
) -> None:
    device = FakeGpu()
    path = keep(device, bf16, [won(), won(OTHER)])
    path.write_text(damaged(json.loads(path.read_text()), change))
    with caplog.at_level(logging.WARNING):
        assert read(device, bf16) == {OTHER: won(OTHER)}
    (warning,) = caplog.messages
    assert "no tile that can be used is in the entry" in warning


@settings(max_examples=60, deadline=None)
@given(text=st.binary(max_size=200))
def test_no_bytes_bring_a_start_down(text: bytes, tmp_path_factory: Any) -> None:
    device = FakeGpu()
    found = winners.identity(device, bf16)
    assert found is not None
    path = path_of(found)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    assert read(device, bf16) == {}


def test_a_file_that_cannot_be_read(caplog: pytest.LogCaptureFixture) -> None:
    device = FakeGpu()
    path = keep(device, bf16, [won()])
    path.unlink()
    path.mkdir()
    assert read(device, bf16) == {}
    assert "it cannot be read: Is a directory" in caplog.messages[0]


def _keeps(folder: str, first: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GROUT_CACHE", folder)
        for i in range(first, first + 10):
            keep(FakeGpu(), bf16, [won(Problem("product", 512, 64 * i, 2560))])


def test_processes_that_keep_at_once_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_keeps, args=(str(tmp_path), n)) for n in (1, 11)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    assert sorted(p.outputs for p in read(FakeGpu(), bf16)) == [64 * i for i in range(1, 21)]
    kept = [path.suffix for path in (tmp_path / "tiles").iterdir()]
    assert sorted(kept) == [".json", ".lock"]


# -- what is tried -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [bf16, f32])
@pytest.mark.parametrize("problem", [PRODUCT, OTHER, GATED, Problem("product", 5, 1024, 2048)])
def test_the_usual_tile_is_tried_first_and_each_once(problem: Problem, dtype: tilert.DType) -> None:
    base = tiling_of(FakeGpu(), dtype)
    found = declared(base, problem)
    sizes = problem.tokens, problem.outputs, problem.inputs
    assert found[0] == (base.product if problem.kind == "product" else base.gate_up)(*sizes)
    assert len(set(found)) == len(found) > 3
    assert all(tiles.rows < problem.tokens + 64 for tiles in found[1:])
    assert problem.kind == "product" or {tiles.shares for tiles in found} == {1}


def test_shares_have_room_and_enough_steps() -> None:
    base = HopperTiling()
    found = declared(base, Problem("product", 512, 6144, 1024))
    # 512 x 6144 sums in 8 shares are more than there is room for; 1024 / 128 are 8 steps.
    assert {t.shares for t in found if t.depth == 128} == {1, 2}
    assert {t.shares for t in found if t.depth == 64} == {1, 2, 4}
