"""Ops: a kernel bound to its arguments, run once. `make_op` checks the launch rules O2, O3, O5."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias

from tilert import ir
from tilert.array import Array
from tilert.bound import Bound, nothing
from tilert.constant import constant_key
from tilert.device import Device, Use
from tilert.errors import LaunchError, MovedError, OwnershipError, TilertError
from tilert.event import Event
from tilert.limits import MAX_EXTENT
from tilert.ownership import Place, caller, check_alias, check_free
from tilert.parameters import Decl, Plan
from tilert.partition import Partition
from tilert.pending import note_pending
from tilert.repeat import Repeat, keep, repeat_key
from tilert.repeated_index import check_repeats
from tilert.stream import Stream
from tilert.work import Work

__all__ = ["Op", "Plan", "make_op"]

Extents: TypeAlias = tuple[int | None, ...]


class _Kernel(Protocol):
    """What an op needs of a kernel."""

    @property
    def name(self) -> str: ...
    @property
    def decls(self) -> Sequence[Any]: ...
    @property
    def plan(self) -> Plan: ...
    def captured(self) -> int: ...
    def specialize(
        self,
        params: tuple[ir.Param, ...],
        grid: Extents,
        consts: tuple[tuple[str, Any], ...],
    ) -> ir.Function: ...


class Op(Work):
    """A launch that has not happened yet. It holds the partitioned arrays until it runs.

    Dropping an op that never ran gives them back.
    """

    __slots__ = ("_bound", "_muts", "_refs", "kernel", "place")

    device: Device

    def __init__(
        self,
        kernel: str,
        place: Place,
        device: Device,
        bound: Bound,
        muts: list[Partition],
        refs: list[Array],
    ) -> None:
        self.kernel = kernel
        self.place = place
        self.device = device
        self._stream: Stream | None = None
        self._bound: Bound | None = bound
        self._muts = muts
        self._refs = refs
        if device.recorder is not None:
            note_pending(device, self, (kernel, place))

    def __repr__(self) -> str:
        state = "has run" if self._bound is None else "not run"
        return f"<op '{self.kernel}' created at {self.place}, {state}>"

    def run(self) -> Any:
        """Enqueue the op on its device, or record it during a capture.

        Returns:
            The partitioned Array, or a tuple of them in the order of the kernel's `Mut`s.

        Raises:
            LaunchError: if it has run already, or was made in a capture that failed.
            MovedError: if another op or partition holds what this one reads; it can run later.
            DeviceError: if the launch fails; the arrays come back all the same.
        """
        bound = self._bound
        if bound is None:
            raise LaunchError(
                f"op '{self.kernel}' created at {self.place} has already run; call the kernel"
                " again to make another"
            )
        muts, refs = self._muts, self._refs
        self._check_held(muts, refs)
        self._bound, self._muts, self._refs = None, [], []
        trail = self.device.trail
        if trail is not None:
            trail.add((self.kernel, self.place))
        try:
            maker = None
            if self.device.recorder is not None:
                maker = bound.maker(f"op '{self.kernel}' created", self.place, muts, refs)
            self.device.submit(bound.call, _uses(muts, refs), maker, self._stream)
        except TilertError as error:
            error.add_note(f"while running op '{self.kernel}' created at {self.place}")
            if trail is not None:
                trail.explain(error)
            raise
        finally:
            for mut in muts:
                mut.release()
        return muts[0].array if len(muts) == 1 else tuple([mut.array for mut in muts])

    def _check_held(self, muts: list[Partition], refs: list[Array]) -> None:
        """Rule O5 once more: since the op was made, what it reads may have moved."""
        for mut in muts:
            if not mut.held:
                raise LaunchError(
                    f"op '{self.kernel}' created at {self.place} was released, or was made in a"
                    " capture that failed; call the kernel again to make another"
                )
        for ref in refs:
            holds = ref.storage.holds
            if holds:
                own = [mut.hold for mut in muts]
                others = [hold for hold in list(holds) if hold not in own]
                try:
                    check_free(others, ref.region, write=False)
                except MovedError as error:
                    error.add_note(f"read by op '{self.kernel}' created at {self.place}")
                    raise

    def release(self) -> None:
        """Give the partitioned arrays back; the op cannot run any more."""
        for mut in self._muts:
            mut.release()

    @property
    def waiting(self) -> bool:
        """See `Work`."""
        return self._bound is not None and all(mut.held for mut in self._muts)

    def _ends(self) -> Iterator[Event]:
        yield self.device.end(self._stream)


def _uses(muts: list[Partition], refs: list[Array]) -> Iterator[Use]:
    for mut in muts:
        yield mut.array.storage, mut.region, True
    for ref in refs:
        yield ref.storage, ref.region, False


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
    taken: list[Partition] = []
    place = caller(2)
    try:
        key = None
        plan = kernel.plan
        first = values[plan.mut_places[0]]
        if type(first) is Partition:
            repeats = first.array.repeats
            if repeats is None:
                first.array.repeats = {}
            else:
                key = repeat_key(kernel, plan, values)
                repeat = repeats.get(key) if key is not None else None
                if repeat is not None:
                    return _again(kernel, values, place, taken, repeat)
        return _make_op(kernel, values, place, taken, key)
    except BaseException:
        # A failed call must not keep the arrays for as long as its traceback lives.
        for mut in taken:
            mut.release()
        raise


def _again(
    kernel: _Kernel, values: Sequence[Any], place: Place, taken: list[Partition], repeat: Repeat
) -> Op:
    """An op like an earlier one: rules O3 and O5, for what may have moved since."""
    plan, name = kernel.plan, kernel.name
    for at in plan.mut_places:
        mut = values[at]
        mut.move_to(name, place)
        taken.append(mut)
    refs = [values[at] for at in plan.ref_places]
    for ref in refs:
        if ref.storage.holds:
            _check_ownership(kernel, values)
            break
    device = taken[0].array.storage.device
    return Op(name, place, device, repeat.bound, taken, repeat.maps + refs if repeat.maps else refs)


def _make_op(
    kernel: _Kernel,
    values: Sequence[Any],
    place: Place,
    taken: list[Partition],
    repeat: tuple[object, ...] | None,
) -> Op:
    plan = kernel.plan
    arrays: list[Any] = [values[at] for at in plan.arrays]
    maps: dict[int, Array] = {}
    # What tells specialisations apart, cheap to hash. Whether a part is a type's number, a tile or
    # a constant follows from its place, since the kernel is the first.
    key: list[object] = [kernel, kernel.captured()]
    refs: list[Array] = []
    grid: tuple[int, ...] | None = None
    device: Device | None = None
    held = several = placed = False
    alike = True
    programs: int | None = None
    for at, position, decl in plan.muts:
        mut = values[at]
        if not isinstance(mut, Partition):
            raise _wrong_mut(kernel, decl, mut)
        mut.move_to(kernel.name, place)
        taken.append(mut)
        arrays[position] = array = mut.array
        if grid is None:
            grid, device = mut.grid, array.storage.device
        else:
            alike = alike and mut.grid == grid
            several = several or array.storage.device is not device
        index_map = mut.index_map
        if index_map is not None:
            check_repeats(kernel.name, decl.name, decl.accumulate, index_map)
            maps[position] = entries = index_map.array
            refs.append(entries)
        if mut.programs is not None:
            programs = _programs(kernel, decl, mut, programs)
        placement = mut.placement
        if placement is not None:
            placed = True
            key.append(placement.place)
        number = array.types.get(decl.dyn) or _type(kernel, decl, array)
        key += (mut.tile, index_map is None, number)
    if grid is None or device is None:
        raise LaunchError(f"kernel '{kernel.name}' has no Mut, so nothing gives its grid")
    for at, _, decl in plan.refs:
        array = values[at]
        if not isinstance(array, Array):
            raise _wrong_ref(kernel, decl, array)
        refs.append(array)
        storage = array.storage
        if storage.holds:
            held = True
        if storage.device is not device:
            several = True
        key.append(array.types.get(decl.dyn) or _type(kernel, decl, array))
    for at in plan.consts:
        key.append(constant_key(values[at]))
    if several:
        raise _several_devices(kernel, arrays)
    if held:
        _check_ownership(kernel, values)
    if not alike:
        grid = _common_grid(kernel, taken)
    count = math.prod(grid)
    if count == 0:
        return Op(kernel.name, place, device, nothing(plan), taken, refs)
    if count > MAX_EXTENT:
        raise LaunchError(
            f"kernel '{kernel.name}' would run {count} programs, more than 2^31 - 1; use larger"
            " tiles"
        )
    static_grid: Extents = grid
    if maps or placed or not alike:
        static_grid = _static_grid(kernel, taken, grid)
    elif plan.run_time:
        static_grid = tuple([None if i in plan.run_time else n for i, n in enumerate(grid)])
    key.append(static_grid)
    launcher = device.launchers.get(found := tuple(key))
    if launcher is None:
        launcher = device.launcher(
            found, lambda: kernel.specialize(*_specialisation(kernel, values, static_grid))
        )
    if plan.walks:
        programs = programs or device.concurrent
        call = launcher.bind(arrays, maps, grid, programs)
    else:
        call = launcher.bind(arrays, maps, grid)
    bound = Bound(call, launcher, plan, grid, programs)
    if repeat is not None:
        named = [*arrays, *[mut.index_map for mut in taken if mut.index_map is not None]]
        keep(taken[0].array, repeat, bound, list(maps.values()), named)
    return Op(kernel.name, place, device, bound, taken, refs)


def _wrong_mut(kernel: _Kernel, decl: Decl, value: object) -> LaunchError:
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


def _wrong_ref(kernel: _Kernel, decl: Decl, value: object) -> LaunchError:
    hint = ""
    if isinstance(value, Partition):
        hint = "; the kernel only reads it, so pass the array"
    elif hasattr(value, "__array_interface__") or isinstance(value, int | float):
        hint = "; tilert.from_numpy(value, device) copies host data to a device"
    return LaunchError(
        f"argument '{decl.name}' of kernel '{kernel.name}' must be an Array, got"
        f" {type(value).__name__}{hint}"
    )


def _programs(kernel: _Kernel, decl: Decl, mut: Partition, others: int | None) -> int:
    """How many programs the partition asks for; all of a launch agree."""
    if not kernel.plan.walks:
        raise LaunchError(
            f"O2 disjoint pieces: '{decl.name}' was partitioned for {mut.programs} programs, but"
            f" each program of kernel '{kernel.name}' writes one piece; leave programs= out, or"
            f" write `for piece in {decl.name}.pieces()` in the kernel"
        )
    if mut.programs is None or others not in (None, mut.programs):
        raise OwnershipError(
            f"O2 disjoint pieces: the Muts of kernel '{kernel.name}' were partitioned for {others}"
            f" and for {mut.programs} programs; the pieces of all are walked together"
        )
    return mut.programs


def _several_devices(kernel: _Kernel, arrays: list[Array]) -> LaunchError:
    names = [kernel.decls[place].name for place in kernel.plan.arrays]
    device = arrays[0].device
    other = next(i for i, array in enumerate(arrays) if array.device is not device)
    return LaunchError(
        f"kernel '{kernel.name}': '{names[0]}' is on {device.title} and '{names[other]}' on"
        f" {arrays[other].device.title}; all arrays of a launch are on one device"
    )


def _check_ownership(kernel: _Kernel, values: Sequence[Any]) -> None:
    """Rules O3 and O5. Two Muts cannot overlap: the second partition() was refused."""
    pairs = list(zip(kernel.decls, values, strict=True))
    for decl, array in pairs:
        if decl.kind != "ref" or not array.storage.holds:
            continue
        for written, mut in pairs:
            if written.kind == "mut" and mut.array.storage is array.storage:
                check_alias(kernel.name, written.name, mut.region, decl.name, array.region)
        try:
            array.check_free()
        except OwnershipError as error:
            error.add_note(f"as argument '{decl.name}' of kernel '{kernel.name}'")
            raise


def _common_grid(kernel: _Kernel, muts: list[Partition]) -> tuple[int, ...]:
    """The launch grid (rule O2), padded with 1 to the longest."""
    grid = muts[0].grid
    for place, mut in enumerate(muts):
        if mut.grid == grid:
            continue
        rank = max(len(grid), len(mut.grid))
        grid = _padded(grid, rank)
        if _padded(mut.grid, rank) != grid:
            names = [decl.name for _, _, decl in kernel.plan.muts]
            raise OwnershipError(
                f"O2 disjoint pieces: the Muts of kernel '{kernel.name}' disagree on the grid:"
                f" '{names[0]}' has {list(muts[0].grid)} pieces and '{names[place]}'"
                f" {list(mut.grid)}"
            )
    return grid


def _padded(grid: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return grid + (1,) * (rank - len(grid))


def _static_grid(kernel: _Kernel, muts: list[Partition], grid: tuple[int, ...]) -> Extents:
    """The grid as the specialisation knows it: an axis is run time unless some Mut fixes it."""
    unknown = set(range(len(grid)))
    for (_, _, decl), mut in zip(kernel.plan.muts, muts, strict=True):
        varying = decl.dyn if mut.index_map is None else decl.dyn | {0}
        if mut.placement is not None:
            varying = mut.placement.run_time_axes(decl.dyn)
        # Where the grid is padded for this Mut, its extent is 1.
        unknown &= {axis for axis in varying if axis < len(mut.grid)}
    if not unknown:
        return grid
    return tuple([None if axis in unknown else n for axis, n in enumerate(grid)])


# Type of an array parameter: dtype, shape, strides, aligned.
_Type: TypeAlias = tuple[str, Extents, Extents, bool]
_numbers: dict[_Type, int] = {}
_next_number = itertools.count(1)
# The same by what decides the type, extents of run-time axes included: any number of these.
_views: dict[tuple[object, ...], int] = {}
_MAX_VIEWS = 1 << 16


def _type(kernel: _Kernel, decl: Decl, array: Array) -> int:
    """A number for each type that a launch has met, from 1; hashing it is cheap."""
    view = array.dtype.name, array.shape, array.strides, array.address % 16, decl.dyn
    number = _views.get(view)
    if number is None:
        number = _numbers.setdefault(_array_type(kernel, decl, array), next(_next_number))
        if len(_views) >= _MAX_VIEWS:
            _views.clear()
        _views[view] = number
    array.types[decl.dyn] = number
    return number


def _array_type(kernel: _Kernel, decl: Decl, array: Array) -> _Type:
    shape: Extents = array.shape
    strides: Extents = array.strides
    if max(array.shape, default=0) > MAX_EXTENT:
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
    return array.dtype.name, shape, strides, array.address % 16 == 0


def _specialisation(
    kernel: _Kernel, values: Sequence[Any], grid: Extents
) -> tuple[tuple[ir.Param, ...], Extents, tuple[tuple[str, Any], ...]]:
    """What `Kernel.specialize` takes."""
    params: list[ir.Param] = []
    consts: list[tuple[str, Any]] = []
    for decl, value in zip(kernel.decls, values, strict=True):
        if decl.kind == "const":
            consts.append((decl.name, value))
            continue
        mut = value if isinstance(value, Partition) else None
        array = value.array if mut is not None else value
        _, shape, strides, aligned = _array_type(kernel, decl, array)
        tile = mut.tile if mut is not None else None
        placement = mut.placement if mut is not None else None
        indexed = mut is not None and mut.index_map is not None
        params.append(
            ir.Param(
                decl.name, len(params), decl.kind, array.dtype, shape, strides, tile, indexed,
                aligned, placement.place if placement is not None else None, decl.accumulate,
            )
        )  # fmt: skip
    return tuple(params), grid, tuple(consts)
