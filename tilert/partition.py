"""Partitions: an array moved into disjoint pieces, one for each program of a launch (O2, O5)."""

import math
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from tilert.errors import LaunchError, MovedError
from tilert.index_map import IndexMap
from tilert.limits import MAX_TILE
from tilert.ownership import At, Place, Region, where
from tilert.pending import note_pending
from tilert.piece_map import PieceMap
from tilert.placement import Pieces, Placement, placed

if TYPE_CHECKING:
    from tilert.array import Array
    from tilert.repeat import Repeat

__all__ = ["Partition", "Tiling"]


class Tiling:
    """An array cut into all its pieces of one shape; the array has it, and it knows no memory.

    Attributes:
        grid: number of pieces on each axis.
        repeats: launches that write the array first, in these pieces, and may be made again; see
            `tilert.repeat`.
    """

    __slots__ = ("__weakref__", "grid", "repeats")

    def __init__(self, grid: tuple[int, ...]) -> None:
        self.grid = grid
        self.repeats: dict[tuple[object, ...], Repeat] | None = None


class Partition:
    """A `Mut` argument. It holds the array until an op takes it, or until it is dropped.

    Attributes:
        array: the partitioned view.
        tile: shape of a piece.
        grid: number of pieces on each axis.
        index_map: places the pieces of axis 0, or None.
        placement: which piece each program writes, or None where it is the one of its own number.
        programs: how many programs walk the pieces, where the kernel walks them and it was said.
        tiling: of the array.
        key: equal for partitions of one array that are alike in all that is above.
        taken: kernel of the op that took it, and where that was made.
        hold: what the storage knows it by while it holds the array: while it is in `holds`.
    """

    __slots__ = (
        "__weakref__",
        "_at",
        "array",
        "grid",
        "hold",
        "holds",
        "index_map",
        "key",
        "placement",
        "programs",
        "taken",
        "tile",
        "tiling",
    )

    reading = False

    def __init__(
        self,
        array: "Array",
        tile: tuple[int, ...],
        index_map: IndexMap | None = None,
        pieces: Pieces | None = None,
        map: PieceMap | Callable[..., Any] | None = None,
        grid: Sequence[int] | None = None,
        programs: int | None = None,
    ) -> None:
        self.array = array
        self.index_map = index_map
        self.placement: Placement | None = None
        self.programs = programs
        self.taken: tuple[str, At] | None = None
        self._at = where(3)
        for size in tile:
            if type(size) is not int:
                tile = _ints(tile)
                break
        self.tile = tile
        tilings = array.tilings
        tiling = tilings.get(tile) if tilings else None
        if tiling is None:
            tiling = self._check_tile()
        self.tiling = tiling
        self.grid = tiling.grid
        self.key: Hashable = tiling
        if index_map is not None:
            self._check_index(index_map)
            self.grid = (len(index_map), *tiling.grid[1:])
            self.key = tiling, id(index_map)
        elif pieces is not None or map is not None or grid is not None:
            self.placement = placed(array, tile, pieces, map, grid)
            self.grid = self.placement.grid
            self.key = tiling, self.placement
        if programs is not None:
            if type(programs) is not int or programs < 1:
                raise LaunchError(
                    f"O2 disjoint pieces: programs= is a positive int, got {programs!r}"
                )
            self.key = self.key, programs
        storage = array.storage
        self.holds = storage.holds
        self.hold = storage.lease(self)
        if storage.device.recorder is not None:
            note_pending(storage.device, self)

    def __repr__(self) -> str:
        return f"Partition({self.array!r}, tile={list(self.tile)}, grid={list(self.grid)})"

    def move_to(self, op: tuple[str, At]) -> None:
        """Hand the array to an op, by its kernel and where it was made.

        Raises:
            MovedError: if an op has taken this partition already.
        """
        if self.taken is not None or self.hold not in self.holds:
            raise MovedError(
                f"O5 move: the partition made at {self.place} is used a second time, by"
                f" kernel '{op[0]}'; {self._taker()} has taken it; partition the array again when"
                " it is back"
            )
        self.taken = op

    def _taker(self) -> str:
        if self.taken is None:
            return "a capture that failed"
        return f"op '{self.taken[0]}' created at {Place(*self.taken[1])}"

    @property
    def whose(self) -> str:
        """See `tilert.ownership.Holder`."""
        if self.taken is None:
            return (
                f"a partition made at {self.place}, which has its memory to itself; pass it to a"
                " kernel and use what the op returns, or drop it"
            )
        return f"{self._taker()}; use what its .run() or .sync() returns"

    @property
    def place(self) -> Place:
        """Where `partition` was called."""
        return Place(*self._at)

    @property
    def region(self) -> Region:
        """The memory of the pieces, which is what moves; the rest of the buffer stays usable."""
        return self.array.region if self.placement is None else self.placement.region

    @property
    def held(self) -> bool:
        """Whether the array is still out."""
        return self.hold in self.holds

    def release(self) -> None:
        """Give the array back; doing it again does nothing."""
        self.holds.discard(self.hold)

    def _check_tile(self) -> Tiling:
        """The tiling, kept with the array."""
        array, tile = self.array, self.tile
        if len(tile) != array.ndim or min(tile, default=1) < 1 or math.prod(tile) > MAX_TILE:
            raise self._wrong_tile()
        array.check_writable("partition")
        tiling = Tiling(tuple([-(-n // size) for n, size in zip(array.shape, tile, strict=True)]))
        if array.tilings is None:
            array.tilings = {}
        # Another thread may have been here first.
        return array.tilings.setdefault(tile, tiling)

    def _wrong_tile(self) -> LaunchError:
        array, tile = self.array, self.tile
        if len(tile) != array.ndim:
            sizes = "one size" if len(tile) == 1 else f"{len(tile)} sizes"
            return LaunchError(
                f"partition takes one size for each axis: got {sizes}, {list(tile)}, for an array"
                f" of shape {list(array.shape)}"
            )
        if any(size < 1 for size in tile):
            return LaunchError(f"the sizes of a piece are at least 1, got {list(tile)}")
        return LaunchError(
            f"a piece of {list(tile)} is too large: it has at most {MAX_TILE} elements"
        )

    def _check_index(self, index_map: IndexMap) -> None:
        array, tile = self.array, self.tile
        if not tile or tile[0] != 1:
            raise LaunchError(
                f"O7 indexed pieces: partition_at places single rows, so the tile begins with 1;"
                f" got {list(tile)}"
            )
        if index_map.device is not array.device:
            raise LaunchError(
                f"O7 indexed pieces: the array is on {array.device.name}, its index map on"
                f" {index_map.device.name}"
            )
        index_map.bound_to(array.shape[0])


def _ints(tile: tuple[Any, ...]) -> tuple[int, ...]:
    try:
        return tuple([operator.index(size) for size in tile])
    except TypeError:
        raise LaunchError(f"the sizes of a tile are ints, got {tile!r}") from None
