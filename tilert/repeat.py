"""Repeats: launches with the very arrays, tiles and constants of an earlier one.

Whatever follows from those alone was checked and bound then: what is left of a launch is that
nothing has moved (rules O3 and O5). The tiling of the first `Mut` keeps the launches made after its
first one, for most views are written once; they go with any of their arrays.
"""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilert.bound import Bound
    from tilert.partition import Tiling

__all__ = ["Repeat", "keep"]

# Of one tiling. Buffers of a model are written by a few kernels in each of its layers.
_MOST = 256

Key = tuple[object, ...]


class Repeat:
    """A launch that may be made again.

    Attributes:
        bound: the kernel bound to the arrays.
    """

    __slots__ = ("_watched", "bound")

    def __init__(self, bound: "Bound", watched: list[weakref.ref[Any]]) -> None:
        self.bound = bound
        self._watched = watched


def keep(first: "Tiling", key: Key, bound: "Bound", others: Sequence[object]) -> None:
    """Remember a launch.

    Args:
        first: of the first `Mut`.
        key: see `Plan.key`.
        others: the arrays and index maps that `key` names, beside the first.
    """
    repeats = first.repeats
    if repeats is None:
        return
    if len(repeats) >= _MOST:
        repeats.clear()
    # Not through `repeats` itself: a cycle would keep the memory of arrays that are gone.
    owner = weakref.ref(first)

    def forget(_: object) -> None:
        tiling = owner()
        if tiling is not None and tiling.repeats:
            tiling.repeats.pop(key, None)

    repeats[key] = Repeat(bound, [weakref.ref(other, forget) for other in others])
