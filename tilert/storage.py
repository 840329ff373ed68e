"""Storage: one owned block of device memory and the record of what has moved out of it (O5)."""

from typing import TYPE_CHECKING
from weakref import ref

from tilert.ownership import Hold, Holder, Region, check_free

if TYPE_CHECKING:
    import numpy as np

    from tilert.device import Block, Device

__all__ = ["Storage"]


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
        # A set for its atomic insert and remove: holds end where their holder dies, in any thread.
        self.holds: set[Hold] = set()

    def check_free(self, region: Region, write: bool = True) -> None:
        """Rule O5 before a use of `region`.

        Args:
            write: whether the use may write.

        Raises:
            MovedError: if an op, a partition or a borrower holds part of it.
        """
        if self.holds:
            check_free(list(self.holds), region, write)

    def lease(self, holder: Holder) -> Hold:
        """Move the holder's region out: its uses fail until it is given back, or its holder dies.

        Giving it back is to take what this gives out of `holds`.

        Raises:
            MovedError: if part of it has moved already.
        """
        holds, lock = self.holds, self.device.lock
        lock.acquire()
        try:
            if holds:
                check_free(list(holds), holder.region, not holder.reading)
            hold = ref(holder, holds.discard)
            holds.add(hold)
        finally:
            lock.release()
        return hold
