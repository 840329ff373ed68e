"""The cpu backend's temporaries: bounded, dropped when nobody uses them, and never too early."""

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilert
from models.kernels import fill_normal
from tests.tilert import test_cpu_backend as backend
from tests.tilert.cpu_reference import params_of
from tilert import Accumulate, Dyn, Mut, Ref, RepeatedIndex, f32, i32
from tilert.backends import cpu, cpu_lifetimes
from tilert.backends.cpu_emit import generate
from tilert.backends.cpu_lifetimes import bounded
from tilert.cpu_device import CpuDevice
from tilert.language import erf, fma, philox, random_normal, where

MIB = 1 << 20


def peak(call: Callable[[], Any]) -> int:
    """Bytes that NumPy and Python take at a time beyond what is there before."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    try:
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@tilert.kernel
def chain(y: Mut[Dyn], x: Ref[Dyn]):
    v = x[y.index[0]]
    a = v * v
    b = a + v
    c = where(b > a, b, a)
    d = c * 2.0
    y.store(d - a)


def test_a_large_grid_takes_a_bounded_share_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not a multiple of the tile: the last program is cut.
    x = np.random.default_rng(0).normal(size=(8 << 20) - 5).astype(np.float32)
    y, cut = np.empty_like(x), np.empty_like(x)
    grid = ((8 << 20) >> 12,)
    params = params_of(chain, [y, x], {0: (1 << 12,)}, set())
    function = chain.specialize(params, grid, ())
    monkeypatch.setattr(cpu, "BUDGET", 1 << 40)
    cpu.compile(function).bind([y, x], {}, grid)()
    np.testing.assert_array_equal(y, np.where(x > 0, x * x + x, x * x) * 2 - x * x)

    monkeypatch.setattr(cpu, "BUDGET", 4 * MIB)
    run = cpu.compile(function).bind([cut, x], {}, grid)
    assert x.nbytes > 31 * MIB
    assert peak(run) < 5 * MIB
    np.testing.assert_array_equal(cut, y)


def test_made_up_weights_take_little_more_than_themselves() -> None:
    device = tilert.device("cpu")
    y = tilert.empty((12 << 20,), f32, device)
    key = tilert.from_numpy(np.array([1, 2, 3], np.uint32), device)
    op = fill_normal(y.partition(1 << 16), key, std=0.5)
    assert peak(op.run) < cpu.BUDGET * 5 // 4
    got = y.numpy()
    assert abs(float(got.mean(dtype=np.float64))) < 1e-3
    assert abs(float(got.std(dtype=np.float64)) - 0.5) < 1e-3


@tilert.kernel
def draws(y: Mut[Dyn], x: Ref[Dyn]):
    y.store(random_normal(7, y.index[0].offsets))


@tilert.kernel
def words(y: Mut[Dyn], x: Ref[Dyn]):
    y.store(philox(7, y.index[0].offsets)[0].to(f32))


@tilert.kernel
def errors(y: Mut[Dyn], x: Ref[Dyn]):
    y.store(erf(x[y.index[0]]))


@tilert.kernel
def fused(y: Mut[Dyn], x: Ref[Dyn]):
    v = x[y.index[0]]
    y.store(fma(v, v, v))


@tilert.kernel
def gathered(y: Mut[Dyn], x: Ref[Dyn]):
    i = (x[y.index[0]] * 0.0).to(i32)
    y.store(x[i])


@pytest.mark.parametrize("kernel", [chain, draws, words, errors, fused, gathered])
def test_what_a_launch_takes_is_known_before(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "BUDGET", 1 << 40)
    x = np.ones(1 << 20, np.float32)
    y, grid = np.empty_like(x), (1 << 8,)
    function = kernel.specialize(params_of(kernel, [y, x], {0: (1 << 12,)}, set()), grid, ())
    expected = generate(function, [y.shape, x.shape], grid, (0,)).peak
    run = cpu.compile(function).bind([y, x], {}, grid)
    run()
    assert 0.8 < peak(run) / expected < 1.25


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="says what Linux calls resident")
def test_zeros_take_no_memory_until_they_are_written() -> None:
    device = tilert.device("cpu")
    before = resident()
    cache = tilert.zeros((512, MIB // 4), f32, device)
    assert resident() - before < 64 * MIB
    cache[100:200].copy_from(np.ones((100, MIB // 4), np.float32))
    assert 90 * MIB < resident() - before < 164 * MIB
    got = [float(cache[row, -1].numpy()) for row in (99, 100, 199, 200)]
    assert got == [0, 1, 1, 0]


def test_zeros_in_memory_that_held_something_else() -> None:
    device = tilert.device("cpu")
    for size in (8, 1000, MIB):
        for dtype in (f32, i32):
            full = tilert.full((size,), 7, dtype, device)
            del full
            np.testing.assert_array_equal(tilert.zeros((size,), dtype, device).numpy(), 0)
    assert np.signbit(tilert.full((3,), -0.0, f32, device).numpy()).all()


def test_zeros_count_as_written() -> None:
    device = CpuDevice(check=True)
    y = tilert.empty((64,), f32, device)
    chain(y.partition(16), tilert.zeros((64,), f32, device)).run()
    np.testing.assert_array_equal(y.numpy(), 0)


ONE_BY_ONE: dict[str, Callable[[], None]] = {
    "reductions": lambda: backend.test_reductions(f32, "sum", 1, 3),
    "products": lambda: backend.test_products_over_strided_arrays_read_them_at_every_run(),
    "gathers": lambda: backend.test_gathers_fill_outside_and_never_wrap(2),
    "two gathered axes": lambda: backend.test_two_gathered_axes(),
    "pages": lambda: backend.test_pages_through_a_table(3, 2, 2),
    "ragged": lambda: backend.test_masked_stores_at_ragged_ends((5, 8)),
    "indexed": lambda: backend.test_indexed_pieces([2, -1, 0, 6], (1, 2, 3), True),
    "branches": lambda: backend.test_branches_store_only_where_they_are_taken(7),
    "seldom": lambda: backend.test_costly_branches_that_some_or_no_programs_take([0, 2, 0]),
    "carried": lambda: backend.test_carried_values_change_places_at_once(),
    "shared operand": lambda: backend.test_heads_that_share_an_operand(6, 3, 4),
    "argmax": lambda: backend.test_masks_and_argmax(2),
}


@pytest.mark.parametrize("case", sorted(ONE_BY_ONE))
def test_programs_one_after_the_other_give_the_same(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "BUDGET", 4)
    monkeypatch.setattr(cpu_lifetimes, "_LARGE", 1)
    built: list[int] = []
    plain = cpu._parts

    def parts(*args: Any) -> Any:
        found = plain(*args)
        built.append(len(found))
        return found

    monkeypatch.setattr(cpu, "_parts", parts)
    ONE_BY_ONE[case]()
    assert max(built) > 1


@tilert.kernel
def tally(y: Mut[Dyn, Accumulate.Add], x: Ref[Dyn]):
    i, j = y.index
    y.add(x[i, j] * 3)


def test_slices_accumulate_into_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "BUDGET", 4)
    monkeypatch.setattr(cpu_lifetimes, "_LARGE", 1)
    device = tilert.device("cpu")
    y = tilert.zeros((1, 8), i32, device)
    x = np.arange(24, dtype=np.int32).reshape(3, 8)
    places = RepeatedIndex.of(np.zeros(3, np.int64), device)
    tally(y.partition_at(places, 1, 4), tilert.from_numpy(x, device)).run()
    np.testing.assert_array_equal(y.numpy(), 3 * x.sum(axis=0, keepdims=True))


def dropped(text: str, **sizes: int) -> tuple[str, int]:
    lines, most = bounded(text.strip("\n").split("\n"), sizes, {})
    return "\n".join(lines), most


BIG = 1 << 20


def test_a_value_that_a_view_shows_lives_as_long_as_the_view() -> None:
    text = """
v1 = exp(a0)
v2 = v1.reshape(4)
v3 = exp(a1)
a2[...] = v2
a3[...] = v3
"""
    got, most = dropped(text, v1=BIG, v3=BIG)
    assert got == text.strip("\n").replace("v3 =", "del v1\nv3 =").replace("v2\n", "v2\ndel v2\n")
    assert most == 2 * BIG


def test_a_loop_keeps_what_its_next_turn_reads() -> None:
    text = """
v1 = exp(a0)
c2 = v1
for i3 in range(4):
    v4 = (c2 + v1)
    v5 = exp(v4)
    c2 = v5
a2[...] = c2
a2[...] = 0
"""
    got, most = dropped(text, v1=BIG, v4=BIG, v5=BIG)
    assert "    del v4\n    c2 = v5\n    del v5\ndel v1\na2[...] = c2\ndel c2\na2" in got
    assert got.count("del") == 4
    assert most == 3 * BIG


def test_what_both_branches_make_is_dropped_behind_them() -> None:
    text = """
v1 = exp(a0)
if a1[0]:
    v2 = sin(v1)
    r3 = v2
else:
    r3 = v1
a2[...] = r3
a2[...] = 0
"""
    got, most = dropped(text, v1=BIG, v2=BIG)
    assert "    del v2\nelse:\n    r3 = v1\ndel v1\na2[...] = r3\ndel r3\n" in got
    assert most == 2 * BIG


def test_small_values_are_left_alone() -> None:
    text = "v1 = exp(a0)\nv2 = exp(v1)\na2[...] = v2"
    assert dropped(text, v1=100, v2=100) == (text, 0)
