"""Storage: one owned block of device memory and the record of what has moved out of it (O5)."""

from typing import TYPE_CHECKING

from tilert.ownership import Hold, Place, Region, check_free

if TYPE_CHECKING:
    import numpy as np

    from tilert.device import Block, Device

__all__ = ["Lease", "Storage"]


class Storage:
    """A block of memory shared by the arrays that view it; freed with the last of them.

    Args:
        block: the memory, if it is there already; nbytes of it.

    Attributes:
        address: of the first byte, in the device's address space.
        host: the bytes as uint8[nbytes] where the host may touch them (cpu), else None.
        holds: regions that partitions and ops hold at present.
        leases: uses by work that may be in flight (rule O4), which go on when the storage is gone.
    """

    __slots__ = ("__weakref__", "address", "block", "device", "holds", "host", "leases", "nbytes")

    def __init__(self, device: "Device", nbytes: int, block: "Block | None" = None) -> None:
        self.device = device
        self.nbytes = nbytes
        self.block = device.allocate(nbytes) if block is None else block
        self.address: int = self.block.address
        self.host: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = self.block.host
        self.leases = self.block.leases
        # A dict for its atomic insert and remove: leases end in finalisers, in any thread.
        self.holds: dict[Hold, None] = {}

    def check_free(self, region: Region, write: bool = True) -> None:
        """Rule O5 before a use of `region`.

        Args:
            write: whether the use may write.

        Raises:
            MovedError: if an op, a partition or a borrower holds part of it.
        """
        if self.holds:
            check_free(list(self.holds), region, write)

    def lease(self, region: Region, place: Place, loan: str = "", reading: bool = False) -> "Lease":
        """Move `region` out: its uses fail until the lease is released or dropped.

        Args:
            loan: what it is lent through, if it is lent.
            reading: whether the borrower only reads it, so that reading it goes on.

        Raises:
            MovedError: if part of it has moved already.
        """
        with self.device.lock:
            self.check_free(region, not reading)
            return Lease(self, Hold(region, None, place, loan, reading))


class Lease:
    """The right to a region. Dropping it gives the region back."""

    __slots__ = ("_storage", "hold")

    def __init__(self, storage: Storage, hold: Hold) -> None:
        self._storage = storage
        self.hold = hold
        storage.holds[hold] = None

    @property
    def live(self) -> bool:
        """Whether the region is still held through this lease."""
        return self.hold in self._storage.holds

    def release(self) -> None:
        """Give the region back; doing it again does nothing."""
        self._storage.holds.pop(self.hold, None)

    def __del__(self) -> None:
        self.release()
