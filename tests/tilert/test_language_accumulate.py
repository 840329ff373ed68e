"""Muts that programs only update: overlapping pieces, histograms, sums over a grid."""

from typing import Any

import numpy as np
import pytest

import tilert
from tests.tilert.checks import Frame, data
from tilert import (
    Accumulate,
    Dyn,
    Mut,
    OwnershipError,
    Ref,
    RepeatedIndex,
    UniqueIndex,
    f32,
    i32,
    i64,
    u32,
)

KINDS = {"add": np.add, "max": np.maximum, "min": np.minimum}


@tilert.kernel
def add(y: Mut[Dyn, Accumulate.Add], x: Ref[Dyn]):
    i, j = y.index
    y.add(x[i, j])


@tilert.kernel
def largest(y: Mut[Accumulate.Max, Dyn], x: Ref[Dyn]):
    i, j = y.index
    y.max(x[i, j])


@tilert.kernel
def smallest(y: Mut[Dyn, Accumulate.Min], x: Ref[Dyn]):
    i, j = y.index
    y.min(x[i, j])


KERNELS = {"add": add, "max": largest, "min": smallest}
CASES = [("add", d) for d in (f32, i32, u32, i64)]
CASES += [(k, d) for k in ("max", "min") for d in (i32, u32, i64)]


@pytest.mark.parametrize(("kind", "dtype"), CASES)
@pytest.mark.parametrize("shape", [(1, 3), (9, 70), (0, 4)])
def test_own_pieces(device: tilert.Device, shape: Any, kind: str, dtype: tilert.DType) -> None:
    low = 0 if dtype.kind == "u" else -90
    x, x64 = data(device, shape, dtype, low, 90, seed=1)
    start = data(device, shape, dtype, low, 90, seed=2)[1]
    y = Frame(device, shape, dtype, values=start)
    KERNELS[kind](y.piece(2, 32), x).sync()
    y.check(KINDS[kind](start, x64))


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_rows_that_repeat(device: tilert.Device, kind: str, dtype: tilert.DType) -> None:
    rows = np.array([3, 0, 3, -1, 3, 2, 0, -7, 3])
    low = 0 if dtype.kind == "u" else -90
    x, x64 = data(device, (9, 40), dtype, low, 90, seed=1)
    start = data(device, (5, 40), dtype, low, 90, seed=2)[1]
    y = Frame(device, (5, 40), dtype, values=start)
    index = RepeatedIndex.of(rows, device)
    KERNELS[kind](y.view.partition_at(index, 1, 16), x).sync()
    want = start.copy()
    magnitude = np.abs(start)
    for row, values in zip(rows, x64, strict=True):
        if row >= 0:
            want[row] = KINDS[kind](want[row], values)
            magnitude[row] += np.abs(values)
    y.check(want, steps=9, scale=magnitude)


@tilert.kernel
def total(y: Mut[Dyn, Accumulate.Add], n: Mut[Dyn, Accumulate.Add], x: Ref[Dyn]):
    """All programs add into one place: index maps of zeros."""
    part = x[y.index[0].number, :]
    y.add(sum(part))
    if sum(part) > 0.0:
        n.add(1)


def test_a_sum_over_the_grid(device: tilert.Device) -> None:
    x, x64 = data(device, (50, 33))
    y = Frame(device, (1,), values=np.zeros(1))
    n = Frame(device, (1,), i32, values=np.zeros(1))
    zeros = RepeatedIndex.of(np.zeros(50, np.int64), device)
    total(y.view.partition_at(zeros, 1), n.view.partition_at(zeros, 1), x).sync()
    y.check(x64.sum(), steps=50, scale=np.abs(x64).sum())
    n.check((x64.sum(1) > 0).sum())


@tilert.kernel
def histogram(y: Mut[Dyn, Accumulate.Add], x: Ref[Dyn], bins: Ref):
    v = x[y.index[0].number, :]
    y.add(sum((v[:, None] == bins[:][None, :]).to(i32), axis=0)[None, :])


def test_histogram(device: tilert.Device) -> None:
    values = np.random.default_rng(0).integers(0, 7, (20, 30)).astype(np.int32)
    y = Frame(device, (1, 7), i32, values=np.zeros((1, 7)))
    zeros = RepeatedIndex.of(np.zeros(20, np.int32), device)
    bins = tilert.from_numpy(np.arange(7, dtype=np.int32), device)
    histogram(y.view.partition_at(zeros, 1, 7), tilert.from_numpy(values, device), bins).sync()
    y.check(np.bincount(values.ravel(), minlength=7)[None])


def test_integers_wrap(device: tilert.Device) -> None:
    y = Frame(device, (1, 2), i32, values=np.array([[2**31 - 1, -(2**31)]]))
    x = tilert.from_numpy(np.array([[1, -1]], np.int32), device)
    add(y.piece(1, 2), x).sync()
    y.check([[-(2**31), 2**31 - 1]])


MAY_REPEAT = (
    "O7 indexed pieces: the index map of 'y' may name a row twice, and kernel 'stored' stores"
    " to it; declare it Mut[Accumulate.Add] and call y.add(tile), or pass a UniqueIndex"
)


@tilert.kernel
def stored(y: Mut[Dyn], x: Ref[Dyn]):
    i, j = y.index
    y.store(x[i, j])


def test_rows_that_may_repeat_are_not_stored_to() -> None:
    device = tilert.device("cpu")
    y, x = tilert.zeros((4, 2), f32, device), tilert.zeros((2, 2), f32, device)
    index = RepeatedIndex.of(np.array([1, 2]), device)
    with pytest.raises(OwnershipError) as caught:
        stored(y.partition_at(index, 1, 2), x)
    assert str(caught.value) == MAY_REPEAT
    # The refused call gave y back, and rows that do not repeat are accumulated into as well.
    unique = UniqueIndex.checked(np.array([1, 2]), device)
    add(y.partition_at(unique, 1, 2), tilert.full((2, 2), 2.0, f32, device)).sync()
    assert y.numpy().sum(1).tolist() == [0, 4, 4, 0]


def test_an_index_map_takes_integers() -> None:
    device = tilert.device("cpu")
    with pytest.raises(ValueError, match=r"^an index map takes integers on one axis, got float64"):
        RepeatedIndex.of(np.zeros(2), device)
    with pytest.raises(ValueError, match=r"^row 2147483648 of an index map does not fit"):
        RepeatedIndex.of(np.array([2**31]), device)
    with pytest.raises(tilert.LaunchError, match=r"reaches row 4, the array has 4 rows"):
        tilert.zeros((4, 2), f32, device).partition_at(RepeatedIndex.of([4, 4], device), 1, 2)
