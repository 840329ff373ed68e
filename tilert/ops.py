"""The validity table: every IR operation, what it takes, what it gives, what it means.

`make(name, args, attrs)` checks an operation against the table and infers its result types; it is
the only way operations come into being, so no backend meets one that the table does not allow.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilert.dtypes import DType, bf16, bool_, f8e4m3, f8e5m2, f16, f32, i8, i32, i64, u32
from tilert.ir import Access, Op, TileType, Value

__all__ = ["ELEMENTWISE", "FLOAT_FUNCTIONS", "OPS", "OpSpec", "TypeRuleError", "make"]


class TypeRuleError(Exception):
    """An operation's operands break the table; the frontend adds the place in the source."""


Infer = Callable[[list[Value], dict[str, Any]], list[TileType]]


@dataclass(frozen=True)
class OpSpec:
    """One row of the table.

    Attributes:
        pure: whether nothing but its results tells that it ran.
        elementwise: whether each element of the result comes from those in the same place.
    """

    name: str
    infer: Infer
    doc: str
    pure: bool = True
    elementwise: bool = False


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


def _predicate(args: list[Value], attrs: dict[str, Any]) -> list[TileType]:
    return [TileType(_floats(args, attrs)[0].shape, bool_)]


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


def _permute(args: list[Value], attrs: dict[str, Any]) -> list[TileType]:
    x, axes = args[0], attrs["axes"]
    if sorted(axes) != list(range(len(x.shape))):
        raise TypeRuleError(
            f"permute takes every axis of shape {list(x.shape)} once, got {list(axes)}"
        )
    return [TileType(tuple(x.shape[a] for a in axes), x.dtype)]


def _slice(args: list[Value], attrs: dict[str, Any]) -> list[TileType]:
    x, shape = args[0], attrs["shape"]
    for n, first, step, size in zip(x.shape, attrs["start"], attrs["step"], shape, strict=True):
        if size < 1 or not (0 <= first < n and 0 <= first + (size - 1) * step < n):
            raise TypeRuleError(f"a slice is outside a tile of shape {list(x.shape)}")
    return [TileType(shape, x.dtype)]


def _concat(args: list[Value], attrs: dict[str, Any]) -> list[TileType]:
    axis, first = attrs["axis"], args[0].shape
    if not 0 <= axis < len(first):
        raise TypeRuleError(f"no axis {axis} in a tile of shape {list(first)}")
    rest = {a.shape[:axis] + a.shape[axis + 1 :] for a in args if len(a.shape) == len(first)}
    if len(rest) != 1 or any(len(a.shape) != len(first) for a in args):
        shown = " and ".join(str(list(a.shape)) for a in args)
        raise TypeRuleError(f"tiles of shapes {shown} cannot be joined along axis {axis}")
    size = sum(a.shape[axis] for a in args)
    return [TileType((*first[:axis], size, *first[axis + 1 :]), _same_dtype(args))]


def _take(args: list[Value], attrs: dict[str, Any]) -> list[TileType]:
    x, index = args
    axis = _axis(x, attrs)
    if not index.dtype.is_int:
        raise TypeRuleError(f"an index must be an integer tile, got {index.type}")
    same = x.shape[:axis] + x.shape[axis + 1 :] == index.shape[:axis] + index.shape[axis + 1 :]
    if len(x.shape) != len(index.shape) or not same:
        raise TypeRuleError(
            f"an index of shape {list(index.shape)} does not fit a tile of shape {list(x.shape)}"
            f" along axis {axis}"
        )
    return [TileType(index.shape, x.dtype)]


def _axis(x: Value, attrs: dict[str, Any]) -> int:
    axis: int = attrs["axis"]
    if not 0 <= axis < len(x.shape):
        raise TypeRuleError(f"no axis {axis} in a tile of shape {list(x.shape)}")
    return axis


def _no_bool(x: Value, verb: str) -> None:
    if x.dtype == bool_:
        hint = ", or use any() or all()" if verb == "reduce" else ""
        raise TypeRuleError(f"cannot {verb} a bool tile; cast with .to(i32){hint}")


def _reduce(args: list[Value], attrs: dict[str, Any]) -> list[TileType]:
    x, axis, kind = args[0], _axis(args[0], attrs), attrs["kind"]
    if kind in ("any", "all"):
        if x.dtype != bool_:
            raise TypeRuleError(f"{kind} needs a bool tile, got {x.dtype.name}; compare first")
    else:
        _no_bool(x, "reduce")
    shape = x.shape[:axis] + x.shape[axis + 1 :]
    return [TileType(shape, i32 if kind in ("argmax", "argmin") else x.dtype)]


def _scan(args: list[Value], attrs: dict[str, Any]) -> list[TileType]:
    _axis(args[0], attrs)
    _no_bool(args[0], "accumulate")
    return [args[0].type]


def _sort(args: list[Value], attrs: dict[str, Any]) -> list[TileType]:
    _axis(args[0], attrs)
    _no_bool(args[0], "sort")
    return [args[0].type, TileType(args[0].shape, i32)]


def _random(dtype: DType) -> Infer:
    def infer(args: list[Value], _: dict[str, Any]) -> list[TileType]:
        shape = _same_shape(args)
        if _same_dtype(args) != u32:
            raise TypeRuleError(f"a key and a counter are words of u32, got {args[0].dtype.name}")
        return [TileType(shape, dtype)]

    return infer


_FACTORS = {(d, d) for d in (f32, bf16, f16, i8)}
_FACTORS |= {(a, b) for a in (f8e4m3, f8e5m2) for b in (f8e4m3, f8e5m2)}


def _mma(args: list[Value], _: dict[str, Any]) -> list[TileType]:
    a, b, acc = args
    if len(a.shape) != 2 or len(b.shape) != 2 or len(acc.shape) != 2:
        raise TypeRuleError("mma takes 2-D tiles")
    m, k, k2, n = *a.shape, *b.shape
    if k != k2 or acc.shape != (m, n):
        raise TypeRuleError(
            f"mma shapes do not agree: [{m}, {k}] @ [{k2}, {n}] into {list(acc.shape)}"
        )
    if (a.dtype, b.dtype) not in _FACTORS:
        raise TypeRuleError(
            "mma takes two f32, bf16, f16 or i8 tiles, or two of f8e4m3 and f8e5m2, got"
            f" {a.dtype}, {b.dtype}"
        )
    wide = i32 if a.dtype == i8 else f32
    if acc.dtype != wide:
        raise TypeRuleError(f"mma of {a.dtype} accumulates in {wide}, got {acc.dtype}")
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


_UPDATED = {"add": (f32, i32, u32, i64), "max": (i32, u32, i64), "min": (i32, u32, i64)}


def _accumulate_piece(args: list[Value], attrs: dict[str, Any]) -> list[TileType]:
    p = attrs["param"]
    allowed = _UPDATED[p.accumulate]
    if p.dtype not in allowed:
        names = ", ".join(d.name for d in allowed[:-1])
        raise TypeRuleError(
            f"'{p.name}' holds {p.dtype.name}; .{p.accumulate}(tile) updates {names} or"
            f" {allowed[-1].name}"
        )
    return _store_piece(args, attrs)


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


def _check(args: list[Value], _: dict[str, Any]) -> list[TileType]:
    if args[0].dtype != bool_:
        raise TypeRuleError(f"debug_assert needs a bool scalar or tile, got {args[0].dtype.name}")
    return []


OPS: dict[str, OpSpec] = {}

_FLOAT_FUNCTIONS = (
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh erf"
    " floor ceil trunc round"
)
FLOAT_FUNCTIONS = tuple(_FLOAT_FUNCTIONS.split())
"""Functions of one float, computed in f32."""


def _row(names: str, infer: Infer, doc: str, pure: bool = True) -> None:
    for name in names.split():
        OPS[name] = OpSpec(name, infer, doc, pure)


def _each(names: str, infer: Infer, doc: str) -> None:
    for name in names.split():
        OPS[name] = OpSpec(name, infer, doc, elementwise=True)


_row("const", _const, "scalar attrs['value'] of attrs['dtype']")
_row("iota", _iota, "i32 tile 0, 1, ..., attrs['size'] - 1")
_row("program", _scalar_i32, "coordinate of this program on grid axis attrs['axis']")
_row("dim", _scalar_i32, "run-time extent of axis attrs['axis'] of attrs['param']")
_each("add sub mul", _arith, "integers wrap")
_each("div", _floats, "float division")
_each("floordiv mod", _ints, "rounding toward minus infinity; divisor not 0")
_each("minimum maximum", _arith, "a NaN operand gives NaN")
_each("neg abs", _arith, "integers wrap")
_each(_FLOAT_FUNCTIONS, _floats, "in f32; round: halves to even")
_each("pow atan2", _floats, "in f32")
_each("fma", _floats, "args[0] * args[1] + args[2] in f32, rounded once")
_each("isnan isinf isfinite", _predicate, "a bool")
_each("and or xor", _bits, "bits, or logic on bool")
_each("not", _bits, "complement")
_each("shl shr", _ints, "shr is arithmetic on signed, logical on unsigned types")
_each("eq ne lt le gt ge", _compare, "a bool")
_each("select", _select, "args[1] where args[0] else args[2]")
_each(
    "cast",
    _cast,
    "to attrs['dtype']; to a narrower float: nearest even, 8-bit floats saturating; float to"
    " integer: toward 0, saturating, NaN gives 0; integer to integer wraps",
)
_each(
    "philox",
    _random(u32),
    "word attrs['word'] of Philox 4x32-10 of key (args[0], args[1]), counter (args[2], args[3],"
    " 0, 0)",
)
_each(
    "normal",
    _random(f32),
    "a normal deviate of words 0 and 1 of that block (Box and Muller), each step rounded to"
    " nearest, so that every backend gives the same bits",
)
_each("bitcast", _bitcast, "same bits as attrs['dtype']")
_row("broadcast", _broadcast, "a scalar, or axes of size 1, repeated to attrs['shape']")
_row("reshape", _reshape, "row-major reshape to attrs['shape']")
_row("transpose", _transpose, "swap the axes of a 2-D tile")
_row("permute", _permute, "axis i of the result is axis attrs['axes'][i]")
_row(
    "slice",
    _slice,
    "element attrs['start'] + i * attrs['step'] on each axis, for i below attrs['shape']",
)
_row("concat", _concat, "the tiles one after the other along attrs['axis']")
_row(
    "take",
    _take,
    "along attrs['axis'] the element that args[1] names in each place; 0 where it is outside",
)
_row(
    "reduce",
    _reduce,
    "attrs['kind'] sum, prod, max, min, any, all, argmax or argmin over attrs['axis'], which goes"
    " away; NaN counts as the largest for argmax, as the smallest for argmin",
)
_row(
    "scan",
    _scan,
    "attrs['kind'] sum, prod, max or min of the elements up to each place of attrs['axis']",
)
_row(
    "sort",
    _sort,
    "the elements in order along attrs['axis'], and where each was; attrs['descending'] or"
    " ascending; NaN counts as largest; equal elements keep their order",
)
_row("mma", _mma, "args[0] @ args[1] + args[2], accumulated in f32, or i32 for i8")
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
_row(
    "accumulate_piece",
    _accumulate_piece,
    "add args[0] to this program's piece of a Mut, or take the larger or smaller of both: what"
    " attrs['param'].accumulate says; programs one after the other, in any order",
    False,
)
_row("for", _for, "args lo, hi, step, *carried; block args i, *carried", False)
_row("if", _if, "args[0] chooses a region; results are what it yields", False)
_row("print", _none, "print attrs['text'] and the operands of this program, for people", False)
_row("check", _check, "stop with attrs['message'] unless args[0] holds, in every element", False)
_row("pieces", _none, "its region for every piece of this program, in any order", False)
_row("yield", _none, "gives the values of a region", False)


ELEMENTWISE = frozenset(name for name, spec in OPS.items() if spec.elementwise)
"""Operations that work element by element on operands of one shape."""


def make(name: str, args: list[Value], **attrs: Any) -> Op:
    """An operation of the table with its results typed.

    Raises:
        TypeRuleError: if the operands break the table's row.
    """
    op = Op(name, list(args), attrs)
    op.results = [Value(t, op) for t in OPS[name].infer(op.args, attrs)]
    return op
