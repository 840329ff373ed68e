"""What a launch moves and computes, counted in the tile IR."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Protocol

from tilert.dtypes import DType
from tilert.ir import Block, Function, Op, Param, Value
from tilert.ops import ELEMENTWISE

__all__ = ["Estimate", "estimate"]

_SAMPLES = 8
"""Coordinates on an axis of the grid for which a loop that depends on them is looked at."""

_INTEGERS: dict[str, Callable[..., int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b if b else 0,
    "mod": lambda a, b: a % b if b else 0,
    "minimum": min,
    "maximum": max,
    "neg": lambda a: -a,
    "cast": lambda a: a,
}
_NO_WORK = {"select", "cast", "bitcast"}


@dataclass(frozen=True)
class Estimate:
    """Of one launch. Parts of tiles outside of their array count, unless the whole axis is shorter.

    Attributes:
        flops: operations on floats, two a multiplication and addition of a product; both ways of a
            branch count.
        asked: bytes that all programs load and store together, wherever they come from.
        least: bytes that memory moves if it moves what is asked for once: of no array more than
            it has, loaded and stored.
        complete: False where the number of a loop's turns follows from what arrays hold: one turn
            of it is counted.
    """

    flops: int
    asked: int
    least: int
    complete: bool


class _Array(Protocol):
    """What is needed of an argument."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def dtype(self) -> DType: ...


def estimate(function: Function, arrays: Sequence[_Array], grid: Sequence[int]) -> Estimate:
    """Count one launch.

    Args:
        arrays: one per parameter.
        grid: extents of the launch.
    """
    counter = _Counter(arrays, grid)
    counter.block(function.body, prod(grid))
    least = sum(
        min(nbytes, arrays[position].nbytes) for (position, _), nbytes in counter.moved.items()
    )
    asked = sum(counter.moved.values())
    return Estimate(round(counter.flops), round(asked), round(least), counter.complete)


class _Counter:
    """Adds up the operations of blocks.

    Attributes:
        moved: bytes by parameter and whether they are stored.
    """

    def __init__(self, arrays: Sequence[_Array], grid: Sequence[int]) -> None:
        self.arrays, self.grid = arrays, grid
        self.flops = 0.0
        self.moved: dict[tuple[int, bool], float] = {}
        self.complete = True

    def block(self, block: Block, times: float) -> None:
        """Count operations that run so many times in all programs together."""
        for op in block.ops:
            self._op(op, times)
            turns = self._turns(op) if op.name == "for" else 1.0
            for region in op.regions:
                self.block(region, times * turns)

    def _op(self, op: Op, times: float) -> None:
        if op.name == "mma":
            (m, k), n = op.args[0].shape, op.args[1].shape[1]
            self.flops += 2 * m * n * k * times
        elif op.name in ELEMENTWISE and op.name not in _NO_WORK and op.result.dtype.is_float:
            self.flops += op.result.type.numel * (2 if op.name == "fma" else 1) * times
        elif op.name in ("reduce", "scan") and op.args[0].dtype.is_float:
            self.flops += op.args[0].type.numel * times
        elif op.name == "load":
            sizes = [access.size for access in op.attrs["access"]]
            self._move(op.attrs["param"], sizes, False, times)
        elif op.name in ("load_piece", "store_piece", "accumulate_piece"):
            param: Param = op.attrs["param"]
            if op.name != "store_piece":
                self._move(param, param.tile or (), False, times)
            if op.name != "load_piece":
                self._move(param, param.tile or (), True, times)

    def _move(self, param: Param, sizes: Sequence[int], stored: bool, times: float) -> None:
        array = self.arrays[param.position]
        count = prod(min(size, n) for size, n in zip(sizes, array.shape, strict=True))
        key = param.position, stored
        nbytes = count * array.dtype.itemsize * times
        self.moved[key] = self.moved.get(key, 0.0) + nbytes

    def _turns(self, loop: Op) -> float:
        """Turns of a loop, on average over the programs."""
        found = []
        for place in product(*map(_samples, self.grid)):
            first, last, step = (self._number(v, place) for v in loop.args[:3])
            if first is None or last is None or not step:
                self.complete = False
                return 1.0
            found.append(max(0, -(-(last - first) // step)))
        return sum(found) / len(found)

    def _number(self, value: Value, place: Sequence[int]) -> int | None:
        """A scalar in the program at a place of the grid, None where it is not known."""
        op = value.op
        if op is None:
            return None
        match op.name:
            case "const":
                return int(op.attrs["value"])
            case "dim":
                param: Param = op.attrs["param"]
                return self.arrays[param.position].shape[int(op.attrs["axis"])]
            case "program":
                axis = int(op.attrs["axis"])
                return place[axis] if axis < len(place) else 0
        function = _INTEGERS.get(op.name)
        if function is None:
            return None
        numbers = [self._number(a, place) for a in op.args]
        known = [n for n in numbers if n is not None]
        return function(*known) if len(known) == len(numbers) else None


def _samples(extent: int) -> list[int]:
    """Some coordinates, evenly."""
    if extent <= _SAMPLES:
        return list(range(extent))
    return [round(i * (extent - 1) / (_SAMPLES - 1)) for i in range(_SAMPLES)]
