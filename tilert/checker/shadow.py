"""Shadow memory: which elements have been written, and by which access of a launch."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tilert.checker.operations import Tile

if TYPE_CHECKING:
    from tilert.array import Array
    from tilert.storage import Storage

__all__ = ["Cut", "Races", "Written", "element"]

Cut = tuple[Tile, ...]
"""Elements of an array: the index of each axis, as `np.ix_` gives it."""


def element(cut: Cut, wrong: Tile) -> tuple[int, ...]:
    """The index in the array of the first element of a cut that is wrong."""
    first = np.argwhere(wrong)[0]
    return tuple([int(axis.flat[i]) for axis, i in zip(cut, first, strict=True)])


def _view(array: "Array", buffer: Tile, unit: int, shift: int = 0) -> Tile:
    """An element of `buffer` for each of the array, at its address counted in `unit` bytes."""
    if not array.size:
        return np.zeros(array.shape, buffer.dtype)
    ratio = array.dtype.itemsize // unit
    size = buffer.itemsize
    return np.ndarray(
        array.shape,
        buffer.dtype,
        buffer,
        (array.offset * ratio + shift) * size,
        tuple([stride * ratio * size for stride in array.strides]),
    )


class Written:
    """Which bytes of a storage anything has written.

    Args:
        known: whether all of it counts as written.
    """

    def __init__(self, storage: "Storage", known: bool) -> None:
        self._bytes = np.full(storage.nbytes, known, np.bool_)

    def note(self, array: "Array", where: Cut | Tile | None = None) -> None:
        """Elements of a view have been written; all of them by default."""
        for i in range(array.dtype.itemsize):
            view = _view(array, self._bytes, 1, i)
            view[... if where is None else where] = True

    def missing(self, array: "Array", cut: Cut) -> Tile:
        """Of each element, whether part of it is unwritten."""
        missing: Any = False
        for i in range(array.dtype.itemsize):
            missing = missing | ~_view(array, self._bytes, 1, i)[cut]
        return np.asarray(missing)

    def copy(self, target: "Array", source: "Array", of: "Written") -> None:
        """What a copy to a view of this storage makes of it."""
        for i in range(target.dtype.itemsize):
            _view(target, self._bytes, 1, i)[...] = _view(source, of._bytes, 1, i)


class Races:
    """Who has written and read each element of a storage in a launch.

    Accesses have numbers that grow, from 1; those of a program begin at `first`, and it never
    comes back, so a smaller number is another program's.

    Args:
        arrays: the views of the storage that the launch uses.
    """

    def __init__(self, storage: "Storage", arrays: Iterable["Array"]) -> None:
        self._unit = min(array.dtype.itemsize for array in arrays)
        count = storage.nbytes // self._unit
        self._writer = np.zeros(count, np.int32)
        self._reader = np.zeros(count, np.int32)
        # The last reader of a program before that of `_reader`.
        self._before = np.zeros(count, np.int32)

    def _views(self, array: "Array", buffer: Tile) -> list[Tile]:
        parts = array.dtype.itemsize // self._unit
        return [_view(array, buffer, self._unit, i) for i in range(parts)]

    def write(self, array: "Array", cut: Cut, access: int, first: int) -> Tile:
        """Note a write; gives the access of another program that each element clashes with, or 0.
        A clash of two writes comes before one with a read."""
        writes = reads = np.zeros((), np.int32)
        for writer, reader, before in self._each(array):
            writes = np.maximum(writes, _older(writer[cut], first))
            reads = np.maximum(reads, np.maximum(_older(reader[cut], first), before[cut]))
            writer[cut] = access
        return np.asarray(np.where(writes, writes, reads))

    def read(self, array: "Array", cut: Cut, access: int, first: int) -> Tile:
        """Note a read; gives the write of another program that each element clashes with, or 0."""
        found = np.zeros((), np.int32)
        for writer, reader, before in self._each(array):
            last = reader[cut]
            before[cut] = np.where(_older(last, first), last, before[cut])
            reader[cut] = access
            found = np.maximum(found, _older(writer[cut], first))
        return np.asarray(found)

    def _each(self, array: "Array") -> Sequence[tuple[Tile, Tile, Tile]]:
        buffers = (self._writer, self._reader, self._before)
        return list(zip(*(self._views(array, b) for b in buffers), strict=True))


def _older(accesses: Tile, first: int) -> Tile:
    return np.where(accesses < first, accesses, 0)
