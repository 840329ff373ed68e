"""Kernels of few rows that are not a model's: operands from any place on, or of one array on both
sides, sums that begin with something, pieces that an index map places."""

import re

import numpy as np
import pytest

import tilert
from tests.tilert.checks import data
from tests.tilert.emulator import EmulatedDevice
from tests.tilert.products import hopper, is_pipelined, last_text, needs_compiler
from tilert import Const, Mut, Ref, UniqueIndex, bf16, f32, sass
from tilert.codegen import ring
from tilert.language import mma, span, tiles, zeros
from tilert.target_device import TargetDevice

pytestmark = pytest.mark.usefixtures("pipelined")


@pytest.fixture(autouse=True)
def _of_any_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, that do not take long on the host."""
    monkeypatch.setattr(ring, "LEAST_READ", 0)


@tilert.kernel
def placed_product(y: Mut, a: Ref, b: Ref, bk: Const[int]):
    _, m, n = y.index
    _, rows, columns = y.shape
    acc = zeros((rows, columns), f32)
    for k in tiles(a, axis=1, size=bk):
        acc = mma(a[m, k], b[n, k].T, acc)
    y.store(acc.reshape(y.shape))


@pytest.mark.parametrize(("rows", "schedule"), [(8, "thin"), (16, "pipelined")])
def test_where_an_index_map_says_nothing_comes_ahead(rows: int, schedule: str) -> None:
    """Not even the place of a piece is known before the wait: earlier kernels may write the map."""
    device = TargetDevice("sm_90a")
    a, b = (tilert.empty(shape, bf16, device) for shape in ((rows, 2560), (9728, 2560)))
    index = UniqueIndex.checked(np.arange(8), device)
    y = tilert.empty((8, rows, 9728), f32, device)
    placed_product(y.partition_at(index, 1, rows, 80), a, b, bk=128).run()
    placed_product(y.partition(1, rows, 80), a, b, bk=128).run()
    at, plain = device.kernels
    assert (at.schedule, at.early) == (schedule, ())
    assert (plain.schedule, plain.early) == (schedule, (1, 2))
    (lines,) = sass.disassemble([at.cubin], "sm_90a")
    assert sass.hasty(lines) == []


@tilert.kernel
def gram(y: Mut, a: Ref, bk: Const[int]):
    m, _ = y.index
    acc = zeros(y.shape, f32)
    for k in tiles(a, axis=1, size=bk):
        v = a[m, k]
        acc = mma(v, v.T, acc)
    y.store(acc)


@pytest.mark.parametrize(("rows", "depth"), [(16, 512), (32, 256), (16, 64)])
def test_rows_that_are_not_there_fit_as_well(rows: int, depth: int) -> None:
    """Products of a warpgroup read 64 rows of an operand, here behind the last stage."""
    device = TargetDevice("sm_90a")
    a, y = tilert.empty((rows, 4096), bf16, device), tilert.empty((rows, rows), f32, device)
    gram(y.partition(rows, rows), a, bk=depth).run()
    (kernel,) = device.kernels
    assert kernel.shared_bytes <= (device.shared_bytes or 0)


@needs_compiler
@pytest.mark.parametrize("early", [0, 1])
def test_one_operand_on_both_sides(early: int) -> None:
    device = EmulatedDevice("sm_90a", early=early)
    x, x64 = data(device, (16, 320), bf16)
    y = tilert.full((16, 16), float("nan"), f32, device)
    gram(y.partition(16, 16), x, bk=64).run()
    wanted = x64 @ x64.T
    assert np.abs(y.numpy() - wanted).max() <= 1e-5 * np.abs(wanted).max()


@tilert.kernel
def shifted(y: Mut, a: Ref, b: Ref, by: Const[int]):
    m, n = y.index
    acc = zeros(y.shape, f32)
    for k in tiles(a, axis=1, size=128):
        acc = mma(a[m, span(k.start + by, 128)], b[n, span(k.start + by, 128)].T, acc)
    y.store(acc)


@needs_compiler
@pytest.mark.parametrize("by", [8, -72])
@pytest.mark.parametrize("tile", [(8, 20), (16, 20), (16, 24), (64, 24)])
def test_columns_from_any_place_on(tile: tuple[int, int], by: int) -> None:
    device = EmulatedDevice("sm_90a", early=3)
    a, a64 = data(device, (64, 384), bf16)
    b, b64 = data(device, (60, 384), bf16)
    y = tilert.full((64, 60), float("nan"), f32, device)
    shifted(y.partition(*tile), a, b, by=by).run()
    assert is_pipelined(device)
    first, last = max(by, 0), min(384 + by, 384)
    wanted = a64[:, first:last] @ b64[:, first:last].T
    assert np.abs(y.numpy() - wanted).max() <= 1e-4 * np.abs(wanted).max()


@tilert.kernel
def onto_a_bias(y: Mut, x: Ref, w: Ref, bias: Ref):
    m, n = y.index
    acc = zeros(y.shape, f32) + bias[n][None, :] + 3.0
    for k in tiles(x, axis=1, size=128):
        acc = mma(x[m, k], w[n, k].to(f32).T, acc)
    y.store(acc)


@needs_compiler
@pytest.mark.parametrize("rows", [3, 4])
def test_what_sums_of_two_terms_begin_with_counts_once(rows: int) -> None:
    device = EmulatedDevice("sm_90a")
    x, x64 = data(device, (rows, 384), f32)
    w, w64 = data(device, (80, 384), bf16)
    bias, bias64 = data(device, (80,), f32)
    y = tilert.full((rows, 80), float("nan"), f32, device)
    onto_a_bias(y.partition(4, 40), x, w, bias).run()
    assert "share_sums<" in last_text(device)
    wanted = x64 @ w64.T + bias64 + 3.0
    assert np.abs(y.numpy() - wanted).max() <= 1e-4 * np.abs(wanted).max()


@tilert.kernel
def both_sides(y: Mut, a: Ref, u: Ref, w: Ref, bk: Const[int]):
    """A tile is a left operand here and a right one there, beside one that is a left one alone."""
    m, n = y.index
    acc, other = zeros(y.shape, f32), zeros(y.shape, f32)
    for k in tiles(a, axis=1, size=bk):
        t, v = u[n, k].T, w[n, k]
        acc = mma(a[m, k], t, acc)
        acc = mma(a[m, k], v.T, acc)
        other = mma(v, t, other)
    y.store(acc - other)


def check_both_sides(device: tilert.Device, rows: int, depth: int) -> None:
    (a, a64), (u, u64), (w, w64) = (
        data(device, (rows, 320), bf16, seed=seed) for seed in (1, 2, 3)
    )
    y = tilert.empty((rows, rows), f32, device)
    both_sides(y.partition(rows, rows), a, u, w, bk=depth).sync()
    want = a64 @ u64.T + a64 @ w64.T - w64 @ u64.T
    assert np.abs(y.numpy() - want).max() < 1e-3 * np.abs(want).max()


@needs_compiler
@pytest.mark.parametrize(("rows", "depth"), [(16, 64), (24, 128), (40, 64)])
def test_one_tile_on_both_sides_beside_another(rows: int, depth: int) -> None:
    check_both_sides(EmulatedDevice("sm_90a"), rows, depth)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "depth"), [(16, 64), (24, 128), (40, 64)])
def test_one_tile_on_both_sides_beside_another_on_a_gpu(rows: int, depth: int) -> None:
    check_both_sides(hopper(), rows, depth)


@pytest.mark.parametrize(("rows", "depth"), [(16, 64), (16, 256), (24, 128), (32, 64), (40, 64)])
def test_a_block_has_all_that_its_products_read(rows: int, depth: int) -> None:
    """64 rows from where each left operand of the last stage begins, in whichever ring it is."""
    device = TargetDevice("sm_90a")
    a, u, w = (tilert.empty((n, 4096), bf16, device) for n in (rows, 8 * rows, 8 * rows))
    y = tilert.empty((rows, 8 * rows), f32, device)
    both_sides(y.partition(rows, rows), a, u, w, bk=depth).run()
    (kernel,) = device.kernels
    assert kernel.schedule == "pipelined"
    text = kernel.text
    stages = {
        name: (int(at or 0), int(size))
        for name, at, size in re.findall(
            r"const u32 (\w*at) = ring \+ (?:(\d+) \+ )?\w*stage \* (\d+);", text
        )
    }
    counts = {name: int(n) for name, n in re.findall(r"if \(\+\+(\w*stage) == (\d+)\)", text)}
    starts = re.findall(r"const u64 a = descriptor\((\w*at) \+ (\d+)\);", text)
    assert {name for name, _ in starts} == {"at", "left_at"}
    for name, offset in starts:
        at, size = stages[name]
        last = at + (counts[name.replace("at", "stage")] - 1) * size + int(offset)
        boxes = depth // 64 - 1
        assert last + boxes * rows * 128 + 64 * 128 <= kernel.shared_bytes
