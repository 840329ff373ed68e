"""Products of few rows by one warpgroup, some of whose rows are empty, and blocks of a cluster that
share the steps of a piece where pieces are too few."""

import re
from typing import Any

import numpy as np
import pytest

import tilert
from tests.tilert.checks import Frame, data
from tests.tilert.emulator import EmulatedDevice
from tests.tilert.products import (
    check_epilogue,
    check_product,
    check_row_reduction,
    compiled,
    hopper,
    last_text,
    mistaken,
    needs_compiler,
    product,
    two_products,
)
from tilert import Const, DType, Mut, Ref, bf16, f16, f32
from tilert.codegen import cluster, ring, room
from tilert.language import mma, tiles
from tilert.target_device import TargetDevice

pytestmark = pytest.mark.usefixtures("pipelined")


def sharing(monkeypatch: pytest.MonkeyPatch, count: int, pieces: int) -> None:
    """Have so many pieces be shared by so many blocks each, of any number of steps."""
    monkeypatch.setattr(cluster, "MOST_CLUSTERS", {count: pieces})
    monkeypatch.setattr(cluster, "LEAST_BLOCKS", pieces + 1)
    monkeypatch.setattr(cluster, "LEAST_STEPS", 0)
    monkeypatch.setattr(ring, "LEAST_READ", 0)


def blocks_of(device: Any) -> int:
    """Blocks of a cluster of the kernel compiled last."""
    found = re.search(r"__cluster_dims__\((\d+), 1, 1\)", last_text(device))
    return int(found[1]) if found else 1


# (M, N, K), (bm, bn, bk), dtype: several tiles along rows, narrow ones, all rows and fewer.
GROUPED = [
    ((30, 200, 1416), (32, 80, 128), bf16),
    ((70, 136, 136), (24, 96, 64), f16),
    ((64, 16, 72), (56, 8, 64), bf16),
    ((50, 152, 528), (40, 40, 64), bf16),
    ((70, 136, 264), (64, 40, 64), f16),
]


@needs_compiler
@pytest.mark.parametrize(("sizes", "tile", "dtype"), GROUPED)
def test_one_warpgroup(
    sizes: tuple[int, int, int],
    tile: tuple[int, int, int],
    dtype: DType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster, "LEAST_BLOCKS", 1)
    device = EmulatedDevice("sm_90a")
    check_product(device, sizes, tile, dtype)
    assert "copy_box_once(at" in last_text(device) and "wgmma_n" in last_text(device)
    assert blocks_of(device) == 1


@needs_compiler
@pytest.mark.parametrize("tile", [(32, 64), (40, 72)])
def test_row_reduction_of_rows_that_are_there(tile: tuple[int, int]) -> None:
    check_row_reduction(EmulatedDevice("sm_90a"), tile)


# (M, N, K), (bm, bn, bk), dtype, blocks: steps that divide and that do not, that leave a block
# without any; columns that do not divide, or leave a block none; several tiles along rows.
SHARED = [
    ((64, 128, 392), (64, 64, 64), bf16, 3),
    ((70, 96, 200), (64, 48, 64), f16, 8),
    ((13, 112, 264), (16, 56, 64), bf16, 3),
    ((30, 128, 392), (32, 64, 64), f16, 3),
    ((50, 152, 528), (56, 80, 128), bf16, 4),
]


@needs_compiler
@pytest.mark.parametrize(("sizes", "tile", "dtype", "count"), SHARED)
def test_product(
    sizes: tuple[int, int, int],
    tile: tuple[int, int, int],
    dtype: DType,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sharing(monkeypatch, count, pieces=2)
    device = EmulatedDevice("sm_90a")
    check_product(device, sizes, tile, dtype)
    assert blocks_of(device) == count


LARGE = [
    ((64, 2560, 4096), (64, 40, 128), 2),
    ((33, 2560, 9728), (48, 40, 128), 2),
    ((64, 10240, 5120), (64, 80, 128), 1),
    ((9, 5120, 8192), (16, 80, 128), 2),
    ((100, 2560, 9728), (32, 40, 64), 2),
    ((17, 51200, 5120), (32, 200, 64), 1),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("sizes", "tile", "count"), LARGE)
def test_product_on_a_gpu(
    sizes: tuple[int, int, int], tile: tuple[int, int, int], count: int
) -> None:
    device = hopper()
    check_product(device, sizes, tile, bf16)
    assert blocks_of(compiled(sizes, tile)) == count


@needs_compiler
@pytest.mark.parametrize(("early", "rows"), [(1, 16), (2, 64), (3, 64)])
def test_operands_copied_ahead(early: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block its own steps."""
    sharing(monkeypatch, 3, pieces=2)
    device = EmulatedDevice("sm_90a", early=early)
    monkeypatch.setattr(room, "UNDER_WAY", 3000)
    check_product(device, (rows - 3, 96, 1160), (rows, 48, 64), bf16)
    assert blocks_of(device) == 3


@needs_compiler
@pytest.mark.parametrize(("window", "left"), [(6144, 1), (13000, 16384), (1 << 20, 1)])
def test_rings_of_their_own(window: int, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few stages on either side, and under way; each block walks over several pieces."""
    monkeypatch.setattr(cluster, "LEAST_BLOCKS", 1)
    monkeypatch.setattr(room, "UNDER_WAY", 16000)
    monkeypatch.setattr(room, "WINDOW", window)
    monkeypatch.setattr(room, "LEAST_WINDOW", 1)
    monkeypatch.setattr(room, "LEFT_BYTES", left)
    device = EmulatedDevice("sm_90a", early=2)
    check_product(device, (24, 5 * 48, 1160), (24, 48, 64), bf16)
    text = last_text(device)
    assert ("under_way ==" in text) == (window < 1 << 20)
    assert f"if (++left_stage == {max(2, left // 3072)})" in text


@tilert.kernel
def onto(y: Mut, a: Ref, b: Ref, c: Ref, bk: Const[int]):
    m, n = y.index
    acc = c.tile_like(y)
    for k in tiles(a, axis=1, size=bk):
        acc = mma(a[m, k], b[n, k].T, acc)
    y.store(acc)


@pytest.mark.parametrize("outputs", [5120, 2560])
def test_products_come_before_the_wait_where_all_operands_may(outputs: int) -> None:
    """And what is stored behind it, in one block's pieces and in those that blocks share."""
    text = last_text(compiled((16, outputs, 4096), (16, 40, 128)))
    computes = text[text.rindex("wait_for_all(192);") :]
    first = computes.index("if ((early & 3u) != 3u) wait_for_earlier_grids();")
    products = computes.index("wgmma_some_n40<16>(")
    second = computes.index(" wait_for_earlier_grids();", products)
    assert first < products < second < computes.index("*(u32*)(dst")
    assert computes.count("wait_for_earlier_grids();") == 3


def test_products_that_something_is_read_for_come_behind_the_wait() -> None:
    device = TargetDevice("sm_90a")
    shape = 16, 5120
    y, c = (tilert.empty(shape, f32, device) for _ in range(2))
    a, b = (tilert.empty((n, 4096), bf16, device) for n in shape)
    onto(y.partition(16, 40), a, b, c, bk=128)
    computes = last_text(device).partition("wait_for_all(192);")[2].rpartition("wait_for_all")[2]
    assert "early &" not in computes and computes.count("wait_for_earlier_grids();") == 1
    assert "wgmma_some_n40<16>(" in computes


@needs_compiler
@pytest.mark.parametrize("rows", [16, 64])
def test_epilogue(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sharing(monkeypatch, 3, pieces=2)
    device = EmulatedDevice("sm_90a")
    check_epilogue(device, (rows - 3, 80, 264), (rows, 40))
    assert blocks_of(device) == 3


@needs_compiler
def test_several_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    sharing(monkeypatch, 2, pieces=4)
    device = EmulatedDevice("sm_90a")
    (a, a64), (b, b64), (c, c64) = (data(device, (64, 328), bf16, seed=i) for i in range(3))
    y = Frame(device, (64, 64), f32)
    two_products(y.piece(32, 32), a, b, c).sync()
    assert blocks_of(device) == 2
    y.check(a64 @ (b64 + c64).T - c64 @ b64.T, steps=3 * 328, scale=12.0 * 328)


@needs_compiler
def test_row_reduction_of_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Needs all sums of a row, so that nothing is shared."""
    sharing(monkeypatch, 2, pieces=2)
    device = EmulatedDevice("sm_90a")
    check_row_reduction(device, (64, 64))
    assert blocks_of(device) == 1


@pytest.mark.parametrize(
    ("columns", "steps", "count"),
    [(66, 32, 2), (67, 32, 1), (52, 8, 2), (52, 7, 1), (51, 32, 1), (104, 32, 1)],
)
def test_as_many_as_there_is_room_and_work_for(columns: int, steps: int, count: int) -> None:
    """On 132 multiprocessors, filled and with a few steps each."""
    device = compiled((16, 64 * columns, 64 * steps), (16, 64, 64))
    assert blocks_of(device) == count


def test_of_many_rows_none_is_shared() -> None:
    assert blocks_of(compiled((128, 30 * 64, 2048), (128, 64, 64))) == 1


def test_compiled() -> None:
    """About all of shared memory is under way."""
    for sizes, tile in (
        ((64, 2560, 4096), (64, 40, 128)),
        ((64, 9728, 2560), (16, 80, 128)),
        ((64, 51200, 5120), (64, 200, 64)),
    ):
        (kernel,) = compiled(sizes, tile).kernels
        assert kernel.threads == 192 and kernel.resources.spill_stores == 0
        assert 190 << 10 <= kernel.shared_bytes <= 227 << 10 and kernel.early == (1, 2)


# -- mistakes show -------------------------------------------------------------------------------

MISTAKES = {
    "none": ("", ""),
    "every block takes all steps": ("rank * 13 / 3", "0"),
    "sums are added before they have come": ("barrier_wait(received, 0);", ""),
    "a block sends before the others have begun": (
        "cluster_wait();\n      if (rank != 0",
        "if (rank != 0",
    ),
    "sums lie in the place of another block's": ("(rank - (rank > 1))", "0"),
    "all are sent to one block": (", 1), v", ", 0), v"),
    "the bytes of fewer": ("barrier_expect(received, ", "barrier_expect(received, -512 + "),
}


@needs_compiler
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sharing(monkeypatch, 3, pieces=2)
    mistaken(monkeypatch, *MISTAKES[mistake])
    device = EmulatedDevice("sm_90a")
    a, a64 = data(device, (64, 13 * 64), bf16)
    b, b64 = data(device, (96, 13 * 64), bf16, seed=1)
    y = Frame(device, (64, 96), f32)

    def run() -> None:
        product(y.piece(64, 48), a, b, bk=64).sync()
        y.check(a64 @ b64.T, steps=13 * 64, scale=np.abs(a64) @ np.abs(b64.T))

    if mistake == "none":
        run()
        return
    with pytest.raises(AssertionError):
        run()
