"""Loads of a `Ref`'s tiles and loads and stores of a `Mut`'s piece."""

from dataclasses import dataclass
from math import gcd

import numpy as np

from tilert.codegen.bounds import Bounds, below
from tilert.codegen.emit import Emitter, c_name, c_type, literal
from tilert.codegen.grid import piece_number
from tilert.codegen.layout import Layout
from tilert.dtypes import DType, i64
from tilert.ir import Access, Loc, Op, Param, Value, walk

__all__ = [
    "Address",
    "Axis",
    "accumulate_piece",
    "address",
    "load",
    "load_piece",
    "offset_of",
    "piece_address",
    "store_piece",
    "vector",
]


@dataclass(frozen=True)
class Axis:
    """One kept axis of an access.

    Attributes:
        stride: elements, as C++.
        first: C++ of the first element's index, where a check needs it.
        extent: as C++; "" where no element of the access can be outside.
        gather: the tile of indices, for a gather.
        wide: whether indices may need 64 bits.
        noted: what a check says that the host wants to know of, see `bounds.below`.
    """

    stride: str
    first: str = ""
    extent: str = ""
    gather: Value | None = None
    wide: bool = False
    noted: str = ""

    def check(self, index: str) -> str:
        """C++ condition that an index is within the extent, "" where it always is."""
        return below(index, self.extent, self.wide, self.noted) if self.extent else ""


@dataclass(frozen=True)
class Address:
    """Where an access points.

    Attributes:
        base: C++ offset in elements, equal in all threads.
        uniform: conditions equal in all threads, for the whole access.
        axes: the kept axes.
    """

    param: Param
    base: str
    uniform: list[str]
    axes: list[Axis]


def address(
    e: Emitter,
    param: Param,
    access: tuple[Access, ...],
    args: list[Value],
    loc: Loc | None = None,
) -> Address:
    """Resolve an access to offsets and the bounds checks that it needs.

    Args:
        loc: of the access, for what a checked kernel says.
    """
    bounds = Bounds(e, "reads", param.name, loc)
    base: list[str] = []
    uniform: list[str] = []
    axes: list[Axis] = []
    for axis, a in enumerate(access):
        extent, stride = e.dim(param, axis), e.stride(param, axis)
        static = param.shape[axis]
        if a.kind == "full":
            axes.append(Axis(stride))
            continue
        value = args[a.arg]
        if a.kind == "gather":
            noted = bounds.outside(axis)
            axes.append(Axis(stride, "", extent, value, value.dtype == i64, noted))
            continue
        limit = _upper_bound(e, value)
        # A program's coordinate times the tile is within the array; anything else may wrap.
        wide = limit is None and not (value.op is not None and value.op.name == "program")
        index = f"(i64){e.names[value]}" if wide else e.names[value]
        if a.kind == "point":
            base.append(f"(i64){index} * {stride}")
            proven = static is not None and limit is not None and limit <= static
            noted = bounds.believed(axis) if proven else bounds.outside(axis)
            if noted or not proven:
                uniform.append(below(index, extent, wide, noted))
            continue
        size = a.size if a.kind == "block" else 1
        base.append(f"(i64){index} * {size} * {stride}")
        if a.kind == "block" and static is not None and static % a.size == 0:
            proven = limit is not None and limit <= static // a.size
            noted = bounds.believed(axis, size) if proven else bounds.outside(axis, size)
            if noted or not proven:
                uniform.append(below(index, str(static // a.size), wide, noted))
            axes.append(Axis(stride))
        elif a.kind == "block" and static is not None and limit == 1 and a.size <= static:
            if noted := bounds.believed(axis, size):
                uniform.append(below(index, "1", wide, noted))
            axes.append(Axis(stride))
        else:
            first = f"{index} * {size}" if size != 1 else index
            axes.append(Axis(stride, first, extent, None, wide))
            # Whether any element is inside: some of an edge's lie outside in every program.
            if noted := bounds.outside(axis, shift=a.size - 1):
                last = f"(i64){first} + {a.size - 1}"
                uniform.append(below(last, f"(i64){extent} + {a.size - 1}", True, noted))
    return Address(param, " + ".join(base) or "0", uniform, axes)


def _upper_bound(e: Emitter, index: Value) -> int | None:
    """A proven bound: 0 <= index < bound, or None."""
    op = index.op
    if op is not None and op.name == "const":
        value: int = op.attrs["value"]
        return value + 1 if value >= 0 else None
    if op is not None and op.name == "program":
        extent: int | None = e.function.grid[op.attrs["axis"]]
        return extent
    return e.loop_bounds.get(index)


def offset_of(e: Emitter, where: Address, layout: Layout, register: str) -> tuple[str, list[str]]:
    """C++ offset of a register's element, from where `_advance` points, and the conditions under
    which it is in bounds."""
    terms: list[str] = []
    conditions: list[str] = []
    for number, axis in enumerate(where.axes):
        i = e.index(layout, number, register)
        padding = f"{i} < {layout.shape[number]}" if layout.padded(number) else ""
        check = ""
        if axis.gather is not None:
            row = _gathered(e, axis.gather, layout, number, register)
            terms.append(f"(i64){row} * {axis.stride}")
            check = axis.check(row)
        else:
            share = f"({e.shares(layout, number, register)[1]})" if e.plan.streams else i
            if share not in ("0", "(0)"):
                terms.append(f"{share} * {axis.stride}")
            if axis.extent:
                check = axis.check(f"{axis.first} + {i}")
        # Indices that padding holds are nobody's.
        both = (padding, check) if axis.noted else (check, padding)
        conditions += [c for c in both if c]
    return " + ".join(terms) or "0", conditions


def _advance(e: Emitter, where: Address, layout: Layout, pointer: str) -> None:
    """Let a pointer point at what the thread's first register holds, so that what other registers
    add to it is a constant of the instruction; where products leave registers for that."""
    if not e.plan.streams:
        return
    terms = [
        f"{e.shares(layout, number, '0')[0]} * {axis.stride}"
        for number, axis in enumerate(where.axes)
        if axis.gather is None and layout.axes[number]
    ]
    if terms:
        e.line(f"{pointer} += {' + '.join(terms)};")


def _gathered(e: Emitter, gather: Value, layout: Layout, axis: int, register: str) -> str:
    """C++ of the gathered index for an element: the index tile must follow the result's axis."""
    key = (gather, layout.axes[axis])
    held, narrow = e.gathers[key]
    terms = []
    for f, g in zip(layout.axes[axis], narrow.axes[0], strict=True):
        if f.kind == "r" and f.size > 1:
            terms.append(f"{register} / {f.stride} % {f.size} * {g.stride}")
    return f"{held}[{' + '.join(terms) or '0'}]"


def _prepare_gathers(e: Emitter, where: Address, layout: Layout) -> None:
    from tilert.codegen.movement import relayout

    for number, axis in enumerate(where.axes):
        if axis.gather is None:
            continue
        shape = tuple(n if i == number else 1 for i, n in enumerate(layout.shape))
        narrow = layout.narrowed(shape)
        flat = Layout((layout.shape[number],), (narrow.axes[number],))
        held = e.names[axis.gather]
        if e.layout(axis.gather) != flat:
            held = relayout(e, axis.gather, flat)
        e.gathers[(axis.gather, layout.axes[number])] = (held, flat)


def vector(e: Emitter, where: Address, layout: Layout) -> int:
    """Elements that can move in one instruction."""
    param = where.param
    if not where.axes or not layout.axes[-1] or param.strides[-1] != 1 or not param.aligned:
        return 1
    last = where.axes[-1]
    inner = layout.axes[-1][0]
    if last.stride != "1LL" or last.gather is not None or inner.kind != "r" or inner.stride != 1:
        return 1
    v = gcd(inner.size, 16 // param.dtype.itemsize)
    if v * param.dtype.itemsize < e.plan.least_bytes:
        return 1
    if layout.shape[-1] % v or any(s is None or s % v for s in param.strides[:-1]):
        return 1
    if last.extent and (
        not last.first.endswith(f"* {layout.shape[-1]}") or not _divides(last.extent, v)
    ):
        return 1
    return v


_WORDS = {16: "vec16", 8: "vec8", 4: "u32"}


def _fill(fill: float, dtype: DType) -> str:
    """C++ of what elements that are not there have. Of 8 bits by its bits: a conversion ends at the
    largest number, and a fill may be infinite."""
    if dtype.is_narrow and dtype.bits == 8:
        bits = int.from_bytes(np.full(1, fill).astype(dtype.numpy).tobytes(), "little")
        return f"{c_type(dtype)}{{{bits}}}"
    return literal(fill, dtype)


def _filled(fill: float, dtype: DType) -> str:
    """C++ of 16 bytes of elements with one value."""
    bits = np.full(16 // dtype.itemsize, fill).astype(dtype.numpy).tobytes()
    words = [f"{int.from_bytes(bits[i : i + 4], 'little'):#x}u" for i in range(0, 16, 4)]
    return f"vec16{{{{{', '.join(words)}}}}}"


def _divides(extent: str, v: int) -> bool:
    return extent.isdigit() and int(extent) % v == 0


def _unit(e: Emitter, op: Op) -> tuple[Address, str]:
    param: Param = op.attrs["param"]
    where = address(e, param, op.attrs["access"], op.args, op.loc)
    pointer = e.fresh("src")
    e.line(f"const {c_type(param.dtype)}* {pointer} = {c_name(param)} + ({where.base});")
    return where, pointer


def load(e: Emitter, op: Op) -> None:
    """A tile of a `Ref`; asynchronous operands were copied already or are copied here."""
    from tilert.codegen.matmul import copy_now

    result = op.result
    operand = e.plan.operands.get(result)
    if operand is not None and operand.load is op:
        if operand not in e.stage_of:
            copy_now(e, operand)
        return
    where, pointer = _unit(e, op)
    if op in e.plan.far:
        _bring_far(e, op, pointer)
    call = "load16_stream" if op.attrs.get("stream") else "load16"
    _read(e, op, where, pointer, op.attrs["fill"], call)


def _bring_far(e: Emitter, op: Op, pointer: str) -> None:
    """Have the second-level cache bring the row of a later program, where there is one."""
    param: Param = op.attrs["param"]
    rows = e.plan.far[op]
    row = f"(i64){e.names[op.args[op.attrs['access'][0].arg]]} + {rows}"
    nbytes = op.result.type.numel * param.dtype.itemsize
    with e.braces(f"if (threadIdx.x == 0 && {row} < {e.dim(param, 0)})"):
        e.line(f"bring_soon({pointer} + {rows} * {e.stride(param, 0)}, {nbytes});")


def _read(e: Emitter, op: Op, where: Address, pointer: str, fill: float, call: str = "") -> None:
    """Read a tile. Of memory that the kernel does not store to, 16 bytes at a time by `call`: the
    compiler may move such loads past stores."""
    result = op.result
    dtype = result.dtype
    if not result.shape:
        conditions = " && ".join(where.uniform)
        value = f"{pointer}[0]"
        if conditions:
            value = f"({conditions}) ? {value} : {_fill(fill, dtype)}"
        e.line(f"{c_type(dtype)} {e.fresh_for(result)} = {value};")
        return
    layout = e.layout(result)
    _prepare_gathers(e, where, layout)
    _advance(e, where, layout, pointer)
    name = e.declare(result)
    v = vector(e, where, layout)
    ok = ""
    if where.uniform:
        ok = e.fresh("ok")
        e.line(f"const bool {ok} = {' && '.join(where.uniform)};")
    if v == 1:
        with e.each(layout.registers) as r:
            offset, bounds = offset_of(e, where, layout, r)
            guard = " && ".join(([ok] if ok else []) + bounds)
            value = f"load({pointer} + ({offset}))" if call else f"{pointer}[{offset}]"
            if guard:
                # Not as a choice between both: that takes more registers.
                e.line(f"{name}[{r}] = {_fill(fill, dtype)};")
            e.line(f"{f'if ({guard}) ' if guard else ''}{name}[{r}] = {value};")
        return
    word = _WORDS[v * dtype.itemsize]
    e.line("#pragma unroll")
    first, end = e.window or (0, layout.registers)
    with e.braces(f"for (int r = {first}; r < {end}; r += {v})"):
        offset, bounds = offset_of(e, where, layout, "r")
        guard = " && ".join(([ok] if ok else []) + bounds)
        fetch = f"*(const {word}*)({pointer} + ({offset}))"
        if call:
            at = fetch.removeprefix("*")
            fetch = f"{call}({pointer} + ({offset}))" if word == "vec16" else f"load({at})"
        e.line(f"union {{ {word} v; {c_type(dtype)} e[{v}]; }} u;")
        if guard and e.plan.streams and call and word == "vec16":
            # No branch: where its ends meet, elements of 16 bits would take a register each.
            e.line(f"u.v = {fetch.removesuffix(')')}, {guard}, {_filled(fill, dtype)});")
        elif guard:
            with e.braces(f"if ({guard})"):
                e.line(f"u.v = {fetch};")
            with e.braces("else"):
                e.line("#pragma unroll")
                e.line(f"for (int q = 0; q < {v}; ++q) u.e[q] = {_fill(fill, dtype)};")
        else:
            e.line(f"u.v = {fetch};")
        e.line("#pragma unroll")
        e.line(f"for (int q = 0; q < {v}; ++q) {name}[r + q] = u.e[q];")


# -- pieces of a Mut -------------------------------------------------------------------------


def piece_address(e: Emitter, op: Op, does: str) -> Address:
    """The program's own piece; axis 0 of an indexed Mut goes through its index map."""
    param: Param = op.attrs["param"]
    bounds = Bounds(e, does, param.name, op.loc)
    base: list[str] = []
    uniform: list[str] = []
    axes: list[Axis] = []
    for axis, size in enumerate(param.tile or ()):
        extent, stride = e.dim(param, axis), e.stride(param, axis)
        static = param.shape[axis]
        if axis == 0 and param.indexed:
            slot = f"{c_name(param)}_slot"
            base.append(f"(i64){slot} * {stride}")
            if noted := bounds.row():
                # A negative entry is no piece.
                uniform.append(f"{slot} >= 0")
                uniform.append(below(slot, extent, False, noted))
            else:
                uniform.append(f"(u32){slot} < (u32){extent}")
            axes.append(Axis(stride))
            continue
        if static is not None and static <= size:
            inside = static == size
            axes.append(Axis(stride) if inside else Axis(stride, "0", extent))
            continue
        number = piece_number(param, axis)
        base.append(f"(i64){number} * {size} * {stride}")
        if size == 1 or (static is not None and static % size == 0):
            axes.append(Axis(stride))
            if noted := bounds.believed(axis, size):
                blocks = f"{extent} / {size}" if size > 1 else extent
                uniform.append(below(number, blocks, False, noted))
        else:
            axes.append(Axis(stride, f"{number} * {size}", extent))
    return Address(param, " + ".join(base) or "0", uniform, axes)


def load_piece(e: Emitter, op: Op) -> None:
    """The present content of the piece."""
    param: Param = op.attrs["param"]
    where = piece_address(e, op, "loads")
    pointer = e.fresh("src")
    e.line(f"const {c_type(param.dtype)}* {pointer} = {c_name(param)} + ({where.base});")
    result = op.result
    layout = e.layout(result)
    if e.plan.least_bytes == 4 and 4 <= vector(e, where, layout) * param.dtype.itemsize <= 8:
        # What a kernel may store to: the compiler keeps the order.
        _read(e, op, where, pointer, 0)
        return
    _advance(e, where, layout, pointer)
    name = e.declare(result)
    with e.each(layout.registers) as r:
        offset, conditions = offset_of(e, where, layout, r)
        guard = " && ".join(where.uniform + conditions)
        value = f"{pointer}[{offset}]"
        if guard:
            value = f"({guard}) ? {value} : {literal(0, param.dtype)}"
        e.line(f"{name}[{r}] = {value};")


def store_piece(e: Emitter, op: Op) -> None:
    """Write the piece: one of the threads that hold an element writes it."""
    param: Param = op.attrs["param"]
    value = op.args[0]
    where = piece_address(e, op, "stores")
    pointer = e.fresh("dst")
    ctype = c_type(param.dtype)
    e.line(f"{ctype}* {pointer} = {c_name(param)} + ({where.base});")
    layout = e.layout(value)
    guards = list(where.uniform)
    copies = layout.copies_expr(e.plan.threads, "(int)threadIdx.x")
    if copies:
        guards.append(copies)
    v = vector(e, where, layout)
    _advance(e, where, layout, pointer)
    # Copies of an element lie in several threads: all must have read it before one writes it.
    read_too = e.window is None and any(
        o.name == "load_piece" and o.attrs["param"] is param for o in walk(e.function.body)
    )
    if read_too:
        e.line("__syncthreads();")
    with e.braces(f"if ({' && '.join(guards)})" if guards else ""):
        _write(e, value, where, pointer, layout, v)
    if read_too:
        e.line("__syncthreads();")


def accumulate_piece(e: Emitter, op: Op) -> None:
    """Update the piece in memory: other programs may update the same elements meanwhile."""
    param: Param = op.attrs["param"]
    value = op.args[0]
    where = piece_address(e, op, "adds to")
    pointer = e.fresh("dst")
    # The functions of CUDA know 64 bits without a sign, whose sums are the same.
    wide = param.dtype == i64 and param.accumulate == "add"
    word = "u64" if wide else c_type(param.dtype)
    e.line(f"{word}* {pointer} = ({word}*){c_name(param)} + ({where.base});")
    layout = e.layout(value)
    guards = list(where.uniform)
    copies = layout.copies_expr(e.plan.threads, "(int)threadIdx.x")
    if copies:
        guards.append(copies)
    _advance(e, where, layout, pointer)
    call = f"atomic{param.accumulate.capitalize()}"
    head = f"if ({' && '.join(guards)})" if guards else ""
    with e.braces(head), e.each(layout.registers) as r:
        offset, conditions = offset_of(e, where, layout, r)
        guard = f"if ({' && '.join(conditions)}) " if conditions else ""
        e.line(f"{guard}{call}(&{pointer}[{offset}], ({word}){e.at(value, r)});")


def _write(e: Emitter, value: Value, where: Address, pointer: str, layout: Layout, v: int) -> None:
    ctype, itemsize = c_type(value.dtype), value.dtype.itemsize
    if v == 1:
        with e.each(layout.registers) as r:
            offset, conditions = offset_of(e, where, layout, r)
            guard = f"if ({' && '.join(conditions)}) " if conditions else ""
            e.line(f"{guard}{pointer}[{offset}] = {e.at(value, r)};")
        return
    word = _WORDS[v * itemsize]
    e.line("#pragma unroll")
    first, end = e.window or (0, layout.registers)
    with e.braces(f"for (int r = {first}; r < {end}; r += {v})"):
        offset, conditions = offset_of(e, where, layout, "r")
        e.line(f"union {{ {word} v; {ctype} e[{v}]; }} u;")
        e.line("#pragma unroll")
        e.line(f"for (int q = 0; q < {v}; ++q) u.e[q] = {e.names[value]}[r + q];")
        guard = f"if ({' && '.join(conditions)}) " if conditions else ""
        target = f"{pointer} + ({offset})"
        if e.plan.streams and word == "vec16":
            e.line(f"{guard}store16({target}, u.v);")
        else:
            e.line(f"{guard}*({word}*)({target}) = u.v;")
