"""Loops and branches of the kernel language."""

import numpy as np
import pytest

import tilert
from tests.tilert.checks import Frame, data, ints
from tilert import Const, Dyn, Mut, Ref, bf16, f32, i32
from tilert.language import (
    argmax,
    cdiv,
    full,
    iota,
    maximum,
    minimum,
    static_range,
    tiles,
    where,
    zeros,
)


@tilert.kernel
def row_sums(y: Mut[Dyn], x: Ref[Dyn, Dyn], size: Const[int]):
    (i,) = y.index
    total = zeros(y.shape, f32)
    for k in tiles(x, axis=1, size=size):
        total = total + sum(x[i, k].to(f32), axis=1)
    y.store(total)


@pytest.mark.parametrize("dtype", [f32, bf16])
@pytest.mark.parametrize("size", [1, 16, 64])
def test_tiles(device: tilert.Device, size: int, dtype: tilert.DType) -> None:
    for shape in [(3, 0), (5, 1), (5, 16), (2, 17), (4, 200), (1, 64), (0, 5)]:
        x, x64 = data(device, shape, dtype)
        y = Frame(device, shape[:1])
        row_sums(y.piece(2), x, size=size).sync()
        y.check(x64.sum(1), steps=20, scale=np.abs(x64).sum(1))


@tilert.kernel
def some_tiles(y: Mut, x: Ref, first: Ref, last: Ref):
    (i,) = y.index
    total = zeros((8,), f32)
    count = 0
    for k in tiles(x, axis=0, size=8, start=first[i.number], stop=last[i.number]):
        total = total + x[k] * (k.number + 1).to(f32)
        count = count + k.size
    y.store(sum(total) + count.to(f32))


def test_tiles_between_run_time_bounds(device: tilert.Device) -> None:
    x, x64 = data(device, (50,))
    first = np.array([0, 0, 2, 6, 3, 5, 9])
    last = np.array([7, 1, 2, 7, 6, 2, 12])
    y = Frame(device, (7,))
    some_tiles(y.piece(1), x, ints(device, first), ints(device, last)).sync()
    blocks = np.pad(x64, (0, 62)).reshape(14, 8)
    want = [
        sum(blocks[k].sum() * (k + 1) + 8 for k in range(lo, hi))
        for lo, hi in zip(first, last, strict=True)
    ]
    y.check(np.array(want), steps=20, scale=900)


@tilert.kernel
def counted(y: Mut, lo: Ref, hi: Ref, step: Const[int]):
    (i,) = y.index
    total = 0
    last = -1
    for k in range(lo[i.number], hi[i.number], step):
        total = total + k * k
        last = k
    y.store(total * 1000 + last)


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_range_of_run_time_bounds(device: tilert.Device, step: int) -> None:
    lo = np.array([0, 0, 5, -4, 3, 3, 9, 0])
    hi = np.array([0, 1, 9, 4, 3, 2, -9, 13])
    y = Frame(device, (8,), i32)
    counted(y.piece(1), ints(device, lo), ints(device, hi), step=step).sync()
    want = []
    for a, b in zip(lo, hi, strict=True):
        ks = list(range(a, b, step))
        want.append(sum(k * k for k in ks) * 1000 + (ks[-1] if ks else -1))
    y.check(np.array(want))


@tilert.kernel
def static_loops(y: Mut, x: Ref):
    (i,) = y.index
    v = x[i]
    for k in static_range(3):
        v = v * 2 + k
    for k in range(5):
        v = v + k
    for _ in range(0):
        v = v * 0
    for k in range(7, 8):
        v = v + k
    for k in range(2, 9, 3):
        v = v - k
    y.store(v)


def test_static_loops(device: tilert.Device) -> None:
    x, x64 = data(device, (20,), i32, -9, 9)
    y = Frame(device, (20,), i32)
    static_loops(y.piece(16), x).sync()
    v = x64
    for k in range(3):
        v = v * 2 + k
    y.check(v + 10 + 7 - (2 + 5 + 8))


@tilert.kernel
def triangle(y: Mut, x: Ref):
    """Bounds that depend on the program."""
    (i,) = y.index
    total = zeros((), f32)
    for k in range(i.number + 1):
        total = total + x[k]
    y.store(total)


def test_bounds_depend_on_the_program(device: tilert.Device) -> None:
    x, x64 = data(device, (30,))
    y = Frame(device, (30,))
    triangle(y.piece(1), x).sync()
    y.check(np.cumsum(x64), steps=40, scale=60)


@tilert.kernel
def nested(y: Mut, x: Ref[Dyn, Dyn], repeats: Ref):
    """A carried tile and a carried scalar, in a loop inside a loop."""
    _, j = y.index
    tile = zeros(y.shape, f32)
    seen = 0
    for r in range(repeats[0]):
        part = zeros(y.shape, f32)
        for k in tiles(x, axis=0, size=4):
            part = part + sum(x[k, j], axis=0, keepdims=True)
            seen = seen + 1
        for k in range(r):
            seen = seen + k * 100
        tile = tile + part * (r + 1).to(f32)
    y.store(tile + seen.to(f32))


def test_nested_loops(device: tilert.Device) -> None:
    for rows in (0, 1, 10):
        x, x64 = data(device, (rows, 20))
        for repeats in (0, 1, 3):
            y = Frame(device, (1, 20))
            nested(y.piece(1, 8), x, ints(device, [repeats])).sync()
            seen = repeats * -(-rows // 4) + sum(k * 100 for r in range(repeats) for k in range(r))
            want = x64.sum(0)[None] * sum(range(1, repeats + 1)) + seen
            y.check(want, steps=40, scale=200)


@tilert.kernel
def swapped(y: Mut, z: Mut, x: Ref, n: Ref):
    (i,) = y.index
    a = x[i]
    b = x[i] * 10
    c = a + 1
    for _ in range(n[0]):
        a, b, c = b, a, a - c
    y.store(a * 100 + b)
    z.store(c)


@tilert.kernel
def swapped_scalars(y: Mut, n: Ref):
    a = 0
    b = 1
    for _ in range(n[0]):
        a, b = b, a + b
    y.store(a * 1000 + b)


@tilert.kernel
def swapped_shapes(y: Mut, x: Ref, n: Ref):
    """Each variable becomes the other one, with an axis more or less."""
    a = x[:]
    b = (a * 3)[None, :]
    for _ in range(n[0]):
        a, b = b.reshape(a.shape), a[None, :]
    y.store(a * 100 + b.reshape(a.shape))


@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_swapped_carried_variables(device: tilert.Device, n: int) -> None:
    x, x64 = data(device, (70,), i32, -9, 9)
    y, z = Frame(device, (70,), i32), Frame(device, (70,), i32)
    swapped(y.piece(64), z.piece(64), x, ints(device, [n])).sync()
    a, b, c = x64, x64 * 10, x64 + 1
    for _ in range(n):
        a, b, c = b, a, a - c
    y.check(a * 100 + b)
    z.check(c)
    s = Frame(device, (1,), i32)
    swapped_scalars(s.piece(1), ints(device, [n])).sync()
    p, q = 0, 1
    for _ in range(n):
        p, q = q, p + q
    s.check(p * 1000 + q)
    y = Frame(device, (70,), i32)
    swapped_shapes(y.piece(70), x, ints(device, [n])).sync()
    p, q = (x64, x64 * 3) if n % 2 == 0 else (x64 * 3, x64)
    y.check(p * 100 + q)


@tilert.kernel
def branches(y: Mut, x: Ref, mode: Ref):
    (i,) = y.index
    v = x[i]
    m = mode[i.number]
    count = 0
    if m == 0:
        v = v * 2
        count = 1
    elif m == 1:
        v = v + sum(v)
    else:
        if m > 5:
            v = zeros(v.shape, f32)
            count = m
    if (m > 0) & (m < 3):
        count = count + 10
    y.store(v + count.to(f32))


@pytest.mark.parametrize("size", [1, 8, 64])
def test_run_time_if(device: tilert.Device, size: int) -> None:
    modes = np.array([0, 1, 2, 6, 1, 0, 9])
    x, x64 = data(device, (7 * size - (size > 1),))
    y = Frame(device, x64.shape)
    branches(y.piece(size), x, ints(device, modes)).sync()
    want = np.empty_like(x64)
    for i, m in enumerate(modes):
        v = x64[i * size : (i + 1) * size]
        new, count = v, 0
        if m == 0:
            new, count = v * 2, 1
        elif m == 1:
            new = v + v.sum()
        elif m > 5:
            new, count = v * 0, m
        want[i * size : (i + 1) * size] = new + count + (10 if 0 < m < 3 else 0)
    y.check(want, steps=20, scale=64)


@tilert.kernel
def equal_branches(y: Mut, x: Ref, flag: Ref):
    """Variables that both branches set to the same compile-time value or outer tile."""
    v = x[:]
    n = 1
    other = v * 5
    if flag[0] > 0:
        n = 2
        w = other
        fresh = 3
    else:
        n = 2
        w = other
        fresh = 3
    y.store(v * n + w * fresh)


def test_branches_that_agree(device: tilert.Device) -> None:
    x, x64 = data(device, (9,), i32, -9, 9)
    for flag in (0, 1):
        y = Frame(device, (9,), i32)
        equal_branches(y.piece(9), x, ints(device, [flag])).sync()
        y.check(x64 * 2 + x64 * 15)


@tilert.kernel
def if_in_loop(y: Mut, x: Ref[Dyn], flags: Ref[Dyn]):
    best = full((), float("-inf"), f32)
    at = 0
    for k in range(x.shape[0]):
        if flags[k] > 0:
            v = x[k]
            if v > best:
                best = v
                at = k
    y.store(where(iota(2) == 0, best, at.to(f32)))


@tilert.kernel
def loop_in_if(y: Mut, x: Ref[Dyn], n: Ref):
    v = zeros((4,), f32)
    if n[0] > 0:
        for k in range(n[0]):
            v = v + x[k]
    else:
        v = v - 1
    y.store(v)


def test_ifs_and_loops_inside_each_other(device: tilert.Device) -> None:
    for n in (0, 1, 40):
        x, x64 = data(device, (n,))
        flags = np.arange(n) % 3 == 0
        y = Frame(device, (2,))
        if_in_loop(y.piece(2), x, ints(device, flags)).sync()
        kept = np.where(flags, x64, -np.inf)
        y.check([kept.max(initial=-np.inf), np.argmax(kept) if n else 0])
        z = Frame(device, (4,))
        loop_in_if(z.piece(4), x, ints(device, [n])).sync()
        z.check(x64.sum() if n else -1, steps=40, scale=80)


@tilert.kernel
def static_if(y: Mut, x: Ref, negate: Const[bool], scale: Const[float] = 2.0):
    v = x[:]
    if negate and scale > 1.0:
        v = -v
    factor = scale if not negate else 1.0
    assert y.shape[0] % 2 == 0, "the piece must be even"
    y.store(v * factor)


def test_compile_time_if(device: tilert.Device) -> None:
    x, x64 = data(device, (10,))
    for negate in (False, True):
        y = Frame(device, (10,))
        static_if(y.piece(10), x, negate=negate).sync()
        y.check(-x64 if negate else 2 * x64)


@tilert.kernel
def search(y: Mut, x: Ref, want: Ref):
    """A binary search: an if with results in a loop of unknown length."""
    (i,) = y.index
    lo = 0
    hi = x.shape[0]
    target = want[i.number]
    for _ in range(cdiv(x.shape[0], 2)):
        if lo < hi:
            middle = (lo + hi) // 2
            if x[middle] < target:
                lo = middle + 1
            else:
                hi = middle
    y.store(minimum(lo, maximum(hi, 0)))


def test_binary_search(device: tilert.Device) -> None:
    x = np.sort(np.random.default_rng(0).integers(0, 90, 40)).astype(np.int32)
    want = np.arange(-1, 95, dtype=np.int32)
    y = Frame(device, want.shape, i32)
    search(y.piece(1), ints(device, x), ints(device, want)).sync()
    y.check(np.searchsorted(x, want))


@tilert.kernel
def stores_in_branches(y: Mut, x: Ref, flag: Ref):
    """A piece may be written anywhere, more than once; the last store counts."""
    (i,) = y.index
    y.store(0.0)
    if flag[i.number] > 0:
        y.store(x[i])
    for k in range(flag[i.number] - 1):
        y.store(y.load() + (k + 1).to(f32))


def test_stores_inside_branches_and_loops(device: tilert.Device) -> None:
    flag = np.array([0, 1, 4, -2, 2])
    x, x64 = data(device, (40,))
    y = Frame(device, (40,))
    stores_in_branches(y.piece(8), x, ints(device, flag)).sync()
    extra = np.array([sum(range(1, max(f, 1))) for f in flag])
    y.check(np.where(np.repeat(flag, 8) > 0, x64 + np.repeat(extra, 8), 0), scale=9)


@tilert.kernel
def best_of_blocks(y: Mut, x: Ref, first: Ref, wanted: Ref):
    """An index carried through a loop that only some programs, or none, run."""
    b = y.index[0].number
    token = first[b]
    if wanted[b] > 0:
        best = full((), -1.0, f32)
        for j in tiles(x, axis=1, size=16):
            v = x[b, j]
            here = max(v)
            token = where(here > best, j.start + argmax(v, 0), token)
            best = maximum(best, here)
    y.store(token)


@pytest.mark.parametrize("wanted", ["all", "none", "half"])
@pytest.mark.parametrize("rows", [3, 1500])
def test_loops_that_some_programs_run(device: tilert.Device, rows: int, wanted: str) -> None:
    x, x64 = data(device, (rows, 50), low=0, high=1)
    first, first64 = data(device, (rows,), i32, 0, 50)
    flags = {"all": np.ones(rows), "none": np.zeros(rows), "half": np.arange(rows) % 2}[wanted]
    y = Frame(device, (rows,), i32)
    best_of_blocks(y.piece(1), x, first, ints(device, flags)).sync()
    y.check(np.where(flags > 0, x64.argmax(1), first64))
