"""The fit of the costs of tiles, and what measures them, on the cpu."""

from pathlib import Path

import pytest

import tilert
from models.hopper_tiling import EXPOSED, HopperTiling, TileCost, quickest, time_of
from scripts import bench_kernels, tune_products
from scripts.kernel_cases import Case, Variant
from scripts.kernel_memory import Memory
from scripts.tune_products import Row, fit, memory_of, regrets

COSTS = (TileCost(64, 64, 64, 1.25, 0.2), TileCost(128, 128, 64, 2.5, 0.4))
BANDWIDTH = 4e6
MEASURED = Path(__file__).parents[2] / "docs/benchmarks/h200-product-tiles.jsonl"


def made_up(tokens: int, outputs: int, inputs: int) -> list[Row]:
    """Times of a device of which the model is right."""
    rows = []
    for tile in COSTS:
        for shares in (1, 2):
            row = {"kind": "product", "tokens": tokens, "outputs": outputs, "inputs": inputs,
                   "tile": [tile.rows, tile.columns, tile.depth, shares]}  # fmt: skip
            products, sums = time_of(tile, shares, tokens, outputs, inputs)
            memory = memory_of(row, BANDWIDTH)
            us = sums + max(products, memory) + EXPOSED * min(products, memory)
            rows.append({**row, "us": us})
    return rows


def test_time_of() -> None:
    # 2 x 96 tiles are two waves; each share has 20 of the 40 steps, and 384 tiles are three.
    assert time_of(COSTS[1], 1, 200, 12288, 2560) == (2 * (2.5 + 40 * 0.4), 0.0)
    products, sums = time_of(COSTS[1], 2, 200, 12288, 2560)
    assert products == pytest.approx(3 * (2.5 + 20 * 0.4))
    assert sums == pytest.approx(2 + 8 * 2 * 200 * 12288 / 2e6)


def test_the_fit_finds_what_times_were_made_of() -> None:
    shapes = [(t, n, k) for t in (1024, 2048, 8192) for n, k in ((4096, 2048), (2560, 9728))]
    rows = [row for shape in shapes for row in made_up(*shape)]
    # Memory that hides what it can: all that is left of it are the tenths that are exposed.
    found = fit(rows, BANDWIDTH)
    assert [(c.rows, c.columns, c.depth) for c in found] == [(64, 64, 64), (128, 128, 64)]
    for cost, want in zip(found, COSTS, strict=True):
        assert cost.step == pytest.approx(want.step, rel=0.1)
    assert regrets(rows, COSTS, BANDWIDTH) == [1.0] * len(shapes)


def test_costs_of_the_engine_are_those_of_the_measured_times(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert tune_products.main(["--fit", str(MEASURED)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "product"
    found = printed[: printed.index("gate_up")], printed[printed.index("gate_up") :]
    for cost in HopperTiling.product_costs:
        assert str(cost) in found[0]
    # Those of which there are no times are of fewer tokens.
    few = [cost for cost in HopperTiling.gate_up_costs if str(cost) not in found[1]]
    assert [(cost.rows, cost.columns) for cost in few] == [(64, 32), (64, 32), (64, 96), (128, 48)]


def test_a_slower_clock_is_no_cost() -> None:
    """Times of a shape that are all longer by a third say nothing of its tiles."""
    rows = []
    for shape in ((128, 4096, 9728), (192, 2560, 9728), (1024, 2560, 9728), (2048, 4096, 2048),
                  (8192, 9728, 2560), (8192, 2560, 2560)):  # fmt: skip
        slower = 4 / 3 if shape[0] == 8192 else 1.0
        rows += [{**row, "us": row["us"] * slower} for row in made_up(*shape)]
    for cost, want in zip(fit(rows, 1e9), COSTS, strict=True):
        assert cost.step == pytest.approx(want.step, rel=0.06)


def test_rows_past_the_last_token_are_not_chosen() -> None:
    for tokens, rows in ((17, 32), (33, 48), (64, 64)):
        assert HopperTiling().product(tokens, 2560, 4096).rows == rows
    assert HopperTiling().product(5, 1024, 2048).rows == 64
    large = HopperTiling().product(8192, 6144, 2560)
    assert (large.rows, large.columns, large.shares) == (128, 192, 1)
    assert quickest(COSTS, (1,), BANDWIDTH, 8192, 8192, 8192).columns == 128


def test_measured_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_kernels, "MOST_COPIES", 1)
    monkeypatch.setattr(bench_kernels, "GRAPH_SECONDS", 0.0)
    monkeypatch.setenv("TILERT_SCHEDULES", "")
    sizes = (("m", 70), ("n", 96), ("k", 128))
    found = [(Case("gemm", "small", sizes), Variant("a", "", (64, 32, 64, n))) for n in (1, 2)]
    found.append((Case("gated", "small", sizes), Variant("a", "", (64, 32, 64, 1))))
    rows = list(tune_products.run(Memory(tilert.device("cpu"), None), found, 60.0))
    assert [row["tile"] for row in rows] == [[64, 32, 64, 1], [64, 32, 64, 2], [64, 32, 64, 1]]
    assert [row["kind"] for row in rows] == ["product", "product", "gate_up"]
    assert all(row["us"] > 0 and row["error"] < 2e-2 for row in rows)
    late = tune_products.run(Memory(tilert.device("cpu"), None), found, -1.0)
    assert list(late) == []


def test_every_try_is_a_tile_that_fits() -> None:
    found = list(tune_products.tries())
    assert len(found) > 1000
    assert all(variant.tile[0] < case["m"] + 64 for case, variant in found)


def test_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_device(name: str) -> tilert.Device:
        raise tilert.DeviceError("CUDA is not usable: no driver")

    monkeypatch.setattr(tilert, "device", no_device)
    assert tune_products.main([]) == 2
    assert capsys.readouterr().err == "tune_products: error: CUDA is not usable: no driver\n"
