"""Arrays: strided views of device memory, and the functions that make them."""

import math
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any

import numpy as np

from tilert.device import Device, check_device
from tilert.dtypes import DType, check_dtype, dtype_of
from tilert.errors import OwnershipError
from tilert.exchange import dlpack_device, export_dlpack
from tilert.fill_value import fill_value
from tilert.index_map import IndexMap
from tilert.limits import MAX_AXES, MAX_BYTES
from tilert.loan import Loan
from tilert.ownership import Region, overlap
from tilert.partition import Partition, Tiling
from tilert.piece_map import PieceMap
from tilert.placement import Pieces
from tilert.rebind import Maker
from tilert.storage import Storage
from tilert.strides import (
    Shape,
    flatten,
    full_shape,
    new_shape,
    point,
    reshape_strides,
    row_major,
)

__all__ = ["Array", "empty", "from_numpy", "full", "submit_copy", "zeros"]

Index = int | slice | EllipsisType


class Array:
    """A view of device memory. Slicing, reshaping and permuting give views of the same memory.

    Views may always be made; using one (reading, writing, partitioning, passing to a kernel) while
    an op holds an overlapping piece of its memory raises MovedError (rule O5).

    Attributes:
        storage: the memory, shared by all views of it.
        shape: extents.
        strides: in elements.
        offset: of element (0, ..., 0) in the storage, in elements.
        dtype: element type.
        readonly: why the array may not be written, or "" if it may.
        tilings: for every tile that it has been partitioned by, the whole of its pieces.
        types: what launches know of it by the run-time axes of a parameter; see `tilert.op`.
    """

    __slots__ = (
        "__weakref__",
        "_region",
        "dtype",
        "offset",
        "readonly",
        "shape",
        "storage",
        "strides",
        "tilings",
        "types",
    )

    def __init__(
        self,
        storage: Storage,
        dtype: DType,
        shape: Shape,
        strides: Shape,
        offset: int = 0,
        readonly: str = "",
    ) -> None:
        if len(shape) > MAX_AXES:
            raise ValueError(f"an array has at most {MAX_AXES} axes, got {len(shape)}")
        self.storage = storage
        self.dtype = dtype
        self.shape = shape
        self.strides = strides
        self.offset = offset
        self.readonly = readonly
        self._region: Region | None = None
        self.tilings: dict[Shape, Tiling] | None = None
        self.types: dict[frozenset[int], int] = {}

    def __repr__(self) -> str:
        return f"Array({list(self.shape)}, {self.dtype.name}, {self.device.name})"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array without axes has no length")
        return self.shape[0]

    @property
    def device(self) -> Device:
        """Where the memory is."""
        return self.storage.device

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def address(self) -> int:
        """Address of element (0, ..., 0) in the device's address space."""
        return self.storage.address + self.offset * self.dtype.itemsize

    @property
    def region(self) -> Region:
        """The bytes of the storage that the view covers."""
        if self._region is None:
            size = self.dtype.itemsize
            strides = tuple([stride * size for stride in self.strides])
            self._region = Region(self.offset * size, self.shape, strides, size)
        return self._region

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        expected = 1
        for n, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if n != 1 and stride != expected:
                return 0 in self.shape
            expected *= n
        return True

    def check_free(self, write: bool = False) -> None:
        """Rule O5 before a use.

        Args:
            write: whether the use may write.

        Raises:
            MovedError: if an op, a partition or a borrower holds part of the memory.
        """
        if self.storage.holds:
            self.storage.check_free(self.region, write)

    # Views

    def _view(self, shape: Shape, strides: Shape, offset: int) -> "Array":
        return Array(self.storage, self.dtype, shape, strides, offset, self.readonly)

    def __getitem__(self, key: Index | tuple[Index, ...]) -> "Array":
        """A view by ints, slices with positive steps and `...`; fewer indices than axes are fine.

        Raises:
            IndexError: if an int is out of range or there are too many indices.
        """
        keys = list(key) if isinstance(key, tuple) else [key]
        if ... in keys:
            at = keys.index(...)
            missing = self.ndim - (len(keys) - 1)
            keys[at : at + 1] = [slice(None)] * max(missing, 0)
        if len(keys) > self.ndim:
            raise IndexError(f"{len(keys)} indices for an array of shape {list(self.shape)}")
        shape: list[int] = []
        strides: list[int] = []
        offset = self.offset
        for axis, (one, n, stride) in enumerate(zip(keys, self.shape, self.strides, strict=False)):
            if isinstance(one, slice):
                start, stop, step = one.indices(n)
                if step < 0:
                    raise IndexError("slices of device arrays take positive steps")
                count = len(range(start, stop, step))
                # An empty slice may start past the end, where no address is needed.
                offset += start * stride if count else 0
                shape.append(count)
                strides.append(stride * step)
            else:
                offset += point(one, n, axis) * stride
        rest = len(keys)
        return self._view((*shape, *self.shape[rest:]), (*strides, *self.strides[rest:]), offset)

    def reshape(self, *shape: int | tuple[int, ...]) -> "Array":
        """A view of another shape, row-major; one extent may be -1.

        Raises:
            ValueError: if the sizes differ, or the elements' layout allows no such view.
        """
        wanted = full_shape(flatten(shape), self.shape)
        if self.is_contiguous:
            return self._view(wanted, row_major(wanted), self.offset)
        strides = reshape_strides(self.shape, self.strides, wanted)
        if strides is None:
            raise ValueError(
                f"an array of shape {list(self.shape)} and strides {list(self.strides)} cannot be"
                f" viewed as {list(wanted)}; copy it into a contiguous array first"
            )
        return self._view(wanted, strides, self.offset)

    def permute(self, *axes: int | tuple[int, ...]) -> "Array":
        """A view with the axes in another order: axis i of it is axis `axes[i]` of this array.

        Raises:
            ValueError: if `axes` does not name every axis once.
        """
        order = tuple(axis + self.ndim if axis < 0 else axis for axis in flatten(axes))
        if sorted(order) != list(range(self.ndim)):
            raise ValueError(f"{list(order)} is no order of the axes of {list(self.shape)}")
        return self._view(
            tuple(self.shape[a] for a in order), tuple(self.strides[a] for a in order), self.offset
        )

    @property
    def T(self) -> "Array":
        """A view with the axes in reverse order."""
        return self._view(self.shape[::-1], self.strides[::-1], self.offset)

    def broadcast_to(self, *shape: int | tuple[int, ...]) -> "Array":
        """A view that repeats axes of extent 1, and new leading axes. It cannot be written.

        Raises:
            ValueError: if an axis of another extent would have to change.
        """
        wanted = flatten(shape)
        lead = len(wanted) - self.ndim
        if lead < 0 or any(n not in (1, w) for n, w in zip(self.shape, wanted[lead:], strict=True)):
            raise ValueError(f"cannot broadcast {list(self.shape)} to {list(wanted)}")
        if math.prod(wanted) * self.dtype.itemsize > MAX_BYTES:
            raise ValueError(f"a view of shape {list(wanted)} has too many elements")
        strides = tuple(
            stride if n == w else 0
            for n, w, stride in zip(self.shape, wanted[lead:], self.strides, strict=True)
        )
        return self._view(wanted, (0,) * lead + strides, self.offset)

    def view(self, dtype: DType) -> "Array":
        """The same bytes as elements of another type of the same size.

        Raises:
            ValueError: if the types differ in size.
            TypeError: if it is no dtype.
        """
        check_dtype(dtype)
        if dtype.bits != self.dtype.bits:
            raise ValueError(f"cannot view {self.dtype.name} as {dtype.name}: the sizes differ")
        return Array(self.storage, dtype, self.shape, self.strides, self.offset, self.readonly)

    def as_readonly(self, reason: str) -> "Array":
        """A view that kernels may read but nothing may write; `reason` completes the message."""
        return Array(self.storage, self.dtype, self.shape, self.strides, self.offset, reason)

    # Uses

    def numpy(self) -> np.ndarray[Any, Any]:
        """A host copy, after all enqueued work that writes the array (bf16 through ml_dtypes).

        It is enqueued on the device's own stream, and waits.

        Raises:
            MovedError: if an op holds part of the array.
            LaunchError: during a capture.
        """
        self.device.refuse_in_capture("reading an array on the host")
        self.check_free()
        return self.device.download(self)

    def copy_from(self, source: "np.ndarray[Any, Any] | Array") -> None:
        """Overwrite with data of the same shape and dtype, in order with the device's other work.

        A host array may be changed as soon as this returns. A capture records copies between
        device arrays and refuses copies from the host.

        Raises:
            TypeError: if the source is no array.
            ValueError: if shape or dtype differ.
            MovedError: if an op holds part of either array.
            OwnershipError: if the two overlap (O3), or this array may not be written.
        """
        if not isinstance(source, Array | np.ndarray | np.generic):
            raise TypeError(
                f"copy_from takes a NumPy array or an Array, got {type(source).__name__};"
                " np.asarray(values, dtype) makes one"
            )
        if tuple(source.shape) != self.shape:
            raise ValueError(
                f"cannot copy shape {list(source.shape)} into an array of shape {list(self.shape)}"
            )
        dtype = source.dtype if isinstance(source, Array) else dtype_of(source.dtype)
        if dtype != self.dtype:
            raise ValueError(f"cannot copy {dtype.name} into an array of {self.dtype.name}")
        self.check_writable("copy_from")
        self.check_free(write=True)
        if isinstance(source, Array):
            self._copy_from_device(source)
        elif self.size:
            self.device.refuse_in_capture("a copy from the host")
            self.device.upload(self, source)

    def _copy_from_device(self, source: "Array") -> None:
        if source.device is not self.device:
            self.device.refuse_in_capture("a copy between devices")
            self.device.upload(self, source.numpy())
            return
        source.check_free()
        if source.storage is self.storage and overlap(source.region, self.region):
            raise OwnershipError(
                "O3 alias xor mutate: the source of copy_from overlaps the memory it writes"
            )
        if self.size:
            submit_copy(self, source)

    def lend(self, write: bool | None = None) -> Loan:
        """Lend the memory for as long as the loan lives, after all enqueued work (rule O5).

        Args:
            write: whether the borrower may write; by default if the array may be written.

        Raises:
            As `Loan`.
        """
        return Loan(self, not self.readonly if write is None else write, "lend()")

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's device type and number."""
        return dlpack_device(self)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule. The array is lent until its taker lets go: to write, unless it is
        read-only or a broadcast view; then both may read it.

        Raises:
            BufferError: if the taker wants what cannot be given.
            As `Loan`.
        """
        return export_dlpack(self, stream, max_version, dl_device, copy)

    def check_writable(self, what: str) -> None:
        """Refuse `what` on an array that may not be written.

        Raises:
            OwnershipError: if it is read-only (O7) or its elements overlap (O3).
        """
        if self.readonly:
            raise OwnershipError(f"{what}: {self.readonly}")
        if self.region.overlaps_itself:
            raise OwnershipError(self._overlaps_itself(what))

    def _overlaps_itself(self, what: str) -> str:
        repeated = [
            axis
            for axis, (n, stride) in enumerate(zip(self.shape, self.strides, strict=True))
            if n > 1 and stride == 0
        ]
        if repeated:
            return (
                f"O3 alias xor mutate: {what} on a broadcast view of shape {list(self.shape)}: axis"
                f" {repeated[0]} repeats the same elements, so it cannot be written; write the"
                " array that it was made of"
            )
        return (
            f"O3 alias xor mutate: {what} on an array of shape {list(self.shape)} and strides"
            f" {list(self.strides)}, whose elements overlap each other; it cannot be written"
        )

    def partition(
        self,
        *tile: int,
        pieces: Pieces | None = None,
        map: PieceMap | Callable[..., Any] | None = None,
        grid: Sequence[int] | None = None,
        programs: int | None = None,
    ) -> Partition:
        """Move the array into pieces of shape `tile`, one for each program of a launch.

        The grid is ceil(shape / tile) on every axis; pieces at the end may be partial. With
        `pieces` or `map` only the pieces that programs write move; the rest of the array stays
        usable.

        Args:
            pieces: which pieces, by slices and ints as in indexing, one for each axis. Program
                coordinates count them from 0; `y.index` in the kernel is the piece in the array.
            map: the piece of each program, an affine function of its coordinates:
                `lambda i, j: (j, i)`. It must give every program another piece.
            grid: programs on each coordinate of `map`; by default as many as the array has pieces
                for, where each axis follows one coordinate.
            programs: how many programs walk the pieces, for a kernel with
                `for piece in y.pieces()`; by default as many as the device runs at once.

        Raises:
            LaunchError: if `tile` has not one positive size for each axis, or the rest does not
                fit the array.
            MovedError: if part of it has moved already.
            OwnershipError: if the array may not be written, or two programs would write one piece.
        """
        return Partition(self, tile, None, pieces, map, grid, programs)

    def partition_at(self, index_map: IndexMap, *tile: int) -> Partition:
        """Move the array into rows chosen by an injective map (rule O7).

        Piece i along axis 0 is row `index_map[i]`; a negative entry is no piece. The grid is
        len(index_map) on axis 0 and ceil(shape / tile) on the others.

        Args:
            index_map: made by a type that proves it has no repeated row.
            tile: sizes of a piece; the first is 1.

        Raises:
            As `partition`, and LaunchError if a row of the map is outside the array.
        """
        return Partition(self, tile, index_map)


def submit_copy(target: Array, source: Array) -> None:
    """Enqueue a copy between two arrays of one device, of one shape and dtype and not empty."""
    device = target.device
    uses = (target.storage, target.region, True), (source.storage, source.region, False)
    maker = None
    if device.recorder is not None:
        maker = Maker(
            "a copy", lambda arrays: device.copy_call(arrays[0], arrays[1]), (target, source)
        )
    device.submit(device.copy_call(target, source), uses, maker)


def empty(shape: int | tuple[int, ...], dtype: DType, device: Device) -> Array:
    """An array whose contents are undefined until written.

    Raises:
        DeviceError: if the device has not enough memory.
        ValueError: if an extent is negative, or there are more than 32 axes.
        TypeError: if dtype or device are none.
    """
    check_dtype(dtype)
    check_device(device)
    extents, nbytes = new_shape(shape, dtype.itemsize, device.name)
    return Array(Storage(device, nbytes), dtype, extents, row_major(extents))


def zeros(shape: int | tuple[int, ...], dtype: DType, device: Device) -> Array:
    """An array of zeros (during a capture, every replay sets them again)."""
    return full(shape, 0, dtype, device)


def full(shape: int | tuple[int, ...], value: float, dtype: DType, device: Device) -> Array:
    """An array of one value (during a capture, every replay sets it again).

    Raises:
        As `empty`, and ValueError if the value is no number or does not fit an integer dtype.
    """
    check_dtype(dtype)
    check_device(device)
    filling = fill_value(value, dtype)
    extents, nbytes = new_shape(shape, dtype.itemsize, device.name)
    zeroed = None
    if device.recorder is None and not any(filling.tobytes()):
        zeroed = device.allocate_zeros(nbytes)
    array = Array(Storage(device, nbytes, zeroed), dtype, extents, row_major(extents))
    if zeroed is not None:
        return array
    if array.size:
        maker = None
        if device.recorder is not None:
            maker = Maker("a fill", lambda given: device.fill_call(given[0], filling), (array,))
        call = device.fill_call(array, filling)
        device.submit(call, ((array.storage, array.region, True),), maker)
    return array


def from_numpy(source: np.ndarray[Any, Any], device: Device) -> Array:
    """A copy of host data on a device.

    Raises:
        TypeError: if it is no NumPy array, or its dtype has no tilert type.
    """
    if not isinstance(source, np.ndarray | np.generic):
        raise TypeError(
            f"from_numpy takes a NumPy array, got {type(source).__name__}; np.asarray(values,"
            " dtype) makes one"
        )
    check_device(device)
    array = empty(source.shape, dtype_of(source.dtype), device)
    array.copy_from(source)
    return array
