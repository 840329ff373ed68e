"""Kernels bound to their arrays: what launching them again takes."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tilert.rebind import Maker

if TYPE_CHECKING:
    from tilert.array import Array
    from tilert.device import Call, Device, Launcher
    from tilert.ownership import Place
    from tilert.parameters import Plan

__all__ = ["Bound", "nothing", "reads"]


class Bound:
    """A compiled kernel with its arrays. It keeps none of them alive.

    Attributes:
        device: where it runs.
        call: enqueues it.
        plan: the parameters of the kernel.
        indexed: whether some `Mut` has an index map.
    """

    __slots__ = ("_grid", "_launcher", "_programs", "call", "device", "indexed", "plan")

    def __init__(
        self,
        device: "Device",
        call: "Call",
        launcher: "Launcher",
        plan: "Plan",
        grid: tuple[int, ...],
        programs: int | None,
        indexed: bool,
    ) -> None:
        self.device = device
        self.call = call
        self.plan = plan
        self.indexed = indexed
        self._launcher = launcher
        self._grid = grid
        self._programs = programs

    def maker(self, what: str, place: "Place", values: "Sequence[Any]") -> Maker:
        """What makes the call from arrays like these.

        Args:
            what: the op, made at `place`.
            values: of the parameters that it was bound to.
        """
        plan = self.plan
        muts = [(position, values[at]) for at, position, _ in plan.muts]
        indexed = tuple([position for position, mut in muts if mut.index_map is not None])
        read, maps = reads(plan, values), len(indexed)
        arrays = [*read[:maps], *[mut.array for _, mut in muts], *read[maps:]]
        return Maker(what, functools.partial(self._bind, indexed), arrays, maps, place)

    def _bind(self, indexed: tuple[int, ...], given: "Sequence[Array]") -> "Call":
        plan = self.plan
        maps = dict(zip(indexed, given, strict=False))
        places = [position for _, position, _ in (*plan.muts, *plan.refs)]
        found = dict(zip(places, given[len(maps) :], strict=True))
        arrays = [found[position] for position in range(len(places))]
        if plan.walks:
            return self._launcher.bind(arrays, maps, self._grid, self._programs)
        return self._launcher.bind(arrays, maps, self._grid)


def reads(plan: "Plan", values: "Sequence[Any]") -> "list[Array]":
    """What a launch reads and does not write: the entries of its index maps, then its `Ref`s."""
    maps = [values[at].index_map for at in plan.mut_places]
    return [
        *[index_map.array for index_map in maps if index_map is not None],
        *[values[at] for at in plan.ref_places],
    ]


class _NoPrograms:
    """The launcher of a grid without programs."""

    def bind(self, *_: object) -> "Call":
        return _nothing


def _nothing(queue: Any) -> None:
    """The work of a launch whose grid is empty."""


def nothing(device: "Device", plan: "Plan", indexed: bool) -> Bound:
    """A launch whose grid is empty."""
    return Bound(device, _nothing, _NoPrograms(), plan, (), None, indexed)
