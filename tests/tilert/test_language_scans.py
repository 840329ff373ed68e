"""Products, any and all, running totals: along every axis, against float64."""

from typing import Any

import numpy as np
import pytest

import tilert
from tests.tilert.checks import FLOATS, Frame, data
from tilert import Const, Dyn, Mut, Ref, bf16, bool_, f16, f32, i8, i32, i64, u8, u32
from tilert.language import argmin, cummax, cummin, cumprod, cumsum, prod

SHAPES = [(1, 1), (2, 3), (3, 1), (1, 70), (16, 64), (65, 31)]
SCANS = {
    "cumsum": (cumsum, np.cumsum),
    "cumprod": (cumprod, np.cumprod),
    "cummax": (cummax, np.maximum.accumulate),
    "cummin": (cummin, np.minimum.accumulate),
}


def scanning(word: Any) -> tilert.Kernel:
    @tilert.kernel
    def scan(y: Mut, x: Ref, axis: Const[int]):
        y.store(word(x[:, :], axis))

    return scan


@pytest.mark.parametrize("dtype", [f32, bf16, f16, i32, u32, i64, u8, i8])
@pytest.mark.parametrize("name", SCANS)
def test_scan(device: tilert.Device, name: str, dtype: tilert.DType) -> None:
    word, meaning = SCANS[name]
    kernel = scanning(word)
    for shape in SHAPES:
        low, high = (0.8, 1.2) if name == "cumprod" and dtype.is_float else (-2, 3)
        x, x64 = data(device, shape, dtype, 0 if dtype.kind == "u" else low, high)
        for axis in (0, 1, -1):
            y = Frame(device, shape, dtype)
            kernel(y.piece(*shape), x, axis=axis).sync()
            want = meaning(x64, axis=axis)
            # The running sum of magnitudes, and as many roundings as there may be steps.
            size = np.cumsum(np.abs(x64), axis=axis) if name == "cumsum" else np.abs(want)
            y.check(want, steps=4 + shape[axis], scale=size)


@tilert.kernel
def scan_pieces(y: Mut[Dyn], x: Ref[Dyn]):
    i, j, k = y.index
    v = x.load(i, j, k, fill=1.0)
    y.store(cumsum(v, axis=1) - cumsum(v, axis=2))


@pytest.mark.parametrize("shape", [(0, 3, 4), (5, 1, 1), (7, 5, 20)])
def test_scan_of_ragged_pieces(device: tilert.Device, shape: tuple[int, int, int]) -> None:
    x, x64 = data(device, shape)
    y = Frame(device, shape)
    scan_pieces(y.piece(2, 4, 32), x).sync()
    want = np.empty(shape)
    for first in range(0, shape[1], 4):
        part = x64[:, first : first + 4]
        want[:, first : first + 4] = np.cumsum(part, 1) - np.cumsum(part, 2)
    y.check(want, steps=24, scale=np.sum(np.abs(x64), (1, 2), keepdims=True))


def test_nan_stays_in_running_extremes(device: tilert.Device) -> None:
    values = np.array([[1.0, 5.0, np.nan, 7.0], [-np.inf, 2.0, 1.0, np.inf]])
    for dtype in FLOATS:
        x = tilert.from_numpy(values.astype(dtype.numpy), device)
        for name in ("cummax", "cummin"):
            word, meaning = SCANS[name]
            y = Frame(device, (2, 4), dtype)
            scanning(word)(y.piece(2, 4), x, axis=1).sync()
            y.check(meaning(values, axis=1))


@tilert.kernel
def cdf(y: Mut, n: Mut, p: Ref, u: Ref):
    """Where a number falls among running sums: what sampling does."""
    total = cumsum(p[:], 0)
    y.store(total)
    n.store(sum((total <= u[0]).to(i32)))


def test_scan_in_a_program(device: tilert.Device) -> None:
    p, p64 = data(device, (1000,), f32, 0, 1)
    u = tilert.from_numpy(np.array([p64.sum() / 3], np.float32), device)
    y, n = Frame(device, (1000,)), Frame(device, (1,), i32, margin=1)
    cdf(y.piece(1000), n.piece(1), p, u).sync()
    total = np.cumsum(p64)
    y.check(total, steps=40)
    n.check((total <= p64.sum() / 3).sum())


# -- prod, any, all, argmin ------------------------------------------------------------------


@tilert.kernel
def products(y: Mut, z: Mut, x: Ref, axis: Const[int]):
    v = x[:, :]
    y.store(prod(v, axis))
    z.store(argmin(v, axis))


@pytest.mark.parametrize("dtype", [f32, bf16, f16, i32, u32, i64, u8, i8])
def test_prod_and_argmin(device: tilert.Device, dtype: tilert.DType) -> None:
    for shape in SHAPES:
        bounds = (0.7, 1.4) if dtype.is_float else (1, 4)
        x, x64 = data(device, shape, dtype, *bounds)
        for axis in (0, -1):
            out = np.delete(shape, axis % 2)
            y, z = Frame(device, out, dtype), Frame(device, out, i32)
            products(y.piece(*out), z.piece(*out), x, axis=axis).sync()
            with np.errstate(over="ignore"):
                want = np.prod(x64, axis=axis)
                if not dtype.is_float:
                    want = np.prod(x64.astype(dtype.numpy), axis=axis, dtype=dtype.numpy)
            y.check(want, steps=4 + shape[axis])
            z.check(np.argmin(x64, axis=axis))


@tilert.kernel
def whole(y: Mut, z: Mut, top: Mut, x: Ref):
    v = x[:, :]
    y.store(prod(v))
    z.store(argmin(v.reshape(-1), 0, keepdims=True))
    top.store(argmin(v, 1, keepdims=True))


def test_whole_tile(device: tilert.Device) -> None:
    x, x64 = data(device, (9, 70), f32, 0.9, 1.1)
    y, z, top = Frame(device, (1,)), Frame(device, (1,), i32), Frame(device, (9, 1), i32)
    whole(y.piece(1), z.piece(1), top.piece(9, 1), x).sync()
    y.check(np.prod(x64), steps=700)
    z.check(np.argmin(x64))
    top.check(np.argmin(x64, 1)[:, None])


def test_first_of_equal_and_nan(device: tilert.Device) -> None:
    values = np.array([[3.0, 1.0, 1.0, 2.0], [3.0, np.nan, 1.0, np.nan]])
    for dtype in FLOATS:
        x = tilert.from_numpy(values.astype(dtype.numpy), device)
        y, z = Frame(device, (2,), dtype), Frame(device, (2,), i32)
        products(y.piece(2), z.piece(2), x, axis=1).sync()
        z.check([1, 1])
        y.check(values.prod(1))


@tilert.kernel
def anyall(a: Mut, b: Mut, c: Mut, d: Mut, x: Ref[Dyn]):
    i = a.index[0]
    v = x[i, :] > 0.0
    a.store(any(v, 1))
    b.store(all(v, axis=1))
    c.store(any(v, 0, keepdims=True).reshape(1, -1))
    d.store(all(any(v, axis=1)))


@pytest.mark.parametrize("shape", [(1, 1), (4, 3), (9, 70), (6, 1030)])
def test_any_all(device: tilert.Device, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(3)
    values = rng.uniform(-1, 1, shape).astype(np.float32)
    values[::3] = 1
    values[1::3] = -1
    x = tilert.from_numpy(values, device)
    rows = -(-shape[0] // 4)
    a, b = (Frame(device, (shape[0],), bool_, margin=1) for _ in range(2))
    c, d = Frame(device, (rows, shape[1]), bool_), Frame(device, (rows,), bool_, margin=1)
    anyall(a.piece(4), b.piece(4), c.piece(1, shape[1]), d.piece(1), x).sync()
    v = np.zeros((rows * 4, shape[1]), bool)
    v[: shape[0]] = values > 0
    a.check(v[: shape[0]].any(1))
    b.check(v[: shape[0]].all(1))
    c.check(v.reshape(rows, 4, -1).any(1))
    d.check(v.any(1).reshape(rows, 4).all(1))


@pytest.mark.parametrize("dtype", [bf16, u8])
def test_narrow_sums_do_not_round_on_the_way(device: tilert.Device, dtype: tilert.DType) -> None:
    ones = tilert.from_numpy(np.ones((1, 1000), dtype.numpy), device)
    y = Frame(device, (1, 1000), dtype)
    scanning(cumsum)(y.piece(1, 1000), ones, axis=1).sync()
    want = np.arange(1, 1001)[None]
    y.check_exact(
        want.astype(np.float32).astype(dtype.numpy) if dtype.is_float else want.astype(dtype.numpy)
    )
