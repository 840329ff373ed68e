"""The validity table: every IR operation, what it takes, what it gives, what it means.

`make(name, args, attrs)` checks an operation against the table and infers its result types; it is
the only way operations come into being, so no backend meets one that the table does not allow.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilert.dtypes import DType, bf16, bool_, f16, f32, i32
from tilert.ir import Access, Op, TileType, Value

__all__ = ["OPS", "OpSpec", "TypeRuleError", "make"]


class TypeRuleError(Exception):
    """An operation's operands break the table; the frontend adds the place in the source."""


Infer = Callable[[list[Value], dict[str, Any]], list[TileType]]


@dataclass(frozen=True)
class OpSpec:
    """One row of the table."""

    name: str
    infer: Infer
    doc: str
    pure: bool = True


def _same_shape(args: list[Value]) -> tuple[int, ...]:
    shapes = {a.shape for a in args}
    if len(shapes) != 1:
        shown = " and ".join(str(list(a.shape)) for a in args)
        raise TypeRuleError(f"operands must have one shape, got {shown}")
    return args[0].shape


def _same_dtype(args: list[Value]) -> DType:
    dtypes = {a.dtype for a in args}
    if len(dtypes) != 1:
        shown = " and ".join(a.dtype.name for a in args)
        raise TypeRuleError(f"operands must have one dtype, got {shown}; cast with .to(...)")
    return args[0].dtype


def _arith(args: list[Value], _: dict[str, Any]) -> list[TileType]:
    shape, dtype = _same_shape(args), _same_dtype(args)
    if dtype == bool_:
        raise TypeRuleError("arithmetic on bool tiles; cast with .to(i32) or use & | ^")
    return [TileType(shape, dtype)]


def _floats(args: list[Value], _: dict[str, Any]) -> list[TileType]:
    shape, dtype = _same_shape(args), _same_dtype(args)
    if not dtype.is_float:
        raise TypeRuleError(f"needs a float tile, got {dtype.name}; cast with .to(f32)")
    return [TileType(shape, dtype)]


def _ints(args: list[Value], _: dict[str, Any]) -> list[TileType]:
    shape, dtype = _same_shape(args), _same_dtype(args)
    if not dtype.is_int:
        raise TypeRuleError(f"needs integer tiles, got {dtype.name}")
    return [TileType(shape, dtype)]


def _bits(args: list[Value], _: dict[str, Any]) -> list[TileType]:
    shape, dtype = _same_shape(args), _same_dtype(args)
    if dtype.is_float:
        raise TypeRuleError(f"needs integer or bool tiles, got {dtype.name}")
    return [TileType(shape, dtype)]


def _compare(args: list[Value], _: dict[str, Any]) -> list[TileType]:
    shape = _same_shape(args)
    _same_dtype(args)
    return [TileType(shape, bool_)]


def _select(args: list[Value], _: dict[str, Any]) -> list[TileType]:
    shape = _same_shape(args)
    if args[0].dtype != bool_:
        raise TypeRuleError(f"the condition must be bool, got {args[0].dtype.name}")
    return [TileType(shape, _same_dtype(args[1:]))]


def _cast(args: list[Value], attrs: dict[str, Any]) -> list[TileType]:
    return [TileType(args[0].shape, attrs["dtype"])]


def _bitcast(args: list[Value], attrs: dict[str, Any]) -> list[TileType]:
    dtype: DType = attrs["dtype"]
    if dtype.bits != args[0].dtype.bits or bool_ in (dtype, args[0].dtype):
        raise TypeRuleError(f"cannot reinterpret {args[0].dtype.name} as {dtype.name}")
    return [TileType(args[0].shape, dtype)]


def _const(_: list[Value], attrs: dict[str, Any]) -> list[TileType]:
    return [TileType((), attrs["dtype"])]


def _iota(_: list[Value], attrs: dict[str, Any]) -> list[TileType]:
    return [TileType((attrs["size"],), i32)]


def _scalar_i32(_: list[Value], __: dict[str, Any]) -> list[TileType]:
    return [TileType((), i32)]


def _broadcast(args: list[Value], attrs: dict[str, Any]) -> list[TileType]:
    shape: tuple[int, ...] = attrs["shape"]
    src = args[0].shape
    if src and (
        len(src) != len(shape) or any(s not in (1, n) for s, n in zip(src, shape, strict=True))
    ):
        raise TypeRuleError(f"cannot broadcast {list(src)} to {list(shape)}")
    return [TileType(shape, args[0].dtype)]


def _reshape(args: list[Value], attrs: dict[str, Any]) -> list[TileType]:
    out = TileType(attrs["shape"], args[0].dtype)
    if out.numel != args[0].type.numel:
        raise TypeRuleError(f"cannot reshape {list(args[0].shape)} to {list(out.shape)}")
    return [out]


def _transpose(args: list[Value], _: dict[str, Any]) -> list[TileType]:
    if len(args[0].shape) != 2:
        raise TypeRuleError(f".T needs a 2-D tile, got shape {list(args[0].shape)}")
    return [TileType(args[0].shape[::-1], args[0].dtype)]


def _reduce(args: list[Value], attrs: dict[str, Any]) -> list[TileType]:
    x, axis, kind = args[0], attrs["axis"], attrs["kind"]
    if not 0 <= axis < len(x.shape):
        raise TypeRuleError(f"no axis {axis} in a tile of shape {list(x.shape)}")
    if x.dtype == bool_:
        raise TypeRuleError("cannot reduce a bool tile; cast with .to(i32)")
    shape = x.shape[:axis] + x.shape[axis + 1 :]
    return [TileType(shape, i32 if kind == "argmax" else x.dtype)]


def _mma(args: list[Value], _: dict[str, Any]) -> list[TileType]:
    a, b, acc = args
    if len(a.shape) != 2 or len(b.shape) != 2 or len(acc.shape) != 2:
        raise TypeRuleError("mma takes 2-D tiles")
    m, k, k2, n = *a.shape, *b.shape
    if k != k2 or acc.shape != (m, n):
        raise TypeRuleError(
            f"mma shapes do not agree: [{m}, {k}] @ [{k2}, {n}] into {list(acc.shape)}"
        )
    if a.dtype != b.dtype or a.dtype not in (f32, bf16, f16):
        raise TypeRuleError(f"mma takes two f32, bf16 or f16 tiles, got {a.dtype}, {b.dtype}")
    if acc.dtype != f32:
        raise TypeRuleError(f"mma accumulates in f32, got {acc.dtype}")
    return [acc.type]


def _load(args: list[Value], attrs: dict[str, Any]) -> list[TileType]:
    access: tuple[Access, ...] = attrs["access"]
    shape: list[int] = []
    for axis, a in enumerate(access):
        if a.kind in ("block", "span", "full", "gather"):
            shape.append(a.size)
        if a.arg >= 0:
            index = args[a.arg]
            want = (a.size,) if a.kind == "gather" else ()
            if not index.dtype.is_int or index.shape != want:
                raise TypeRuleError(f"index of axis {axis} must be an integer, got {index.type}")
    return [TileType(tuple(shape), attrs["param"].dtype)]


def _load_piece(_: list[Value], attrs: dict[str, Any]) -> list[TileType]:
    return [TileType(attrs["param"].tile, attrs["param"].dtype)]


def _store_piece(args: list[Value], attrs: dict[str, Any]) -> list[TileType]:
    p = attrs["param"]
    if args[0].shape != p.tile:
        raise TypeRuleError(
            f"'{p.name}' holds pieces of shape {list(p.tile)}, the stored tile has"
            f" {list(args[0].shape)}"
        )
    if args[0].dtype != p.dtype:
        raise TypeRuleError(
            f"'{p.name}' holds {p.dtype.name}, the stored tile has {args[0].dtype.name};"
            " cast with .to(...)"
        )
    return []


def _for(args: list[Value], _: dict[str, Any]) -> list[TileType]:
    for bound in args[:3]:
        if bound.shape != () or bound.dtype != i32:
            raise TypeRuleError(f"loop bounds must be i32 scalars, got {bound.type}")
    return [a.type for a in args[3:]]


def _if(args: list[Value], attrs: dict[str, Any]) -> list[TileType]:
    if args[0].shape != () or args[0].dtype != bool_:
        raise TypeRuleError(f"an if needs a bool scalar, got {args[0].type}")
    return list(attrs["types"])


def _none(_: list[Value], __: dict[str, Any]) -> list[TileType]:
    return []


OPS: dict[str, OpSpec] = {}


def _row(names: str, infer: Infer, doc: str, pure: bool = True) -> None:
    for name in names.split():
        OPS[name] = OpSpec(name, infer, doc, pure)


_row("const", _const, "scalar attrs['value'] of attrs['dtype']")
_row("iota", _iota, "i32 tile 0, 1, ..., attrs['size'] - 1")
_row("program", _scalar_i32, "coordinate of this program on grid axis attrs['axis']")
_row("dim", _scalar_i32, "run-time extent of axis attrs['axis'] of attrs['param']")
_row("add sub mul", _arith, "elementwise; integers wrap")
_row("div", _floats, "elementwise float division")
_row("floordiv mod", _ints, "elementwise, rounding toward minus infinity; divisor not 0")
_row("minimum maximum", _arith, "elementwise; a NaN operand gives NaN")
_row("neg abs", _arith, "elementwise")
_row("exp exp2 log log2 sqrt rsqrt sin cos tanh floor", _floats, "elementwise, in f32")
_row("and or xor", _bits, "elementwise bits, or logic on bool")
_row("not", _bits, "elementwise complement")
_row("shl shr", _ints, "elementwise; shr is arithmetic on i32, logical on u32")
_row("eq ne lt le gt ge", _compare, "elementwise, bool result")
_row("select", _select, "elementwise args[1] where args[0] else args[2]")
_row("cast", _cast, "to attrs['dtype']; float to narrower float rounds to nearest even")
_row("bitcast", _bitcast, "same bits as attrs['dtype']")
_row("broadcast", _broadcast, "a scalar, or axes of size 1, repeated to attrs['shape']")
_row("reshape", _reshape, "row-major reshape to attrs['shape']")
_row("transpose", _transpose, "swap the axes of a 2-D tile")
_row(
    "reduce",
    _reduce,
    "attrs['kind'] sum, max, min or argmax over attrs['axis'], which goes away",
)
_row("mma", _mma, "args[0] @ args[1] + args[2], accumulated in f32")
_row(
    "load",
    _load,
    "read attrs['param'] at attrs['access']; outside its extents attrs['fill']",
)
_row(
    "load_piece",
    _load_piece,
    "read this program's own piece of a Mut; outside: 0",
    False,
)
_row("store_piece", _store_piece, "write this program's own piece of a Mut", False)
_row("for", _for, "args lo, hi, step, *carried; block args i, *carried", False)
_row("if", _if, "args[0] chooses a region; results are what it yields", False)
_row("yield", _none, "gives the values of a region", False)


def make(name: str, args: list[Value], **attrs: Any) -> Op:
    """An operation of the table with its results typed.

    Raises:
        TypeRuleError: if the operands break the table's row.
    """
    op = Op(name, list(args), attrs)
    op.results = [Value(t, op) for t in OPS[name].infer(op.args, attrs)]
    return op
