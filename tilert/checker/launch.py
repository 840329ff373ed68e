"""A kernel interpreted: one program after the other, one operation at a time."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tilert.backends.cpu_debug import show, verify
from tilert.backends.cpu_process import prepare
from tilert.backends.cpu_tiles import accumulate
from tilert.checker.doubt import Doubt, doubted
from tilert.checker.memory import Memory, Program
from tilert.checker.operations import Tile, operation
from tilert.checker.refusal import outside
from tilert.checker.shadow import Cut, Written
from tilert.dtypes import DType
from tilert.ir import Block, Function, Loc, Op, Param, Value

if TYPE_CHECKING:
    from tilert.array import Array
    from tilert.device import Call
    from tilert.storage import Storage

__all__ = ["CheckedKernel"]

Checked = tuple[Tile, Doubt]
_UPDATES = {"add": np.add, "max": np.maximum, "min": np.minimum}


class CheckedKernel:
    """A kernel whose launches are checked. It is a `tilert.device.Launcher`."""

    def __init__(
        self, function: Function, written: "Callable[[Storage], Written]", strict: bool
    ) -> None:
        prepare()
        self.function = function
        self.strict = strict
        self._written = written
        self._compiled: dict[tuple[Op, DType | None], Callable[..., list[Tile]]] = {}

    def operation(self, op: Op, dtype: DType | None = None) -> Callable[..., list[Tile]]:
        """As `operations.operation`, made once."""
        found = self._compiled.get((op, dtype))
        if found is None:
            found = self._compiled[op, dtype] = operation(op, dtype)
        return found

    def bind(
        self,
        arrays: "Sequence[Array]",
        index_maps: "Mapping[int, Array]",
        grid: tuple[int, ...],
        programs: int | None = None,
    ) -> "Call":
        """See `Launcher`. Each piece counts as a program of its own: what races then would race
        for some number of programs that walk them."""
        # Views of its own: an array that keeps its launches must not be kept by them.
        given = [array.as_readonly("") for array in arrays]
        maps = {at: array.as_readonly("") for at, array in index_maps.items()}

        def run(queue: object) -> None:
            memory = Memory(self.function, given, maps, self._written)
            with np.errstate(all="ignore"):
                for program in np.ndindex(*grid):
                    memory.begin(program)
                    _Program(self, memory, program).block(self.function.body)

        return run


class _Program:
    """One program on its way through the kernel."""

    def __init__(self, kernel: CheckedKernel, memory: Memory, program: Program) -> None:
        self._kernel = kernel
        self._memory = memory
        self._program = program
        self._env: dict[Value, Checked] = {}

    def block(self, block: Block) -> list[Checked]:
        """Run the operations; gives what the block yields."""
        for op in block.ops:
            args = [self._env[a] for a in op.args]
            if op.name == "yield":
                return args
            run = _RUN.get(op.name, _Program._pure)
            self._env.update(zip(op.results, run(self, op, args), strict=True))
        return []

    def _pure(self, op: Op, args: list[Checked]) -> list[Checked]:
        values = [value for value, _ in args]
        results = self._kernel.operation(op)(*values)
        doubts = doubted(op, values, [doubt for _, doubt in args], self._kernel.operation)
        return list(zip(results, doubts, strict=True))

    def _for(self, op: Op, args: list[Checked]) -> list[Checked]:
        for _, doubt in args[:3]:
            self._memory.refuse_doubt(op, doubt, "counts a loop by it")
        carried, body = args[3:], op.regions[0]
        for i in range(*(int(bound) for bound, _ in args[:3])):
            self._env[body.args[0]] = np.asarray(i, np.int32), None
            self._env.update(zip(body.args[1:], carried, strict=True))
            carried = self.block(body)
        return carried

    def _if(self, op: Op, args: list[Checked]) -> list[Checked]:
        self._memory.refuse_doubt(op, args[0][1], "branches on it")
        return self.block(op.regions[0 if args[0][0] else 1])

    def _pieces(self, op: Op, args: list[Checked]) -> list[Checked]:
        return self.block(op.regions[0])

    def _coordinate(self, op: Op, args: list[Checked]) -> list[Checked]:
        axis = op.attrs["axis"]
        at = self._program[axis] if axis < len(self._program) else 0
        return [(np.asarray(at, np.int32), None)]

    def _dim(self, op: Op, args: list[Checked]) -> list[Checked]:
        extent = self._memory.arrays[op.attrs["param"].position].shape[op.attrs["axis"]]
        return [(np.asarray(extent, np.int32), None)]

    def _print(self, op: Op, args: list[Checked]) -> list[Checked]:
        loc = self._loc(op)
        head = f"{loc.filename}:{loc.line}: {self._kernel.function.name} "
        show(head, op.attrs["text"], self._program, (), None, tuple([v for v, _ in args]))
        return []

    def _check(self, op: Op, args: list[Checked]) -> list[Checked]:
        self._memory.refuse_doubt(op, args[0][1], "asserts it")
        loc = self._loc(op)
        place = loc.filename, loc.line, loc.column
        verify(place, op.attrs["message"], self._program, (), None, args[0][0])
        return []

    def _loc(self, op: Op) -> Loc:
        return op.loc or Loc(self._kernel.function.filename, 1, 0)

    # Memory

    def _load(self, op: Op, args: list[Checked]) -> list[Checked]:
        places: list[Tile] = []
        kept: list[int] = []
        for access in op.attrs["access"]:
            start = np.zeros((), np.int64)
            if access.arg >= 0:
                self._memory.refuse_doubt(op, args[access.arg][1], "reads at that index")
                start = args[access.arg][0].astype(np.int64)
            if access.kind in ("gather", "point"):
                places.append(start.reshape(-1))
            else:
                scale = access.size if access.kind == "block" else 1
                places.append(start * scale + np.arange(access.size))
            if access.kind != "point":
                kept.append(access.size)
        tile, doubt = self._fetch(op, places)
        return [(tile.reshape(kept), None if doubt is None else doubt.reshape(kept))]

    def _take(self, op: Op, args: list[Checked]) -> list[Checked]:
        axis = op.attrs["axis"]
        self._refuse_outside(op, "", axis, args[1][0].astype(np.int64), args[0][0].shape[axis])
        return self._pure(op, args)

    def _refuse_outside(self, op: Op, param: str, axis: int, index: Tile, extent: int) -> None:
        """An error about the first index outside, where checks are strict."""
        wrong = index[(index < 0) | (index >= extent)]
        if self._kernel.strict and wrong.size:
            name, loc = self._kernel.function.name, self._loc(op)
            raise outside(name, param, axis, self._program, int(wrong[0]), extent, loc)

    def _fetch(self, op: Op, places: list[Tile]) -> Checked:
        """The elements at the places of each axis; the fill value for those outside."""
        param: Param = op.attrs["param"]
        extents = self._memory.arrays[param.position].shape
        inside = [(p >= 0) & (p < n) for p, n in zip(places, extents, strict=True)]
        for axis, access in enumerate(op.attrs["access"]):
            # Of blocks and spans some elements may be outside.
            index = places[axis]
            if access.kind not in ("point", "gather"):
                index = index[:0] if inside[axis].any() else index[:1]
            self._refuse_outside(op, param.name, axis, index, extents[axis])
        whole = [len(p) for p in places]
        tile = np.full(whole, op.attrs.get("fill", 0), param.dtype.numpy)
        cut = np.ix_(*(p[ok] for p, ok in zip(places, inside, strict=True)))
        data, doubt = self._memory.read(op, cut)
        where = np.ix_(*inside)
        tile[where] = data
        if doubt is None:
            return tile, None
        spread = np.zeros(whole, np.int64)
        spread[where] = doubt
        return tile, spread

    def _starts(self, op: Op) -> list[int] | None:
        """First element of this program's piece on each axis, or None where it has no piece."""
        param: Param = op.attrs["param"]
        program = (*self._program, *(0,) * len(param.tile or ()))
        starts: list[int] = []
        for axis, size in enumerate(param.tile or ()):
            number = program[axis]
            if param.place is not None:
                start, steps = param.place[axis]
                number = start + sum(k * c for k, c in zip(steps, program, strict=False))
            if axis == 0 and param.indexed:
                number = int(self._memory.rows[param.position][program[0]])
                if number < 0:
                    return None
                if number >= self._memory.arrays[param.position].shape[0]:
                    self._memory.refuse_row(op, number)
            starts.append(number * size)
        return starts

    def _piece(self, op: Op) -> tuple[Cut, tuple[slice, ...]] | None:
        """The elements of this program's piece, and where they are in the tile."""
        param: Param = op.attrs["param"]
        starts = self._starts(op)
        if starts is None:
            return None
        extents = self._memory.arrays[param.position].shape
        places = [
            np.arange(start, min(start + size, n))
            for start, size, n in zip(starts, param.tile or (), extents, strict=True)
        ]
        return np.ix_(*places), tuple([slice(len(p)) for p in places])

    def _load_piece(self, op: Op, args: list[Checked]) -> list[Checked]:
        param: Param = op.attrs["param"]
        tile, doubt = np.zeros(op.result.shape, param.dtype.numpy), None
        piece = self._piece(op)
        if piece is not None:
            cut, where = piece
            tile[where], found = self._memory.read(op, cut)
            if found is not None:
                doubt = np.zeros(tile.shape, np.int64)
                doubt[where] = found
        return [(tile, doubt)]

    def _store_piece(self, op: Op, args: list[Checked]) -> list[Checked]:
        piece = self._piece(op)
        if piece is not None:
            cut, where = piece
            value, doubt = args[0]
            if doubt is not None:
                self._memory.refuse_doubt(op, doubt[where], "stores it")
            self._memory.write(op, cut, value[where])
        return []

    def _accumulate_piece(self, op: Op, args: list[Checked]) -> list[Checked]:
        """Updates may meet in an element (rule O2 of `Accumulate`), so races are not looked for."""
        piece, starts = self._piece(op), self._starts(op)
        if piece is not None and starts is not None:
            (value, doubt), (cut, where) = args[0], piece
            if doubt is not None:
                self._memory.refuse_doubt(op, doubt[where], "adds it")
            self._memory.update(op, cut)
            param: Param = op.attrs["param"]
            data = self._memory.data[param.position]
            ufunc = _UPDATES[param.accumulate]
            accumulate(ufunc, data, tuple(starts), param.tile or (), value, None)
        return []


_RUN: dict[str, Callable[[_Program, Op, list[Checked]], list[Checked]]] = {
    "for": _Program._for,
    "if": _Program._if,
    "pieces": _Program._pieces,
    "program": _Program._coordinate,
    "dim": _Program._dim,
    "print": _Program._print,
    "check": _Program._check,
    "load": _Program._load,
    "take": _Program._take,
    "load_piece": _Program._load_piece,
    "store_piece": _Program._store_piece,
    "accumulate_piece": _Program._accumulate_piece,
}
