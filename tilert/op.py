"""Ops: a kernel bound to its arguments, run once. `make_op` checks the launch rules O2, O3, O5."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from tilert import ir
from tilert.array import Array
from tilert.device import Device, Use
from tilert.errors import LaunchError, OwnershipError, TilertError
from tilert.ownership import Place, caller, check_alias
from tilert.partition import Partition

__all__ = ["Op", "make_op"]

_INT32_MAX = 2**31 - 1
Extents: TypeAlias = tuple[int | None, ...]


class _Decl(Protocol):
    """What an op needs to know of a declared parameter."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def dyn(self) -> frozenset[int]: ...


class _Kernel(Protocol):
    """What an op needs of a kernel."""

    @property
    def name(self) -> str: ...
    @property
    def decls(self) -> Sequence[Any]: ...
    def specialize(
        self,
        params: tuple[ir.Param, ...],
        grid: Extents,
        consts: tuple[tuple[str, Any], ...],
    ) -> ir.Function: ...


class Op:
    """A launch that has not happened yet. It holds the partitioned arrays until it runs.

    Dropping an op that never ran gives them back.
    """

    def __init__(
        self,
        kernel: str,
        place: Place,
        device: Device,
        call: Callable[[], None],
        muts: list[Partition],
        uses: list[Use],
    ) -> None:
        self.kernel = kernel
        self.place = place
        self.device = device
        self._call: Callable[[], None] | None = call
        self._muts = muts
        self._uses = uses

    def __repr__(self) -> str:
        state = "has run" if self._call is None else "not run"
        return f"<op '{self.kernel}' created at {self.place}, {state}>"

    def run(self) -> Any:
        """Enqueue the op on its device, or record it during a capture.

        Returns:
            The partitioned Array, or a tuple of them in the order of the kernel's `Mut`s.

        Raises:
            LaunchError: if it has run already.
            DeviceError: if the launch fails; the arrays come back all the same.
        """
        call, self._call = self._call, None
        if call is None:
            raise LaunchError(
                f"op '{self.kernel}' created at {self.place} has already run; call the kernel"
                " again to make another"
            )
        muts, uses = self._muts, self._uses
        self._muts, self._uses = [], []
        try:
            self.device.submit(call, uses)
        except TilertError as error:
            error.add_note(f"while running op '{self.kernel}' created at {self.place}")
            raise
        finally:
            for mut in muts:
                mut.release()
        return muts[0].array if len(muts) == 1 else tuple(mut.array for mut in muts)

    def sync(self) -> Any:
        """Run, and wait for the device; gives what `run` gives.

        Raises:
            As `run`, and LaunchError during a capture.
        """
        self.device.refuse_in_capture("waiting for an op")
        arrays = self.run()
        self.device.synchronize()
        return arrays


def make_op(kernel: _Kernel, values: Sequence[Any]) -> Op:
    """Bind a kernel to the values of its parameters.

    Args:
        values: in declaration order: a Partition for each Mut, an Array for each Ref, a Python
            number for each Const.

    Raises:
        LaunchError: if a value does not fit its parameter, or the arrays are on several devices.
        OwnershipError: if the launch breaks O2 or O3.
        MovedError: if an argument is held by another op (O5).
        KernelError: if the kernel's body does not fit the arguments.
        CompileError: if the device compiler fails.
    """
    place = caller()
    taken: list[Partition] = []
    try:
        return _make_op(kernel, values, place, taken)
    except BaseException:
        # A failed call must not keep the arrays for as long as its traceback lives.
        for mut in taken:
            mut.release()
        raise


def _make_op(kernel: _Kernel, values: Sequence[Any], place: Place, taken: list[Partition]) -> Op:
    arrays: list[Array] = []
    decls: list[_Decl] = []
    types: list[_Type] = []
    uses: list[Use] = []
    muts: list[tuple[_Decl, Partition]] = []
    maps: dict[int, Array] = {}
    consts: list[tuple[str, Any]] = []
    for decl, value in zip(kernel.decls, values, strict=True):
        kind = decl.kind
        if kind == "const":
            consts.append((decl.name, value))
            continue
        mut: Partition | None = None
        if kind == "mut":
            if not isinstance(value, Partition):
                raise _wrong_mut(kernel, decl, value)
            value.move_to(kernel.name, place)
            mut = value
            taken.append(mut)
            muts.append((decl, mut))
            if mut.index_map is not None:
                maps[len(arrays)] = mut.index_map.array
            value = mut.array
        elif not isinstance(value, Array):
            raise _wrong_ref(kernel, decl, value)
        arrays.append(value)
        decls.append(decl)
        types.append(_array_type(kernel, decl, value, mut))
        uses.append((value, mut is not None))
    if not muts:
        raise LaunchError(f"kernel '{kernel.name}' has no Mut, so nothing gives its grid")
    uses += [(index, False) for index in maps.values()]
    device = arrays[0].storage.device
    _check_devices(kernel, decls, arrays)
    _check_ownership(kernel, decls, arrays, muts)
    grid = _common_grid(kernel, muts)
    if 0 in grid:
        return Op(kernel.name, place, device, _nothing, taken, uses)
    static_grid = _static_grid(muts, grid)
    # 1, 1.0 and True are equal as keys and different as constants.
    key = (kernel, tuple(types), static_grid, tuple([(v, type(v)) for _, v in consts]))
    launcher = device.launcher(
        key, lambda: kernel.specialize(_params(decls, arrays, types), static_grid, tuple(consts))
    )
    return Op(kernel.name, place, device, launcher.bind(arrays, maps, grid), taken, uses)


def _nothing() -> None:
    """The work of a launch whose grid is empty."""


def _wrong_mut(kernel: _Kernel, decl: _Decl, value: object) -> LaunchError:
    if isinstance(value, Array):
        tile = ", ".join(f"tile{axis}" for axis in range(value.ndim))
        return LaunchError(
            f"kernel '{kernel.name}' writes '{decl.name}': pass {decl.name}.partition({tile}), not"
            " the array"
        )
    return LaunchError(
        f"argument '{decl.name}' of kernel '{kernel.name}' must be a partition of an Array, got"
        f" {type(value).__name__}"
    )


def _wrong_ref(kernel: _Kernel, decl: _Decl, value: object) -> LaunchError:
    hint = ""
    if isinstance(value, Partition):
        hint = "; the kernel only reads it, so pass the array"
    elif hasattr(value, "__array_interface__") or isinstance(value, int | float):
        hint = "; tilert.from_numpy(value, device) copies host data to a device"
    return LaunchError(
        f"argument '{decl.name}' of kernel '{kernel.name}' must be an Array, got"
        f" {type(value).__name__}{hint}"
    )


def _check_devices(kernel: _Kernel, decls: list[_Decl], arrays: list[Array]) -> None:
    device = arrays[0].storage.device
    for decl, array in zip(decls, arrays, strict=True):
        if array.storage.device is not device:
            raise LaunchError(
                f"kernel '{kernel.name}': '{decls[0].name}' is on {device.name} and"
                f" '{decl.name}' on {array.device.name}; all arrays of a launch are on one device"
            )


def _check_ownership(
    kernel: _Kernel, decls: list[_Decl], arrays: list[Array], muts: list[tuple[_Decl, Partition]]
) -> None:
    """Rules O3 and O5. Two Muts cannot overlap: the second partition() was refused."""
    for decl, array in zip(decls, arrays, strict=True):
        if decl.kind == "mut" or not array.storage.holds:
            continue
        for written, mut in muts:
            if mut.array.storage is array.storage:
                check_alias(kernel.name, written.name, mut.array.region, decl.name, array.region)
        try:
            array.check_free()
        except OwnershipError as error:
            error.add_note(f"as argument '{decl.name}' of kernel '{kernel.name}'")
            raise


def _common_grid(kernel: _Kernel, muts: list[tuple[_Decl, Partition]]) -> tuple[int, ...]:
    """The launch grid (rule O2), padded with 1 to the longest."""
    grid = muts[0][1].grid
    for decl, mut in muts[1:]:
        rank = max(len(grid), len(mut.grid))
        grid = _padded(grid, rank)
        if _padded(mut.grid, rank) != grid:
            first = muts[0]
            raise OwnershipError(
                f"O2 disjoint pieces: the Muts of kernel '{kernel.name}' disagree on the grid:"
                f" '{first[0].name}' has {list(first[1].grid)} pieces and '{decl.name}'"
                f" {list(mut.grid)}"
            )
    if math.prod(grid) > _INT32_MAX:
        raise LaunchError(
            f"kernel '{kernel.name}' would run {math.prod(grid)} programs, more than 2^31 - 1; use"
            " larger tiles"
        )
    return grid


def _padded(grid: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return grid + (1,) * (rank - len(grid))


def _static_grid(muts: list[tuple[_Decl, Partition]], grid: tuple[int, ...]) -> Extents:
    """The grid as the specialisation knows it: an axis is run time unless some Mut fixes it."""
    unknown = set(range(len(grid)))
    for decl, mut in muts:
        varying = decl.dyn | {0} if mut.index_map is not None else decl.dyn
        # Where the grid is padded for this Mut, its extent is 1.
        unknown &= {axis for axis in varying if axis < len(mut.grid)}
    if not unknown:
        return grid
    return tuple([None if axis in unknown else n for axis, n in enumerate(grid)])


# Type of an array parameter as a cheap key: dtype, shape, strides, tile, indexed, aligned.
_Type: TypeAlias = tuple[str, Extents, Extents, tuple[int, ...] | None, bool, bool]


def _array_type(kernel: _Kernel, decl: _Decl, array: Array, mut: Partition | None) -> _Type:
    shape: Extents = array.shape
    strides: Extents = array.strides
    for n in array.shape:
        if n > _INT32_MAX:
            raise LaunchError(
                f"argument '{decl.name}' of kernel '{kernel.name}' has shape {list(shape)}; an axis"
                " may have at most 2^31 - 1 elements"
            )
    dyn = decl.dyn
    if dyn:
        last = max(dyn)
        if last >= len(shape):
            raise LaunchError(
                f"argument '{decl.name}' of kernel '{kernel.name}' is declared with a run-time axis"
                f" {last}, got shape {list(shape)}"
            )
        # A stride is run time where it is a product that holds a run-time extent.
        shape = tuple([None if axis in dyn else n for axis, n in enumerate(shape)])
        if last:
            strides = (None,) * last + array.strides[last:]
    dtype = array.dtype
    aligned = (array.storage.address + array.offset * dtype.itemsize) % 16 == 0
    if mut is None:
        return dtype.name, shape, strides, None, False, aligned
    return dtype.name, shape, strides, mut.tile, mut.index_map is not None, aligned


def _params(decls: list[_Decl], arrays: list[Array], types: list[_Type]) -> tuple[ir.Param, ...]:
    return tuple(
        ir.Param(
            decl.name, position, decl.kind, array.dtype, shape, strides, tile, indexed, aligned
        )
        for position, (decl, array, (_, shape, strides, tile, indexed, aligned)) in enumerate(
            zip(decls, arrays, types, strict=True)
        )
    )
