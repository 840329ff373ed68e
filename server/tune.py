"""`grout tune`: finds the quickest tiles for a model's products on this GPU and keeps them."""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import tilert
from grout.config import EngineConfig
from grout.loading import DTYPES
from models import tuner, winners
from models.config import ModelConfig
from models.presets import PRESETS
from models.source import open_checkpoint
from models.tile_sizes import ProductTiles
from models.tiling import tiling_of
from server.exceptions import CommandError

__all__ = ["tune"]


def tune(options: argparse.Namespace, clock: Callable[[], float] = time.monotonic) -> int:
    """Tune and print a line a product; returns the exit code.

    Raises:
        CommandError: where there is no GPU, or the winners cannot be kept.
    """
    device = tilert.device(options.device)
    config = EngineConfig(dtype=options.dtype).resolve(device.kind)
    dtype = DTYPES[config.dtype]
    if winners.identity(device, dtype) is None:
        raise CommandError(f"tiles are tuned on a GPU; {device.name} is none")
    base, model = tiling_of(device, dtype), _shape(options.model)
    tokens = options.tokens or tuner.recorded(base, config.max_num_seqs, config.chunk(device.kind))
    tasks = tuner.tasks(model, base, dtype, tokens)
    end = clock() + options.seconds
    begun = 0

    def in_time() -> Iterator[tuner.Task]:
        nonlocal begun
        for task in tasks:
            if clock() > end:
                return
            begun += 1
            yield task

    found = better = 0
    place: Path | None = None
    measuring = tuner.GraphClock(device)
    for winner in tuner.tune(device, dtype, in_time(), measuring, options.most, _say_wrong):
        found += 1
        better += winner.seconds < winner.usual
        place = _keep(device, dtype, winner)
        print(_line(winner), flush=True)
    late = f"; {len(tasks) - begun} not begun, the time was up" * (begun < len(tasks))
    where = f", kept in {place}" if place else ""
    print(f"{found} of {len(tasks)} products tuned, {better} quicker than before{where}{late}")
    return 0


def _shape(model: str | None) -> ModelConfig:
    """Of a preset or a checkpoint, whose weights are not read."""
    return PRESETS[model] if model in PRESETS else open_checkpoint(model).config


def _keep(device: tilert.Device, dtype: tilert.DType, winner: winners.Winner) -> Path:
    try:
        return winners.keep(device, dtype, [winner])
    except OSError as error:
        raise CommandError(f"the tiles cannot be kept: {error}") from None


def _say_wrong(tried: tuner.Tried) -> None:
    if tried.wrong:
        print(f"{tried.problem}: {_shown(tried.tiles)} is left out: {tried.wrong}", flush=True)


def _line(winner: winners.Winner) -> str:
    gain = f", {winner.usual / winner.seconds:.2f} times as quick as before"
    return (
        f"{winner.problem}: {_shown(winner.tiles)}, {1e6 * winner.seconds:.1f} us"
        + gain * (winner.seconds < winner.usual)
    )  # fmt: skip


def _shown(tiles: ProductTiles) -> str:
    shares = f" in {tiles.shares} shares" * (tiles.shares > 1)
    return f"{tiles.rows} x {tiles.columns} x {tiles.depth}{shares}"
