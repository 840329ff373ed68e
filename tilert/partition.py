"""Partitions: an array moved into disjoint pieces, one for each program of a launch (O2, O5)."""

import operator
from typing import TYPE_CHECKING

from tilert.errors import LaunchError, MovedError
from tilert.index_map import IndexMap
from tilert.ownership import Place, caller

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

    __slots__ = ("_lease", "array", "grid", "index_map", "place", "tile")

    def __init__(
        self, array: "Array", tile: tuple[int, ...], index_map: IndexMap | None = None
    ) -> None:
        self.array = array
        self.tile = tuple(operator.index(size) for size in tile)
        self.index_map = index_map
        self.place = caller()
        self._check_tile()
        grid = [-(-n // size) for n, size in zip(array.shape, self.tile, strict=True)]
        if index_map is not None:
            index_map.bound_to(array.shape[0])
            grid[0] = len(index_map)
        self.grid = tuple(grid)
        array.check_writable("partition")
        self._lease = array.storage.lease(array.region, self.place)

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

    def release(self) -> None:
        """Give the array back."""
        self._lease.release()

    def _check_tile(self) -> None:
        array, tile = self.array, self.tile
        if len(tile) != array.ndim:
            raise LaunchError(
                f"O2 disjoint pieces: tile {list(tile)} has {len(tile)} sizes, an array of shape"
                f" {list(array.shape)} needs {array.ndim}"
            )
        if any(size < 1 for size in tile):
            raise LaunchError(f"O2 disjoint pieces: tile {list(tile)} has a size below 1")
        if self.index_map is None:
            return
        if not tile or tile[0] != 1:
            raise LaunchError(
                f"O7 indexed pieces: partition_at places single rows, so the tile begins with 1;"
                f" got {list(tile)}"
            )
        if self.index_map.device is not array.device:
            raise LaunchError(
                f"O7 indexed pieces: the array is on {array.device.name}, its index map on"
                f" {self.index_map.device.name}"
            )
