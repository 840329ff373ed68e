"""The cpu backend against a slow reading of the table: one program, one operation at a time."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilert
from tests.tilert.cpu_reference import (
    RNG,
    both,
    compare,
    elementwise_function,
    ints,
    normal,
    params_of,
)
from tilert import Const, Dyn, Mut, Ref, bf16, f16, f32, i32, u32
from tilert.backends import cpu
from tilert.dtypes import DType
from tilert.ir import Access, Block, Function, Param
from tilert.language import argmax, iota, max, mma, rsqrt, span, sum, tiles, where, zeros
from tilert.ops import make


@pytest.mark.parametrize("dtype", [f32, bf16, f16, i32, u32])
@pytest.mark.parametrize("kind", ["sum", "max", "min", "argmax"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("programs", [1, 3])
def test_reductions(dtype: DType, kind: str, axis: int, programs: int) -> None:
    shape, rest = (6, 5), ((5,), (6,))[axis]
    result = i32 if kind == "argmax" else dtype
    params = [
        Param("out", 0, "mut", result, (programs, *rest), (1, 1), (1, *rest)),
        Param("x", 1, "ref", dtype, (programs, *shape), (1, 1, 1)),
    ]
    block = Block()
    at = make("program", [], axis=0)
    access = (Access("point", 1, 0), Access("full", 6), Access("full", 5))
    load = make("load", [at.result], param=params[1], access=access, fill=0)
    reduce = make("reduce", [load.result], axis=axis, kind=kind)
    flat = make("reshape", [reduce.result], shape=(1, *rest))
    block.ops += [at, load, reduce, flat, make("store_piece", [flat.result], param=params[0])]
    function = Function("reduce", params, (programs, 1), block)
    x = RNG.integers(0, 4, (programs, *shape)).astype(dtype.numpy)
    out = np.zeros((programs, *rest), result.numpy)
    compare(function, [out, x], {}, (programs, 1))


def test_sum_of_bf16_accumulates_in_f32() -> None:
    @tilert.kernel
    def total(y: Mut, x: Ref):
        y.store(sum(x[:], axis=0, keepdims=True))

    x = np.full(1000, 1.0, ml_dtypes.bfloat16)
    y = np.zeros(1, ml_dtypes.bfloat16)
    got = both(total, [y, x], {0: (1,)})
    assert float(got[0][0]) == 1000.0


# Matrix products


@tilert.kernel
def linear(y: Mut[Dyn], x: Ref[Dyn], w: Ref, bk: Const[int]):
    m, n = y.index
    acc = zeros(y.shape, f32)
    for k in tiles(x, axis=1, size=bk):
        acc = mma(x[m, k], w[n, k].T, acc)
    y.store(acc)


@tilert.kernel
def product_nn(y: Mut[Dyn], a: Ref[Dyn], b: Ref, bk: Const[int]):
    m, n = y.index
    acc = zeros(y.shape, f32)
    for k in tiles(a, axis=1, size=bk):
        acc = mma(a[m, k], b[k, n], acc)
    y.store(acc)


@tilert.kernel
def norm_linear(y: Mut[Dyn], x: Ref[Dyn], g: Ref, w: Ref, bk: Const[int]):
    m, n = y.index
    acc = zeros(y.shape, f32)
    squares = zeros((y.shape[0],), f32)
    for k in tiles(x, axis=1, size=bk):
        v = x[m, k].to(f32)
        squares = squares + sum(v * v, axis=1)
        acc = mma((v * g[k][None, :].to(f32)).to(x.dtype), w[n, k].T, acc)
    y.store(acc * rsqrt(squares / x.shape[1] + 1e-5)[:, None])


def count_products(
    monkeypatch: pytest.MonkeyPatch, kernel: Any, arrays: list, tiled: dict, **consts: Any
) -> list[tuple]:
    """Shapes of the operands of every matrix product of one launch."""
    from tilert.backends import cpu_runtime

    calls: list[tuple] = []

    def spy(name: str) -> Callable:
        plain = cpu_runtime.NAMESPACE[name]

        def call(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            calls.append(
                (name, a.shape, b.shape, b.base is not None and np.shares_memory(b, arrays[-1]))
            )
            return plain(a, b)

        return call

    for name in ("matmul", "batch_matmul"):
        monkeypatch.setitem(cpu_runtime.NAMESPACE, name, spy(name))
    params = params_of(kernel, arrays, tiled, set())
    grid = tuple(-(-n // t) for n, t in zip(arrays[0].shape, tiled[0], strict=True))
    function = kernel.specialize(params, grid, tuple(consts.items()))
    cpu.compile(function).bind(arrays, {}, grid)()
    return calls


@pytest.mark.parametrize("kernel", [linear, norm_linear])
@pytest.mark.parametrize("bm", [1, 2])
@pytest.mark.parametrize("k", [24, 20])
def test_a_tiled_product_is_one_call_on_the_weights_in_place(
    monkeypatch: pytest.MonkeyPatch, kernel: Any, bm: int, k: int
) -> None:
    y, x, w = normal(6, 32), normal(6, k), normal(32, k)
    arrays = [y, x, w] if kernel is linear else [y, x, np.ones(k, np.float32), w]
    calls = count_products(monkeypatch, kernel, arrays, {0: (bm, 8)}, bk=8)
    assert calls == [("matmul", (6, k), (k, 32), True)]
    scale = 1 / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5) if kernel is norm_linear else 1
    np.testing.assert_allclose(y, x @ w.T * scale, rtol=1e-4, atol=1e-4)


def test_a_product_with_columns_in_place_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    y, a, b = normal(4, 32), normal(4, 24), normal(24, 32)
    calls = count_products(monkeypatch, product_nn, [y, a, b], {0: (2, 8)}, bk=8)
    assert calls == [("matmul", (4, 24), (24, 32), True)]
    np.testing.assert_allclose(y, a @ b, rtol=1e-4, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 20)] * 3),
    tile=st.tuples(*[st.integers(1, 9)] * 3),
    which=st.sampled_from([linear, product_nn, norm_linear]),
    dtype=st.sampled_from([np.float32, ml_dtypes.bfloat16, np.float16]),
)
def test_products_of_any_size(sizes: tuple, tile: tuple, which: Any, dtype: Any) -> None:
    (m, n, k), (bm, bn, bk) = sizes, tile
    y, x = normal(m, n), normal(m, k).astype(dtype)
    w = normal(*((k, n) if which is product_nn else (n, k))).astype(dtype)
    arrays = [y, x, normal(k).astype(dtype), w] if which is norm_linear else [y, x, w]
    both(which, arrays, {0: (bm, bn)}, rtol=1e-4, atol=1e-4, bk=bk)


def test_products_over_strided_arrays_read_them_at_every_run() -> None:
    y, x, w = normal(4, 8), normal(4, 12)[:, ::2], normal(6, 16)[:, ::2].T
    params = params_of(linear, [y, x, w], {0: (2, 4)}, set())
    function = linear.specialize(params, (2, 2), (("bk", 3),))
    launch = cpu.compile(function).bind([y, x, w], {}, (2, 2))
    for _ in range(2):
        launch()
        np.testing.assert_allclose(y, x @ w.T, rtol=1e-5, atol=1e-5)
        w *= 2
        x += 1


def test_a_large_ragged_operand_is_not_copied_whole() -> None:
    y, x, w = normal(1, 1030), normal(1, 80), normal(1030, 80)
    params = params_of(linear, [y, x, w], {0: (1, 64)}, set())
    function = linear.specialize(params, (1, 17), (("bk", 16),))
    kernel = cpu.compile(function)
    kernel.bind([y, x, w], {}, (1, 17))()
    np.testing.assert_allclose(y, x @ w.T, rtol=1e-4, atol=1e-4)
    pads = [
        s for s in kernel.source([a.shape for a in (y, x, w)], (1, 17)).splitlines() if "pad(" in s
    ]
    assert len(pads) == 1
    assert "(64, 80)" in pads[0]


# Loads


@tilert.kernel
def rows_of(y: Mut[Dyn], ids: Ref[Dyn], table: Ref):
    t, _ = y.index
    y.store(table[ids[t], :])


@tilert.kernel
def elements_of(y: Mut[Dyn], ids: Ref[Dyn], other: Ref[Dyn], table: Ref):
    t, c = y.index
    at = other[t.number]
    y.store(table.load(at, c, ids[t], fill=-3.0).reshape(y.shape))


@pytest.mark.parametrize("bt", [1, 2, 4])
def test_gathers_fill_outside_and_never_wrap(bt: int) -> None:
    ids = np.array([0, 9, -1, 10, 3, -10, 2**31 - 1], np.int32)
    got = both(rows_of, [normal(7, 5), ids, normal(10, 5)], {0: (bt, 5)})[0]
    assert not got[[2, 3, 5, 6]].any()
    assert got[[0, 1, 4]].all()


def test_two_gathered_axes() -> None:
    ids, other = ints(-1, 7, 9), ints(-2, 5, 9)
    both(elements_of, [normal(9, 4), ids, other, normal(4, 4, 6)], {0: (1, 4)})
    both(elements_of, [normal(9, 4), ids, other, normal(4, 4, 6)], {0: (1, 1)})


@tilert.kernel
def windows(y: Mut[Dyn], x: Ref[Dyn], starts: Ref[Dyn], size: Const[int]):
    t, _ = y.index
    y.store(x.load(span(starts[t.number], size), fill=7.0)[None, :])


@settings(max_examples=40, deadline=None)
@given(
    starts=st.lists(st.integers(-20, 20), min_size=1, max_size=4),
    n=st.integers(0, 12),
    size=st.integers(1, 6),
)
def test_spans_at_any_start(starts: list[int], n: int, size: int) -> None:
    at = np.array(starts, np.int32)
    arrays = [normal(len(starts), size), normal(n), at]
    both(windows, arrays, {0: (1, size)}, size=size)


@tilert.kernel
def affine(y: Mut[Dyn], x: Ref[Dyn], a: Const[int], b: Const[int], size: Const[int]):
    t, _ = y.index
    i = t.number
    y.store((x[span(i * a + b, size)] + x[i * i + b] + x[(i + 1) // 2]).reshape(y.shape))


@settings(max_examples=60, deadline=None)
@given(
    programs=st.integers(1, 5),
    n=st.integers(1, 16),
    a=st.integers(-3, 4),
    b=st.integers(-3, 9),
    size=st.integers(1, 4),
)
def test_known_addresses(programs: int, n: int, a: int, b: int, size: int) -> None:
    both(affine, [normal(programs, size), normal(n)], {0: (1, size)}, a=a, b=b, size=size)


@tilert.kernel
def paged(y: Mut, pages: Ref[Dyn], table: Ref[Dyn, Dyn], rows: Ref, count: Const[int]):
    b, h, _ = y.index
    acc = zeros((y.shape[2],), f32)
    for j in tiles(table, axis=1, size=count):
        acc = acc + sum(sum(pages[table[rows[b.number], j], :, h.number, :], axis=0), axis=0)
    y.store(acc.reshape(y.shape))


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_pages_through_a_table(slots: int, heads: int, count: int) -> None:
    table = ints(-1, 6, 4, 5)
    arrays = [normal(slots, heads, 3), normal(6, 2, heads, 3), table, ints(-1, 5, slots)]
    both(paged, arrays, {0: (1, 1, 3)}, count=count)


# Stores


@tilert.kernel
def scale_own(y: Mut[Dyn, Dyn], x: Ref[Dyn, Dyn], c: Const[float]):
    m, n = y.index
    y.store(y.load() * c + x[m, n])


@settings(max_examples=40, deadline=None)
@given(shape=st.tuples(*[st.integers(0, 9)] * 2), tile=st.tuples(*[st.integers(1, 5)] * 2))
def test_ragged_and_empty_pieces(shape: tuple, tile: tuple) -> None:
    got = both(scale_own, [normal(*shape), normal(*shape)], {0: tile}, c=2.0)
    assert got[0].shape == shape


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_stores_cover_their_piece_and_nothing_else(order: tuple) -> None:
    whole = np.full((9, 14), np.nan, np.float32)
    y = whole[1:8, 2:12].transpose(order)
    x = normal(*y.shape)
    y[...] = 0
    params = params_of(scale_own, [y, x], {0: (3, 4)}, set())
    grid = tuple(-(-n // t) for n, t in zip(y.shape, (3, 4), strict=True))
    function = scale_own.specialize(params, grid, (("c", 0.0),))
    cpu.compile(function).bind([y, x], {}, grid)()
    np.testing.assert_array_equal(y, x)
    assert np.isnan(whole).sum() == whole.size - y.size


@tilert.kernel
def append(cache: Mut[Dyn], x: Ref[Dyn], twice: Const[bool]):
    t, h, d = cache.index
    v = x[t.number, h, d]
    if twice:
        cache.store(cache.load() * 2.0 + v.reshape(cache.shape))
    else:
        cache.store(v.reshape(cache.shape))


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("tile", [(1, 4, 3), (1, 2, 3), (1, 3, 2)])
@pytest.mark.parametrize("rows", [[3], [-1], [2, -1, 0, 6], [-1, -1], [9, 5]])
def test_indexed_pieces(rows: list[int], tile: tuple, twice: bool) -> None:
    index = np.array(rows, np.int32)
    arrays = [normal(7, 4, 3), normal(len(rows), 4, 3)]
    both(append, arrays, {0: tile}, {0: index}, twice=twice)


def test_index_maps_are_read_at_every_run() -> None:
    cache, x, index = np.zeros((5, 2, 2), np.float32), normal(2, 2, 2), np.array([0, 1], np.int32)
    params = params_of(append, [cache, x], {0: (1, 2, 2)}, {0})
    function = append.specialize(params, (2, 1, 1), (("twice", False),))
    launch = cpu.compile(function).bind([cache, x], {0: index}, (2, 1, 1))
    launch()
    index[:] = [4, -1]
    launch()
    np.testing.assert_array_equal(cache[[0, 1, 4]], x[[0, 1, 0]])
    assert not cache[[2, 3]].any()


# Control flow


@tilert.kernel
def run_lengths(y: Mut[Dyn], x: Ref[Dyn, Dyn], lo: Ref[Dyn], hi: Ref[Dyn], step: Const[int]):
    t, _ = y.index
    acc = zeros((4,), f32)
    last = x[0, 0] * 0.0
    count = t.number * 0
    for i in range(lo[t.number], hi[t.number], step):
        acc = acc * 0.5 + x[i, span(0, 4)]
        last = x[i, 0]
        count = count + i
    y.store((acc + last + count.to(f32)).reshape(y.shape))


@settings(max_examples=50, deadline=None)
@given(
    bounds=st.lists(st.tuples(st.integers(-3, 8), st.integers(-3, 8)), min_size=1, max_size=5),
    step=st.integers(1, 3),
)
def test_loops_whose_bounds_differ(bounds: list, step: int) -> None:
    lo, hi = (np.array(c, np.int32) for c in zip(*bounds, strict=True))
    arrays = [normal(len(bounds), 4), normal(6, 5), lo, hi]
    both(run_lengths, arrays, {0: (1, 4)}, step=step)


@tilert.kernel
def branches(y: Mut[Dyn], z: Mut[Dyn], x: Ref[Dyn], n: Ref[Dyn]):
    t = y.index[0].number
    v = x[t]
    k = n[t]
    if v > 0.0:
        for i in range(k):
            if i % 2 == 0:
                v = v + 1.0
                z.store(z.load() + 2.0 * v)
    else:
        v = v * 3.0
        k = k + 5
        if k > 6:
            z.store(zeros(z.shape, f32) + v)
    y.store(zeros(y.shape, f32) + v + k.to(f32))


@pytest.mark.parametrize("programs", [1, 2, 7])
def test_branches_store_only_where_they_are_taken(programs: int) -> None:
    for _ in range(5):
        arrays = [normal(programs) for _ in range(3)]
        both(branches, [*arrays, ints(-1, 5, programs)], {0: (1,), 1: (1,)})


@tilert.kernel
def masked_ragged(y: Mut[Dyn, Dyn], x: Ref[Dyn, Dyn], flags: Ref[Dyn]):
    m, n = y.index
    if flags[m.number] > 0:
        y.store(x[m, n])


@pytest.mark.parametrize("shape", [(1, 3), (5, 3), (5, 8), (4, 7)])
def test_masked_stores_at_ragged_ends(shape: tuple) -> None:
    for _ in range(4):
        arrays = [normal(*shape), normal(*shape), ints(0, 2, shape[0])]
        both(masked_ragged, arrays, {0: (2, 3)})


@tilert.kernel
def masked_append(cache: Mut[Dyn], x: Ref[Dyn], flags: Ref[Dyn]):
    t = cache.index[0].number
    if flags[t] > 0:
        cache.store(x[t, :, :].reshape(cache.shape))


@pytest.mark.parametrize("rows", [[4], [1, -1, 0, 3]])
def test_masked_indexed_stores(rows: list[int]) -> None:
    index = np.array(rows, np.int32)
    for _ in range(4):
        arrays = [normal(5, 3, 2), normal(len(rows), 3, 2), ints(0, 2, len(rows))]
        both(masked_append, arrays, {0: (1, 3, 2)}, {0: index})


@tilert.kernel
def swap(y: Mut, x: Ref, n: Ref):
    a = x[0]
    b = x[1]
    t = y.index[0].number
    for _ in range(n[t]):
        c = a
        a = b
        b = c
    y.store(zeros((1,), f32) + a * 10.0 + b)


def test_carried_values_change_places_at_once() -> None:
    n = np.array([0, 1, 2, 5], np.int32)
    got = both(swap, [normal(4), np.array([1, 2], np.float32), n], {0: (1,)})
    np.testing.assert_array_equal(got[0], [12, 21, 12, 21])
    both(swap, [normal(1), np.array([1, 2], np.float32), n[1:2]], {0: (1,)})


@tilert.kernel
def masks_and_best(y: Mut[Dyn], best: Mut[Dyn], x: Ref[Dyn]):
    t, c = y.index
    v = x[t, c]
    seen = (t.offsets[:, None] >= iota(y.shape[1])[None, :]) & (v > -1.0)
    v = where(seen, v, float("-inf"))
    top = max(v, axis=1, keepdims=True)
    y.store(where(v == top, 1.0, zeros(y.shape, f32)))
    best.store(argmax(v, axis=1)[:, None])


@pytest.mark.parametrize("bt", [1, 3, 8])
def test_masks_and_argmax(bt: int) -> None:
    arrays = [normal(7, 6), np.zeros((7, 1), np.int32), np.round(normal(7, 6))]
    both(masks_and_best, arrays, {0: (bt, 6), 1: (bt, 1)})


def test_large_tiles_reuse_dead_temporaries_only() -> None:
    @tilert.kernel
    def chain(y: Mut, x: Ref):
        m, n = y.index
        v = x[m, n]
        a = v * 2.0
        b = a + 1.0
        c = b * a
        y.store(c - b + v)

    got = both(chain, [normal(4, 8192), normal(4, 8192)], {0: (4, 8192)})
    x = got[1]
    np.testing.assert_allclose(got[0], (2 * x + 1) * 2 * x - (2 * x + 1) + x, rtol=1e-4, atol=1e-4)


def test_empty_grids_do_nothing() -> None:
    y = normal(0, 4)
    params = params_of(scale_own, [y, y], {0: (2, 2)}, set())
    function = scale_own.specialize(params, (0, 2), (("c", 1.0),))
    cpu.compile(function).bind([y, y.copy()], {}, (0, 2))()


def test_code_is_kept_for_launches_of_one_shape() -> None:
    function, grid = elementwise_function("add", [f32, f32], f32, "tiles", {})
    kernel = cpu.compile(function)
    for _ in range(3):
        arrays = [normal(12) for _ in range(3)]
        kernel.bind(arrays, {}, grid)()
        np.testing.assert_array_equal(arrays[0], arrays[1] + arrays[2])
    assert len(kernel._variants) == 1


@tilert.kernel
def grouped(y: Mut[Dyn], x: Ref[Dyn], w: Ref, group: Const[int]):
    t, h, _ = y.index
    a = x[t, h.number, :]
    y.store(mma(a, w[h.number // group, :, :], zeros((y.shape[0], y.shape[2]), f32))[:, None, :])


@pytest.mark.parametrize(("heads", "group"), [(6, 3), (6, 2), (6, 6), (6, 1), (5, 2)])
@pytest.mark.parametrize("bt", [3, 7, 4])
def test_heads_that_share_an_operand(heads: int, group: int, bt: int) -> None:
    arrays = [normal(7, heads, 5), normal(7, heads, 4), normal(-(-heads // group), 4, 5)]
    both(grouped, arrays, {0: (bt, 1, 5)}, group=group)


def test_heads_that_share_an_operand_read_it_in_place() -> None:
    arrays = [normal(7, 6, 5), normal(7, 6, 4), normal(2, 4, 5)]
    params = params_of(grouped, arrays, {0: (7, 1, 5)}, set())
    function = grouped.specialize(params, (1, 6, 1), (("group", 3),))
    source = cpu.compile(function).source([a.shape for a in arrays], (1, 6, 1))
    assert "gather" not in source


@pytest.mark.parametrize("dtype", [f32, i32, u32])
@pytest.mark.parametrize("form", ["tiles", "scalar", "zero", "rows"])
def test_large_selects(dtype: DType, form: str) -> None:
    @tilert.kernel
    def choose(y: Mut, x: Ref, c: Ref):
        a = x[:, :]
        test = c[:, :] > 0
        if form == "tiles":
            y.store(where(test, a, a * 3))
        elif form == "scalar":
            y.store(where(test, 7, a))
        elif form == "zero":
            y.store(where(test, a, 0))
        else:
            y.store(where(c[0, :][None, :] > 0, a, a * 3))

    x = normal(40, 50) if dtype == f32 else ints(0, 2**31 - 1, 40, 50).astype(dtype.numpy)
    if dtype == f32:
        x[0, :4] = [np.inf, -np.inf, np.nan, -0.0]
    with np.errstate(over="ignore"):
        both(choose, [np.zeros_like(x), x, ints(0, 2, 40, 50)], {0: (40, 50)})


@tilert.kernel
def seldom(y: Mut, x: Ref, n: Ref):
    t = y.index[0].number
    v = x[t, :]
    k = n[t]
    total = k
    if k > 0:
        for _ in range(k):
            v = v + 1.0
        total = total + 2
    y.store((v + (total * 2).to(f32)).reshape(y.shape))


@pytest.mark.parametrize("counts", [[0, 0, 0], [0, 2, 0], [1, 2, 3]])
def test_costly_branches_that_some_or_no_programs_take(counts: list[int]) -> None:
    both(seldom, [normal(3, 8), normal(3, 8), np.array(counts, np.int32)], {0: (1, 8)})
    n = np.array(counts * 400, np.int32)
    both(seldom, [normal(1200, 2), normal(1200, 2), n], {0: (1, 2)})
