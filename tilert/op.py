"""Ops: a kernel bound to its arguments, run once. `make_op` checks the launch rules O2, O3, O5."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias

from tilert import ir
from tilert.array import Array
from tilert.bound import Bound, nothing, reads
from tilert.constant import constant_key
from tilert.device import Device, Use
from tilert.errors import LaunchError, MovedError, OwnershipError, TilertError
from tilert.event import Event
from tilert.limits import MAX_EXTENT
from tilert.ownership import At, Place, check_alias, check_free, where
from tilert.parameters import Decl, Plan
from tilert.partition import Partition
from tilert.pending import note_pending
from tilert.repeat import keep
from tilert.repeated_index import check_repeats
from tilert.stream import Stream
from tilert.work import Work

__all__ = ["Op", "Plan", "make_op"]

Extents: TypeAlias = tuple[int | None, ...]
Made: TypeAlias = tuple[str, At]
"""An op's kernel, and where the op was made."""


class _Kernel(Protocol):
    """What an op needs of a kernel."""

    @property
    def name(self) -> str: ...
    @property
    def decls(self) -> Sequence[Any]: ...
    @property
    def plan(self) -> Plan: ...
    def captured(self) -> int: ...
    def deferred(
        self,
        params: tuple[ir.Param, ...],
        grid: Extents,
        consts: tuple[tuple[str, Any], ...],
    ) -> ir.Function: ...


class Op(Work):
    """A launch that has not happened yet. It holds the partitioned arrays until it runs.

    Dropping an op that never ran gives them back.
    """

    __slots__ = ("_bound", "_made", "_values")

    device: Device

    def __init__(self, made: Made, bound: Bound, values: Sequence[Any]) -> None:
        self._made = made
        self.device = device = bound.device
        self._stream: Stream | None = None
        self._bound: Bound | None = bound
        self._values = values
        if device.recorder is not None:
            note_pending(device, self, made)

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return self._made[0]

    @property
    def place(self) -> Place:
        """Where it was made."""
        return Place(*self._made[1])

    @property
    def _shown(self) -> str:
        return f"op '{self.kernel}' created at {self.place}"

    def __repr__(self) -> str:
        state = "has run" if self._bound is None else "not run"
        return f"<{self._shown}, {state}>"

    def run(self) -> Any:
        """Enqueue the op on its device, or record it during a capture.

        Returns:
            The partitioned Array, or a tuple of them in the order of the kernel's `Mut`s.

        Raises:
            LaunchError: if it has run already, or was made in a capture that failed.
            MovedError: if another op or partition holds what this one reads; it can run later.
            DeviceError: if the launch fails; the arrays come back all the same.
        """
        bound, device = self._bound, self.device
        if bound is None:
            raise LaunchError(
                f"{self._shown} has already run; call the kernel again to make another"
            )
        self._check_held(bound)
        self._bound = None
        trail = device.trail
        if trail is not None:
            trail.add(self._made)
        # The arrays are in no variable here: who keeps the stack of a launch, as memory checkers
        # do, keeps no memory.
        try:
            if self._stream is not None or not device.submit_alone(bound.call):
                self._submit(bound)
        except BaseException as error:
            self._take_back(bound.plan)
            if isinstance(error, TilertError):
                error.add_note(f"while running {self._shown}")
                if trail is not None:
                    trail.explain(error)
            raise
        return self._take_back(bound.plan)

    def _check_held(self, bound: Bound) -> None:
        """Rule O5 once more: since the op was made, what it reads may have moved."""
        values, held = self._values, bound.indexed
        for at in bound.plan.mut_places:
            mut = values[at]
            if mut.hold not in mut.holds:
                raise LaunchError(
                    f"{self._shown} was released, or was made in a capture that failed; call the"
                    " kernel again to make another"
                )
        for at in bound.plan.ref_places:
            if values[at].storage.holds:
                held = True
        if held:
            own = {values[at].hold for at in bound.plan.mut_places}
            for array in reads(bound.plan, values):
                others = array.storage.holds - own
                try:
                    check_free(others, array.region, write=False)
                except MovedError as error:
                    error.add_note(f"read by {self._shown}")
                    raise

    def _submit(self, bound: Bound) -> None:
        """Enqueue it where others may have to wait for it, or record it."""
        maker = None
        if self.device.recorder is not None:
            maker = bound.maker(f"op '{self.kernel}' created", self.place, self._values)
        self.device.submit(bound.call, _uses(bound.plan, self._values), maker, self._stream)

    def _take_back(self, plan: Plan) -> Any:
        """The arrays, which the op holds no more."""
        values, self._values = self._values, ()
        arrays: list[Array] = []
        for at in plan.mut_places:
            mut = values[at]
            mut.release()
            arrays.append(mut.array)
        return arrays[0] if len(arrays) == 1 else tuple(arrays)

    def release(self) -> None:
        """Give the partitioned arrays back; the op cannot run any more."""
        if self._bound is not None:
            for at in self._bound.plan.mut_places:
                self._values[at].release()

    @property
    def waiting(self) -> bool:
        """See `Work`."""
        bound = self._bound
        return bound is not None and all(self._values[at].held for at in bound.plan.mut_places)

    def _ends(self) -> Iterator[Event]:
        yield self.device.end(self._stream)


def _uses(plan: Plan, values: Sequence[Any]) -> tuple[Use, ...]:
    muts = [values[at] for at in plan.mut_places]
    return (
        *[(mut.array.storage, mut.region, True) for mut in muts],
        *[(array.storage, array.region, False) for array in reads(plan, values)],
    )


def make_op(kernel: _Kernel, values: Sequence[Any], at: At | None = None) -> Op:
    """Bind a kernel to the values of its parameters.

    Args:
        values: in declaration order: a Partition for each Mut, an Array for each Ref, a Python
            number for each Const.
        at: where the program made it; by default the line that called this.

    Raises:
        LaunchError: if a value does not fit its parameter, or the arrays are on several devices.
        OwnershipError: if the launch breaks O2 or O3.
        MovedError: if an argument is held by another op (O5).
        KernelError: if the kernel's body does not fit the arguments.
        CompileError: if the device compiler fails.
    """
    made = kernel.name, where(2) if at is None else at
    plan = kernel.plan
    try:
        key = None
        first = values[plan.mut_places[0]]
        if type(first) is Partition and (len(plan.muts) == 1 or _all_moved(plan, values)):
            repeats = first.tiling.repeats
            if repeats is None:
                first.tiling.repeats = {}
            else:
                key = plan.key(kernel, values)
                repeat = repeats.get(key)
                if repeat is not None:
                    # Rules O3 and O5, for what may have moved since.
                    for place in plan.mut_places:
                        values[place].move_to(made)
                    for place in plan.ref_places:
                        if values[place].storage.holds:
                            _check_ownership(kernel, values)
                            break
                    return Op(made, repeat.bound, values)
        return _make_op(kernel, values, made, key)
    except BaseException:
        # A failed call must not keep the arrays for as long as its traceback lives.
        for place in plan.mut_places:
            mut = values[place]
            if isinstance(mut, Partition) and mut.taken is made:
                mut.release()
        raise


def _all_moved(plan: Plan, values: Sequence[Any]) -> bool:
    return all(type(values[at]) is Partition for at in plan.mut_places)


def _make_op(
    kernel: _Kernel, values: Sequence[Any], made: Made, repeat: tuple[object, ...] | None
) -> Op:
    plan = kernel.plan
    arrays: list[Any] = [values[at] for at in plan.arrays]
    muts: list[Partition] = []
    maps: dict[int, Array] = {}
    # What tells specialisations apart, cheap to hash. Whether a part is a type's number, a tile or
    # a constant follows from its place, since the kernel is the first.
    key: list[object] = [kernel, kernel.captured()]
    grid: tuple[int, ...] | None = None
    device: Device | None = None
    held = several = placed = False
    alike = True
    programs: int | None = None
    for at, position, decl in plan.muts:
        mut = values[at]
        if not isinstance(mut, Partition):
            raise _wrong_mut(kernel, decl, mut)
        mut.move_to(made)
        muts.append(mut)
        arrays[position] = array = mut.array
        if grid is None:
            grid, device = mut.grid, array.storage.device
        else:
            alike = alike and mut.grid == grid
            several = several or array.storage.device is not device
        index_map = mut.index_map
        if index_map is not None:
            check_repeats(kernel.name, decl.name, decl.accumulate, index_map)
            maps[position] = index_map.array
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
        grid = _common_grid(kernel, muts)
    count = math.prod(grid)
    if count == 0:
        return Op(made, nothing(device, plan, bool(maps)), values)
    if count > MAX_EXTENT:
        raise LaunchError(
            f"kernel '{kernel.name}' would run {count} programs, more than 2^31 - 1; use larger"
            " tiles"
        )
    static_grid: Extents = grid
    if maps or placed or not alike:
        static_grid = _static_grid(kernel, muts, grid)
    elif plan.run_time:
        static_grid = tuple([None if i in plan.run_time else n for i, n in enumerate(grid)])
    key.append(static_grid)
    launcher = device.launchers.get(found := tuple(key))
    if launcher is None:
        launcher = device.launcher(
            found, lambda: kernel.deferred(*_specialisation(kernel, values, static_grid))
        )
    if plan.walks:
        programs = programs or device.concurrent
        call = launcher.bind(arrays, maps, grid, programs)
    else:
        call = launcher.bind(arrays, maps, grid)
    bound = Bound(device, call, launcher, plan, grid, programs, bool(maps))
    if repeat is not None:
        first = muts[0]
        others = [array for array in arrays if array is not first.array]
        indexes = [mut.index_map for mut in muts if mut.index_map is not None]
        keep(first.tiling, repeat, bound, [*others, *indexes])
    return Op(made, bound, values)


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
