"""Tiles that were the quickest when they were tried on this very device: what is kept of a tuning.

One file a device, driver, compiler and dtype, in `tiles` beside the compiled kernels. Its name is a
hash of them, so that after an update nothing old is found; what it holds is looked at entry by
entry before it is believed.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import tilert
from models.candidates import KINDS, Problem, declared
from models.files import reason
from models.tile_sizes import ProductTiles, Tiling
from models.tiling import tiling_of
from tilert import Device, DType, entries, nvrtc_version

__all__ = ["TunedTiling", "Winner", "identity", "keep", "path_of", "read", "tuned_tiling"]

_log = logging.getLogger(__name__)

FORMAT = 1

Identity = dict[str, str | int]


@dataclass(frozen=True)
class Winner:
    """The tile with which a product took the least time.

    Attributes:
        seconds: it took.
        usual: seconds of the tile that is taken where nothing was tried.
    """

    problem: Problem
    tiles: ProductTiles
    seconds: float
    usual: float


def identity(device: Device, dtype: DType) -> Identity | None:
    """What a time depends on besides the product: device, driver, compiler and type of the weights.

    None for devices whose tiles are not tuned: those that are no GPU, or only compile.
    """
    info = device.info()
    if device.kind != "cuda" or "driver" not in info:
        return None
    return {
        "device": str(info["name"]),
        "arch": str(info["arch"]),
        "multiprocessors": int(info["multiprocessors"]),
        "driver": str(info["driver"]),
        "nvrtc": nvrtc_version.version(),
        "compiler": _own_version(),
        "dtype": dtype.name,
    }


@functools.cache
def _own_version() -> str:
    """A hash of what makes kernels of tiles: the code generator and the kernels themselves."""
    package = Path(tilert.__file__).parent
    folders = (package, package / "codegen", Path(__file__).parent / "kernels")
    digest = hashlib.sha256()
    for path in (path for folder in folders for path in sorted(folder.glob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def path_of(found: Identity) -> Path:
    """Where the winners of a device are kept."""
    name = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:24]
    return entries.folder().parent / "tiles" / f"{name}.json"


def read(device: Device, dtype: DType) -> dict[Problem, Winner]:
    """What was kept for a device; nothing, and a warning, where the file cannot be used.

    Entries whose tile is not among those that are tried are left out, with a warning.
    """
    found = identity(device, dtype)
    return {} if found is None else _read(path_of(found), found, tiling_of(device, dtype))


def _read(path: Path, found: Identity, base: Tiling) -> dict[Problem, Winner]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        return _useless(path, f"it cannot be read: {reason(error)}")
    try:
        held = json.loads(text)
    except (ValueError, RecursionError):
        return _useless(path, "it is no JSON")
    if (
        not isinstance(held, dict)
        or held.get("format") != FORMAT
        or not isinstance(held.get("winners"), list)
    ):
        return _useless(path, f"it is not of format {FORMAT}")
    if held.get("made_on") != found:
        return _useless(path, "it was made on another device, or with other versions")
    winners = {}
    for entry in held["winners"]:
        winner = _winner(entry, base)
        if winner is None:
            _log.warning("%s: no tile that can be used is in the entry %.200r", path, entry)
        else:
            winners[winner.problem] = winner
    return winners


def _useless(path: Path, why: str) -> dict[Problem, Winner]:
    _log.warning("tuned tiles in %s are not used: %s; delete it, or tune again", path, why)
    return {}


def _winner(entry: Any, base: Tiling) -> Winner | None:
    """An entry of a file, None unless all of it is as it should be."""
    try:
        problem = Problem(**entry["problem"])
        tiles = ProductTiles(**entry["tiles"])
        seconds, usual = entry["seconds"], entry["usual"]
    except (KeyError, TypeError):
        return None
    sizes = (problem.tokens, problem.outputs, problem.inputs)
    if (
        problem.kind not in KINDS
        or not all(type(n) is int and n > 0 for n in sizes)
        or not all(type(s) is float and 0 < s < 1e3 for s in (seconds, usual))
        or tiles not in declared(base, problem)
    ):
        return None
    return Winner(problem, tiles, seconds, usual)


def keep(device: Device, dtype: DType, winners: Iterable[Winner]) -> Path:
    """Add winners to those on disk, in place of older ones of the same products; where they are.

    Processes that do so at once wait for each other, and readers see the old file or the new one.

    Raises:
        OSError: if the folder cannot be written.
        ValueError: for a device whose tiles are not tuned.
    """
    found = identity(device, dtype)
    if found is None:
        raise ValueError(f"tiles of {device.name} are not tuned")
    path = path_of(found)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path.with_suffix(".lock")):
        held = _read(path, found, tiling_of(device, dtype))
        held |= {winner.problem: winner for winner in winners}
        entries = [asdict(winner) for winner in held.values()]
        _replace(path, json.dumps({"format": FORMAT, "made_on": found, "winners": entries}))
    return path


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Until no other process is in here. The lock goes with the process that holds it."""
    try:
        import fcntl
    except ImportError:
        # Not on Windows, where of two tunings at once one may lose what the other kept.
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _replace(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


class TunedTiling:
    """A tiling with the winners in place of what it would choose; all else is as it has it."""

    def __init__(self, base: Tiling, winners: Mapping[Problem, Winner]) -> None:
        self._base = base
        self._tiles = {problem: winner.tiles for problem, winner in winners.items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def product(self, tokens: int, outputs: int, inputs: int) -> ProductTiles:
        """See `Tiling`."""
        tiles = self._tiles.get(Problem("product", tokens, outputs, inputs))
        return tiles or self._base.product(tokens, outputs, inputs)

    def gate_up(self, tokens: int, outputs: int, inputs: int) -> ProductTiles:
        """See `Tiling`."""
        tiles = self._tiles.get(Problem("gate_up", tokens, outputs, inputs))
        return tiles or self._base.gate_up(tokens, outputs, inputs)


def tuned_tiling(device: Device, dtype: DType) -> Tiling:
    """The tile sizes for a device and weights of a type, tuned ones where some are kept."""
    base = tiling_of(device, dtype)
    winners = read(device, dtype)
    return cast(Tiling, TunedTiling(base, winners)) if winners else base
