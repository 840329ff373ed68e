"""Repeats: launches with the very arrays, tiles and constants of an earlier one.

Whatever follows from those alone was checked and bound then: what is left of a launch is that
nothing has moved (rules O3 and O5). The array of the first `Mut` keeps the launches made after its
first one, for most views are written once; they go with any of their arrays.
"""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tilert.constant import constant_key
from tilert.partition import Partition

if TYPE_CHECKING:
    from tilert.array import Array
    from tilert.bound import Bound
    from tilert.parameters import Plan

__all__ = ["Repeat", "keep", "repeat_key"]

# Of one array. Buffers of a model are written by a few kernels in each of its layers.
_MOST = 256

Key = tuple[object, ...]


class Repeat:
    """A launch that may be made again.

    Attributes:
        bound: the kernel bound to the arrays.
        maps: the entries of index maps that it reads.
    """

    __slots__ = ("_watched", "bound", "maps")

    def __init__(
        self, bound: "Bound", maps: list["Array"], watched: list[weakref.ref[Any]]
    ) -> None:
        self.bound = bound
        self.maps = maps
        self._watched = watched


def repeat_key(kernel: Any, plan: "Plan", values: Sequence[Any]) -> Key | None:
    """What tells launches apart, or None where they are not kept.

    Arrays and index maps go by their addresses in the host's memory, which are theirs as long as
    they live.
    """
    key: list[object] = [kernel, kernel.captured()]
    for at in plan.mut_places:
        mut = values[at]
        if type(mut) is not Partition or mut.placement is not None or mut.programs is not None:
            return None
        key += (id(mut.array), mut.tile, mut.index_map and id(mut.index_map))
    for at in plan.ref_places:
        key.append(id(values[at]))
    for at in plan.consts:
        key.append(constant_key(values[at]))
    return tuple(key)


def keep(
    first: "Array",
    key: Key,
    bound: "Bound",
    maps: list["Array"],
    others: Sequence[object],
) -> None:
    """Remember a launch.

    Args:
        first: array of the first `Mut`.
        maps: entries of index maps.
        others: the arrays and index maps that `key` names.
    """
    repeats = first.repeats
    if repeats is None:
        return
    if len(repeats) >= _MOST:
        repeats.clear()
    # Not through `repeats` itself: a cycle would keep the memory of arrays that are gone.
    owner = weakref.ref(first)

    def forget(_: object) -> None:
        array = owner()
        if array is not None and array.repeats:
            array.repeats.pop(key, None)

    watched = [weakref.ref(other, forget) for other in others if other is not first]
    repeats[key] = Repeat(bound, maps, watched)
