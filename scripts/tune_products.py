"""Times of tiles of pipelined products on a GPU, and the costs of `HopperTiling` fitted to them.

    python -m scripts.tune_products --seconds 150 --out tiles.jsonl
    python -m scripts.tune_products --fit tiles.jsonl

Each line of the file is one tile of one shape, its output checked against float64 before it was
timed. `--fit` measures nothing: it prints costs for `models/hopper_tiling.py`, and how much longer
than the best tile of each shape what they choose takes. Exit status 2: there is no GPU.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import tilert
from models.hopper_tiling import HopperTiling, TileCost, quickest, time_of
from scripts.bench_kernels import copies_of, measure
from scripts.kernel_cases import GATED, PROJECTIONS, Case, Variant
from scripts.kernel_memory import Memory
from scripts.kernel_work import work_of

TOKENS = (4, 16, 32, 64, 128, 192, 256, 384, 512, 1024, 2048, 8192)
SHARES = (1, 2, 4, 8)
MOST_SHARED = 512
"""Tokens up to which shares are tried."""
MARGIN = 1.12
"""What takes less than this times what memory takes says nothing about the products."""

CLOCK_TOKENS, CLOCK_TURNS = 192, 8
"""Tokens above which a product draws so much power that the clock differs from shape to shape;
turns in which clocks and costs are fitted."""

Row = dict[str, Any]


KINDS = {
    "gemm": ("product", PROJECTIONS, HopperTiling.product_costs, HopperTiling.bandwidth),
    "gated": ("gate_up", GATED, HopperTiling.gate_up_costs, HopperTiling.gate_up_bandwidth / 2),
}
"""By the group of `bench_kernels`: what `Tiling` is asked for, shapes, tiles, and bytes of operands
a microsecond; of two products as if memory had half its bandwidth."""


def tries() -> Iterator[tuple[Case, Variant]]:
    """Every tile and number of shares that makes sense of every shape."""
    for tokens, (group, (kind, shapes, tiles, _)) in product(TOKENS, KINDS.items()):
        shared = kind == "product" and tokens <= MOST_SHARED
        for name, (outputs, inputs) in shapes.items():
            case = Case(group, name, (("m", tokens), ("n", outputs), ("k", inputs)))
            for tile in tiles:
                for shares in SHARES if shared else (1,):
                    if tile.rows < tokens + 64:
                        sizes = (tile.rows, tile.columns, tile.depth, shares)
                        yield case, Variant("x".join(map(str, sizes)), "", sizes)


def run(memory: Memory, found: Iterable[tuple[Case, Variant]], seconds: float) -> Iterator[Row]:
    """A row for each, until the time is up."""
    end = time.monotonic() + seconds
    work = None
    for case, variant in found:
        if time.monotonic() > end:
            return
        if work is None or work.case != case:
            work = None
            work = work_of(memory, case, copies_of(case))
        (got,) = measure(memory, work, [variant])
        if "failed" in got:
            raise RuntimeError(f"{case.label}, tile {variant.name}: {got['failed']}")
        yield {
            "kind": KINDS[case.group][0],
            "tokens": case["m"],
            "outputs": case["n"],
            "inputs": case["k"],
            "tile": list(variant.tile),
            "us": round(1e6 * float(np.median(got["times"])), 3),
            "error": got["error"],
        }


def fit(rows: Sequence[Row], bandwidth: float) -> tuple[TileCost, ...]:
    """Costs of each tile: least squares of relative differences, of what memory does not bound.

    What a shape of many tokens takes with all tiles alike, more or less than their costs say, is
    the clock of the device while it was measured, and is left out of them.

    Args:
        bandwidth: bytes of operands a microsecond.
    """
    points: dict[_Sizes, list[_Point]] = {}
    for row in rows:
        high, wide, deep, shares = row["tile"]
        tile, shape = (high, wide, deep), (row["tokens"], row["outputs"], row["inputs"])
        waves = time_of(TileCost(*tile, 1.0, 0.0), shares, *shape)
        steps = time_of(TileCost(*tile, 0.0, 1.0), shares, *shape)
        us = row["us"] - waves.sums
        if us > MARGIN * memory_of(row, bandwidth):
            points.setdefault(tile, []).append(
                _Point(shape, waves.products / us, steps.products / us)
            )
    points = {tile: found for tile, found in points.items() if len(found) > 3}
    slower: dict[_Sizes, float] = {}
    costs: dict[_Sizes, NDArray[np.float64]] = {}
    for _ in range(CLOCK_TURNS):
        logs: dict[_Sizes, list[float]] = {}
        for tile, found in points.items():
            table = np.array([(p.waves, p.steps) for p in found])
            clocks = np.array([slower.get(p.shape, 1.0) for p in found])
            ones = np.ones(len(found))
            costs[tile] = np.linalg.lstsq(table * clocks[:, None], ones, rcond=None)[0]
            for p, share in zip(found, table @ costs[tile], strict=True):
                logs.setdefault(p.shape, []).append(-float(np.log(share)))
        slower = {shape: float(np.exp(np.median(of)))
                  for shape, of in logs.items() if shape[0] > CLOCK_TOKENS}  # fmt: skip
    return tuple(
        TileCost(*tile, round(float(wave), 2), round(float(step), 3))
        for tile, (wave, step) in sorted(costs.items())
    )


_Sizes = tuple[int, int, int]
"""Of a tile, or tokens, outputs and inputs."""


class _Point(NamedTuple):
    """Waves and steps of a tile, over the time of a product of some shape."""

    shape: _Sizes
    waves: float
    steps: float


def memory_of(row: Row, bandwidth: float) -> float:
    """Microseconds for operands and output."""
    tokens, outputs, inputs = row["tokens"], row["outputs"], row["inputs"]
    return 2 * float(tokens * (inputs + outputs) + outputs * inputs) / bandwidth


def regrets(rows: Sequence[Row], costs: tuple[TileCost, ...], bandwidth: float) -> list[float]:
    """Time of what the costs choose over the best, of each shape whose choice was measured."""
    shapes: dict[tuple[int, int, int], dict[tuple[int, ...], float]] = {}
    for row in rows:
        shape = row["tokens"], row["outputs"], row["inputs"]
        shapes.setdefault(shape, {})[tuple(row["tile"])] = row["us"]
    out = []
    for shape, times in shapes.items():
        shares = tuple(sorted({tile[3] for tile in times}))
        chosen = quickest(costs, shares, bandwidth, *shape)
        tile = chosen.rows, chosen.columns, chosen.depth, chosen.shares
        if tile in times:
            out.append(times[tile] / min(times.values()))
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    parser = argparse.ArgumentParser(prog="tune_products", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=150, help="for all (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("tiles.jsonl"), help="(%(default)s)")
    parser.add_argument("--fit", type=Path, metavar="FILE", help="fit what was measured before")
    args = parser.parse_args(argv)
    if args.fit is None:
        try:
            device = tilert.device("cuda")
        except tilert.DeviceError as error:
            print(f"tune_products: error: {error}", file=sys.stderr)
            return 2
        try:
            import torch
        except ImportError:
            torch = None
        with args.out.open("w", encoding="utf-8") as file:
            for row in run(Memory(device, torch), tries(), args.seconds):
                print(json.dumps(row), file=file, flush=True)
                print(f"{row['tokens']} x {row['outputs']} x {row['inputs']}, tile {row['tile']}:"
                      f" {row['us']} us", file=sys.stderr)  # fmt: skip
    rows = [json.loads(line) for line in (args.fit or args.out).read_text("utf-8").splitlines()]
    report = {}
    for kind, _, _, bandwidth in KINDS.values():
        mine = [row for row in rows if row["kind"] == kind]
        costs = fit(mine, bandwidth)
        print(kind, *costs, sep="\n")
        over = regrets(mine, costs, bandwidth)
        report[kind] = {
            "rows": len(mine),
            "shapes": len(over),
            "mean_regret": round(float(np.mean(over)), 4) if over else None,
            "most": round(max(over), 4) if over else None,
        }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
