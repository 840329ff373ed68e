"""The meaning of the language's functions and methods as operations."""

from collections.abc import Callable
from typing import Any

from tilert.dtypes import DType, i32
from tilert.frontend.builder import Builder
from tilert.frontend.pieces import check_held
from tilert.frontend.tile_words import TILE_WORDS, permute, static_int, static_shape
from tilert.frontend.values import MutArg, RefArg, Span, TileIndex, as_tile, describe
from tilert.ir import Value
from tilert.ops import FLOAT_FUNCTIONS, TypeRuleError, make

__all__ = ["FUNCTIONS", "METHODS", "attribute"]


def _dtype(dtype: Any) -> DType:
    if not isinstance(dtype, DType):
        raise TypeRuleError(f"expected a dtype such as f32, got {describe(dtype)}")
    return dtype


def _full(b: Builder, shape: Any, value: Any, dtype: Any) -> Value:
    return b.broadcast(b.cast(b.value(value, _dtype(dtype)), _dtype(dtype)), static_shape(shape))


def _zeros(b: Builder, shape: Any, dtype: Any) -> Value:
    return _full(b, shape, 0 if _dtype(dtype).name != "bool" else False, dtype)


def _iota(b: Builder, size: Any) -> Value:
    return b.emit("iota", size=static_shape(static_int(size, "the size"))[0])


def _span(_: Builder, start: Any, size: Any) -> Span:
    scalar = isinstance(start, Value) and not start.shape and start.dtype.is_int
    if not scalar and (not isinstance(start, int) or isinstance(start, bool)):
        raise TypeRuleError(f"a span starts at an integer scalar, got {describe(start)}")
    return Span(start, static_shape(static_int(size, "the size"))[0])


def _mma(b: Builder, x: Any, y: Any, acc: Any) -> Value:
    return b.emit("mma", b.value(x), b.value(y), b.value(acc))


def _cdiv(b: Builder, x: Any, y: Any) -> "Value | int":
    if isinstance(x, int) and isinstance(y, int):
        if y == 0:
            raise TypeRuleError("division by zero")
        return -(-x // y)
    return b.binary("floordiv", b.binary("add", x, b.binary("sub", y, 1)), y)


def _bitcast(b: Builder, x: Any, dtype: Any) -> Value:
    return b.emit("bitcast", b.value(x), dtype=_dtype(dtype))


def _minimum(b: Builder, x: Any, y: Any) -> Any:
    if isinstance(x, int | float) and isinstance(y, int | float):
        return min(x, y)
    return b.binary("minimum", x, y)


def _maximum(b: Builder, x: Any, y: Any) -> Any:
    if isinstance(x, int | float) and isinstance(y, int | float):
        return max(x, y)
    return b.binary("maximum", x, y)


def _extreme(kind: str, two: Callable[[Builder, Any, Any], Any]) -> Callable[..., Any]:
    def word(b: Builder, x: Any, axis: Any = None, keepdims: Any = False) -> Any:
        if isinstance(axis, Value) or not isinstance(x, Value):
            return two(b, x, axis)
        return b.reduce(kind, x, axis, keepdims)

    return word


def _unary(name: str) -> Callable[[Builder, Any], Value]:
    return lambda b, x: b.unary(name, x)


_UNARY = (*FLOAT_FUNCTIONS, "abs", "isnan", "isinf", "isfinite")


def _device_print(b: Builder, text: Any, *values: Any) -> None:
    if not isinstance(text, str):
        raise TypeRuleError(f"device_print begins with a text, got {describe(text)}")
    b.append(make("print", [b.value(v) for v in values], text=text))


def _debug_assert(b: Builder, condition: Any, message: Any) -> None:
    if not isinstance(message, str):
        raise TypeRuleError(f"debug_assert ends with a text, got {describe(message)}")
    b.append(make("check", [b.value(condition)], message=message))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "zeros": _zeros,
    "full": _full,
    "iota": _iota,
    "span": _span,
    "mma": _mma,
    "cdiv": _cdiv,
    "bitcast": _bitcast,
    "minimum": _minimum,
    "maximum": _maximum,
    "max": _extreme("max", _maximum),
    "min": _extreme("min", _minimum),
    "where": lambda b, c, x, y: b.select(c, x, y),
    **{name: _unary(name) for name in _UNARY},
    **TILE_WORDS,
    "device_print": _device_print,
    "debug_assert": _debug_assert,
}


# -- methods and attributes ------------------------------------------------------------------


def _to(b: Builder, x: Value, dtype: Any) -> Value:
    return b.cast(x, _dtype(dtype))


def _reshape(b: Builder, x: Value, *shape: Any) -> Value:
    flat = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
    if not all(isinstance(n, int) for n in flat):
        raise TypeRuleError("reshape takes compile-time ints")
    return b.reshape(x, tuple(flat))


def _ref_load(b: Builder, ref: RefArg, *index: Any, fill: Any = 0) -> Value:
    return b.load(ref, index, fill)


def _tile_like(b: Builder, ref: RefArg, other: Any, axis: Any = None) -> Value:
    if not isinstance(other, MutArg):
        raise TypeRuleError(f"tile_like takes a Mut, got {describe(other)}")
    index = piece_index(b, other)
    if axis is None:
        return b.load(ref, index, 0)
    if not -len(index) <= static_int(axis, "the axis") < len(index):
        raise TypeRuleError(f"'{other.param.name}' has {len(index)} axes, no axis {axis}")
    return b.load(ref, (index[axis],), 0)


def _mut_load(b: Builder, mut: MutArg) -> Value:
    check_held(b, mut)
    _check_mode(mut, "load")
    return b.emit("load_piece", param=mut.param)


def _mut_store(b: Builder, mut: MutArg, tile: Any) -> None:
    _check_mode(mut, "store")
    b.append(make("store_piece", [_to_store(b, mut, tile)], param=mut.param))


def _update(word: str) -> Callable[..., None]:
    def update(b: Builder, mut: MutArg, tile: Any) -> None:
        _check_mode(mut, word)
        b.append(make("accumulate_piece", [_to_store(b, mut, tile)], param=mut.param))

    return update


def _check_mode(mut: MutArg, word: str) -> None:
    """Rule O2: pieces that may overlap are only updated, all others are loaded and stored to."""
    name, mode = mut.param.name, mut.param.accumulate
    if mode and word != mode:
        raise TypeRuleError(
            f"O2 disjoint pieces: '{name}' is a Mut[Accumulate.{mode.capitalize()}], whose pieces"
            f" may overlap; only {name}.{mode}(tile) is allowed"
        )
    if not mode and word not in ("store", "load"):
        raise TypeRuleError(
            f"'{name}' is a plain Mut; declare it Mut[Accumulate.{word.capitalize()}] to call"
            f" {name}.{word}(tile)"
        )


def _to_store(b: Builder, mut: MutArg, tile: Any) -> Value:
    """The tile in the piece's shape; floats round to its dtype."""
    param = mut.param
    check_held(b, mut)
    if isinstance(tile, RefArg):
        raise TypeRuleError(
            f"expected a tile or a number, got {describe(tile)}{as_tile(tile, param.name)}"
        )
    v = b.value(tile, param.dtype)
    if v.dtype.is_float and param.dtype.is_float:
        v = b.cast(v, param.dtype)
    if not v.shape and param.tile is not None:
        v = b.broadcast(v, param.tile)
    return v


def _pieces(_: Builder, mut: MutArg) -> None:
    raise TypeRuleError(
        f"O2 disjoint pieces: {mut.param.name}.pieces() stands only in a for statement of the"
        " kernel's own body"
    )


METHODS: dict[tuple[type, str], tuple[str, Callable[..., Any]]] = {
    (Value, "to"): (".to(dtype)", _to),
    (Value, "reshape"): (".reshape(*shape)", _reshape),
    (Value, "permute"): (".permute(*axes)", permute),
    (RefArg, "load"): (".load(*index, fill=0)", _ref_load),
    (RefArg, "tile_like"): (".tile_like(mut, axis=None)", _tile_like),
    (MutArg, "load"): (".load()", _mut_load),
    (MutArg, "store"): (".store(tile)", _mut_store),
    **{(MutArg, word): (f".{word}(tile)", _update(word)) for word in ("add", "max", "min")},
    (MutArg, "pieces"): (".pieces()", _pieces),
}


def piece_index(b: Builder, mut: MutArg) -> tuple[TileIndex, ...]:
    """Where this program's piece is, one tile index an axis."""
    param = mut.param
    check_held(b, mut)
    tile = param.tile or ()
    out = []
    for axis, size in enumerate(tile):
        n = param.shape[axis]
        single = n is not None and n <= size and not (param.indexed and axis == 0)
        number = b.const(0, i32) if single else _piece_number(b, mut, axis)
        out.append(TileIndex(number, size))
    return tuple(out)


def _piece_number(b: Builder, mut: MutArg, axis: int) -> Value:
    if mut.param.place is None:
        return b.emit("program", axis=axis)
    start, steps = mut.param.place[axis]
    number = b.const(start, i32)
    for grid_axis, step in enumerate(steps):
        if step:
            way = b.binary("mul", b.emit("program", axis=grid_axis), step)
            number = b.binary("add", way, number)
    return number


def _mut_attribute(b: Builder, mut: MutArg, name: str) -> Any:
    if name == "index":
        return piece_index(b, mut)
    if name == "shape":
        return mut.param.tile
    if name == "array_shape":
        return tuple(b.extent(mut, i) for i in range(len(mut.param.shape)))
    return mut.param.dtype if name == "dtype" else None


def _start(b: Builder, index: TileIndex) -> Value:
    return b.binary("mul", index.number, index.size)


def attribute(b: Builder, owner: Any, name: str) -> Any:
    """The value of `owner.name`, or None where there is no such attribute."""
    if isinstance(owner, Value):
        if name == "T":
            return b.emit("transpose", owner)
        return {"shape": owner.shape, "dtype": owner.dtype}.get(name)
    if isinstance(owner, TileIndex):
        if name == "number":
            return owner.number
        if name == "size":
            return owner.size
        if name == "start":
            return _start(b, owner)
        if name == "offsets":
            return b.binary("add", b.emit("iota", size=owner.size), _start(b, owner))
        return None
    if isinstance(owner, RefArg):
        if name == "shape":
            return tuple(b.extent(owner, i) for i in range(len(owner.param.shape)))
        return owner.param.dtype if name == "dtype" else None
    if isinstance(owner, MutArg):
        return _mut_attribute(b, owner, name)
    return None
