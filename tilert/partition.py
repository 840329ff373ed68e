"""Partitions: an array moved into disjoint pieces, one for each program of a launch (O2, O5)."""

import math
import operator
from typing import TYPE_CHECKING

from tilert.errors import LaunchError, MovedError
from tilert.index_map import IndexMap
from tilert.limits import MAX_TILE
from tilert.ownership import Hold, Place, caller
from tilert.pending import note_pending

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
        place: where `partition` was called.
    """

    __slots__ = ("__weakref__", "_lease", "array", "grid", "index_map", "place", "tile")

    def __init__(
        self, array: "Array", tile: tuple[int, ...], index_map: IndexMap | None = None
    ) -> None:
        self.array = array
        self.index_map = index_map
        self.place = caller(2)
        try:
            self.tile = tile = tuple(map(operator.index, tile))
        except TypeError:
            raise LaunchError(
                f"O2 disjoint pieces: the sizes of a tile are ints, got {tile!r}"
            ) from None
        shape = array.shape
        if len(tile) != len(shape) or min(tile, default=1) < 1 or math.prod(tile) > MAX_TILE:
            raise self._wrong_tile()
        grid = tuple([-(-n // size) for n, size in zip(shape, tile, strict=True)])
        if index_map is not None:
            self._check_index(index_map)
            grid = (len(index_map), *grid[1:])
        self.grid = grid
        array.check_writable("partition")
        self._lease = array.storage.lease(array.region, self.place)
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
