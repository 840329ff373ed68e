"""Memory that this package and another library both know: what is lent and what is borrowed.

Two that share memory may both read it, or one of them has it alone (rule O3). Addresses are kept
of every loan and every import, for as long as it lives.
"""

import threading
import weakref
from typing import TYPE_CHECKING, Any

from tilert.errors import OwnershipError
from tilert.ownership import Place, Region, overlap

if TYPE_CHECKING:
    from tilert.device import Device

__all__ = ["note_shared"]


class _Shared:
    """One stretch of memory: `what` says how it is shared while `owner` lives."""

    def __init__(
        self, owner: Any, device: "Device", region: Region, write: bool, what: str, place: Place
    ) -> None:
        self.owner = weakref.ref(owner)
        self.device = device
        self.region = region
        self.write = write
        self.what = what
        self.place = place


_shared: list[_Shared] = []
_lock = threading.Lock()


def note_shared(
    owner: Any,
    device: "Device",
    region: Region,
    write: bool,
    what: str,
    place: Place,
    within: object = None,
) -> None:
    """Note that `region`, in addresses, is `what` at `place` for as long as `owner` lives.

    Args:
        write: whether whoever has it may write.
        within: an owner that shares what it has itself, under leases of its own.

    Raises:
        OwnershipError: if some of it is shared already, and either may write (O3).
    """
    with _lock:
        _shared[:] = [one for one in _shared if one.owner() is not None]
        for one in _shared:
            if within is not None and one.owner() is within:
                continue
            # Host memory is the same for every cpu device.
            if one.device is not device and (one.device.kind, device.kind) != ("cpu", "cpu"):
                continue
            if (write or one.write) and overlap(one.region, region):
                raise OwnershipError(
                    f"O3 alias xor mutate: the memory is {one.what} already, at {one.place}, and"
                    " one of the two may write it; use the array from there, or let both only read"
                )
        _shared.append(_Shared(owner, device, region, write, what, place))
