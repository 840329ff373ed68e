"""Tiles moved and cut: permute, slices, concatenate, broadcast_to."""

from typing import Any

import numpy as np
import pytest

import tilert
from tests.tilert.checks import Frame, data
from tilert import Const, Dyn, Mut, Ref, bf16, bool_, f32, i32, u8
from tilert.language import broadcast_to, concatenate, zeros

DTYPES = [f32, bf16, i32, u8]


@tilert.kernel
def turned(y: Mut, z: Mut, w: Mut, x: Ref):
    v = x[:, :, :]
    y.store(v.permute(2, 0, 1))
    z.store(v.permute((1, 0, -1)))
    w.store(v.permute(0, 1, 2) + v.permute(2, 1, 0).permute(2, 1, 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 4), (3, 20, 33), (9, 4, 128)])
def test_permute(device: tilert.Device, shape: tuple[int, ...], dtype: tilert.DType) -> None:
    x, x64 = data(device, shape, dtype, 0, 50)
    a, b, c = shape
    y, z = Frame(device, (c, a, b), dtype), Frame(device, (b, a, c), dtype)
    w = Frame(device, shape, dtype)
    turned(y.piece(c, a, b), z.piece(b, a, c), w.piece(a, b, c), x).sync()
    y.check(x64.transpose(2, 0, 1))
    z.check(x64.transpose(1, 0, 2))
    w.check(2 * x64)


@tilert.kernel
def four(y: Mut, x: Ref):
    y.store(x[:, :, :, :].permute(3, 1, 0, 2))


def test_permute_of_four_axes(device: tilert.Device) -> None:
    x, x64 = data(device, (2, 5, 3, 16))
    y = Frame(device, (16, 5, 2, 3))
    four(y.piece(16, 5, 2, 3), x).sync()
    y.check(x64.transpose(3, 1, 0, 2))


@tilert.inline
def cut(v: Any, kind: Any):
    if kind == 0:
        return v[1:4, 2:]
    if kind == 1:
        return v[::2, ::3]
    if kind == 2:
        return v[::-1, -4:-1]
    if kind == 3:
        return v[2]
    if kind == 4:
        return v[..., -1]
    if kind == 5:
        return v[3, None, 4::-2]
    if kind == 6:
        return v[1, 2]
    return v[-1:, :][:, :1]


CUTS = [
    np.s_[1:4, 2:], np.s_[::2, ::3], np.s_[::-1, -4:-1], np.s_[2], np.s_[..., -1],
    np.s_[3, None, 4::-2], np.s_[1, 2], np.s_[-1:, :1],
]  # fmt: skip


@tilert.kernel
def cutting(y: Mut, x: Ref, kind: Const[int]):
    y.store(cut(x[:, :], kind))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", range(len(CUTS)))
def test_slices(device: tilert.Device, kind: int, dtype: tilert.DType) -> None:
    x, x64 = data(device, (6, 9), dtype, 0, 50)
    want = x64[CUTS[kind]]
    shape = want.shape or (1,)
    y = Frame(device, shape, dtype)
    cutting(y.piece(*shape), x, kind=kind).sync()
    y.check(want)


@tilert.kernel
def rotated(y: Mut[Dyn], x: Ref[Dyn], cos: Ref):
    """What a rotary embedding does to halves of a row."""
    i, j = y.index
    v = x[i, j]
    half = v.shape[1] // 2
    low, high = v[:, :half], v[:, half:]
    c = cos[i, :]
    y.store(concatenate((low * c - high, high * c + low), axis=1))


def test_halves_of_rows(device: tilert.Device) -> None:
    x, x64 = data(device, (5, 64))
    c, c64 = data(device, (5, 32), seed=3)
    y = Frame(device, (5, 64))
    rotated(y.piece(2, 64), x, c).sync()
    low, high = x64[:, :32], x64[:, 32:]
    y.check(np.concatenate([low * c64 - high, high * c64 + low], 1), scale=8)


@tilert.kernel
def joined(y: Mut, x: Ref, n: Ref, axis: Const[int]):
    v = x[:, :]
    y.store(concatenate((v, n[:, :], zeros((2, 2), v.dtype), v * 2), axis))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [0, 1, -2])
def test_concatenate(device: tilert.Device, axis: int, dtype: tilert.DType) -> None:
    a, b = ((2, 7), (2, 1)) if axis == 1 else ((3, 2), (1, 2))
    x, x64 = data(device, a, dtype, 0, 50)
    n, n64 = data(device, b, dtype, 0, 50, seed=1)
    want = np.concatenate([x64, n64, np.zeros((2, 2)), 2 * x64], axis)
    y = Frame(device, want.shape, dtype)
    joined(y.piece(*want.shape), x, n, axis=axis).sync()
    y.check(want)


@tilert.kernel
def of_programs(y: Mut[Dyn], x: Ref[Dyn]):
    """Parts that differ between programs beside one that does not."""
    i = y.index[0]
    y.store(concatenate((x[0, :], x[i.number, :], broadcast_to(i.number.to(f32), (2,))))[None, :])


def test_concatenate_of_programs(device: tilert.Device) -> None:
    x, x64 = data(device, (4, 3))
    y = Frame(device, (4, 8))
    of_programs(y.piece(1, 8), x).sync()
    first = np.broadcast_to(x64[:1], (4, 3))
    y.check(np.concatenate([first, x64, np.repeat(np.arange(4.0)[:, None], 2, 1)], 1))


@tilert.kernel
def spread(y: Mut, z: Mut, b: Mut, x: Ref):
    y.store(broadcast_to(x[:][:, None], y.shape))
    z.store(broadcast_to(x[1], z.shape))
    b.store(broadcast_to(x[:][None, :] > 0, (7, 5))[::-1, 1:])


def test_broadcast_to(device: tilert.Device) -> None:
    x, x64 = data(device, (5,))
    y, z, b = Frame(device, (5, 7)), Frame(device, (2, 3)), Frame(device, (7, 4), bool_)
    spread(y.piece(5, 7), z.piece(2, 3), b.piece(7, 4), x).sync()
    y.check(np.broadcast_to(x64[:, None], (5, 7)))
    z.check(np.full((2, 3), x64[1]))
    b.check(np.broadcast_to(x64[None, 1:] > 0, (7, 4)))
