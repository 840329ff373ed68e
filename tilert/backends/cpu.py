"""The cpu backend: NumPy code that runs every program of a launch at once.

It is the meaning of every operation. Code is generated for the shapes and the grid of a launch and
kept for the next launch like it.
"""

import builtins
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilert.backends.cpu_emit import Generated, generate
from tilert.backends.cpu_process import prepare
from tilert.ir import Function

__all__ = ["CpuKernel", "compile"]

Launch = Callable[..., None]
"""Runs a launch. What it is given, a device's queue, does not matter here."""
_Key = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]

# Bytes of temporaries above which a grid is run in slices, one after the other.
BUDGET = 64 << 20
# Prompts have many lengths; the code of one takes a few hundred kilobytes at most.
_KEPT_VARIANTS = 64


class CpuKernel:
    """A kernel that runs on the host.

    Attributes:
        function: its IR.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        self._variants: OrderedDict[_Key, Callable[..., Launch]] = OrderedDict()

    def bind(
        self,
        arrays: Sequence[NDArray[Any]],
        index_maps: Mapping[int, NDArray[np.int32]],
        grid: tuple[int, ...],
    ) -> Launch:
        """A closure that runs the whole grid; it reads the arrays' contents when called.

        Args:
            arrays: one strided array for every parameter, by position.
            index_maps: rows of every indexed Mut, by position; negative ones are skipped.
            grid: number of programs on each axis.
        """
        if 0 in grid:
            return _nothing
        key = grid, tuple(a.shape for a in arrays)
        build = self._variants.get(key)
        if build is None:
            build = self._build(key)
            self._variants[key] = build
            if len(self._variants) > _KEPT_VARIANTS:
                self._variants.popitem(last=False)
        else:
            self._variants.move_to_end(key)
        return build(arrays, index_maps)

    def source(self, shapes: Sequence[tuple[int, ...]], grid: tuple[int, ...]) -> str:
        """The Python code of a launch with these array shapes, for people and tests."""
        parts = _parts(self.function, tuple(shapes), grid, (0,) * len(grid))
        return "\n".join(part.text for part in parts)

    def _build(self, key: _Key) -> Callable[..., Launch]:
        grid, shapes = key
        builds: list[Callable[..., Launch]] = []
        for i, part in enumerate(_parts(self.function, shapes, grid, (0,) * len(grid))):
            filename = f"<tilert cpu {self.function.name} {id(self):x} {grid} {shapes} {i}>"
            exec(builtins.compile(part.text, filename, "exec"), part.namespace)
            builds.append(part.namespace["build"])
        return builds[0] if len(builds) == 1 else _sequence(builds)


def _parts(
    function: Function,
    shapes: tuple[tuple[int, ...], ...],
    grid: tuple[int, ...],
    start: tuple[int, ...],
) -> list[Generated]:
    """The code of a grid, its ragged last programs apart if they would cost the others a copy."""
    whole = generate(function, shapes, grid, start)
    cut = next(((axis, grid[axis] - 1) for axis in whole.ragged if grid[axis] > 1), None)
    if cut is None and whole.peak > BUDGET:
        cut = _slices(function, shapes, grid, start, whole.peak)
    if cut is None:
        return [whole]
    axis, size = cut
    parts = []
    for first in range(0, grid[axis], size):
        some, at = list(grid), list(start)
        some[axis] = min(size, grid[axis] - first)
        at[axis] += first
        parts += _parts(function, shapes, tuple(some), tuple(at))
    return parts


def _slices(
    function: Function,
    shapes: tuple[tuple[int, ...], ...],
    grid: tuple[int, ...],
    start: tuple[int, ...],
    peak: int,
) -> tuple[int, int] | None:
    """The grid axis to cut and how many programs to run at a time, so that temporaries fit BUDGET.

    None where fewer programs would not take less.
    """
    best: tuple[int, int] | None = None
    least = peak * 3 // 4
    for axis, n in enumerate(grid):
        if n == 1:
            continue
        some = list(grid)
        some[axis] = n // 2
        half = generate(function, shapes, tuple(some), start).peak
        if half < least:
            # A line through both; the axis that saves the most, the first of equals.
            least = half
            each = (peak - half) / (n - n // 2)
            best = axis, max(1, min(n // 2, int((BUDGET - (peak - each * n)) / each)))
    return best


def _sequence(builds: Sequence[Callable[..., Launch]]) -> Callable[..., Launch]:
    """One build function for parts of a grid, which run in order."""

    def build(*args: Any) -> Launch:
        launches = [part(*args) for part in builds]

        def run(queue: object = None) -> None:
            for launch in launches:
                launch()

        return run

    return build


def _nothing(queue: object = None) -> None:
    """A launch without programs."""


def compile(function: Function) -> CpuKernel:
    """The kernel of a specialised function; code is generated at the first launch of a shape.

    The first call changes settings of the process; see `cpu_process.prepare`.
    """
    prepare()
    return CpuKernel(function)
