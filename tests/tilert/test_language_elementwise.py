"""Elementwise words of the kernel language: arithmetic, functions, casts, broadcasting."""

import math
import operator
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilert
from tests.tilert.checks import FLOATS, Frame, data, ints
from tilert import Const, Dyn, Mut, Ref, bf16, bool_, f16, f32, i32, i64, u8, u32
from tilert import language as lang
from tilert.language import (
    bitcast,
    cdiv,
    exp,
    exp2,
    floor,
    full,
    iota,
    log,
    log2,
    maximum,
    minimum,
    rsqrt,
    sqrt,
    where,
    zeros,
)

SHAPES = [(1, 1), (2, 3), (3, 64), (5, 130), (0, 40)]
TILE = (2, 64)


def unary(word: Any) -> tilert.kernel:
    @tilert.kernel
    def apply(y: Mut[Dyn], x: Ref[Dyn]):
        i, j = y.index
        y.store(word(x[i, j]))

    return apply


def binary(word: Any) -> tilert.kernel:
    @tilert.kernel
    def apply(y: Mut[Dyn], a: Ref[Dyn], b: Ref[Dyn]):
        i, j = y.index
        y.store(word(a[i, j], b[i, j]))

    return apply


@tilert.inline
def negated(x):
    return -x


@tilert.inline
def flipped(x):
    return ~x


@tilert.inline
def plus(a, b):
    return +a + b


@tilert.inline
def less(a, b):
    return a - b


@tilert.inline
def times(a, b):
    return a * b


@tilert.inline
def over(a, b):
    return a / b


@tilert.inline
def floored(a, b):
    return a // b


@tilert.inline
def remainder(a, b):
    return a % b


@tilert.inline
def both(a, b):
    return a & b


@tilert.inline
def either(a, b):
    return a | b


@tilert.inline
def one(a, b):
    return a ^ b


@tilert.inline
def left(a, b):
    return a << (b & 31)


@tilert.inline
def right(a, b):
    return a >> (b & 31)


@tilert.inline
def eq(a, b):
    return a == b


@tilert.inline
def ne(a, b):
    return a != b


@tilert.inline
def lt(a, b):
    return a < b


@tilert.inline
def le(a, b):
    return a <= b


@tilert.inline
def gt(a, b):
    return a > b


@tilert.inline
def ge(a, b):
    return a >= b


FUNCTIONS: dict[str, tuple[Any, Callable, float, float]] = {
    "exp": (exp, np.exp, -9, 9),
    "exp2": (exp2, np.exp2, -9, 9),
    "log": (log, np.log, 0.1, 90),
    "log2": (log2, np.log2, 0.1, 90),
    "sqrt": (sqrt, np.sqrt, 0, 90),
    "rsqrt": (rsqrt, lambda x: 1 / np.sqrt(x), 0.01, 90),
    "sin": (lang.sin, np.sin, -9, 9),
    "cos": (lang.cos, np.cos, -9, 9),
    "tanh": (lang.tanh, np.tanh, -4, 4),
    "expm1": (lang.expm1, np.expm1, -9, 9),
    "log10": (lang.log10, np.log10, 0.1, 90),
    "log1p": (lang.log1p, np.log1p, -0.9, 90),
    "tan": (lang.tan, np.tan, -1.4, 1.4),
    "asin": (lang.asin, np.arcsin, -1, 1),
    "acos": (lang.acos, np.arccos, -1, 1),
    "atan": (lang.atan, np.arctan, -9, 9),
    "sinh": (lang.sinh, np.sinh, -9, 9),
    "cosh": (lang.cosh, np.cosh, -9, 9),
    "erf": (lang.erf, np.vectorize(math.erf, otypes=[float]), -4, 4),
    "floor": (floor, np.floor, -9, 9),
    "ceil": (lang.ceil, np.ceil, -9, 9),
    "trunc": (lang.trunc, np.trunc, -9, 9),
    "round": (lang.round, np.round, -9, 9),
    "abs": (lang.abs, np.abs, -9, 9),
    "neg": (negated, np.negative, -9, 9),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(device: tilert.Device, name: str, dtype: tilert.DType) -> None:
    word, meaning, low, high = FUNCTIONS[name]
    kernel = unary(word)
    for shape in SHAPES:
        x, x64 = data(device, shape, dtype, low, high)
        y = Frame(device, shape, dtype)
        kernel(y.piece(*TILE), x).sync()
        # Relative errors grow where a function crosses 0.
        y.check(meaning(x64), scale=np.maximum(np.abs(meaning(x64)), 1e-1))


@pytest.mark.parametrize("dtype", FLOATS)
def test_function_special_values(device: tilert.Device, dtype: tilert.DType) -> None:
    values = np.array([[np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0]])
    x = tilert.from_numpy(values.astype(dtype.numpy), device)
    for word, meaning, *_ in FUNCTIONS.values():
        y = Frame(device, values.shape, dtype, margin=1)
        unary(word)(y.piece(1, 7), x).sync()
        with np.errstate(all="ignore"):
            y.check(meaning(values), scale=1)


ARITHMETIC: dict[str, tuple[Any, Callable]] = {
    "add": (plus, operator.add),
    "sub": (less, operator.sub),
    "mul": (times, operator.mul),
    "minimum": (minimum, np.minimum),
    "maximum": (maximum, np.maximum),
    "min": (lang.min, np.minimum),
    "max": (lang.max, np.maximum),
}


@pytest.mark.parametrize("dtype", [*FLOATS, i32, u32, i64, u8])
@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic(device: tilert.Device, name: str, dtype: tilert.DType) -> None:
    word, meaning = ARITHMETIC[name]
    for shape in SHAPES:
        low, high = (0, 200) if dtype.kind == "u" else (-200, 200)
        a, a64 = data(device, shape, dtype, low, high, seed=1)
        b, b64 = data(device, shape, dtype, low, high, seed=2)
        y = Frame(device, shape, dtype)
        binary(word)(y.piece(*TILE), a, b).sync()
        y.check(meaning(a64, b64))


def test_integers_wrap(device: tilert.Device) -> None:
    for dtype in (i32, u32):
        a = np.array([[0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x12345678]], np.uint32)
        b = np.array([[1, 0xFFFFFFFF, 0xFFFFFFFF, 0x9ABCDEF0]], np.uint32)
        a, b = a.view(dtype.numpy), b.view(dtype.numpy)
        for word, meaning in ((plus, np.add), (less, np.subtract), (times, np.multiply)):
            y = Frame(device, a.shape, dtype)
            x = (tilert.from_numpy(v, device) for v in (a, b))
            binary(word)(y.piece(1, 4), *x).sync()
            y.check(meaning(a, b))


def test_nan_operand_gives_nan(device: tilert.Device) -> None:
    a = np.array([[np.nan, 1.0, np.nan, -np.inf]])
    b = np.array([[1.0, np.nan, np.nan, 2.0]])
    for dtype in FLOATS:
        for word, meaning in ((minimum, np.minimum), (maximum, np.maximum)):
            y = Frame(device, a.shape, dtype, values=np.zeros(a.shape))
            x = (tilert.from_numpy(v.astype(dtype.numpy), device) for v in (a, b))
            binary(word)(y.piece(1, 4), *x).sync()
            y.check(meaning(a, b))


@pytest.mark.parametrize("dtype", FLOATS)
def test_float_division(device: tilert.Device, dtype: tilert.DType) -> None:
    for shape in SHAPES:
        a, a64 = data(device, shape, dtype, seed=1)
        b, b64 = data(device, shape, dtype, 0.5, 3, seed=2)
        y = Frame(device, shape, dtype, margin=1)
        binary(over)(y.piece(*TILE), a, b).sync()
        y.check(a64 / b64)


@pytest.mark.parametrize("dtype", [i32, u32, i64, u8])
def test_floor_division(device: tilert.Device, dtype: tilert.DType) -> None:
    low = 0 if dtype.kind == "u" else -100
    a, a64 = data(device, (7, 65), dtype, low, 100, seed=1)
    b, b64 = data(device, (7, 65), dtype, low, 100, seed=2)
    b64[b64 == 0] = 3
    b.copy_from(b64.astype(dtype.numpy))
    for word, meaning in ((floored, np.floor_divide), (remainder, np.remainder)):
        y = Frame(device, (7, 65), dtype)
        binary(word)(y.piece(*TILE), a, b).sync()
        y.check(meaning(a64, b64))


BITS = {"and": (both, np.bitwise_and), "or": (either, np.bitwise_or), "xor": (one, np.bitwise_xor)}


@pytest.mark.parametrize("dtype", [i32, u32, u8, i64])
def test_bits(device: tilert.Device, dtype: tilert.DType) -> None:
    words = np.random.default_rng(0).integers(0, 255, (2, 5, 3 * dtype.itemsize), np.uint8)
    a, b = (w.view(dtype.numpy) for w in words)
    x = [tilert.from_numpy(v, device) for v in (a, b)]
    for word, meaning in BITS.values():
        y = Frame(device, a.shape, dtype)
        binary(word)(y.piece(2, 2), *x).sync()
        y.check(meaning(a, b))
    y = Frame(device, a.shape, dtype)
    unary(flipped)(y.piece(2, 2), x[0]).sync()
    y.check(np.invert(a))


@pytest.mark.parametrize("dtype", [i32, u32])
def test_shifts(device: tilert.Device, dtype: tilert.DType) -> None:
    a = np.array([[1, 0x80000000, 0xFFFFFFFF, 0x12345678, 5, 6]], np.uint32).view(dtype.numpy)
    b = np.array([[31, 31, 4, 13, 0, 1]], dtype.numpy)
    for word, meaning in ((left, np.left_shift), (right, np.right_shift)):
        y = Frame(device, a.shape, dtype)
        binary(word)(y.piece(1, 4), *(tilert.from_numpy(v, device) for v in (a, b))).sync()
        y.check(meaning(a, b))


COMPARISONS = {
    "eq": (eq, np.equal),
    "ne": (ne, np.not_equal),
    "lt": (lt, np.less),
    "le": (le, np.less_equal),
    "gt": (gt, np.greater),
    "ge": (ge, np.greater_equal),
}


@pytest.mark.parametrize("dtype", [*FLOATS, i32, u32])
@pytest.mark.parametrize("name", COMPARISONS)
def test_comparison(device: tilert.Device, name: str, dtype: tilert.DType) -> None:
    word, meaning = COMPARISONS[name]
    a = np.arange(12).reshape(3, 4).astype(dtype.numpy)
    b = np.array([3, 1, 2, 0, 4, 9, 0, 7, 8, 9, 1, 11]).reshape(3, 4).astype(dtype.numpy)
    if dtype.is_float:
        a[0, 0] = b[1, 1] = np.nan
    y = Frame(device, a.shape, bool_)
    binary(word)(y.piece(2, 4), *(tilert.from_numpy(v, device) for v in (a, b))).sync()
    y.check(meaning(a.astype(np.float64), b.astype(np.float64)))


def test_logic_on_bools(device: tilert.Device) -> None:
    a = np.array([[True, True, False, False]])
    b = np.array([[True, False, True, False]])
    x = [tilert.from_numpy(v, device) for v in (a, b)]
    for word, meaning in BITS.values():
        y = Frame(device, a.shape, bool_)
        binary(word)(y.piece(1, 4), *x).sync()
        y.check(meaning(a, b))
    y = Frame(device, a.shape, bool_)
    unary(flipped)(y.piece(1, 4), x[0]).sync()
    y.check(~a)


@tilert.kernel
def convert(y: Mut[Dyn], x: Ref[Dyn]):
    (i,) = y.index
    y.store(x[i].to(y.dtype))


EVERY = [f32, bf16, f16, i32, u32, i64, u8, bool_]


@pytest.mark.parametrize("source", EVERY)
@pytest.mark.parametrize("target", EVERY)
def test_cast(device: tilert.Device, source: tilert.DType, target: tilert.DType) -> None:
    values = np.array([0, 1, 2.75, 3.5, 100.25, 77, 200, 0.25, 5, 6, 7])
    if source.kind in "fi" and target.kind in "fi":
        values[::2] *= -1
    x = values.astype(source.numpy)
    y = Frame(device, x.shape, target)
    convert(y.piece(4), tilert.from_numpy(x, device)).sync()
    y.check(x.astype(target.numpy).astype(np.float64))


def test_float_casts_round_to_nearest_even(device: tilert.Device) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 4000, np.uint32)
    ties = (np.arange(4000, dtype=np.uint32) << 15) + 0x3F808000
    x = np.concatenate([bits, ties]).view(np.float32)
    x = x[np.isfinite(x)]
    for dtype in (bf16, f16):
        y = Frame(device, x.shape, dtype)
        convert(y.piece(512), tilert.from_numpy(x, device)).sync()
        with np.errstate(over="ignore"):
            want = x.astype(dtype.numpy)
        y.check_exact(want)


@tilert.kernel
def rebits(y: Mut[Dyn], x: Ref[Dyn]):
    (i,) = y.index
    y.store(bitcast(x[i], y.dtype))


@pytest.mark.parametrize(
    ("source", "target"),
    [(f32, u32), (f32, i32), (u32, f32), (i32, f32), (i32, u32), (u32, i32), (bf16, f16)],
)
def test_bitcast(device: tilert.Device, source: tilert.DType, target: tilert.DType) -> None:
    x, _ = data(device, (37,), source, 1, 100)
    y = Frame(device, (37,), target)
    rebits(y.piece(8), x).sync()
    want = x.numpy().view(target.numpy)
    y.check(want.astype(np.float64) if target.is_float else want)


@tilert.kernel
def promotions(y: Mut, a: Ref, b: Ref, c: Ref):
    """bf16 + f16 is f32; so is f32 with either; literals take the tile's dtype."""
    s = a[:] + b[:]
    y.store(where(s.dtype == f32, s * 1.0009765625 + c[:] - 1, 0.0))


@tilert.kernel
def weak_literals(y: Mut, a: Ref):
    v = 2 * a[:] + 0.5
    y.store(v if v.dtype == bf16 else full(y.shape, -1.0, bf16))


def test_promotion_and_literals(device: tilert.Device) -> None:
    a, a64 = data(device, (19,), bf16, seed=1)
    b, b64 = data(device, (19,), f16, seed=2)
    c, c64 = data(device, (19,), f32, seed=3)
    y = Frame(device, (19,), f32)
    promotions(y.piece(19), a, b, c).sync()
    y.check((a64 + b64) * 1.0009765625 + c64 - 1, scale=8)
    z = Frame(device, (19,), bf16)
    weak_literals(z.piece(19), a).sync()
    twice = (2 * a64).astype(ml_dtypes.bfloat16).astype(np.float64)
    z.check(twice + 0.5)


@tilert.kernel
def outer(y: Mut[Dyn], a: Ref[Dyn], b: Ref, scale: Const[float]):
    i, j = y.index
    y.store(a[i][:, None] * b[j][None, :] + scale)


@tilert.kernel
def ranks(y: Mut, a: Ref, b: Ref, c: Ref):
    y.store(a[:, :][:, :, None] + b[:][None, None] * c[0] + full(y.shape, 1, f32))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (17, 100), (64, 64), (0, 3)])
def test_broadcast(device: tilert.Device, shape: tuple[int, int], dtype: tilert.DType) -> None:
    a, a64 = data(device, shape[:1], dtype, seed=1)
    b, b64 = data(device, shape[1:], dtype, seed=2)
    y = Frame(device, shape, f32)
    outer(y.piece(8, 32), a, b, scale=0.0).sync()
    y.check(np.outer(a64, b64), steps=ROUND_ONCE[dtype.name])


ROUND_ONCE = {"f32": 2, "bf16": 2.0**16, "f16": 2.0**13}


def test_broadcast_three_axes(device: tilert.Device) -> None:
    a, a64 = data(device, (3, 5), seed=1)
    b, b64 = data(device, (18,), seed=2)
    c, c64 = data(device, (1,), seed=3)
    y = Frame(device, (3, 5, 18))
    ranks(y.piece(3, 5, 18), a, b, c).sync()
    y.check(a64[:, :, None] + b64 * c64[0] + 1, scale=8)


@tilert.kernel
def choices(y: Mut, z: Mut, x: Ref, flag: Ref):
    (i,) = y.index
    v = x[i]
    y.store(where(v > 0, v, -1.0))
    z.store(where(flag[0] > 0, v, zeros(v.shape, v.dtype)))


def test_where(device: tilert.Device) -> None:
    x, x64 = data(device, (77,))
    for flag in (0, 1):
        y, z = Frame(device, (77,)), Frame(device, (77,), margin=1)
        choices(y.piece(32), z.piece(32), x, ints(device, [flag])).sync()
        y.check(np.where(x64 > 0, x64, -1))
        z.check(x64 * flag)


@tilert.kernel
def makers(y: Mut, z: Mut, n: Ref):
    (i,) = y.index
    y.store(i.offsets * 10 + cdiv(n[0], 4) + cdiv(7, 2) + iota(y.shape[0]) // i.size)
    z.store(3.5)


def test_makers(device: tilert.Device) -> None:
    y, z = Frame(device, (21,), i32), Frame(device, (21,), bf16)
    makers(y.piece(8), z.piece(8), ints(device, [9])).sync()
    y.check(np.arange(21) * 10 + 3 + 4)
    z.check(3.5)


@tilert.inline
def sigmoid(x, gain=1.0):
    """With a default, a docstring and a branch on a compile-time value."""
    if gain == 1.0:
        return 1.0 / (1.0 + exp(-x))
    return gain / (1.0 + exp(-x))


@tilert.kernel
def inlined(y: Mut[Dyn], x: Ref[Dyn], gain: Const[float] = 1.0):
    (i,) = y.index
    y.store(sigmoid(x[i], gain=gain) + sigmoid(x[i]))


def test_inline(device: tilert.Device) -> None:
    x, x64 = data(device, (100,))
    sigma = 1 / (1 + np.exp(-x64))
    for gain in (1.0, 3.0):
        y = Frame(device, (100,))
        inlined(y.piece(64), x, gain=gain).sync()
        y.check(sigma * (1 + gain))
