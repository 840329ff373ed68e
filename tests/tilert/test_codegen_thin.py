"""Products of few rows under the pipelined schedule: operands that change sides, and rows of the
instruction that are not there."""

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
    is_pipelined,
    last_text,
    mistaken,
    needs_compiler,
    product,
    two_products,
)
from tilert import DType, bf16, f16, f32, nvrtc, sass
from tilert.codegen import pipelined, ring

pytestmark = pytest.mark.usefixtures("pipelined")


@pytest.fixture(autouse=True)
def _of_any_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, that do not take long on the host; not for what asks how it is on a GPU."""
    if request.node.get_closest_marker("gpu") is None and "taken" not in request.fixturenames:
        monkeypatch.setattr(ring, "LEAST_READ", 0)


def is_swapped(device: Any) -> bool:
    return "copy_box_once(at" in last_text(device)


# (M, N, K), (bm, bn, bk), dtype: whole and ragged tiles, products of 64 rows of which all, some or
# only a few are there, fewer steps than stages and more.
PRODUCTS = [
    ((5, 72, 200), (8, 64, 64), bf16),
    ((13, 112, 264), (16, 24, 64), f16),
    ((30, 200, 1416), (32, 80, 128), bf16),
    ((70, 136, 136), (24, 128, 64), f16),
    ((64, 16, 72), (56, 8, 64), bf16),
    ((16, 48, 2600), (16, 24, 256), bf16),
]


@needs_compiler
@pytest.mark.parametrize(("sizes", "tile", "dtype"), PRODUCTS)
def test_product(
    gpu: EmulatedDevice, sizes: tuple[int, int, int], tile: tuple[int, int, int], dtype: DType
) -> None:
    check_product(gpu, sizes, tile, dtype)
    assert is_swapped(gpu)


LARGE = [
    ((16, 6144, 2560), (16, 48, 128), bf16),
    ((9, 2560, 4096), (16, 24, 256), bf16),
    ((33, 2560, 9728), (40, 80, 128), f16),
    ((16, 5120, 8192), (16, 40, 256), bf16),
    ((200, 512, 1096), (16, 192, 64), bf16),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("sizes", "tile", "dtype"), LARGE)
def test_product_on_a_gpu(
    sizes: tuple[int, int, int], tile: tuple[int, int, int], dtype: DType
) -> None:
    device = tilert.device("cuda:0")
    if device.info()["arch"] != "sm_90a":
        pytest.skip("the schedule is one of sm_90a")
    check_product(device, sizes, tile, dtype)


@needs_compiler
@pytest.mark.parametrize("tile", [(16, 64), (32, 40)])
def test_epilogue(gpu: EmulatedDevice, tile: tuple[int, int]) -> None:
    check_epilogue(gpu, (2 * tile[0] - 3, 136, 264), tile)
    assert is_swapped(gpu)


@needs_compiler
@pytest.mark.parametrize("tile", [(16, 64), (24, 72)])
def test_row_reduction_of_the_sums(gpu: EmulatedDevice, tile: tuple[int, int]) -> None:
    check_row_reduction(gpu, tile)
    assert is_swapped(gpu)


@needs_compiler
def test_several_products_a_step(gpu: EmulatedDevice) -> None:
    """Sums of their own for each, tiles that are the left operand here and the right one there."""
    a, a64 = data(gpu, (64, 328), bf16)
    b, b64 = data(gpu, (64, 328), bf16, seed=1)
    c, c64 = data(gpu, (64, 328), bf16, seed=2)
    y = Frame(gpu, (64, 64), f32)
    two_products(y.piece(32, 32), a, b, c).sync()
    assert is_swapped(gpu)
    y.check(a64 @ (b64 + c64).T - c64 @ b64.T, steps=3 * 328, scale=12.0 * 328)


# -- which tiles it takes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "taken"),
    [((16, 96, 64), True), ((16, 88, 64), False), ((16, 24, 256), True), ((20, 96, 64), False),
     ((16, 100, 64), False), ((16, 264, 64), False), ((56, 256, 64), True)],
)  # fmt: skip
def test_tiles(sizes: tuple[int, int, int], taken: bool) -> None:
    device = compiled((64, 1024, 1024), sizes)
    assert is_pipelined(device) == taken


# -- mistakes show -------------------------------------------------------------------------------

MISTAKES = {
    "none": ("", ""),
    "rows that are not there": ("_some_n16<24>", "_n16"),
    "operands the other way round": ("b + 2, a + 2", "a + 2, b + 2"),
    "a stage in use is filled": ("barrier_wait(empty + 8 * stage, turn ^ 1);", ""),
    "a stage is given back too early": ("wgmma_wait<1>();", ""),
    "rows of one tile for all": ("coordinate((i64)v2 * 24)", "coordinate(0)"),
    "a step beside the tile": ("b + 194", "b + 192"),
}


@needs_compiler
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelined, "UNDER_WAY", 1)
    device = EmulatedDevice("sm_90a")
    a, a64 = data(device, (16, 8 * 128), bf16)
    b, b64 = data(device, (48, 8 * 128), bf16, seed=1)
    mistaken(monkeypatch, *MISTAKES[mistake])
    y = Frame(device, (16, 48), f32)

    def run() -> None:
        product(y.piece(16, 24), a, b, bk=128).sync()
        y.check(a64 @ b64.T, steps=8 * 128, scale=np.abs(a64) @ np.abs(b64.T))

    if mistake == "none":
        run()
        return
    with pytest.raises(AssertionError):
        run()


# -- the device ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tile", "stages"),
    [((16, 48, 128), 7), ((16, 24, 256), 6), ((16, 40, 256), 5), ((16, 192, 64), 6),
     ((56, 256, 64), 5)],
)  # fmt: skip
def test_compiled(tile: tuple[int, int, int], stages: int) -> None:
    """80 KiB are under way besides two stages, as far as there is room."""
    (kernel,) = compiled((64, 1024, 1024), tile).kernels
    assert kernel.threads == 256
    assert f"if (++stage == {stages})" in kernel.text
    assert kernel.resources.spill_stores == 0
    _, log = nvrtc._compile(kernel.text, kernel.entry, "sm_90a", ("--ptxas-options=--verbose",))
    assert "C75" not in log


def test_machine_code() -> None:
    (kernel,) = compiled((16, 6144, 2560), (16, 48, 128)).kernels
    (lines,) = sass.disassemble([kernel.cubin], "sm_90a")
    found = list(sass.names(lines))
    assert found.count("HGMMA.64x16x16.F32.BF16") == 8
    assert sum(name.startswith("UTMALDG.2D") for name in found) == 4
    assert not [name for name in found if name.startswith(("LDL", "STL", "HMMA"))]
