"""Products of few rows under the pipelined schedule: operands that change sides or are made on the
way, rows of the instruction that are not there, and copies before earlier kernels are complete."""

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
    is_pipelined,
    last_text,
    mistaken,
    needs_compiler,
    product,
    two_products,
)
from tilert import (
    Const,
    DType,
    Dyn,
    Mut,
    Ref,
    bf16,
    f16,
    f32,
    i32,
    nvrtc,
    sass,
)
from tilert.codegen import ring, room
from tilert.language import mma, sum, tiles, zeros
from tilert.target_device import TargetDevice

pytestmark = pytest.mark.usefixtures("pipelined")


@pytest.fixture(autouse=True)
def _of_any_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, that do not take long on the host; not for what asks how it is on a GPU."""
    if request.node.get_closest_marker("gpu") is None and "taken" not in request.fixturenames:
        monkeypatch.setattr(ring, "LEAST_READ", 0)


def is_thin(device: Any) -> bool:
    return "share_sums<" in last_text(device)


# (M, N, K), (bm, bn, bk), dtype: whole and ragged tiles, products of 16 rows of which all, some or
# only a few are there, steps that one copy brings and that several do, fewer than stages and more.
PRODUCTS = [
    ((5, 72, 200), (8, 64, 64), bf16),
    ((13, 112, 264), (16, 27, 64), f16),
    ((30, 200, 1416), (16, 83, 128), bf16),
    ((3, 73, 328), (4, 40, 128), bf16),
    ((16, 48, 2600), (16, 25, 256), bf16),
    ((9, 77, 1024), (16, 23, 128), bf16),
    ((1, 63, 1536), (8, 21, 512), f16),
]


@needs_compiler
@pytest.mark.parametrize(("sizes", "tile", "dtype"), PRODUCTS)
def test_product(
    gpu: EmulatedDevice, sizes: tuple[int, int, int], tile: tuple[int, int, int], dtype: DType
) -> None:
    check_product(gpu, sizes, tile, dtype)
    assert is_thin(gpu)


LARGE = [
    ((16, 6144, 2560), (16, 48, 128), bf16),
    ((9, 2560, 4096), (16, 24, 256), bf16),
    ((33, 2560, 9728), (40, 80, 128), f16),
    ((16, 5120, 8192), (16, 40, 256), bf16),
    ((200, 512, 1096), (16, 192, 64), bf16),
    ((8, 6144, 2560), (8, 47, 128), bf16),
    ((5, 2560, 9728), (8, 20, 512), bf16),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("sizes", "tile", "dtype"), LARGE)
def test_product_on_a_gpu(
    sizes: tuple[int, int, int], tile: tuple[int, int, int], dtype: DType
) -> None:
    device = hopper()
    check_product(device, sizes, tile, dtype)


@needs_compiler
@pytest.mark.parametrize("tile", [(16, 62), (8, 40)])
def test_epilogue(gpu: EmulatedDevice, tile: tuple[int, int]) -> None:
    check_epilogue(gpu, (2 * tile[0] - 3, 136, 264), tile)
    assert is_thin(gpu)


@needs_compiler
@pytest.mark.parametrize("tile", [(16, 62), (8, 72)])
def test_row_reduction_of_the_sums(gpu: EmulatedDevice, tile: tuple[int, int]) -> None:
    check_row_reduction(gpu, tile)
    assert is_thin(gpu)


@needs_compiler
def test_several_products_a_step(gpu: EmulatedDevice) -> None:
    """Sums of their own for each, tiles that are the left operand here and the right one there."""
    a, a64 = data(gpu, (64, 328), bf16)
    b, b64 = data(gpu, (64, 328), bf16, seed=1)
    c, c64 = data(gpu, (64, 328), bf16, seed=2)
    y = Frame(gpu, (64, 64), f32)
    two_products(y.piece(16, 34), a, b, c).sync()
    assert is_thin(gpu)
    y.check(a64 @ (b64 + c64).T - c64 @ b64.T, steps=3 * 328, scale=12.0 * 328)


# -- which tiles it takes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "taken"),
    [((16, 64, 64), True), ((8, 56, 64), False), ((16, 24, 256), True), ((20, 96, 64), False),
     ((16, 99, 64), True), ((16, 264, 64), False), ((56, 96, 64), True), ((56, 32, 128), True),
     ((16, 192, 96), False)],
)  # fmt: skip
def test_tiles(sizes: tuple[int, int, int], taken: bool) -> None:
    device = compiled((64, 1024, 1024), sizes)
    assert is_pipelined(device) == taken


# -- mistakes show -------------------------------------------------------------------------------

MISTAKES = {
    "none": ("", ""),
    "a stage in use is filled": ("barrier_wait(empty + 8 * stage, turn ^ 1);", ""),
    "a stage is given back too early": (
        "barrier_wait(full + 8 * stage, turn);",
        "barrier_wait(full + 8 * stage, turn); barrier_arrive_warp(empty + 8 * stage); if (false)",
    ),
    "rows of one tile for all": ("coordinate((i64)v2 * 24)", "coordinate(0)"),
    "columns of one warp for all": ("warp * 32 + k", "k"),
    "one warp's sums": ("from < threads; from += 32", "from < 32; from += 32"),
    "copies without their swizzle": ("swizzled(column / 64", "(column / 64"),
    "bytes that never come": (", 6144);", ", 6152);"),
}


@needs_compiler
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "UNDER_WAY", 1)
    device = EmulatedDevice("sm_90a")
    a, a64 = data(device, (8, 8 * 128), bf16)
    b, b64 = data(device, (48, 8 * 128), bf16, seed=1)
    mistaken(monkeypatch, *MISTAKES[mistake])
    y = Frame(device, (8, 48), f32)

    def run() -> None:
        product(y.piece(8, 24), a, b, bk=128).sync()
        y.check(a64 @ b64.T, steps=8 * 128, scale=np.abs(a64) @ np.abs(b64.T))

    if mistake == "none":
        run()
        return
    with pytest.raises(AssertionError):
        run()


# -- left operands that are made -----------------------------------------------------------------


@tilert.kernel
def scaled_product(y: Mut[Dyn], x: Ref[Dyn], gain: Ref, w: Ref, bias: Ref, bk: Const[int]):
    """Of x * gain, less the row's mean square, onto a bias."""
    m, n = y.index
    acc = zeros(y.shape, f32) + bias[n][None, :].to(f32)
    squares = zeros((y.shape[0],), f32)
    for k in tiles(x, axis=1, size=bk):
        v = x[m, k].to(f32)
        squares = squares + sum(v * v, axis=1)
        acc = mma((v * gain[k][None, :].to(f32)).to(w.dtype), w[n, k].T, acc)
    y.store(acc - (squares / x.shape[1])[:, None])


def check_scaled(
    device: Any, sizes: tuple[int, int, int], tile: tuple[int, int, int], dtype: DType
) -> None:
    m, n, k = sizes
    x, x64 = data(device, (m, k), dtype)
    gain, gain64 = data(device, (k,), bf16, seed=1)
    w, w64 = data(device, (n, k), bf16, seed=2)
    bias, bias64 = data(device, (n,), bf16, seed=3)
    y = Frame(device, (m, n), f32)
    scaled_product(y.piece(*tile[:2]), x, gain, w, bias, bk=tile[2]).sync()
    made = (x64.astype(np.float32) * gain64.astype(np.float32)).astype(bf16.numpy)
    left = made.astype(np.float64)
    want = left @ w64.T + bias64 - (x64**2).mean(axis=1, keepdims=True)
    size = np.abs(left) @ np.abs(w64.T) + np.abs(bias64) + (x64**2).mean(axis=1, keepdims=True)
    y.check(want, steps=k, scale=size)


SCALED = [
    ((3, 72, 520), (8, 24, 128), f32),
    ((16, 50, 1024), (16, 25, 256), bf16),
    ((9, 33, 264), (16, 33, 64), f32),
]


@needs_compiler
@pytest.mark.parametrize("early", [0, 0x7FFFFFFF])
@pytest.mark.parametrize(("sizes", "tile", "dtype"), SCALED)
def test_made_left_operand(
    sizes: tuple[int, int, int], tile: tuple[int, int, int], dtype: DType, early: int
) -> None:
    device = EmulatedDevice("sm_90a", early=early)
    check_scaled(device, sizes, tile, dtype)
    assert is_thin(device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [bf16, f32])
def test_made_left_operand_on_a_gpu(dtype: DType) -> None:
    device = hopper()
    for rows in (8, 16):
        check_scaled(device, (rows - 3, 6144, 2560), (rows, 47, 128), dtype)
        check_scaled(device, (2 * rows, 1000, 520), (rows, 100, 64), dtype)


# -- left operands that are not rounded ----------------------------------------------------------


@tilert.kernel
def wide_products(y: Mut[Dyn], x: Ref[Dyn], gain: Ref, w: Ref, v: Ref, bk: Const[int]):
    """Of f32, once computed; one of bf16 onto the same sums."""
    m, n = y.index
    acc = zeros(y.shape, f32)
    for k in tiles(x, axis=1, size=bk):
        a = x[m, k]
        acc = mma(a * gain[k][None, :].to(f32), w[n, k].to(f32).T, acc)
        acc = mma(a.to(w.dtype), v[n, k].T, acc)
    y.store(acc)


def check_wide(device: Any, sizes: tuple[int, int, int], tile: tuple[int, int, int]) -> float:
    """The largest error over the largest sum."""
    m, n, k = sizes
    x, x64 = data(device, (m, k), f32)
    gain, gain64 = data(device, (k,), bf16, seed=1)
    w, w64 = data(device, (n, k), bf16, seed=2)
    v, v64 = data(device, (n, k), bf16, seed=3)
    y = tilert.empty((m, n), f32, device)
    wide_products(y.partition(*tile[:2]), x, gain, w, v, bk=tile[2]).sync()
    rounded = x64.astype(bf16.numpy).astype(np.float64)
    want = (x64 * gain64) @ w64.T + rounded @ v64.T
    got = y.numpy()
    return float(np.abs(got - want).max() / np.abs(want).max())


@needs_compiler
@pytest.mark.parametrize("sizes", [(1, 40, 264), (3, 73, 520), (4, 40, 384), (6, 40, 264)])
def test_four_rows_of_f32(sizes: tuple[int, int, int]) -> None:
    """Of which the instruction takes what bf16 holds, and what is left, in its eight columns."""
    device = EmulatedDevice("sm_90a")
    assert check_wide(device, sizes, (4, 40, 128)) < 2e-5
    assert is_thin(device)


@needs_compiler
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("from(a - f32_of(first))", "from(0.0f)"),
        ("[r] + shuffle_xor(", "[r] + 0.0f * shuffle_xor("),
        ("? 0u : pack(a, b)", "? pack(a, b) : pack(a, b)"),
    ],
)
def test_a_mistake_with_what_is_left_shows(
    old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistaken(monkeypatch, old, new)
    assert check_wide(EmulatedDevice("sm_90a"), (4, 40, 256), (4, 40, 128)) > 1e-4


@pytest.mark.gpu
def test_four_rows_of_f32_on_a_gpu() -> None:
    device = hopper()
    for rows in (1, 2, 4):
        assert check_wide(device, (rows, 6144, 2560), (4, 47, 128)) < 2e-5


def test_more_rows_of_f32_are_not_taken() -> None:
    device = TargetDevice("sm_90a")
    x, y = (tilert.empty((8, n), f32, device) for n in (1024, 96))
    w = tilert.empty((96, 1024), bf16, device)
    gain = tilert.empty((1024,), bf16, device)
    wide_products(y.partition(8, 48), x, gain, w, w, bk=128).run()
    assert device.kernels[0].schedule == "staged"


# -- before earlier kernels are complete -----------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("early", [1, 2, 3])
@pytest.mark.parametrize("depth", [64, 512])
def test_operands_copied_ahead(early: int, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either side, both, of fewer steps than the ring has stages and of more; one piece a block and
    several."""
    monkeypatch.setattr(room, "UNDER_WAY", 3000)
    device = EmulatedDevice("sm_90a", early=early)
    for sizes in ((5, 24, 1024), (8, 120, 2560), (24, 48, 1088)):
        check_product(device, sizes, (8, 24, depth), bf16)
        assert is_thin(device)


@needs_compiler
def test_an_operand_ahead_that_others_write_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator knows which ones may be read before the wait."""
    mistaken(monkeypatch, "if ((early & 1u) != 1u) wait", "if (!early) wait")
    check_product(EmulatedDevice("sm_90a", early=3), (8, 24, 256), (8, 24, 128), bf16)
    with pytest.raises(AssertionError, match="before earlier grids were complete"):
        check_product(EmulatedDevice("sm_90a", early=2), (8, 24, 256), (8, 24, 128), bf16)


def test_what_can_be_copied_ahead() -> None:
    """Operands of few rows, of which the producer knows all before it waits."""

    @tilert.kernel
    def some_steps(y: Mut, a: Ref, b: Ref, count: Ref):
        m, n = y.index
        acc = zeros(y.shape, f32)
        for k in tiles(a, axis=1, size=128, stop=count[0]):
            acc = mma(a[m, k], b[n, k].T, acc)
        y.store(acc)

    device = TargetDevice("sm_90a")
    a, b = (tilert.empty((rows, 1024), bf16, device) for rows in (8, 96))
    y = tilert.empty((8, 96), f32, device)
    product(y.partition(8, 48), a, b, bk=128).run()
    some_steps(y.partition(8, 48), a, b, tilert.empty((1,), i32, device)).run()
    wide = tilert.empty((64, 96), f32, device)
    product(wide.partition(64, 48), tilert.empty((64, 1024), bf16, device), b, bk=128).run()
    assert [(k.schedule, k.early) for k in device.kernels] == [
        ("thin", (1, 2)), ("thin", ()), ("pipelined", ()),
    ]  # fmt: skip


# -- the device ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tile", "stages"),
    [((16, 47, 128), 16), ((16, 25, 256), 14), ((16, 39, 256), 9), ((16, 194, 64), 8),
     ((8, 20, 512), 9), ((8, 47, 128), 17), ((4, 47, 128), 18)],
)  # fmt: skip
def test_compiled(tile: tuple[int, int, int], stages: int) -> None:
    """Weights have about all of shared memory."""
    (kernel,) = compiled((64, 1024, 1024), tile).kernels
    assert kernel.threads == 192
    assert f"if (++stage == {stages})" in kernel.text
    assert f"if (++left_stage == {room.THIN_LEFT_STAGES})" in kernel.text
    assert kernel.resources.spill_stores == 0
    assert 190 << 10 <= kernel.shared_bytes <= 227 << 10


@pytest.mark.parametrize(
    ("tile", "left"), [((8, 47, 512), 4), ((32, 47, 512), 3), ((24, 76, 512), 2)]
)
def test_left_operands_leave_room(tile: tuple[int, int, int], left: int) -> None:
    """Of many rows and deep steps they have fewer stages, not weights less than two."""
    (kernel,) = compiled((64, 1024, 1024), tile).kernels
    assert kernel.schedule == "thin" and kernel.shared_bytes <= 227 << 10
    assert f"if (++left_stage == {left})" in kernel.text


def test_machine_code() -> None:
    (kernel,) = compiled((8, 6144, 2560), (8, 48, 128)).kernels
    (lines,) = sass.disassemble([kernel.cubin], "sm_90a")
    found = list(sass.names(lines))
    # Two steps of k a warp, of three times 16 rows by 8 columns.
    assert found.count("HMMA.16816.F32.BF16") == 6
    assert found.count("LDSM.16.M88.4") == 6
    # One copy a side, whatever the depth.
    assert found.count("UTMALDG.3D") == 2
    assert not [name for name in found if name.startswith(("LDL", "STL", "HGMMA"))]


FENCE = 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");\n  __syncwarp();'


def test_what_is_under_way_is_read_before_a_stage_is_given_back() -> None:
    device = TargetDevice("sm_90a")
    y, x, w = (tilert.empty(shape, bf16, device) for shape in ((8, 2560), (8, 4096), (2560, 4096)))
    product(y.partition(8, 20), x, w, bk=512).run()
    (kernel,) = device.kernels
    assert kernel.schedule == "thin" and FENCE in kernel.text
    without = nvrtc.compile(kernel.text.replace(FENCE, "__syncwarp();"), kernel.entry, "sm_90a")
    with_fence, loose = sass.disassemble([kernel.cubin, without], "sm_90a")
    assert sass.overtaking(with_fence) == []
    assert {name.split(".")[0] for name in sass.overtaking(loose)} == {"LDS", "LDSM"}


def test_sums_are_shared_when_all_have_read_what_was_there() -> None:
    """Scratch is used again and again by a block that takes several pieces."""
    device = TargetDevice("sm_90a")
    y, x, w = (tilert.empty(shape, bf16, device) for shape in ((8, 2560), (8, 4096), (2560, 4096)))
    product(y.partition(8, 20), x, w, bk=512).run()
    text = device.kernels[0].text
    body = text[text.index("void share_sums") :]
    assert body.index("meet(threads);") < body.index("] = sums[i];")
