"""device_print and debug_assert on the cpu: generated code, and the helpers that it calls."""

import linecache
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from tilert.errors import KernelError
from tilert.ir import Loc, Op

if TYPE_CHECKING:
    from tilert.backends.cpu_emit import Emitter

__all__ = ["check", "print_", "show", "verify"]

Tile = Any


def _programs(em: "Emitter") -> str:
    """Arguments that say which programs there are: coordinates, extents, mask."""
    coordinates = [em.program(axis).text for axis in range(len(em.grid.full))]
    mask = "None"
    if em.mask is not None:
        mask = f"expand_mask({em.mask.text}, {em.grid.extents})"
    return f"({''.join(f'{c}, ' for c in coordinates)}), {em.grid.extents}, {mask}"


def print_(em: "Emitter", op: Op) -> None:
    """A line of output for every program."""
    loc = op.loc or Loc(em.function.filename, 0, 0)
    head = f"{loc.filename}:{loc.line}: {em.function.name} "
    values = [em.materialize(em.env[a], em.grid.extents + a.shape) for a in op.args]
    shown = f"({''.join(f'{v}, ' for v in values)})"
    em.line(f"show({head!r}, {op.attrs['text']!r}, {_programs(em)}, {shown})")


def check(em: "Emitter", op: Op) -> None:
    """An error where a condition does not hold."""
    loc = op.loc or Loc(em.function.filename, 0, 0)
    place = (loc.filename, loc.line, loc.column)
    held = em.materialize(em.env[op.args[0]], em.grid.extents + op.args[0].shape)
    em.line(f"verify({place!r}, {op.attrs['message']!r}, {_programs(em)}, {held})")


def _each(
    coordinates: tuple[Tile, ...], extents: tuple[int, ...], mask: Tile
) -> Iterator[tuple[tuple[int, ...], str]]:
    """The place of every program in arrays over the grid, and what people call the program."""
    wide = [np.broadcast_to(np.asarray(c), extents) for c in coordinates]
    for at in np.ndindex(*extents):
        if mask is None or mask[at]:
            yield at, f"program ({', '.join(str(int(w[at])) for w in wide)})"


def show(
    head: str,
    text: str,
    coordinates: tuple[Tile, ...],
    extents: tuple[int, ...],
    mask: Tile,
    values: tuple[Tile, ...],
) -> None:
    """Print the values of each program of the mask."""
    arrays = [np.asarray(v) for v in values]
    for at, program in _each(coordinates, extents, mask):
        shown = "".join(f" {a[at]}" for a in arrays)
        print(f"{head}{program}: {text}{shown}", flush=True)


def verify(
    place: tuple[str, int, int],
    message: str,
    coordinates: tuple[Tile, ...],
    extents: tuple[int, ...],
    mask: Tile,
    held: Tile,
) -> None:
    """Raise where a condition does not hold in a program of the mask.

    Raises:
        KernelError: with the program, and the element of a tile.
    """
    tile = np.asarray(held)
    for at, program in _each(coordinates, extents, mask):
        wrong = np.argwhere(~np.asarray(tile[at]))
        if wrong.size or (tile[at].ndim == 0 and not tile[at]):
            element = f", element {wrong[0].tolist()}" if tile[at].ndim else ""
            filename, line, column = place
            source = linecache.getline(filename, line)
            raise KernelError(
                f"debug_assert failed in {program}{element}: {message}",
                filename, line, column, source,
            )  # fmt: skip
