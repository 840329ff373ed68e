"""Words that move, order, reduce or draw tiles, as operations."""

from collections.abc import Callable
from typing import Any

from tilert.dtypes import f32, i64, u32
from tilert.frontend.builder import Builder
from tilert.frontend.values import describe
from tilert.ir import Value
from tilert.ops import TypeRuleError

__all__ = ["TILE_WORDS", "permute", "static_int", "static_shape", "subscript"]

_WORD = 0xFFFFFFFF


def static_int(x: Any, what: str) -> int:
    """A compile-time int, or an error that says what must be one."""
    if not isinstance(x, int) or isinstance(x, bool):
        raise TypeRuleError(f"{what} must be a compile-time int, got {describe(x)}")
    return x


def static_shape(shape: Any) -> tuple[int, ...]:
    """A shape from an int or a tuple of them."""
    if isinstance(shape, int) and not isinstance(shape, bool):
        shape = (shape,)
    if not isinstance(shape, tuple) or not all(isinstance(n, int) and n > 0 for n in shape):
        shown = describe(shape)
        if isinstance(shape, tuple) and all(isinstance(n, int) for n in shape):
            shown = str(list(shape))
        raise TypeRuleError(f"a shape is a tuple of positive compile-time ints, got {shown}")
    return shape


def _flag(x: Any, what: str) -> bool:
    if not isinstance(x, bool):
        raise TypeRuleError(f"{what} is a compile-time bool, got {describe(x)}")
    return x


def _axis(x: Value, axis: Any, verb: str) -> int:
    """The position of an axis that may be counted from the end."""
    place = static_int(axis, "the axis")
    if not x.shape:
        raise TypeRuleError(f"cannot {verb} a scalar")
    if not -len(x.shape) <= place < len(x.shape):
        raise TypeRuleError(f"no axis {place} in a tile of shape {list(x.shape)}")
    return place % len(x.shape)


# -- reductions, scans, order ----------------------------------------------------------------


def _mean(b: Builder, x: Any, axis: Any = None, keepdims: Any = False) -> Value:
    v = b.value(x)
    if not v.dtype.is_float:
        raise TypeRuleError(f"mean needs a float tile, got {v.dtype.name}; cast with .to(f32)")
    # In f32, or the sum of a narrow tile would round, and could overflow, before the division.
    total = b.reduce("sum", b.cast(v, f32), axis, keepdims)
    count = v.type.numel // total.type.numel
    return b.cast(b.binary("mul", total, 1.0 / count), v.dtype)


def _reduction(kind: str) -> Callable[..., Value]:
    def word(b: Builder, x: Any, axis: Any = None, keepdims: Any = False) -> Value:
        return b.reduce(kind, b.value(x), axis, keepdims)

    return word


def _place(kind: str) -> Callable[..., Value]:
    def word(b: Builder, x: Any, axis: Any, keepdims: Any = False) -> Value:
        return b.reduce(kind, b.value(x), static_int(axis, "the axis"), keepdims)

    return word


def _scan(kind: str) -> Callable[..., Value]:
    def word(b: Builder, x: Any, axis: Any) -> Value:
        v = b.value(x)
        return b.emit("scan", v, kind=kind, axis=_axis(v, axis, "accumulate"))

    return word


def _sorted(b: Builder, x: Any, axis: Any, descending: Any) -> list[Value]:
    v = b.value(x)
    attrs = {"axis": _axis(v, axis, "sort"), "descending": _flag(descending, "descending")}
    return b.results("sort", v, **attrs)


def _sort(b: Builder, x: Any, axis: Any = -1, descending: Any = False) -> Value:
    return _sorted(b, x, axis, descending)[0]


def _argsort(b: Builder, x: Any, axis: Any = -1, descending: Any = False) -> Value:
    return _sorted(b, x, axis, descending)[1]


def _topk(b: Builder, x: Any, k: Any, axis: Any = -1) -> tuple[Value, ...]:
    v = b.value(x)
    axis, k = _axis(v, axis, "sort"), static_int(k, "k")
    if not 1 <= k <= v.shape[axis]:
        raise TypeRuleError(f"topk takes 1 to {v.shape[axis]} elements of the axis, got {k}")
    cut = [slice(None)] * len(v.shape)
    cut[axis] = slice(0, k)
    return tuple(subscript(b, r, tuple(cut)) for r in _sorted(b, v, axis, True))


# -- movement --------------------------------------------------------------------------------


def permute(b: Builder, x: Value, *axes: Any) -> Value:
    """The axes in another order."""
    order = axes[0] if len(axes) == 1 and isinstance(axes[0], tuple) else axes
    places = [static_int(a, "an axis") for a in order]
    rank = len(x.shape)
    if sorted(a % rank if -rank <= a < rank else -1 for a in places) != list(range(rank)):
        raise TypeRuleError(f"permute takes every axis of shape {list(x.shape)} once, got {places}")
    places = [a % rank for a in places]
    if places == list(range(rank)):
        return x
    if rank == 2:
        return b.emit("transpose", x)
    return b.emit("permute", x, axes=tuple(places))


def _broadcast_to(b: Builder, x: Any, shape: Any) -> Value:
    return b.broadcast(b.value(x), static_shape(shape))


def _concatenate(b: Builder, tiles: Any, axis: Any = 0) -> Value:
    if not isinstance(tiles, tuple) or not tiles:
        raise TypeRuleError(f"concatenate takes a tuple of tiles, got {describe(tiles)}")
    values = [b.value(t) for t in tiles]
    position = _axis(values[0], axis, "concatenate")
    return b.emit("concat", *values, axis=position) if len(values) > 1 else values[0]


def subscript(b: Builder, x: Value, index: tuple[Any, ...]) -> Value:
    """`x[...]` of a tile: ints, slices, None and one `...`, all compile time."""
    if sum(i is Ellipsis for i in index) > 1:
        raise TypeRuleError("an index has at most one `...`")
    taken = sum(i is not None and i is not Ellipsis for i in index)
    if taken > len(x.shape):
        raise TypeRuleError(f"a tile of shape {list(x.shape)} has no {taken} axes to index")
    if not any(i is Ellipsis for i in index):
        index = (*index, Ellipsis)
    rest = len(x.shape) - taken
    start: list[int] = []
    step: list[int] = []
    size: list[int] = []
    shown: list[int] = []
    for i in index:
        if i is None:
            shown.append(1)
            continue
        for part in [slice(None)] * rest if i is Ellipsis else [i]:
            axis = len(size)
            one = _range(part, x.shape[axis], axis)
            start.append(one.start)
            step.append(one.step)
            size.append(len(one))
            if isinstance(part, slice):
                shown.append(len(one))
    if tuple(size) != x.shape or any(s != 1 for s in step):
        x = b.emit("slice", x, start=tuple(start), step=tuple(step), shape=tuple(size))
    return b.reshape(x, tuple(shown))


def _range(index: Any, n: int, axis: int) -> range:
    """The places of an axis of `n` that an index names."""
    if isinstance(index, slice):
        parts = (index.start, index.stop, index.step)
        for p in parts:
            if p is not None and (not isinstance(p, int) or isinstance(p, bool)):
                raise TypeRuleError(
                    f"a slice of a tile has compile-time bounds, got {describe(p)}; use take(x,"
                    " index, axis)"
                )
        if index.step == 0:
            raise TypeRuleError("a slice's step must not be 0")
        found = range(n)[index]
        if not found:
            raise TypeRuleError(f"the slice of axis {axis} is empty: the tile has {n} there")
        return found if len(found) > 1 else range(found.start, found.start + 1)
    if isinstance(index, int) and not isinstance(index, bool):
        if not -n <= index < n:
            raise TypeRuleError(f"index {index} is outside axis {axis} of a tile ({n})")
        return range(index % n, index % n + 1)
    raise TypeRuleError(
        f"a tile is indexed by compile-time ints, slices and None, got {describe(index)}; use"
        " take(x, index, axis)"
    )


def _take(b: Builder, x: Any, index: Any, axis: Any) -> Value:
    v, i = b.value(x), b.value(index)
    axis = _axis(v, axis, "take from")
    if len(i.shape) > 1 or not i.dtype.is_int:
        raise TypeRuleError(
            f"take needs an integer scalar or a 1-D integer tile, got {describe(i)}; use"
            " take_along(x, index, axis)"
        )
    count = i.shape[0] if i.shape else 1
    unit = tuple(count if a == axis else 1 for a in range(len(v.shape)))
    wide = tuple(count if a == axis else n for a, n in enumerate(v.shape))
    out = b.emit("take", v, b.broadcast(b.reshape(i, unit), wide), axis=axis)
    return out if i.shape else b.reshape(out, v.shape[:axis] + v.shape[axis + 1 :])


def _take_along(b: Builder, x: Any, index: Any, axis: Any) -> Value:
    v, i = b.value(x), b.value(index)
    axis = _axis(v, axis, "take from")
    if len(i.shape) != len(v.shape):
        raise TypeRuleError(
            f"an index of shape {list(i.shape)} does not fit a tile of shape {list(v.shape)} along"
            f" axis {axis}"
        )
    wide = [
        max(m, n) if 1 in (m, n) and a != axis else n
        for a, (m, n) in enumerate(zip(v.shape, i.shape, strict=True))
    ]
    source = [v.shape[a] if a == axis else n for a, n in enumerate(wide)]
    fits = all(n in (1, w) for n, w in zip(v.shape, source, strict=True))
    v = b.broadcast(v, tuple(source)) if fits else v
    return b.emit("take", v, b.broadcast(i, tuple(wide)), axis=axis)


# -- random numbers --------------------------------------------------------------------------


def _halves(b: Builder, x: Any, what: str) -> tuple[Value, Value]:
    """The low and the high word of an integer."""
    if isinstance(x, int) and not isinstance(x, bool):
        if not -(2**63) <= x < 2**64:
            raise TypeRuleError(f"{what} must fit in 64 bits")
        return b.const(x & _WORD, u32), b.const(x >> 32 & _WORD, u32)
    v = x if isinstance(x, Value) else None
    if v is None or not v.dtype.is_int:
        raise TypeRuleError(f"{what} is an integer, got {describe(x)}")
    if v.dtype != i64:
        return b.cast(v, u32), b.const(0, u32)
    return b.cast(v, u32), b.cast(b.binary("shr", v, 32), u32)


def _draw(b: Builder, name: str, seed: Any, counter: Any, **attrs: Any) -> Value:
    if isinstance(seed, Value) and seed.shape:
        raise TypeRuleError(f"a seed is an integer scalar, got {describe(seed)}")
    words = (*_halves(b, seed, "a seed"), *_halves(b, counter, "a counter"))
    return b.emit(name, *b.align(*words), **attrs)


def _philox(b: Builder, seed: Any, counter: Any) -> tuple[Value, ...]:
    return tuple(_draw(b, "philox", seed, counter, word=w) for w in range(4))


def _random_bits(b: Builder, seed: Any, counter: Any) -> Value:
    return _draw(b, "philox", seed, counter, word=0)


def _random_uniform(b: Builder, seed: Any, counter: Any) -> Value:
    high = b.binary("shr", _random_bits(b, seed, counter), 8)
    # 24 bits: exact in f32, and so the same on every backend.
    return b.binary("mul", b.cast(high, f32), 2.0**-24)


def _random_normal(b: Builder, seed: Any, counter: Any) -> Value:
    return _draw(b, "normal", seed, counter)


# -- elementwise words that are several operations -------------------------------------------


def _clamp(b: Builder, x: Any, low: Any, high: Any) -> Any:
    numbers = (int, float)
    if isinstance(x, numbers) and isinstance(low, numbers) and isinstance(high, numbers):
        return min(max(x, low), high)
    return b.binary("minimum", b.binary("maximum", x, low), high)


def _fma(b: Builder, x: Any, y: Any, z: Any) -> Value:
    if not any(isinstance(v, Value) for v in (x, y, z)):
        x = b.value(float(x) if isinstance(x, int) else x)
    x, y = b.pair(x, y)
    x, z = b.pair(x, z)
    y, z = b.pair(y, z)
    return b.emit("fma", *b.align(x, y, z))


TILE_WORDS: dict[str, Callable[..., Any]] = {
    "sum": _reduction("sum"),
    "prod": _reduction("prod"),
    "any": _reduction("any"),
    "all": _reduction("all"),
    "mean": _mean,
    "argmax": _place("argmax"),
    "argmin": _place("argmin"),
    "cumsum": _scan("sum"),
    "cumprod": _scan("prod"),
    "cummax": _scan("max"),
    "cummin": _scan("min"),
    "sort": _sort,
    "argsort": _argsort,
    "topk": _topk,
    "broadcast_to": _broadcast_to,
    "concatenate": _concatenate,
    "take": _take,
    "take_along": _take_along,
    "philox": _philox,
    "random_bits": _random_bits,
    "random_uniform": _random_uniform,
    "random_normal": _random_normal,
    "clamp": _clamp,
    "fma": _fma,
    "pow": lambda b, x, y: b.power(x, y),
    "atan2": lambda b, y, x: b.binary("atan2", y, x),
}
