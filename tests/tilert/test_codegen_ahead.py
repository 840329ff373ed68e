"""Weights of matrix-vector products that are read before earlier kernels are complete."""

from typing import Any

import numpy as np
import pytest

import tilert
from tests.tilert.checks import Frame, data
from tests.tilert.emulator import EmulatedDevice
from tests.tilert.products import check_product, last_text, mistaken, needs_compiler, product
from tilert import Const, DType, Mut, Ref, bf16, f16, f32, i32, sass
from tilert.language import mma, rsqrt, sum, tiles, zeros
from tilert.target_device import TargetDevice


@tilert.kernel
def gated_scaled(y: Mut, x: Ref, gain: Ref, w: Ref, bk: Const[int]):
    """y = (x @ w[0].T) * (x @ w[1].T) * gain / |x|: two operands of one array, and three sums."""
    m, n = y.index
    first, second = zeros(y.shape, f32), zeros(y.shape, f32)
    squares = zeros((y.shape[0],), f32)
    for k in tiles(x, axis=1, size=bk):
        v = x[m, k].to(f32)
        squares = squares + sum(v * v, axis=1)
        scaled = v * gain[k][None, :].to(f32)
        first = mma(scaled, w[0, n, k].to(f32).T, first)
        second = mma(scaled, w[1, n, k].to(f32).T, second)
    scale = rsqrt(squares / x.shape[1])[:, None]
    y.store(first * scale * second)


def check_gated(
    device: Any, sizes: tuple[int, int, int], tile: tuple[int, int, int], dtype: DType
) -> None:
    m, n, k = sizes
    bm, bn, bk = tile
    (x, x64), (gain, g64), (w, w64) = (
        data(device, shape, dtype, seed=i) for i, shape in enumerate(((m, k), (k,), (2, n, k)))
    )
    y = Frame(device, (m, n))
    gated_scaled(y.piece(bm, bn), x, gain, w, bk=bk).run()
    a, b = ((x64 * g64) @ w64[i].T for i in (0, 1))
    sizes_of = [np.abs(x64 * g64) @ np.abs(w64[i].T) for i in (0, 1)]
    scale = 1 / np.sqrt((x64**2).mean(axis=1, keepdims=True))
    y.check(a * scale * b, steps=k, scale=sizes_of[0] * sizes_of[1] * scale)


# (M, N, K), (bm, bn, bk), dtype: one step without a loop, fewer than registers are for, more,
# whole and ragged steps and pieces, elements of one byte, two and four.
PRODUCTS = [
    ((1, 16, 512), (1, 4, 512), bf16),
    ((1, 24, 2560), (1, 2, 512), bf16),
    ((1, 24, 9728), (1, 4, 512), f16),
    ((2, 19, 1416), (1, 4, 256), bf16),
    ((3, 20, 2600), (2, 4, 512), f16),
    ((1, 7, 640), (1, 2, 128), f32),
    ((1, 40, 3072), (1, 16, 512), bf16),
    ((1, 9, 100), (1, 2, 64), bf16),
]


@needs_compiler
@pytest.mark.parametrize("early", [0, 1, 2, 0x7FFFFFFF])
@pytest.mark.parametrize(("sizes", "tile", "dtype"), PRODUCTS)
def test_product(
    sizes: tuple[int, int, int], tile: tuple[int, int, int], dtype: DType, early: int
) -> None:
    """Whether they may be read before the wait or not."""
    device = EmulatedDevice("sm_90a", early=early)
    check_product(device, sizes, tile, dtype)
    # Rows of 100 elements do not begin at 16 bytes.
    assert ("= load16_early(" in last_text(device)) == (sizes[2] % 8 == 0)
    check_gated(device, sizes, tile, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("sizes", "tile", "dtype"), PRODUCTS)
def test_product_on_a_gpu(
    sizes: tuple[int, int, int], tile: tuple[int, int, int], dtype: DType
) -> None:
    device = tilert.device("cuda:0")
    check_product(device, sizes, tile, dtype)
    check_gated(device, sizes, tile, dtype)


@needs_compiler
def test_weights_that_others_write_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator knows whether weights may be read before the wait."""
    wait = "wait_for_earlier_grids();"
    mistaken(monkeypatch, f"if ((early & 1u) != 1u) {wait}", f"if ((early & 1u) != 1u && 0) {wait}")
    check_product(EmulatedDevice("sm_90a", early=1), (1, 16, 512), (1, 4, 512), bf16)
    with pytest.raises(AssertionError, match="weights were read before"):
        check_product(EmulatedDevice("sm_90a", early=0), (1, 16, 512), (1, 4, 512), bf16)


def test_what_comes_early() -> None:
    """Weights alone: not what a table or another load says where to find, nor in checked kernels;
    of a piece that a map places, nothing."""

    @tilert.kernel
    def through_a_table(y: Mut, x: Ref, w: Ref, table: Ref, bk: Const[int]):
        m, n = y.index
        expert = table[m.number]
        acc = zeros(y.shape, f32)
        for k in tiles(x, axis=1, size=bk):
            acc = mma(x[m, k], w[expert, n, k].T, acc)
        y.store(acc)

    for check, wanted in ((False, [(2,), (), ()]), (True, [(), (), ()])):
        device = TargetDevice("sm_90a", check)
        x, w = (tilert.empty((n, 1024), bf16, device) for n in (1, 64))
        y = tilert.empty((1, 64), f32, device)
        product(y.partition(1, 4), x, w, bk=256).run()
        table = tilert.empty((1,), i32, device)
        through_a_table(y.partition(1, 4), x, w.reshape(4, 16, 1024), table, bk=256).run()
        index = tilert.UniqueIndex.checked(np.array([0]), device)
        product(y.partition_at(index, 1, 4), x, w, bk=256).run()
        assert [kernel.schedule for kernel in device.kernels] == ["skinny"] * 3
        assert [kernel.early for kernel in device.kernels] == wanted


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
def test_machine_code(arch: str) -> None:
    """All weights that come early are asked for before the wait, and nothing else is."""
    device = TargetDevice(arch)
    x, w = (tilert.empty((n, 2560), bf16, device) for n in (1, 64))
    product(tilert.empty((1, 64), f32, device).partition(1, 4), x, w, bk=512).run()
    (lines,) = sass.disassemble([device.kernels[0].cubin], arch)
    names = sass.names(lines)
    waits = [i for i, name in enumerate(names) if name == "ACQBULK"]
    loads = [i for i, name in enumerate(names) if sass.contains(name, "LDG.128.STRONG")]
    assert len(waits) == 2 and len(loads) == 10
    assert waits[0] < min(loads) and max(loads) < waits[1]
    assert len(sass.hasty(lines)) == 10
