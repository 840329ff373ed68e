"""Kernels bound to their arrays: what launching them again takes."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tilert.rebind import Maker

if TYPE_CHECKING:
    from tilert.array import Array
    from tilert.device import Call, Launcher
    from tilert.ownership import Place
    from tilert.parameters import Plan
    from tilert.partition import Partition

__all__ = ["Bound", "nothing"]


class Bound:
    """A compiled kernel with its arrays. It keeps none of them alive.

    Attributes:
        call: enqueues it.
    """

    __slots__ = ("_grid", "_launcher", "_plan", "_programs", "call")

    def __init__(
        self,
        call: "Call",
        launcher: "Launcher",
        plan: "Plan",
        grid: tuple[int, ...],
        programs: int | None,
    ) -> None:
        self.call = call
        self._launcher = launcher
        self._plan = plan
        self._grid = grid
        self._programs = programs

    def maker(
        self, what: str, place: "Place", muts: "Sequence[Partition]", refs: "Sequence[Array]"
    ) -> Maker:
        """What makes the call from arrays like these.

        Args:
            what: the op, made at `place`.
            muts, refs: those that it was bound to; the entries of index maps are the first of refs.
        """
        indexed = tuple(
            [
                position
                for (_, position, _), mut in zip(self._plan.muts, muts, strict=True)
                if mut.index_map is not None
            ]
        )
        maps = len(indexed)
        arrays = [*refs[:maps], *[mut.array for mut in muts], *refs[maps:]]
        return Maker(what, functools.partial(self._bind, indexed), arrays, maps, place)

    def _bind(self, indexed: tuple[int, ...], given: "Sequence[Array]") -> "Call":
        plan = self._plan
        maps = dict(zip(indexed, given, strict=False))
        places = [position for _, position, _ in (*plan.muts, *plan.refs)]
        found = dict(zip(places, given[len(maps) :], strict=True))
        arrays = [found[position] for position in range(len(places))]
        if plan.walks:
            return self._launcher.bind(arrays, maps, self._grid, self._programs)
        return self._launcher.bind(arrays, maps, self._grid)


class _NoPrograms:
    """The launcher of a grid without programs."""

    def bind(self, *_: object) -> "Call":
        return _nothing


def _nothing(queue: Any) -> None:
    """The work of a launch whose grid is empty."""


def nothing(plan: "Plan") -> Bound:
    """A launch whose grid is empty."""
    return Bound(_nothing, _NoPrograms(), plan, (), None)
