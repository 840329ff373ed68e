"""Pieces that the copy engine stores: values, what goes another way, and that mistakes show."""

from typing import Any

import numpy as np
import pytest

import tilert
from tests.tilert.checks import Frame, data
from tests.tilert.emulator import EmulatedDevice
from tests.tilert.products import (
    check_epilogue,
    check_product,
    compiled,
    is_pipelined,
    last_text,
    mistaken,
    needs_compiler,
    product,
    two_products,
)
from tilert import DType, bf16, f16, f32, sass
from tilert.target_device import TargetDevice

pytestmark = pytest.mark.usefixtures("pipelined")

CALL = "store_box(&map"


def boxes(device: Any) -> int:
    """Boxes that a warpgroup stores of a piece."""
    return last_text(device).count(CALL)


# (M, N, K), (bm, bn, bk), dtype, boxes: whole and ragged pieces, both halvings of a tile, several
# blocks of rows a warpgroup, and columns that are no whole boxes.
PRODUCTS = [
    ((128, 64, 128), (128, 64, 64), bf16, 1),
    ((300, 200, 136), (128, 128, 64), f16, 2),
    ((130, 72, 72), (128, 96, 64), bf16, 1),
    ((300, 88, 72), (256, 80, 64), bf16, 2),
    ((70, 264, 72), (64, 256, 64), f16, 2),
    ((64, 256, 200), (64, 256, 64), bf16, 2),
]


@needs_compiler
@pytest.mark.parametrize(("sizes", "tile", "dtype", "count"), PRODUCTS)
def test_product(
    gpu: EmulatedDevice, sizes: tuple[int, int, int], tile: tuple[int, int, int], dtype: DType,
    count: int,
) -> None:  # fmt: skip
    check_product(gpu, sizes, tile, dtype)
    assert is_pipelined(gpu) and boxes(gpu) == count


@needs_compiler
def test_added_to_what_is_there(gpu: EmulatedDevice) -> None:
    check_epilogue(gpu, (140, 136, 72), (128, 128))
    assert boxes(gpu) == 2


@needs_compiler
def test_part_of_an_array(gpu: EmulatedDevice) -> None:
    """Rows and columns around the piece stay as they are."""
    a, a64 = data(gpu, (100, 72), bf16)
    b, b64 = data(gpu, (72, 72), bf16, seed=1)
    whole = tilert.full((140, 160), 7.0, bf16, gpu)
    y = whole[24:124, 16:88]
    product(y.partition(128, 64), a, b, bk=64).sync()
    assert boxes(gpu) == 1
    got = whole.numpy().astype(np.float64)
    np.testing.assert_allclose(got[24:124, 16:88], a64 @ b64.T, atol=0.2)
    got[24:124, 16:88] = 7.0
    assert (got == 7.0).all()


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "columns", "tile"),
    [(f32, 64, (64, 128)), (bf16, 68, (64, 128)), (bf16, 64, (64, 64)), (bf16, 96, (32, 96))],
    ids=["wide elements", "rows of no 16 bytes", "half boxes", "swapped sides"],
)
def test_what_is_stored_from_registers(
    gpu: EmulatedDevice, dtype: DType, columns: int, tile: tuple[int, int]
) -> None:
    a, a64 = data(gpu, (70, 192), bf16)
    b, b64 = data(gpu, (columns, 192), bf16, seed=1)
    y = Frame(gpu, (70, columns), dtype)
    product(y.piece(*tile), a, b, bk=64).sync()
    assert is_pipelined(gpu) and boxes(gpu) == 0
    assert "boxes" not in last_text(gpu)
    y.check(a64 @ b64.T, steps=192, scale=np.abs(a64) @ np.abs(b64.T))


def test_boxes_and_stages_share_the_memory() -> None:
    found = []
    for dtype in (bf16, f32):
        device = TargetDevice("sm_90a")
        y = tilert.empty((512, 512), dtype, device)
        a, b = (tilert.empty((512, 512), bf16, device) for _ in range(2))
        product(y.partition(128, 192), a, b, bk=64)
        (kernel,) = device.kernels
        assert kernel.shared_bytes <= 227 * 1024
        found.append(next(n for n in range(9) if f"if (++stage == {n})" in kernel.text))
    assert found == [4, 5]


def test_machine_code() -> None:
    (kernel,) = compiled((512, 512, 512), (128, 256, 64)).kernels
    (lines,) = sass.disassemble([kernel.cubin], "sm_90a")
    found = sass.names(lines)
    assert found.count("UTMASTG.2D") == 4
    assert found.count("STSM.16.M88.4") == 16
    assert not [name for name in found if name.startswith(("STG", "SHFL.BFLY"))]


MISTAKES = {
    "a box is filled while it is read": ("boxes_read<1>();", ""),
    "too many boxes under way": ("boxes_read<1>();", "boxes_read<2>();"),
    "others fill a box that one waits for": ("boxes_read<1>();\n          meet_group(group);",
                                             "boxes_read<1>();"),
    "a box is stored before all have filled it": ("boxes_filled();\n          meet_group(group);",
                                                  "boxes_filled();"),
    "the copy engine is not told": ("boxes_filled();", ""),
    "it is told by one thread alone": ("boxes_filled();",
                                       "if (threadIdx.x % 128 == 0) boxes_filled();"),
    "it is told too late": ("boxes_filled();\n          meet_group(group);",
                            "meet_group(group);\n          boxes_filled();"),
    "the block ends before its stores": ("boxes_stored();", ""),
    "the same box each time": ("box = box + 1 == 2 ? 0 : box + 1;", ""),
    "both warpgroups have one box": ("(group * 2 + box) * 8192", "box * 8192"),
    "no swizzle": ("((piece + lane / 16) ^ row % 8)", "(piece + lane / 16)"),
    "rows and columns changed over": ("box + row * 128 + ((piece + lane / 16)",
                                      "box + row * 128 + ((piece ^ 1 - lane / 16)"),
    "the next box's columns": (" + 64), coordinate(", " + 0), coordinate("),
    "the other warpgroup's rows": ("* 128 + group * 64 + 0", "* 128 + (1 - group) * 64 + 0"),
    "boxes over the ring": ("const u32 boxes = ring + ", "const u32 boxes = ring + 0 * "),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = EmulatedDevice("sm_90a")
    a, a64 = data(device, (5 * 128, 72), bf16)
    b, b64 = data(device, (192, 72), bf16, seed=1)

    def run() -> None:
        y = Frame(device, (5 * 128, 192), bf16)
        product(y.piece(128, 192), a, b, bk=64).sync()
        y.check(a64 @ b64.T, steps=72, scale=np.abs(a64) @ np.abs(b64.T))

    mistaken(monkeypatch, *MISTAKES[mistake])
    with pytest.raises(AssertionError):
        run()


@needs_compiler
def test_two_sums_one_piece(gpu: EmulatedDevice) -> None:
    a, a64 = data(gpu, (128, 136), bf16)
    b, b64 = data(gpu, (128, 136), bf16, seed=1)
    c, c64 = data(gpu, (128, 136), bf16, seed=2)
    y = Frame(gpu, (128, 128), bf16)
    two_products(y.piece(128, 64), a, b, c).sync()
    assert boxes(gpu) == 1
    y.check(a64 @ (b64 + c64).T - c64 @ b64.T, steps=3 * 136, scale=12.0 * 136)
