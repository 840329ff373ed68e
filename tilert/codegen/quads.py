"""Pieces of 16-bit elements or f32 that lie as sums do, 16 bytes an access.

Each of the four lanes that share a row of sums has two neighbouring elements of every eight
columns. They exchange them, so that for every 32 columns each lane has eight neighbours.
"""

from collections.abc import Callable

from tilert.codegen.emit import Emitter, c_name, c_type, literal
from tilert.codegen.layout import Factor, Layout
from tilert.codegen.memory import Address, piece_address
from tilert.dtypes import f32
from tilert.ir import Op, Param, Value

__all__ = ["move_quads"]

_ELEMENTS = 8
"""Of a lane: 16 bytes, or twice as many of f32."""
_REGISTERS = 16
"""Of a thread for 32 columns of two rows."""


def move_quads(e: Emitter, op: Op) -> bool:
    """Write a load_piece or store_piece so, if it can be: within a window of registers."""
    param: Param = op.attrs["param"]
    value = op.result if op.name == "load_piece" else op.args[0]
    where = piece_address(e, op, "loads" if op.name == "load_piece" else "stores")
    if e.window is None or not _fits(param, where, e.layout(value)):
        return False
    if op.name == "load_piece":
        _load(e, param, value, where)
    else:
        _store(e, param, value, where)
    return True


def _fits(param: Param, where: Address, layout: Layout) -> bool:
    if (
        (param.dtype.itemsize != 2 and param.dtype != f32)
        or len(where.axes) != 2
        or not param.aligned
    ):
        return False
    columns = layout.axes[1]
    whole = len(columns) > 2 and columns[2].kind == "r" and columns[2].size % 4 == 0
    last = where.axes[1]
    return (
        columns[:2] == (Factor("r", 2, 1), Factor("t", 4, 1))
        and whole
        and param.strides[1] == 1
        and param.strides[0] is not None
        and param.strides[0] % _ELEMENTS == 0
        and (not last.extent or (last.extent.isdigit() and int(last.extent) % _ELEMENTS == 0))
    )


def _each(e: Emitter, layout: Layout, where: Address, body: Callable[[str, str], None]) -> None:
    """For each eight elements of a thread: their offset and the conditions that they are inside."""
    first, end = e.window or (0, layout.registers)
    e.line("#pragma unroll")
    with e.braces(f"for (int r = {first}; r < {end}; r += {_REGISTERS})"):
        e.line("#pragma unroll")
        with e.braces("for (int h = 0; h < 4; h += 2)"):
            row = e.index(layout, 0, "(r + h)")
            # Two elements a lane become eight.
            column = f"({e.index(layout, 1, 'r')} + (int)threadIdx.x % 4 * 6)"
            conditions = list(where.uniform)
            for axis, i in zip(where.axes, (row, column), strict=True):
                if axis.extent:
                    conditions.append(axis.check(f"{axis.first} + {i}"))
            offset = f"{row} * {where.axes[0].stride} + {column}"
            body(offset, " && ".join(conditions) or "true")


def _load(e: Emitter, param: Param, result: Value, where: Address) -> None:
    ctype, pointer = c_type(param.dtype), e.fresh("src")
    e.line(f"const {ctype}* {pointer} = {c_name(param)} + ({where.base});")
    name = e.declare(result)

    def body(offset: str, inside: str) -> None:
        if param.dtype == f32:
            e.line("union { vec16 v[2]; u32 w[8]; } u;")
            source = f"((const vec16*)({pointer} + ({offset})))"
            e.line(f"if ({inside}) {{ u.v[0] = {source}[0]; u.v[1] = {source}[1]; }}")
            e.line("else for (int i = 0; i < 8; ++i) u.w[i] = 0;")
            e.line("exchange_pairs(u.w);")
            value = "__uint_as_float(u.w[i])"
        else:
            e.line(f"union {{ vec16 v; {ctype} e[8]; }} u;")
            e.line(f"if ({inside}) u.v = *(const vec16*)({pointer} + ({offset}));")
            e.line(f"else for (int i = 0; i < 8; ++i) u.e[i] = {literal(0, param.dtype)};")
            e.line("exchange_quad(u.v.w);")
            value = "u.e[i]"
        e.line("#pragma unroll")
        e.line(f"for (int i = 0; i < 8; ++i) {name}[r + i / 2 * 4 + h + i % 2] = {value};")

    _each(e, e.layout(result), where, body)


def _store(e: Emitter, param: Param, value: Value, where: Address) -> None:
    ctype, pointer = c_type(param.dtype), e.fresh("dst")
    e.line(f"{ctype}* {pointer} = {c_name(param)} + ({where.base});")

    def body(offset: str, inside: str) -> None:
        element = f"{e.names[value]}[r + i / 2 * 4 + h + i % 2]"
        target = f"((vec16*)({pointer} + ({offset})))"
        if param.dtype == f32:
            e.line("union { vec16 v[2]; u32 w[8]; } u;")
            e.line("#pragma unroll")
            e.line(f"for (int i = 0; i < 8; ++i) u.w[i] = __float_as_uint({element});")
            e.line("exchange_pairs(u.w);")
            e.line(f"if ({inside}) {{ {target}[0] = u.v[0]; {target}[1] = u.v[1]; }}")
        else:
            e.line(f"union {{ vec16 v; {ctype} e[8]; }} u;")
            e.line("#pragma unroll")
            e.line(f"for (int i = 0; i < 8; ++i) u.e[i] = {element};")
            e.line("exchange_quad(u.v.w);")
            e.line(f"if ({inside}) *{target} = u.v;")

    _each(e, e.layout(value), where, body)
