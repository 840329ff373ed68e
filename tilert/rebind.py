"""Rebinding: the work of a graph once more, on other memory (rule O6)."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from tilert.errors import LaunchError, OwnershipError
from tilert.ownership import Region, covers, overlap
from tilert.recording import Piece

if TYPE_CHECKING:
    from tilert.array import Array
    from tilert.device import Call, Device, Use
    from tilert.ownership import Place
    from tilert.storage import Storage

__all__ = ["Maker", "Swap"]

# What kernels may have been compiled for.
_ALIGNMENT = 16


class Maker:
    """Makes a call from arrays, and makes it again from others.

    Args:
        what: the work, for messages.
        make: takes the arrays and gives the call.
        fixed: how many of the arrays, from the first, stay as they are: those of index maps.
        place: where the work was made, if that is known.
    """

    __slots__ = ("arrays", "fixed", "make", "place", "what")

    def __init__(
        self,
        what: str,
        make: "Callable[[Sequence[Array]], Call]",
        arrays: "Sequence[Array]",
        fixed: int = 0,
        place: "Place | None" = None,
    ) -> None:
        self.what = what
        self.make = make
        self.arrays = arrays
        self.fixed = fixed
        self.place = place

    def __str__(self) -> str:
        return self.what if self.place is None else f"{self.what} at {self.place}"

    def again(self, swap: "Swap") -> "tuple[Call, Maker]":
        """The call on the memory of the swap, and what makes that again."""
        for array in self.arrays[: self.fixed]:
            if swap.pair(array.storage, array.region) is not None:
                raise OwnershipError(
                    f"O7 indexed pieces: the memory of {array!r} is an index map that places pieces"
                    " of the graph, and cannot be rebound; change the map's entries"
                )
        arrays = [swap.array(array) for array in self.arrays]
        return self.make(arrays), Maker(self.what, self.make, arrays, self.fixed, self.place)


class Swap:
    """Memory that takes the place of other memory.

    Args:
        arrays: new memory by the old.

    Raises:
        LaunchError: if a pair does not fit, or two of the old arrays overlap.
    """

    def __init__(self, device: "Device", arrays: "Mapping[Array, Array]") -> None:
        self._pairs = list(arrays.items())
        self._used: set[Array] = set()
        for at, (old, new) in enumerate(self._pairs):
            _check_pair(device, old, new)
            for other, _ in self._pairs[:at]:
                if other.storage is old.storage and overlap(other.region, old.region):
                    raise LaunchError(
                        f"O6 graphs: two of the arrays to rebind share memory, {other!r} and"
                        f" {old!r}; name every part once"
                    )

    def pair(self, storage: "Storage", region: "Region") -> "tuple[Array, Array] | None":
        """The old array that has a region, and its new one; None where the region stays.

        Raises:
            LaunchError: if only part of the region is in an old array.
        """
        for old, new in self._pairs:
            if old.storage is storage and overlap(old.region, region):
                if not covers(old.region, region):
                    raise LaunchError(
                        f"O6 graphs: the graph uses memory of {old!r} together with memory beside"
                        f" it, as an array of shape {list(region.shape)}; rebind the array that"
                        " holds both"
                    )
                return old, new
        return None

    def array(self, array: "Array") -> "Array":
        """The array at the same place of the new memory.

        Raises:
            LaunchError: if it is aligned there as kernels do not expect.
        """
        pair = self.pair(array.storage, array.region)
        if pair is None:
            return array
        old, new = pair
        if (new.address - old.address) % _ALIGNMENT and array.address % _ALIGNMENT == 0:
            raise LaunchError(
                f"O6 graphs: the graph was recorded for memory aligned to {_ALIGNMENT} bytes, which"
                f" that of {new!r} is not"
            )
        from tilert.array import Array

        offset = new.offset + array.offset - old.offset
        return Array(new.storage, array.dtype, array.shape, array.strides, offset, array.readonly)

    def piece(self, piece: Piece) -> Piece:
        """The piece on the new memory.

        Raises:
            As `Graph.rebind`.
        """
        maker = piece.maker
        if maker is None:
            raise LaunchError("O6 graphs: the graph has work that cannot be made again")
        try:
            uses = tuple([self._use(*use) for use in piece.uses])
            if uses != piece.uses:
                _check_alias(uses)
            call, maker = maker.again(self)
        except (LaunchError, OwnershipError) as error:
            error.add_note(f"while rebinding {maker}")
            raise
        return Piece(call, uses, maker, piece.lane)

    def _use(self, storage: "Storage", region: "Region", write: bool) -> "Use":
        pair = self.pair(storage, region)
        if pair is None:
            return storage, region, write
        old, new = pair
        self._used.add(old)
        if write and new.readonly:
            raise OwnershipError(
                f"O6 graphs: the graph writes {old!r}, and {new!r} is read-only: {new.readonly}"
            )
        if write:
            new.check_writable("rebinding what the graph writes")
        start = region.start + new.region.start - old.region.start
        return new.storage, Region(start, region.shape, region.strides, region.itemsize), write

    def check_used(self) -> None:
        """Refuse what the graph has no use for.

        Raises:
            LaunchError: if no piece used the memory of one of the old arrays.
        """
        for old, _ in self._pairs:
            if old not in self._used:
                raise LaunchError(f"O6 graphs: the graph does not use the memory of {old!r}")


def _check_pair(device: "Device", old: "Array", new: "Array") -> None:
    from tilert.array import Array

    for one in (old, new):
        if not isinstance(one, Array):
            raise LaunchError(
                f"O6 graphs: rebind takes arrays of {device.name} by arrays, got"
                f" {type(one).__name__}"
            )
    if old.device is not device or new.device is not device:
        raise LaunchError(
            f"O6 graphs: a graph of {device.name} is rebound from arrays of {old.device.name} to"
            f" arrays of {new.device.name}; all are on the graph's device"
        )
    if (old.shape, old.strides, old.dtype) != (new.shape, new.strides, new.dtype):
        raise LaunchError(
            f"O6 graphs: {old!r} with strides {list(old.strides)} cannot be rebound to {new!r} with"
            f" strides {list(new.strides)}; shape, strides and dtype are those of the recording"
        )


def _check_alias(uses: "Sequence[Use]") -> None:
    """Rule O3 for one piece of work."""
    for at, (storage, region, write) in enumerate(uses):
        for other, other_region, other_write in uses[:at]:
            if storage is other and (write or other_write) and overlap(region, other_region):
                raise OwnershipError(
                    "O3 alias xor mutate: the work would reach memory that it writes through two"
                    " of its arguments; bind each to memory of its own"
                )
