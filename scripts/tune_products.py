"""Times of tiles of pipelined products on a GPU, and the costs of `HopperTiling` fitted to them.

    python -m scripts.tune_products --seconds 150 --out tiles.jsonl
    python -m scripts.tune_products --fit tiles.jsonl

Each line of the file is one tile of one shape, its output checked against float64 before it was
timed. `--fit` measures nothing: it prints costs for `models/tiling.py`, and how much longer than
the best tile of each shape what they choose takes. Exit status 2: there is no GPU.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import tilert
from models.tiling import HopperTiling, TileCost, quickest, time_of
from scripts.bench_kernels import copies_of, measure
from scripts.kernel_cases import PROJECTIONS, Case, Variant
from scripts.kernel_work import Memory, work_of

TOKENS = (4, 16, 32, 64, 128, 192, 256, 384, 512, 1024, 2048, 8192)
SHARES = (1, 2, 4, 8)
MOST_SHARED = 512
"""Tokens up to which shares are tried."""
MARGIN = 1.12
"""What takes less than this times what memory takes says nothing about the products."""

Row = dict[str, Any]


def tries() -> Iterator[tuple[Case, Variant]]:
    """Every tile and number of shares that makes sense of every shape."""
    for tokens in TOKENS:
        for name, (outputs, inputs) in PROJECTIONS.items():
            case = Case("gemm", name, (("m", tokens), ("n", outputs), ("k", inputs)))
            for tile in HopperTiling.product_costs:
                for shares in SHARES if tokens <= MOST_SHARED else (1,):
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
        got = measure(memory, work, variant)
        yield {
            "tokens": case["m"],
            "outputs": case["n"],
            "inputs": case["k"],
            "tile": list(variant.tile),
            "us": round(1e6 * float(np.median(got["times"])), 3),
            "error": got["error"],
        }


def fit(rows: Sequence[Row], bandwidth: float) -> tuple[TileCost, ...]:
    """Costs of each tile: least squares of relative differences, of what memory does not bound.

    Args:
        bandwidth: bytes of operands a microsecond.
    """
    costs = []
    for high, wide, deep in sorted({tuple(row["tile"][:3]) for row in rows}):
        wave_only = TileCost(high, wide, deep, 1.0, 0.0)
        step_only = TileCost(high, wide, deep, 0.0, 1.0)
        points = []
        for row in rows:
            if row["tile"][:3] != [high, wide, deep]:
                continue
            shape = row["tokens"], row["outputs"], row["inputs"]
            waves = time_of(wave_only, row["tile"][3], *shape)
            steps = time_of(step_only, row["tile"][3], *shape)
            us = row["us"] - waves.sums
            if us > MARGIN * memory_of(row, bandwidth):
                points.append((waves.products / row["us"], steps.products / row["us"],
                               us / row["us"]))  # fmt: skip
        if len(points) > 3:
            table = np.array(points)
            wave, step = np.linalg.lstsq(table[:, :2], table[:, 2], rcond=None)[0]
            costs.append(TileCost(high, wide, deep, round(float(wave), 2), round(float(step), 3)))
    return tuple(costs)


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
    costs = fit(rows, HopperTiling.bandwidth)
    for cost in costs:
        print(cost)
    over = regrets(rows, costs, HopperTiling.bandwidth)
    print(json.dumps({
        "rows": len(rows),
        "shapes": len(over),
        "mean_regret": round(float(np.mean(over)), 4) if over else None,
        "most": round(max(over), 4) if over else None,
    }))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
