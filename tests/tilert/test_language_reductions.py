"""Reductions, and tiles that must move between threads: broadcasts, transposes, reshapes."""

from typing import Any

import numpy as np
import pytest

import tilert
from tests.tilert.checks import FLOATS, Frame, data
from tilert import Const, Dyn, Mut, Ref, bf16, f16, f32, i32, u32
from tilert.language import argmax, exp, iota, mean, where

SHAPES_1D = [(1,), (2,), (3,), (33,), (1000,), (5000,)]
SHAPES_2D = [(1, 1), (2, 3), (3, 1), (1, 70), (16, 64), (65, 31), (7, 1030)]
SHAPES_3D = [(1, 1, 1), (2, 3, 4), (3, 20, 33), (9, 4, 128)]
KINDS = {"sum": np.sum, "max": np.max, "min": np.min, "mean": np.mean, "argmax": np.argmax}


@tilert.inline
def reduced(x: Any, kind: Any, axis: Any):
    if kind == 0:
        return sum(x, axis)
    if kind == 1:
        return max(x, axis=axis)
    if kind == 2:
        return min(x, axis=axis)
    if kind == 3:
        return mean(x, axis=axis)
    return argmax(x, axis)


@tilert.kernel
def reduce1(y: Mut, x: Ref, kind: Const[int], axis: Const[int]):
    y.store(reduced(x[:], kind, axis))


@tilert.kernel
def reduce2(y: Mut, x: Ref, kind: Const[int], axis: Const[int]):
    y.store(reduced(x[:, :], kind, axis))


@tilert.kernel
def reduce3(y: Mut, x: Ref, kind: Const[int], axis: Const[int]):
    y.store(reduced(x[:, :, :], kind, axis))


@pytest.mark.parametrize("dtype", [f32, bf16, f16, i32, u32])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_reduce_axis(device: tilert.Device, rank: int, kind: str, dtype: tilert.DType) -> None:
    if kind == "mean" and not dtype.is_float:
        pytest.skip("mean takes floats")
    kernel = (reduce1, reduce2, reduce3)[rank - 1]
    for shape in (SHAPES_1D, SHAPES_2D, SHAPES_3D)[rank - 1]:
        low = 0 if dtype.kind == "u" else -90
        x, x64 = data(device, shape, dtype, low, 90)
        for axis in range(-1, rank):
            want = KINDS[kind](x64, axis=axis)
            out = np.shape(want) or (1,)
            y = Frame(device, out, i32 if kind == "argmax" else dtype)
            kernel(y.piece(*out), x, kind=list(KINDS).index(kind), axis=axis).sync()
            y.check(want, steps=20, scale=np.sum(np.abs(x64), axis=axis).reshape(out))


@tilert.kernel
def whole(y: Mut, top: Mut, low: Mut, at: Mut, x: Ref):
    v = x[:, :]
    y.store(sum(v))
    top.store(max(v) + 0 * sum(max(v, keepdims=True)))
    low.store(min(v))
    at.store(argmax(v.reshape(-1), 0))


@pytest.mark.parametrize("dtype", [f32, bf16, i32])
@pytest.mark.parametrize("shape", SHAPES_2D)
def test_full_reduction(device: tilert.Device, shape: tuple[int, int], dtype: tilert.DType) -> None:
    x, x64 = data(device, shape, dtype, -50, 50)
    y, top, low = (Frame(device, (1,), dtype, margin=1) for _ in range(3))
    at = Frame(device, (1,), i32)
    whole(y.piece(1), top.piece(1), low.piece(1), at.piece(1), x).sync()
    y.check(x64.sum(), steps=20, scale=np.abs(x64).sum())
    top.check(x64.max())
    low.check(x64.min())
    at.check(x64.argmax())


@tilert.kernel
def along_other_axis(y: Mut[Dyn], x: Ref[Dyn]):
    """Both results return to the tile they came from, each along the axis it was not reduced on."""
    i, j = y.index
    v = x[i, j]
    cols = max(v, axis=0)
    rows = sum(v, axis=1, keepdims=True)
    y.store(v - cols[None, :] + rows)


@tilert.kernel
def crossed(y: Mut, x: Ref):
    """A row's sum put along the columns, and the other way round."""
    v = x[:, :]
    y.store(sum(v, axis=0)[:, None] + sum(v, axis=1)[None, :])


@tilert.kernel
def softmax(y: Mut[Dyn], x: Ref[Dyn]):
    i, j = y.index
    v = x.load(i, j, fill=float("-inf"))
    e = exp(v - max(v, axis=1, keepdims=True))
    y.store(e / sum(e, axis=1)[:, None])


@pytest.mark.parametrize("shape", SHAPES_2D)
def test_reduce_then_broadcast(device: tilert.Device, shape: tuple[int, int]) -> None:
    x, x64 = data(device, shape)
    y = Frame(device, shape)
    along_other_axis(y.piece(*shape), x).sync()
    want = x64 - x64.max(0)[None] + x64.sum(1)[:, None]
    y.check(want, steps=20, scale=np.abs(x64).sum(1)[:, None] + 4)
    z = Frame(device, shape[::-1])
    crossed(z.piece(*shape[::-1]), x).sync()
    z.check(
        x64.sum(0)[:, None] + x64.sum(1)[None],
        steps=20,
        scale=np.abs(x64).sum(0)[:, None] + np.abs(x64).sum(1)[None],
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_softmax_of_ragged_rows(device: tilert.Device, rows: int, dtype: tilert.DType) -> None:
    for columns, width in ((1, 16), (7, 8), (100, 128), (1000, 1024)):
        x, x64 = data(device, (rows, columns), f32)
        y = Frame(device, (rows, columns), dtype)
        softmax(y.piece(2, width), x).sync()
        e = np.exp(x64 - x64.max(1, keepdims=True, initial=-9))
        y.check(e / e.sum(1, keepdims=True), steps=20)


@tilert.kernel
def middle_axis(y: Mut, x: Ref):
    v = x[:, :, :]
    y.store(v - mean(v, axis=1, keepdims=True) + sum(max(v, axis=2), axis=0)[None, :, None])


@pytest.mark.parametrize("shape", SHAPES_3D)
def test_three_axes(device: tilert.Device, shape: tuple[int, int, int]) -> None:
    x, x64 = data(device, shape)
    y = Frame(device, shape)
    middle_axis(y.piece(*shape), x).sync()
    y.check(x64 - x64.mean(1, keepdims=True) + x64.max(2).sum(0)[None, :, None], steps=20, scale=20)


# argmax


@tilert.kernel
def one_hot(y: Mut, x: Ref):
    """Every thread must know the place, not only the one that stores it."""
    v = x[:]
    y.store(where(iota(v.shape[0]) == argmax(v, 0), 1, 0))


@tilert.kernel
def one_hot_rows(y: Mut, x: Ref):
    v = x[:, :]
    y.store(where(iota(v.shape[1])[None, :] == argmax(v, 1)[:, None], v, 0.0))


@pytest.mark.parametrize("n", [1, 3, 64, 1000, 4096])
def test_argmax_reaches_every_thread(device: tilert.Device, n: int) -> None:
    for place in sorted({0, n // 3, n - 1}):
        values = np.zeros(n, np.float32)
        values[place] = 5
        y = Frame(device, (n,), i32)
        one_hot(y.piece(n), tilert.from_numpy(values, device)).sync()
        y.check(np.arange(n) == place)
    x, x64 = data(device, (5, n), low=1)
    y = Frame(device, (5, n))
    one_hot_rows(y.piece(5, n), x).sync()
    y.check(np.where(x64 == x64.max(1, keepdims=True), x64, 0))


@pytest.mark.parametrize("dtype", FLOATS)
def test_argmax_of_ties_and_nan(device: tilert.Device, dtype: tilert.DType) -> None:
    for n in (3, 40, 3000):
        rows = np.zeros((7, n))
        rows[1, n // 2 :] = 1
        rows[2, [1, n - 1]] = np.nan
        rows[3, -1] = np.nan
        rows[4] = -np.inf
        rows[5] = np.inf
        rows[6, 0], rows[6, 1:] = -0.0, 0.0
        x = rows.astype(dtype.numpy)
        y = Frame(device, (7,), i32)
        reduce2(y.piece(7), tilert.from_numpy(x, device), kind=4, axis=1).sync()
        y.check(np.argmax(rows, axis=1))
        y = Frame(device, (n,), i32)
        reduce2(y.piece(n), tilert.from_numpy(x, device), kind=4, axis=0).sync()
        y.check(np.argmax(rows, axis=0))


@pytest.mark.parametrize("dtype", FLOATS)
def test_extremes_of_nan_and_infinities(device: tilert.Device, dtype: tilert.DType) -> None:
    rows = np.ones((4, 300))
    rows[0, 77] = np.nan
    rows[1] = -np.inf
    rows[2] = np.inf
    rows[3, 299] = -np.inf
    x = tilert.from_numpy(rows.astype(dtype.numpy), device)
    for kind in (1, 2):
        y = Frame(device, (4,), dtype, values=np.zeros(4))
        reduce2(y.piece(4), x, kind=kind, axis=1).sync()
        y.check((np.max, np.min)[kind - 1](rows, axis=1))


@pytest.mark.parametrize("dtype", [i32, u32])
def test_extremes_of_integers(device: tilert.Device, dtype: tilert.DType) -> None:
    rows = np.array([[0x7FFFFFFF, 0x80000000, 1], [0xFFFFFFFF, 0xFFFFFFFE, 0x80000001]], np.uint32)
    rows = rows.view(dtype.numpy)
    x = tilert.from_numpy(rows, device)
    for kind, meaning in ((0, np.sum), (1, np.max), (2, np.min), (4, np.argmax)):
        y = Frame(device, (2,), i32 if kind == 4 else dtype)
        reduce2(y.piece(2), x, kind=kind, axis=1).sync()
        want = meaning(rows, axis=1)
        y.check(want if kind != 0 else rows.sum(1, dtype=dtype.numpy))


# tiles in another shape


@tilert.kernel
def transposed(y: Mut, x: Ref):
    v = x[:, :]
    y.store((v * 2).T + 1)


@tilert.kernel
def transposed_pieces(y: Mut[Dyn], x: Ref[Dyn, Dyn]):
    i, j = y.index
    y.store(x[j, i].T)


@pytest.mark.parametrize("dtype", [f32, bf16, i32])
@pytest.mark.parametrize("shape", SHAPES_2D)
def test_transpose(device: tilert.Device, shape: tuple[int, int], dtype: tilert.DType) -> None:
    x, x64 = data(device, shape, dtype, -9, 9)
    y = Frame(device, shape[::-1], dtype)
    transposed(y.piece(*shape[::-1]), x).sync()
    y.check((x64 * 2).T + 1, scale=0)
    z = Frame(device, shape[::-1], dtype, margin=1)
    transposed_pieces(z.piece(16, 8), x).sync()
    z.check(x64.T)


@tilert.kernel
def reshaped(y: Mut, x: Ref):
    y.store((x[:, :] + 1).reshape(y.shape))


@tilert.kernel
def reshaped_twice(y: Mut, x: Ref):
    """Through a general shape and back, with a sum in between."""
    v = x[:, :].reshape(6, -1)
    y.store((v - sum(v, axis=1)[:, None]).reshape((y.shape[0], y.shape[1])))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((4, 6), (24,)),
        ((4, 6), (6, 4)),
        ((4, 6), (2, 3, 4)),
        ((4, 6), (1, 4, 1, 6)),
        ((24, 1), (3, 8)),
        ((30, 70), (70, 30)),
        ((64, 128), (32, 2, 128)),
        ((1, 1), (1,)),
        ((1, 1), (1, 1, 1)),
    ],
)
def test_reshape(device: tilert.Device, source: tuple, target: tuple) -> None:
    for dtype in (f32, bf16):
        x, x64 = data(device, source, dtype)
        y = Frame(device, target, dtype)
        reshaped(y.piece(*target), x).sync()
        y.check((x64 + 1).reshape(target))


@pytest.mark.parametrize("shape", [(4, 6), (12, 32), (36, 100)])
def test_reshape_there_and_back(device: tilert.Device, shape: tuple[int, int]) -> None:
    x, x64 = data(device, shape)
    y = Frame(device, shape)
    reshaped_twice(y.piece(*shape), x).sync()
    v = x64.reshape(6, -1)
    want = (v - v.sum(1, keepdims=True)).reshape(shape)
    y.check(want, steps=20, scale=np.abs(v).sum(1).max())
