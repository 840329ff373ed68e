"""Sorting, the largest few, and elements by index within a tile."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tilert
from tests.tilert.checks import FLOATS, Frame, data
from tilert import Const, Dyn, Mut, Ref, bf16, f16, f32, i8, i32, i64, u8, u32
from tilert.language import argsort, sort, take, take_along, topk

SHAPES = [(1, 1), (2, 3), (3, 1), (1, 70), (16, 64), (7, 129)]


def ordered(x: np.ndarray, axis: int, descending: bool) -> tuple[np.ndarray, np.ndarray]:
    """The elements in order and where they were: a stable sort, NaN last or first."""
    key = x.astype(np.float64) if x.dtype.kind not in "iu" else x
    if not descending:
        places = np.argsort(key, axis=axis, kind="stable")
    else:
        back = np.argsort(np.flip(key, axis), axis=axis, kind="stable")
        places = x.shape[axis] - 1 - np.flip(back, axis)
    return np.take_along_axis(x, places, axis), places


@tilert.kernel
def both(y: Mut, places: Mut, x: Ref, axis: Const[int], descending: Const[bool]):
    v = x[:, :]
    y.store(sort(v, axis, descending))
    places.store(argsort(v, axis=axis, descending=descending))


@pytest.mark.parametrize("dtype", [f32, bf16, f16, i32, u32, i64, u8, i8])
@pytest.mark.parametrize("descending", [False, True])
def test_sort(device: tilert.Device, descending: bool, dtype: tilert.DType) -> None:
    for shape in SHAPES:
        # Few values, so that many are equal.
        x, _ = data(device, shape, dtype, 0 if dtype.kind == "u" else -9, 9)
        host = x.numpy()
        if dtype.is_float:
            host = np.round(host.astype(np.float32)).astype(dtype.numpy)
            host.flat[::5] = np.nan
            x = tilert.from_numpy(host, device)
        for axis in (0, -1):
            y, places = Frame(device, shape, dtype), Frame(device, shape, i32)
            both(y.piece(*shape), places.piece(*shape), x, axis=axis, descending=descending).sync()
            want, at = ordered(host, axis, descending)
            y.check_exact(want)
            places.check_exact(at)


@tilert.kernel
def middle(y: Mut, x: Ref):
    y.store(sort(x[:, :, :], axis=1))


def test_sort_of_a_middle_axis(device: tilert.Device) -> None:
    x, x64 = data(device, (3, 20, 5))
    y = Frame(device, (3, 20, 5))
    middle(y.piece(3, 20, 5), x).sync()
    y.check_exact(np.sort(x64, 1))


def test_signed_zeros_keep_their_order(device: tilert.Device) -> None:
    values = np.array([[0.0, -0.0, -1.0, -0.0, 0.0]], np.float32)
    y, places = Frame(device, (1, 5)), Frame(device, (1, 5), i32)
    x = tilert.from_numpy(values, device)
    both(y.piece(1, 5), places.piece(1, 5), x, axis=1, descending=False).sync()
    places.check_exact(np.array([[2, 0, 1, 3, 4]]))


@tilert.kernel
def largest(y: Mut[Dyn], at: Mut[Dyn], x: Ref[Dyn], k: Const[int]):
    i = y.index[0]
    best, places = topk(x[i, :], k)
    y.store(best)
    at.store(places)


@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (3, 1000)])
@pytest.mark.parametrize("dtype", [f32, bf16, i32])
def test_topk(device: tilert.Device, shape: tuple[int, int], dtype: tilert.DType) -> None:
    x, _ = data(device, shape, dtype, -50, 50)
    host = x.numpy()
    for k in sorted({1, min(3, shape[1]), shape[1]}):
        y, at = Frame(device, (shape[0], k), dtype), Frame(device, (shape[0], k), i32)
        largest(y.piece(2, k), at.piece(2, k), x, k=k).sync()
        want, places = ordered(host, 1, True)
        y.check_exact(want[:, :k])
        at.check_exact(places[:, :k])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(st.floats(width=32), min_size=1, max_size=40), down=st.booleans())
def test_sort_of_any_floats(device: tilert.Device, values: list[float], down: bool) -> None:
    host = np.array([values], np.float32)
    y, places = Frame(device, host.shape), Frame(device, host.shape, i32)
    x = tilert.from_numpy(host, device)
    both(y.piece(*host.shape), places.piece(*host.shape), x, axis=1, descending=down).sync()
    want, at = ordered(host, 1, down)
    y.check_exact(want)
    places.check_exact(at)


# -- elements by index -----------------------------------------------------------------------


@tilert.kernel
def taken(y: Mut, z: Mut, x: Ref, at: Ref, axis: Const[int]):
    v = x[:, :]
    y.store(take(v, at[:], axis))
    z.store(take(v, at[1], axis))


def picked(x: np.ndarray, at: np.ndarray, axis: int) -> np.ndarray:
    """numpy.take, with 0 for what is outside."""
    ok = (at >= 0) & (at < x.shape[axis])
    out = np.take(x, np.where(ok, at, 0), axis)
    shape = [1] * x.ndim
    shape[axis] = len(at)
    return np.where(ok.reshape(shape), out, 0)


@pytest.mark.parametrize("index", [i32, u32, i64, u8])
@pytest.mark.parametrize("dtype", [f32, bf16, i32])
def test_take(device: tilert.Device, dtype: tilert.DType, index: tilert.DType) -> None:
    rng = np.random.default_rng(1)
    for shape in SHAPES:
        x, x64 = data(device, shape, dtype, -50, 50)
        for axis in (0, -1):
            at = rng.integers(-3 if index.kind == "i" else 0, shape[axis] + 3, 11)
            at = at.astype(index.numpy).astype(np.int64)
            wide = list(shape)
            wide[axis] = 11
            y = Frame(device, wide, dtype)
            z = Frame(device, [shape[1 + axis]], dtype)
            host = tilert.from_numpy(at.astype(index.numpy), device)
            taken(y.piece(*wide), z.piece(shape[1 + axis]), x, host, axis=axis).sync()
            y.check(picked(x64, at, axis))
            z.check(picked(x64, at[1:2], axis).squeeze(axis))


@tilert.kernel
def along(y: Mut, x: Ref, at: Ref, axis: Const[int]):
    y.store(take_along(x[:, :], at[:, :], axis))


@pytest.mark.parametrize(
    ("source", "index", "axis"),
    [
        ((5, 7), (5, 3), 1),
        ((5, 7), (9, 7), 0),
        ((5, 7), (1, 3), 1),
        ((1, 7), (6, 9), 1),
        ((64, 33), (64, 33), 0),
    ],
)
def test_take_along(device: tilert.Device, source: Any, index: Any, axis: int) -> None:
    x, x64 = data(device, source)
    at = np.random.default_rng(2).integers(-2, source[axis] + 2, index).astype(np.int32)
    out = list(np.maximum(source, index))
    out[axis] = index[axis]
    wide = list(out)
    wide[axis] = source[axis]
    y = Frame(device, out)
    along(y.piece(*out), x, tilert.from_numpy(at, device), axis=axis).sync()
    ok = (at >= 0) & (at < source[axis])
    x64, safe = np.broadcast_to(x64, wide), np.broadcast_to(np.where(ok, at, 0), out)
    y.check(np.where(ok, np.take_along_axis(x64, safe, axis), 0))


@tilert.kernel
def permuted_rows(y: Mut[Dyn, Dyn], x: Ref[Dyn, Dyn]):
    i, j = y.index
    v = x[i, j]
    y.store(take_along(v, argsort(v, axis=1, descending=True), 1))


def test_order_and_take_agree(device: tilert.Device) -> None:
    x, x64 = data(device, (9, 40))
    y = Frame(device, (9, 40))
    permuted_rows(y.piece(4, 8), x).sync()
    want = -np.sort(-x64.reshape(9, 5, 8), 2)
    y.check_exact(want.reshape(9, 40))


@pytest.mark.parametrize("dtype", FLOATS)
def test_median_of_each_piece(device: tilert.Device, dtype: tilert.DType) -> None:
    @tilert.kernel
    def median(y: Mut[Dyn], x: Ref[Dyn]):
        i, j = y.index
        v = x[i, span_all(j)]
        y.store(sort(v, axis=1)[:, 2:3])

    x, _ = data(device, (6, 5), dtype)
    y = Frame(device, (6, 1), dtype)
    median(y.piece(2, 1), x).sync()
    y.check_exact(np.sort(x.numpy().astype(np.float64), 1)[:, 2:3])


@tilert.inline
def span_all(j):
    return tilert.language.span(j.start, 5)
