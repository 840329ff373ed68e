"""Emits typed operations: literals, promotion, broadcasting and constant folding live here."""

import math
import operator
from collections.abc import Callable
from typing import Any

from tilert.dtypes import DType, bool_, f32, i32, promote
from tilert.frontend.values import RefArg, Span, TileIndex, as_tile, describe, shown
from tilert.ir import Access, Block, Loc, Op, Value
from tilert.limits import MAX_AXES, MAX_TILE
from tilert.ops import TypeRuleError, make

__all__ = ["Builder"]

_FOLD: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "minimum": min,
    "maximum": max,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


_MULTIPLIED = 16
"""The largest power that is multiplied out."""


class Builder:
    """Appends operations to the current block.

    Methods take Python numbers wherever they take scalars. Every method raises `TypeRuleError`
    on operands that the validity table refuses; the tracer adds the place.
    """

    def __init__(self) -> None:
        self.block = Block()
        self.loc: Loc | None = None
        self.statements = 0
        # In a kernel that walks its pieces, outside the loop.
        self.between_pieces = False

    def emit(self, name: str, *args: Value, **attrs: Any) -> Value:
        """Append an operation with one result."""
        return self.append(make(name, list(args), **attrs)).result

    def results(self, name: str, *args: Value, **attrs: Any) -> list[Value]:
        """Append an operation with several results."""
        return self.append(make(name, list(args), **attrs)).results

    def append(self, op: Op) -> Op:
        """Append a ready operation.

        Raises:
            TypeRuleError: if it makes a tile that is too large.
        """
        for result in op.results:
            _check_size(result.shape)
        op.loc = self.loc
        self.block.ops.append(op)
        return op

    # -- constants ---------------------------------------------------------------------------

    def const(self, value: float | bool, dtype: DType) -> Value:
        """A scalar constant.

        Raises:
            TypeRuleError: if the number does not fit the dtype.
        """
        if dtype.is_int:
            if isinstance(value, float) and not value.is_integer():
                raise TypeRuleError(f"{value} is no {dtype.name}; cast the tile to f32 first")
            value = int(value)
            _check_range(value, dtype)
        elif dtype.is_float:
            value = _as_float(value, dtype)
        elif not isinstance(value, bool):
            raise TypeRuleError(f"{value} is no bool")
        return self.emit("const", value=value, dtype=dtype)

    def value(self, x: Any, dtype: DType | None = None) -> Value:
        """A value for anything that can be one; Python numbers take `dtype` or their own."""
        if isinstance(x, Value):
            return x
        if isinstance(x, bool):
            return self.const(x, dtype or bool_)
        if isinstance(x, int):
            return self.const(x, dtype or i32)
        if isinstance(x, float):
            return self.const(x, dtype or f32)
        raise TypeRuleError(f"expected a tile or a number, got {describe(x)}{as_tile(x)}")

    # -- elementwise -------------------------------------------------------------------------

    def broadcast(self, x: Value, shape: tuple[int, ...]) -> Value:
        """Repeat a scalar or axes of size 1; nothing to do where the shape is there already."""
        return x if x.shape == shape else self.emit("broadcast", x, shape=shape)

    def align(self, *xs: Value) -> list[Value]:
        """Broadcast operands to their common shape."""
        tiles = [x for x in xs if x.shape]
        if not tiles:
            return list(xs)
        if len({len(x.shape) for x in tiles}) != 1:
            shown = " and ".join(str(list(x.shape)) for x in tiles)
            raise TypeRuleError(
                f"tiles of shapes {shown} differ in rank; insert axes with x[:, None] or x[None, :]"
            )
        shape: list[int] = []
        for sizes in zip(*(x.shape for x in tiles), strict=True):
            wide = {s for s in sizes if s != 1}
            if len(wide) > 1:
                shown = " and ".join(str(list(x.shape)) for x in tiles)
                raise TypeRuleError(f"tiles of shapes {shown} do not broadcast")
            shape.append(wide.pop() if wide else 1)
        return [self.broadcast(x, tuple(shape)) for x in xs]

    def pair(self, a: Any, b: Any) -> tuple[Value, Value]:
        """Two operands of one dtype: literals take the other's, floats are promoted."""
        if isinstance(a, Value) and not isinstance(b, Value):
            b = self.value(b, self._literal_dtype(b, a.dtype))
        elif isinstance(b, Value) and not isinstance(a, Value):
            a = self.value(a, self._literal_dtype(a, b.dtype))
        else:
            a, b = self.value(a), self.value(b)
        common = promote(a.dtype, b.dtype)
        if common is None:
            raise TypeRuleError(
                f"{a.dtype.name} and {b.dtype.name} do not mix; cast one with .to(...)"
            )
        return self.cast(a, common), self.cast(b, common)

    @staticmethod
    def _literal_dtype(literal: Any, other: DType) -> DType | None:
        if isinstance(literal, bool) or not isinstance(literal, int | float):
            return None
        return other if other != bool_ else None

    def binary(self, name: str, a: Any, b: Any) -> Value:
        """An elementwise operation on two operands, with literals, promotion and broadcasting."""
        one, two = self.pair(a, b)
        if name in ("floordiv", "mod") and _literal(two) == 0:
            raise TypeRuleError("division by zero")
        x, y = self.align(one, two)
        folded = self._fold(name, x, y)
        return folded if folded is not None else self.emit(name, x, y)

    def _fold(self, name: str, x: Value, y: Value) -> Value | None:
        cx, cy = _constant(x), _constant(y)
        if x.dtype != i32 or (cx is None and cy is None):
            return None
        if cx is not None and cy is not None and name in _FOLD:
            result = _FOLD[name](cx, cy)
            if isinstance(result, bool):
                return self.const(result, bool_)
            return self.const((result + 2**31) % 2**32 - 2**31, i32)
        if (name, cy) in (("add", 0), ("sub", 0), ("mul", 1), ("floordiv", 1)):
            return x
        if (name, cx) in (("add", 0), ("mul", 1)):
            return y
        return None

    def power(self, x: Any, y: Any) -> Value:
        """`x ** y`: small constant whole powers by multiplying, of integers too; else floats."""
        if isinstance(y, int) and not isinstance(y, bool) and 1 <= y <= _MULTIPLIED:
            given = self.value(x)
            result = base = self.cast(given, f32) if given.dtype.is_narrow else given
            for digit in f"{y:b}"[1:]:
                result = self.binary("mul", result, result)
                if digit == "1":
                    result = self.binary("mul", result, base)
            return self.cast(result, given.dtype)
        return self.binary("pow", x, y)

    def unary(self, name: str, x: Any) -> Value:
        """An elementwise operation on one operand."""
        v = self.value(x)
        c = _constant(v)
        if name == "neg" and c is not None and v.dtype == i32:
            return self.const(-c, i32)
        return self.emit(name, v)

    def select(self, condition: Any, a: Any, b: Any) -> Value:
        """Elementwise choice."""
        x, y = self.pair(a, b)
        c, x, y = self.align(self.value(condition), x, y)
        return self.emit("select", c, x, y)

    def cast(self, x: Value, dtype: DType) -> Value:
        """Convert the dtype; nothing to do where it is there already."""
        return x if x.dtype == dtype else self.emit("cast", x, dtype=dtype)

    # -- shapes and reductions ---------------------------------------------------------------

    def reshape(self, x: Value, shape: tuple[int, ...]) -> Value:
        """Row-major reshape; one extent may be -1."""
        if shape.count(-1) == 1:
            known = math.prod(n for n in shape if n != -1)
            if known and x.type.numel % known == 0:
                shape = tuple(x.type.numel // known if n == -1 else n for n in shape)
        if any(n < 1 for n in shape):
            raise TypeRuleError(f"cannot reshape {list(x.shape)} to {list(shape)}")
        if x.shape == shape:
            return x
        return self.emit("reshape", x, shape=shape)

    def reduce(self, kind: str, x: Value, axis: int | None, keepdims: bool) -> Value:
        """Reduce one axis, or all where `axis` is None."""
        if not isinstance(keepdims, bool):
            raise TypeRuleError(f"keepdims is a compile-time bool, got {describe(keepdims)}")
        if axis is not None and (not isinstance(axis, int) or isinstance(axis, bool)):
            raise TypeRuleError(f"the axis must be a compile-time int, got {describe(axis)}")
        if not x.shape:
            two = f"; {kind}imum(a, b) takes two values" if kind in ("min", "max") else ""
            raise TypeRuleError(f"cannot reduce a scalar{two}")
        if axis is not None and not -len(x.shape) <= axis < len(x.shape):
            raise TypeRuleError(f"no axis {axis} in a tile of shape {list(x.shape)}")
        if axis is None:
            flat = self.reshape(x, (x.type.numel,))
            out = self.emit("reduce", flat, kind=kind, axis=0)
            return self.reshape(out, (1,) * len(x.shape)) if keepdims else out
        position = axis + len(x.shape) if axis < 0 else axis
        out = self.emit("reduce", x, kind=kind, axis=position)
        if keepdims:
            shape = (*x.shape[:position], 1, *x.shape[position + 1 :])
            return self.reshape(out, shape)
        return out

    # -- memory ------------------------------------------------------------------------------

    def extent(self, ref: Any, axis: int) -> "Value | int":
        """Extent of an axis of an array parameter."""
        param = ref.param
        if not -len(param.shape) <= axis < len(param.shape):
            raise TypeRuleError(f"'{param.name}' has {len(param.shape)} axes, no axis {axis}")
        axis %= len(param.shape)
        n: int | None = param.shape[axis]
        return n if n is not None else self.emit("dim", param=param, axis=axis)

    def load(self, ref: RefArg, index: tuple[Any, ...], fill: float) -> Value:
        """Read a tile of a `Ref`."""
        param = ref.param
        if len(index) != len(param.shape):
            raise TypeRuleError(
                f"'{param.name}' has {len(param.shape)} axes, {len(index)} indices are given"
            )
        args: list[Value] = []
        access: list[Access] = []
        for axis, i in enumerate(index):
            access.append(self._access(param.name, param.shape[axis], axis, i, args))
        if sum(a.kind == "gather" for a in access) > 1:
            raise TypeRuleError("at most one index of an access may be a tile")
        self._check_fill(fill, param.dtype)
        return self.emit("load", *args, param=param, access=tuple(access), fill=fill)

    def _check_fill(self, fill: Any, dtype: DType) -> None:
        fits = isinstance(fill, int) or (
            isinstance(fill, float) and (dtype.is_float or fill.is_integer())
        )
        if not fits or (dtype == bool_ and fill not in (0, 1)):
            raise TypeRuleError(f"fill must be a compile-time {dtype.name}, got {describe(fill)}")
        if dtype.is_int:
            _check_range(fill, dtype)
        elif dtype.is_float:
            _as_float(fill, dtype)

    def _access(
        self, name: str, extent: int | None, axis: int, index: Any, args: list[Value]
    ) -> Access:
        if isinstance(index, slice):
            if index != slice(None):
                raise TypeRuleError("only the whole-axis slice `:` indexes an array; use span()")
            if extent is None:
                raise TypeRuleError(
                    f"axis {axis} of '{name}' is run time; read it in tiles instead of `:`"
                )
            return Access("full", extent)
        if isinstance(index, TileIndex):
            args.append(self.value(index.number))
            return Access("block", index.size, len(args) - 1)
        if isinstance(index, Span):
            args.append(self.value(index.start))
            return Access("span", index.size, len(args) - 1)
        if isinstance(index, Value) and len(index.shape) == 1 and index.dtype.is_int:
            args.append(index)
            return Access("gather", index.shape[0], len(args) - 1)
        if isinstance(index, Value) and not index.shape and index.dtype.is_int:
            args.append(index)
            return Access("point", 1, len(args) - 1)
        if isinstance(index, int) and not isinstance(index, bool):
            if extent is not None and not 0 <= index < extent:
                raise TypeRuleError(
                    f"index {shown(index)} is outside axis {axis} of '{name}' ({extent})"
                )
            args.append(self.const(index, i32))
            return Access("point", 1, len(args) - 1)
        raise TypeRuleError(f"{describe(index)} cannot index axis {axis} of '{name}'")


def _check_size(shape: tuple[int, ...]) -> None:
    if len(shape) > MAX_AXES:
        raise TypeRuleError(f"a tile has at most {MAX_AXES} axes, got {len(shape)}")
    if math.prod(shape) > MAX_TILE:
        raise TypeRuleError(
            f"a tile of shape {list(shape)} is too large: it has at most {MAX_TILE} elements"
        )


def _check_range(value: float, dtype: DType) -> None:
    low = -(1 << (dtype.bits - 1)) if dtype.kind == "i" else 0
    if not low <= value < (1 << (dtype.bits - (dtype.kind == "i"))):
        raise TypeRuleError(f"{_number(value)} does not fit {dtype.name}")


def _as_float(value: float, dtype: DType) -> float:
    try:
        return float(value)
    except OverflowError:
        raise TypeRuleError(f"{_number(value)} does not fit {dtype.name}") from None


def _number(value: float) -> str:
    text = shown(value)
    return f"an int {text}" if text.startswith("of") else text


def _literal(x: Value) -> Any:
    """The number that a tile holds in every place, where that is known."""
    while x.op is not None and x.op.name in ("broadcast", "reshape", "cast"):
        x = x.op.args[0]
    return _constant(x)


def _constant(x: Value) -> Any:
    return x.op.attrs["value"] if x.op is not None and x.op.name == "const" else None
