"""References of unsafe kernels: what changed is compared with what the signature says may."""

import linecache
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tilert.checker.memory import index_rows
from tilert.checker.operations import Tile
from tilert.checker.shadow import Written
from tilert.cpu_device import host_view
from tilert.errors import CheckError
from tilert.ir import Param

if TYPE_CHECKING:
    from tilert.array import Array
    from tilert.device import Call
    from tilert.storage import Storage
    from tilert.unsafe_kernel import UnsafeFunction

__all__ = ["CheckedReference"]


class CheckedReference:
    """The NumPy reference of an unsafe kernel, as a `tilert.device.Launcher`.

    What it writes is what it changes: an element that it sets to what was there is not noticed.
    All elements of its pieces count as written afterwards.
    """

    def __init__(self, function: "UnsafeFunction", written: "Callable[[Storage], Written]") -> None:
        self.function = function
        self._written = written

    def bind(
        self,
        arrays: "Sequence[Array]",
        index_maps: "Mapping[int, Array]",
        grid: tuple[int, ...],
        programs: int | None = None,
    ) -> "Call":
        """See `Launcher`."""
        # As in `launch`.
        given = [array.as_readonly("") for array in arrays]
        entries = {at: array.as_readonly("") for at, array in index_maps.items()}
        maps = {at: host_view(array) for at, array in entries.items()}
        call = self.function.bind([host_view(array) for array in given], maps, grid)

        def run(queue: object) -> None:
            rows = {
                at: index_rows(
                    self.function, self.function.params[at], array, self._written(array.storage)
                )
                for at, array in entries.items()
            }
            before = {array.storage: _bytes(array.storage).copy() for array in given}
            call()
            for p in self.function.params:
                array = given[p.position]
                changed = _as(array, before[array.storage]) != _as(array)
                mine = _pieces(p, array, rows.get(p.position))
                wrong = changed & ~mine
                if wrong.any():
                    raise self._error(p, np.argwhere(wrong)[0].tolist())
                _as(array, before[array.storage])[mine] = _as(array)[mine]
                self._written(array.storage).note(array, mine)
            # What is left of the difference lies in no argument.
            for p in self.function.params:
                storage = given[p.position].storage
                beside = np.flatnonzero(before[storage] != _bytes(storage))
                if beside.size:
                    raise CheckError(
                        f"O1 exclusive write: the reference of unsafe kernel"
                        f" '{self.function.name}' writes beside '{p.name}', to byte {beside[0]} of"
                        " the buffer that it is a view of",
                        self._place(),
                    )

        return run

    def _error(self, p: Param, index: list[int]) -> CheckError:
        name = self.function.name
        if p.kind == "ref":
            text = (
                f"O1 exclusive write: the reference of unsafe kernel '{name}' writes element"
                f" {index} of '{p.name}', which is a Ref; make it a Mut"
            )
        else:
            text = (
                f"O2 disjoint pieces: the reference of unsafe kernel '{name}' writes element"
                f" {index} of '{p.name}', which is in no program's piece"
            )
        return CheckError(text, self._place())

    def _place(self) -> tuple[str, str, int, int]:
        made = self.function.opt_out
        line = linecache.getline(made.filename, made.line)
        column = len(line) - len(line.lstrip())
        return f"unsafe kernel '{self.function.name}'", made.filename, made.line, column


def _bytes(storage: "Storage") -> Tile:
    if storage.host is None:
        raise ValueError("a checked device has its memory on the host")
    return storage.host


def _as(array: "Array", buffer: Tile | None = None) -> Tile:
    """The elements of a view as plain bits, of its memory or of a copy of its storage."""
    size = array.dtype.itemsize
    strides = tuple([stride * size for stride in array.strides])
    memory = _bytes(array.storage) if buffer is None else buffer
    kind = np.dtype(f"u{size}")
    return np.ndarray(array.shape, kind, memory, array.offset * size, strides)


def _pieces(p: Param, array: "Array", rows: Tile | None) -> Tile:
    """Which elements programs may write."""
    mine = np.full(array.shape, p.kind == "mut")
    if rows is not None:
        mine[...] = False
        mine[rows[(rows >= 0) & (rows < array.shape[0])]] = True
    return mine
