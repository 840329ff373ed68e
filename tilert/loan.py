"""Loans: memory lent to another library, through DLPack or the CUDA array interface (rule O5)."""

from typing import TYPE_CHECKING, Any

from tilert.errors import DeviceError
from tilert.ownership import Place, Region, caller
from tilert.shared_memory import note_shared

if TYPE_CHECKING:
    from tilert.array import Array

__all__ = ["Loan"]


class _Term:
    """For as long as it lives, the memory of a loan is shared."""


class Loan:
    """An array lent for as long as this object lives.

    The memory is held as if an op had it. What is lent to be written cannot be used at all until
    the borrower lets go; what is lent to be read may be read by both and written by neither.

    On a GPU it has `__cuda_array_interface__`: libraries that take it keep the object that gave it,
    and so the loan, alive.

    Args:
        array: what is lent, after all work that is enqueued on its device.
        write: whether the borrower may write.
        through: what it is lent through.

    Raises:
        MovedError: if an op or another borrower has it.
        OwnershipError: if it may not be written and `write` is asked for.
        LaunchError: during a capture.
    """

    def __init__(self, array: "Array", write: bool, through: str) -> None:
        if write:
            array.check_writable("lending to a writer")
        self.array = array
        self.write = write
        self._through = through
        self._place = place = caller(2)
        array.device.refuse_in_capture("lending an array")
        self._term: _Term | None = _Term()
        hold = array.storage.lease(self)
        try:
            self._begin(place)
        except BaseException:
            # The traceback keeps this object; what is not lent is not held meanwhile.
            array.storage.holds.discard(hold)
            self._term = None
            raise

    def _begin(self, place: Place) -> None:
        array, own, device = self.array, self.region, self.array.device
        start = array.storage.address + own.start
        region = Region(start, own.shape, own.strides, own.itemsize)
        what = f"lent through {self._through}"
        note_shared(self._term, device, region, self.write, what, place, within=array.storage)
        with device.lock:
            while not device.settled(((array.storage, own, self.write),)):
                pass
        device.synchronize()
        if self.write:
            device.lent(array)

    @property
    def region(self) -> Region:
        """See `tilert.ownership.Holder`."""
        return self.array.region

    @property
    def reading(self) -> bool:
        """See `tilert.ownership.Holder`."""
        return not self.write

    @property
    def whose(self) -> str:
        """See `tilert.ownership.Holder`."""
        only = ", to be read only by both," if self.reading else ""
        return (
            f"a borrower: it was lent{only} through {self._through} at {self._place}; drop what was"
            " made of it to have it back"
        )

    def __repr__(self) -> str:
        return f"<loan of {self.array!r} to {'write' if self.write else 'read'}>"

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        array = self.array
        if array.device.kind != "cuda":
            raise AttributeError(
                f"{array!r} is in host memory and has no __cuda_array_interface__; use DLPack"
            )
        if array.dtype.numpy.isbuiltin != 1:
            raise DeviceError(
                f"the CUDA array interface has no type for {array.dtype.name}; use DLPack, or lend"
                " a view of another type of that size"
            )
        size = array.dtype.itemsize
        return {
            "version": 3,
            "shape": array.shape,
            "strides": tuple([stride * size for stride in array.strides]),
            "typestr": array.dtype.numpy.str,
            "data": (array.address if array.size else 0, not self.write),
            # All work was complete when the loan began.
            "stream": None,
        }
