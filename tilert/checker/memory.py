"""The memory of a launch, which looks at every access (rules O2, O7 and O8)."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tilert.checker.doubt import Doubt, mark, origin
from tilert.checker.operations import Tile
from tilert.checker.refusal import row as row_outside
from tilert.checker.refusal import shown
from tilert.checker.shadow import Cut, Races, Written, element
from tilert.cpu_device import host_view
from tilert.errors import CheckError
from tilert.ir import Function, Loc, Op, Param

if TYPE_CHECKING:
    from tilert.array import Array
    from tilert.storage import Storage

__all__ = ["Memory", "Program", "index_rows"]

Program = tuple[int, ...]


def index_rows(function: Function, param: Param, array: "Array", written: Written) -> Tile:
    """The entries of an index map.

    Raises:
        CheckError: if one of them was never written.
    """
    every = np.ix_(*(np.arange(n) for n in array.shape))
    missing = written.missing(array, every)
    if missing.any():
        (entry,) = element(every, missing)
        raise CheckError(
            f"O8 initialised reads: kernel '{function.name}' is launched with an index map of"
            f" '{param.name}' whose entry {entry} nothing has written"
        )
    return host_view(array)


class Memory:
    """Arrays with their shadows.

    Args:
        maps: entries of the index map of each indexed `Mut`, by position.
        written: the shadow of a storage.
    """

    def __init__(
        self,
        function: Function,
        arrays: "Sequence[Array]",
        maps: "Mapping[int, Array]",
        written: "Callable[[Storage], Written]",
    ) -> None:
        self.function = function
        self.arrays = arrays
        self.data = [host_view(array) for array in arrays]
        self._written = [written(array.storage) for array in arrays]
        self.rows = {
            at: index_rows(function, function.params[at], array, written(array.storage))
            for at, array in maps.items()
        }
        # Where nothing is written there are no races.
        mutable = {arrays[p.position].storage for p in function.params if p.kind == "mut"}
        self._races = {s: Races(s, [a for a in arrays if a.storage is s]) for s in mutable}
        self._accesses: list[tuple[Program, Op, str]] = []
        self._unwritten: list[tuple[Program, Op]] = []
        self._program: Program = ()
        self._first = 1

    def begin(self, program: Program) -> None:
        """What follows is the next program's."""
        self._program, self._first = program, len(self._accesses) + 1

    def read(self, op: Op, cut: Cut) -> tuple[Tile, Doubt]:
        """A copy of elements of an array, and which were never written.

        Raises:
            CheckError: if another program of the launch has written one.
        """
        at = op.attrs["param"].position
        array = self.arrays[at]
        races = self._races.get(array.storage)
        if races is not None:
            self._accesses.append((self._program, op, "reads"))
            self._refuse(races.read(array, cut, len(self._accesses), self._first), cut)
        missing = self._written[at].missing(array, cut)
        doubt: Doubt = None
        if missing.any():
            self._unwritten.append((self._program, op))
            places = np.ravel_multi_index(np.broadcast_arrays(*cut), array.shape)
            doubt = np.where(missing, mark(len(self._unwritten), np.asarray(places)), 0)
        return np.array(self.data[at][cut]), doubt

    def write(self, op: Op, cut: Cut, value: Tile) -> None:
        """Set elements of an array.

        Raises:
            CheckError: if another program of the launch has read or written one.
        """
        at = op.attrs["param"].position
        array = self.arrays[at]
        self._accesses.append((self._program, op, "writes"))
        races = self._races[array.storage]
        self._refuse(races.write(array, cut, len(self._accesses), self._first), cut)
        self.data[at][cut] = value
        self._written[at].note(array, cut)

    def update(self, op: Op, cut: Cut) -> None:
        """Before elements of an array are added to.

        Raises:
            CheckError: if one was never written.
        """
        at = op.attrs["param"].position
        missing = self._written[at].missing(self.arrays[at], cut)
        if missing.any():
            raise self._never_written(
                op, element(cut, missing), self._place(self._program, op, "adds to it")
            )

    def refuse_doubt(self, op: Op, doubt: Doubt, use: str) -> None:
        """An error if any element depends on memory that nothing has written.

        Args:
            use: what becomes of the value, as a verb.

        Raises:
            CheckError: with the places where it was read and where it is used.
        """
        if doubt is None or not doubt.any():
            return
        number, place = origin(int(doubt[doubt != 0].flat[0]))
        reader, read = self._unwritten[number - 1]
        param = read.attrs["param"]
        index = np.unravel_index(place, self.arrays[param.position].shape)
        raise self._never_written(
            read,
            tuple([int(i) for i in index]),
            self._place(reader, read, "reads it"),
            self._place(self._program, op, use),
        )

    def _never_written(
        self, op: Op, index: tuple[int, ...], *places: tuple[str, str, int, int]
    ) -> CheckError:
        return CheckError(
            f"O8 initialised reads: nothing has written element {list(index)} of"
            f" '{op.attrs['param'].name}', which kernel '{self.function.name}' reads; write it"
            " first",
            *places,
        )

    def refuse_row(self, op: Op, row: int) -> None:
        """An error about an index map that reaches past its array."""
        param = op.attrs["param"]
        rows = self.arrays[param.position].shape[0]
        loc = self._loc(op)
        raise row_outside(self.function.name, param.name, self._program, row, rows, loc)

    def _refuse(self, clash: Tile, cut: Cut) -> None:
        if not clash.any():
            return
        earlier, first, verb = self._accesses[int(clash[clash != 0].flat[0]) - 1]
        later, second, other = self._accesses[-1]
        param: Param = second.attrs["param"]
        rule = "O7 indexed pieces" if param.indexed else "O2 disjoint pieces"
        raise CheckError(
            f"{rule}: programs {shown(earlier)} and {shown(later)} of kernel"
            f" '{self.function.name}' race for element {list(element(cut, clash))} of"
            f" '{param.name}'",
            self._place(earlier, first, f"{verb} it"),
            self._place(later, second, f"{other} it"),
        )

    def _place(self, program: Program, op: Op, does: str) -> tuple[str, str, int, int]:
        loc = self._loc(op)
        return f"program {shown(program)} {does}", loc.filename, loc.line, loc.column

    def _loc(self, op: Op) -> Loc:
        return op.loc or Loc(self.function.filename, 1, 0)
