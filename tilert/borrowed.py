"""Memory of another library, used as an array with ownership kept (rules O3 and O5)."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tilert.dtypes import DType
from tilert.errors import DeviceError
from tilert.limits import MAX_AXES
from tilert.ownership import Region, caller
from tilert.shared_memory import note_shared

if TYPE_CHECKING:
    from tilert.array import Array
    from tilert.device import Device
    from tilert.order import Record

__all__ = ["borrow"]

_READ_ONLY = (
    "O3 alias xor mutate: this array borrows memory that may only be read; copy it into an array of"
    " its own to write"
)


class _Block:
    """A block that belongs to somebody else, who gets it back when nothing uses it any more."""

    def __init__(
        self, device: "Device", low: int, nbytes: int, give_back: Callable[[], None]
    ) -> None:
        self.address = low
        self.leases: list[Record] = []
        self.host: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = None
        if device.kind == "cpu":
            self.host = np.asarray(_HostBytes(low, nbytes))
        self._device = device
        self._give_back = give_back

    def __del__(self) -> None:
        self._device.after_work(self._give_back)


class _HostBytes:
    """Host memory by its address."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "typestr": "|u1",
            "shape": (nbytes,),
        }


def borrow(
    device: "Device",
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: DType,
    write: bool,
    give_back: Callable[[], None],
) -> "Array":
    """An array on memory at `address`, strides in elements.

    Args:
        write: whether the owner lets it be written.
        give_back: called once: after all work on the memory, or at once where this raises.

    Raises:
        OwnershipError: if the memory is shared already, and either may write it (O3).
        DeviceError: if it has too many axes, or is not aligned to its elements.
    """
    from tilert.array import Array, empty
    from tilert.storage import Storage

    size = dtype.itemsize
    problem = ""
    if len(shape) > MAX_AXES:
        problem = f"has {len(shape)} axes, an array at most {MAX_AXES}"
    elif address % size:
        problem = f"is not aligned to the {size} bytes of {dtype.name}"
    if problem or 0 in shape:
        give_back()
        if problem:
            raise DeviceError(f"the borrowed memory at {address:#x} {problem}")
        return empty(shape, dtype, device)
    region = Region(address, shape, tuple([stride * size for stride in strides]), size)
    block = _Block(device, region.low, region.high - region.low, give_back)
    storage = Storage(device, region.high - region.low, block)
    device.adopt(block, storage.nbytes)
    note_shared(storage, device, region, write, "borrowed", caller(2))
    offset = (address - region.low) // size
    return Array(storage, dtype, shape, strides, offset, "" if write else _READ_ONLY)
