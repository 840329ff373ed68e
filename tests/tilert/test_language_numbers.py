"""Words of several operands, powers, special values, conversions to narrow types, 8-bit floats."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tilert
from tests.tilert.checks import FLOATS, ROUNDING, Frame, data
from tilert import (
    Const,
    Dyn,
    Mut,
    Ref,
    bf16,
    bool_,
    f8e4m3,
    f8e5m2,
    f16,
    f32,
    i8,
    i32,
    i64,
    u8,
    u32,
)
from tilert.language import (
    atan2,
    bitcast,
    clamp,
    exp,
    fma,
    isfinite,
    isinf,
    isnan,
    maximum,
    mma,
    pow,
    tiles,
    zeros,
)

EIGHT = (f8e4m3, f8e5m2)
SPECIAL = np.array([[np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 2.5, -0.5]])


@tilert.kernel
def two(y: Mut[Dyn], z: Mut[Dyn], a: Ref[Dyn], b: Ref[Dyn]):
    i, j = y.index
    y.store(pow(a[i, j], b[i, j]))
    z.store(atan2(a[i, j], b[i, j]))


@pytest.mark.parametrize("dtype", FLOATS)
def test_pow_and_atan2(device: tilert.Device, dtype: tilert.DType) -> None:
    for shape in [(3, 40), (5, 130), (0, 8)]:
        a, a64 = data(device, shape, dtype, 0.2, 4, seed=1)
        b, b64 = data(device, shape, dtype, -3, 3, seed=2)
        y, z = Frame(device, shape, dtype), Frame(device, shape, dtype)
        two(y.piece(2, 64), z.piece(2, 64), a, b).sync()
        y.check(a64**b64, steps=16)
        z.check(np.arctan2(a64, b64))


def test_pow_and_atan2_of_special_values(device: tilert.Device) -> None:
    a, b = (v.reshape(1, -1) for v in np.meshgrid(SPECIAL[0], SPECIAL[0]))
    x = [tilert.from_numpy(v.astype(np.float32), device) for v in (a, b)]
    y, z = Frame(device, a.shape), Frame(device, a.shape)
    two(y.piece(1, 81), z.piece(1, 81), *x).sync()
    with np.errstate(all="ignore"):
        y.check(np.power(a, b), steps=16)
        z.check(np.arctan2(a, b))


@tilert.kernel
def powers(y: Mut, z: Mut, w: Mut, x: Ref, n: Ref):
    y.store(x[:] ** 3 + x[:] ** 0.5)
    z.store(n[:] ** 5 - n[:] ** 1)
    w.store(pow(2.0, x[:]) * x[:] ** 17 / x[:] ** 16)


@pytest.mark.parametrize("dtype", [f32, bf16])
def test_powers(device: tilert.Device, dtype: tilert.DType) -> None:
    x, x64 = data(device, (40,), dtype, 0.5, 1.5)
    n, n64 = data(device, (40,), i32, -30, 30)
    y, z, w = Frame(device, (40,), dtype), Frame(device, (40,), i32), Frame(device, (40,))
    powers(y.piece(40), z.piece(40), w.piece(40), x, n).sync()
    z.check(n64**5 - n64)
    # Each step of a narrow type rounds.
    steps = 8 if dtype == f32 else 8 * ROUNDING["bf16"] / ROUNDING["f32"]
    y.check(x64**3 + x64**0.5, steps=steps)
    w.check(2**x64 * x64, steps=steps + 32)


@tilert.kernel
def added(y: Mut[Dyn], a: Ref[Dyn], b: Ref[Dyn], c: Ref[Dyn]):
    i = y.index[0]
    y.store(fma(a[i], b[i], c[i]))


def test_fma_rounds_once(device: tilert.Device) -> None:
    """Exact values by fractions: what two roundings would get wrong, ties broken by far bits."""
    from fractions import Fraction

    rng = np.random.default_rng(5)
    a = rng.uniform(-2, 2, 4000).astype(np.float32)
    b = rng.uniform(-2, 2, 4000).astype(np.float32)
    c = (-a.astype(np.float64) * b).astype(np.float32)
    c[::2] = rng.uniform(-2, 2, 2000)
    # Products whose sum with c lies half way between two floats but for a bit far below.
    a[:4], b[:4] = np.float32(1 + 2**-23), np.float32([1 + 2**-23, 1 - 2**-23, 1, 2**-60])
    c[:4] = np.float32([2**-24, -(2**-24), 2**-24, 1 + 2**-23])
    y = Frame(device, (4000,))
    x = [tilert.from_numpy(v, device) for v in (a, b, c)]
    added(y.piece(256), *x).sync()
    want = []
    for p, q, r in zip(a, b, c, strict=True):
        exact = Fraction(float(p)) * Fraction(float(q)) + Fraction(float(r))
        want.append(nearest(exact))
    y.check_exact(np.array(want, np.float32))


def nearest(x: Any) -> np.float32:
    """The f32 nearest to a fraction, ties to even."""
    guess = np.float32(float(x))
    near = [np.nextafter(guess, np.float32(s)) for s in (-np.inf, np.inf)]
    from fractions import Fraction

    def key(v: np.float32) -> tuple[Any, int]:
        return abs(Fraction(float(v)) - x), int(v.view(np.int32)) & 1

    return min([guess, *near], key=key)


@pytest.mark.parametrize("dtype", FLOATS)
def test_fma_of_special_values(device: tilert.Device, dtype: tilert.DType) -> None:
    a, b, c = (np.ravel(v).astype(dtype.numpy) for v in np.meshgrid(*[SPECIAL[0]] * 3))
    y = Frame(device, a.shape, dtype)
    added(y.piece(1024), *(tilert.from_numpy(v, device) for v in (a, b, c))).sync()
    with np.errstate(all="ignore"):
        y.check(a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64))


@tilert.kernel
def predicates(n: Mut, i: Mut, f: Mut, y: Mut, x: Ref):
    v = x[:, :]
    n.store(isnan(v))
    i.store(isinf(v))
    f.store(isfinite(v))
    y.store(clamp(v, -0.75, 2))


@pytest.mark.parametrize("dtype", FLOATS)
def test_predicates_and_clamp(device: tilert.Device, dtype: tilert.DType) -> None:
    x = tilert.from_numpy(SPECIAL.astype(dtype.numpy), device)
    n, i, f = (Frame(device, SPECIAL.shape, bool_) for _ in range(3))
    y = Frame(device, SPECIAL.shape, dtype)
    predicates(*(o.piece(1, 9) for o in (n, i, f, y)), x).sync()
    n.check(np.isnan(SPECIAL))
    i.check(np.isinf(SPECIAL))
    f.check(np.isfinite(SPECIAL))
    y.check(np.clip(SPECIAL, -0.75, 2))


@tilert.inline
def where_finite(x):
    return tilert.language.where(isfinite(x), x, 0.0)


@tilert.kernel
def scalars(y: Mut, x: Ref):
    a, b = x[0], x[1]
    total = fma(a, b, 1.0) + pow(a, b) + atan2(a, b) + tilert.language.erf(a)
    y.store(total + where_finite(clamp(a, b, 9.0)) + tilert.language.round(b * 1.5))


def test_words_on_scalars(device: tilert.Device) -> None:
    import math

    x, x64 = data(device, (2,), f32, 0.5, 2)
    y = Frame(device, (1,), margin=1)
    scalars(y.piece(1), x).sync()
    a, b = x64
    want = a * b + 1 + a**b + math.atan2(a, b) + math.erf(a) + max(a, b) + np.round(b * 1.5)
    y.check(want, steps=20)


# -- conversions -----------------------------------------------------------------------------


@tilert.kernel
def cast(y: Mut[Dyn], x: Ref[Dyn]):
    i = y.index[0]
    y.store(x[i].to(y.dtype))


EDGES = np.array(
    [0.0, -0.0, 0.5, -0.5, 1.99, -1.99, 126.9, 127.0, 128.0, -128.9, -129.0, 255.9, 256.0, 3e9,
     -3e9, 2147483520.0, 2147483648.0, 4294967040.0, 4294967296.0, 9.2e18, 9.3e18, -9.3e18, 3e38,
     -3e38, np.inf, -np.inf, np.nan]
)  # fmt: skip


@pytest.mark.parametrize("target", [i8, u8, i32, u32, i64])
@pytest.mark.parametrize("source", FLOATS)
def test_floats_to_integers_saturate(
    device: tilert.Device, source: tilert.DType, target: tilert.DType
) -> None:
    with np.errstate(over="ignore"):
        host = EDGES.astype(source.numpy)
    info = np.iinfo(target.numpy)
    want = [
        0 if np.isnan(v) else info.min if v <= info.min else info.max if v >= info.max else int(v)
        for v in host.astype(np.float64)
    ]
    y = Frame(device, host.shape, target)
    cast(y.piece(8), tilert.from_numpy(host, device)).sync()
    y.check_exact(np.array(want, target.numpy))


@pytest.mark.parametrize("dtype", EIGHT)
def test_every_8_bit_float_survives(device: tilert.Device, dtype: tilert.DType) -> None:
    every = np.arange(256, dtype=np.uint8).view(dtype.numpy)
    for wide in (f32, bf16, f16):
        y, back = Frame(device, (256,), wide), Frame(device, (256,), dtype)
        x = tilert.from_numpy(every, device)
        cast(y.piece(64), x).sync()
        y.check_exact(np.where(np.isinf(every.astype(np.float64)), np.inf, 1) * every)
        cast(back.piece(64), tilert.from_numpy(every.astype(wide.numpy), device)).sync()
        # An infinity becomes the largest number.
        finite = np.clip(every.astype(np.float32), -dtype.largest, dtype.largest)
        back.check_exact(finite.astype(dtype.numpy))


def rounded(x: np.ndarray, dtype: tilert.DType) -> np.ndarray:
    """To 8 bits as documented: to nearest even, saturating."""
    return np.clip(x, -dtype.largest, dtype.largest).astype(dtype.numpy)


@pytest.mark.parametrize("dtype", EIGHT)
def test_rounding_to_8_bits(device: tilert.Device, dtype: tilert.DType) -> None:
    rng = np.random.default_rng(8)
    every = np.arange(256, dtype=np.uint8).view(dtype.numpy).astype(np.float32)
    finite = np.sort(every[np.isfinite(every)])
    middle = (finite[1:] + finite[:-1]) / 2
    around = [np.nextafter(middle, np.float32(s)) for s in (-np.inf, np.inf)]
    random = (rng.standard_normal(500) * 10.0 ** rng.uniform(-8, 6, 500)).astype(np.float32)
    x = np.concatenate([middle, *around, random, np.float32([1e30, -1e30, np.inf, -np.inf, 1e-40])])
    y = Frame(device, x.shape, dtype)
    cast(y.piece(256), tilert.from_numpy(x, device)).sync()
    y.check_exact(rounded(x, dtype))


@tilert.kernel
def worked(y: Mut, z: Mut, w: Mut, x: Ref):
    v = x[:, :]
    y.store(v * 2 + exp(v))
    z.store(sum(v, axis=1))
    w.store(maximum(v, -v)[:, ::-1] + v.to(bf16))


@pytest.mark.parametrize("dtype", EIGHT)
def test_work_in_8_bits(device: tilert.Device, dtype: tilert.DType) -> None:
    x, x64 = data(device, (5, 32), dtype)
    y, z = Frame(device, (5, 32), dtype), Frame(device, (5,), dtype)
    w = Frame(device, (5, 32), bf16)
    worked(y.piece(5, 32), z.piece(5), w.piece(5, 32), x).sync()
    # Three roundings to the type.
    step = ROUNDING[dtype.name] / ROUNDING["f32"]
    y.check(x64 * 2 + np.exp(x64), steps=3 * step, scale=np.abs(x64) * 2 + np.exp(x64))
    z.check(x64.sum(1), steps=40, scale=np.abs(x64).sum(1))
    w.check(np.abs(x64)[:, ::-1] + x64)


@tilert.kernel
def reread(y: Mut, x: Ref):
    y.store(bitcast(bitcast(x[:], f8e5m2), u8) + bitcast(bitcast(x[:], f8e4m3), u8))


def test_bits_of_8_bit_floats(device: tilert.Device) -> None:
    x = np.arange(256, dtype=np.uint8)
    y = Frame(device, (256,), u8)
    reread(y.piece(256), tilert.from_numpy(x, device)).sync()
    y.check_exact(2 * x)


# -- products of 8-bit types -----------------------------------------------------------------


@tilert.kernel
def linear(y: Mut[Dyn], x: Ref[Dyn], w: Ref, bk: Const[int]):
    m, n = y.index
    acc = zeros(y.shape, y.dtype)
    for k in tiles(x, axis=1, size=bk):
        acc = mma(x[m, k], w[n, k].T, acc)
    y.store(acc)


@tilert.kernel
def plain(y: Mut, x: Ref, w: Ref):
    y.store(mma(x[:, :], w[:, :], y.load()))


SIZES = [((33, 24, 130), (16, 8, 32)), ((3, 40, 64), (2, 16, 64)), ((64, 64, 96), (64, 64, 32))]


@pytest.mark.parametrize("pair", [(f8e4m3, f8e4m3), (f8e5m2, f8e5m2), (f8e4m3, f8e5m2)])
def test_products_of_8_bit_floats(device: tilert.Device, pair: Any) -> None:
    for (m, n, k), (bm, bn, bk) in SIZES:
        x, x64 = data(device, (m, k), pair[0], seed=1)
        w, w64 = data(device, (n, k), pair[1], seed=2)
        y = Frame(device, (m, n))
        linear(y.piece(bm, bn), x, w, bk=bk).sync()
        scale = np.abs(x64) @ np.abs(w64).T
        y.check(x64 @ w64.T, steps=k, scale=scale)
        v, v64 = data(device, (k, n), pair[1], seed=3)
        start = np.ones((m, n))
        z = Frame(device, (m, n), values=start)
        plain(z.piece(m, n), x, v).sync()
        z.check(1 + x64 @ v64, steps=k, scale=1 + np.abs(x64) @ np.abs(v64))


def test_products_of_i8(device: tilert.Device) -> None:
    for (m, n, k), (bm, bn, bk) in SIZES:
        x, x64 = data(device, (m, k), i8, -128, 128, seed=1)
        w, w64 = data(device, (n, k), i8, -128, 128, seed=2)
        y = Frame(device, (m, n), i32)
        linear(y.piece(bm, bn), x, w, bk=bk).sync()
        y.check(x64 @ w64.T)
        v, v64 = data(device, (k, n), i8, -128, 128, seed=3)
        z = Frame(device, (m, n), i32, values=np.full((m, n), 7))
        plain(z.piece(m, n), x, v).sync()
        z.check(7 + x64 @ v64)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.floats(width=32), min_size=1, max_size=16))
def test_any_float_to_8_bits(device: tilert.Device, values: list[float]) -> None:
    x = np.array(values, np.float32)
    for dtype in EIGHT:
        y = Frame(device, (16,), dtype, values=np.zeros(16))
        padded = np.zeros(16, np.float32)
        padded[: len(x)] = x
        cast(y.piece(16), tilert.from_numpy(padded, device)).sync()
        y.check_exact(rounded(padded, dtype))


def test_ml_dtypes_of_tilert_dtypes() -> None:
    assert tilert.dtypes.dtype_of(np.dtype(ml_dtypes.float8_e4m3fn)) == f8e4m3
    assert (f8e4m3.largest, f8e5m2.largest, i8.largest, u32.largest) == (448, 57344, 127, 2**32 - 1)
    assert tilert.dtypes.promote(f8e4m3, f8e5m2) == f32
    assert tilert.dtypes.promote(f8e4m3, f16) == f16
