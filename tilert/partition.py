"""Partitions: an array moved into disjoint pieces, one for each program of a launch (O2, O5)."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tilert.errors import LaunchError, MovedError
from tilert.index_map import IndexMap
from tilert.limits import MAX_TILE
from tilert.ownership import Hold, Place, Region, caller
from tilert.pending import note_pending
from tilert.piece_map import PieceMap
from tilert.placement import Pieces, Placement, placed

if TYPE_CHECKING:
    from tilert.array import Array

__all__ = ["Partition"]


class Partition:
    """A `Mut` argument. It holds the array until an op takes it, or until it is dropped.

    Attributes:
        array: the partitioned view.
        tile: shape of a piece.
        grid: number of pieces on each axis.
        index_map: places the pieces of axis 0, or None.
        placement: which piece each program writes, or None where it is the one of its own number.
        programs: how many programs walk the pieces, where the kernel walks them and it was said.
        place: where `partition` was called.
    """

    __slots__ = (
        "__weakref__",
        "_lease",
        "array",
        "grid",
        "index_map",
        "place",
        "placement",
        "programs",
        "tile",
    )

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
        self.place = caller(2)
        try:
            self.tile = tile = tuple([operator.index(size) for size in tile])
        except TypeError:
            raise LaunchError(
                f"O2 disjoint pieces: the sizes of a tile are ints, got {tile!r}"
            ) from None
        grids = array.grids
        found = grids.get(tile) if grids else None
        if found is None:
            found = self._check_tile()
        self.grid = found
        if index_map is not None:
            self._check_index(index_map)
            self.grid = (len(index_map), *found[1:])
        elif pieces is not None or map is not None or grid is not None:
            self.placement = placed(array, tile, pieces, map, grid)
            self.grid = self.placement.grid
        if programs is not None and (type(programs) is not int or programs < 1):
            raise LaunchError(f"O2 disjoint pieces: programs= is a positive int, got {programs!r}")
        self._lease = array.storage.lease(self.region, self.place)
        if array.storage.device.recorder is not None:
            note_pending(array.storage.device, self)

    def __repr__(self) -> str:
        return f"Partition({self.array!r}, tile={list(self.tile)}, grid={list(self.grid)})"

    def move_to(self, op: str, place: Place) -> None:
        """Hand the array to the op of kernel `op`, made at `place`.

        Raises:
            MovedError: if an op has taken this partition already.
        """
        hold = self._lease.hold
        if hold.op is not None or not self._lease.live:
            raise MovedError(
                f"O5 move: the partition made at {self.place} is used a second time, by kernel"
                f" '{op}'; op '{hold.op}' created at {hold.place} has taken it; partition the array"
                " again when it is back"
            )
        hold.op = op
        hold.place = place

    @property
    def region(self) -> Region:
        """The memory of the pieces, which is what moves; the rest of the buffer stays usable."""
        return self.array.region if self.placement is None else self.placement.region

    @property
    def hold(self) -> Hold:
        """What says where the array has gone."""
        return self._lease.hold

    @property
    def held(self) -> bool:
        """Whether the array is still out."""
        return self._lease.live

    def release(self) -> None:
        """Give the array back."""
        self._lease.release()

    def _check_tile(self) -> tuple[int, ...]:
        """The grid of the array's own pieces, kept with the array."""
        array, tile = self.array, self.tile
        if len(tile) != array.ndim or min(tile, default=1) < 1 or math.prod(tile) > MAX_TILE:
            raise self._wrong_tile()
        array.check_writable("partition")
        grid = tuple([-(-n // size) for n, size in zip(array.shape, tile, strict=True)])
        if array.grids is None:
            array.grids = {tile: grid}
        else:
            array.grids[tile] = grid
        return grid

    def _wrong_tile(self) -> LaunchError:
        array, tile = self.array, self.tile
        if len(tile) != array.ndim:
            return LaunchError(
                f"O2 disjoint pieces: tile {list(tile)} has {len(tile)} sizes, an array of shape"
                f" {list(array.shape)} needs {array.ndim}"
            )
        if any(size < 1 for size in tile):
            return LaunchError(f"O2 disjoint pieces: tile {list(tile)} has a size below 1")
        return LaunchError(
            f"O2 disjoint pieces: tile {list(tile)} is too large: a piece has at most {MAX_TILE}"
            " elements"
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
