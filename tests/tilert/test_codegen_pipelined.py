"""The pipelined schedule of sm_90a, run on the host and compiled for the GPU: values, descriptors,
phases of barriers, and that it takes no kernel that it cannot compute."""

import importlib.util
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilert
from tests.tilert.checks import Frame, data, ints
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
from tilert import DType, Mut, Ref, bf16, f16, f32, nvrtc, sass
from tilert.codegen import pipelined, room, schedules
from tilert.errors import CompileError
from tilert.language import minimum, mma, tiles, zeros
from tilert.target_device import TargetDevice

pytestmark = pytest.mark.usefixtures("pipelined")


# -- kernels -------------------------------------------------------------------------------------


@tilert.kernel
def by_expert(y: Mut, a: Ref, b: Ref, expert: Ref, steps: Ref):
    """Each row of tiles takes another matrix, and as many steps of it as `steps` says."""
    m, n = y.index
    e = expert.load(m.number)
    last = steps.load(m.number)
    acc = zeros(y.shape, f32)
    for k in tiles(a, axis=1, size=64, start=0, stop=last):
        acc = mma(a[m, k], b[e, n, k].T, acc)
    y.store(acc)


@tilert.kernel
def transposed(y: Mut, a: Ref, b: Ref):
    n, m = y.index
    columns, rows = y.shape
    acc = zeros((rows, columns), f32)
    for k in tiles(a, axis=1, size=64):
        acc = mma(a[m, k], b[n, k].T, acc)
    y.store(acc.T)


@tilert.kernel
def right_as_it_is(y: Mut, a: Ref, b: Ref):
    m, n = y.index
    acc = zeros(y.shape, f32)
    for k in tiles(a, axis=1, size=64):
        acc = mma(a[m, k], b[k, n], acc)
    y.store(acc)


@tilert.kernel
def scaled_operand(y: Mut, a: Ref, b: Ref):
    m, n = y.index
    acc = zeros(y.shape, f32)
    for k in tiles(a, axis=1, size=64):
        acc = mma((a[m, k].to(f32) * 2.0).to(b.dtype), b[n, k].T, acc)
    y.store(acc)


@tilert.kernel
def looks_at_sums(y: Mut, a: Ref, b: Ref):
    m, n = y.index
    acc = zeros(y.shape, f32)
    for k in tiles(a, axis=1, size=64):
        acc = minimum(mma(a[m, k], b[n, k].T, acc), 1e30)
    y.store(acc)


# -- values --------------------------------------------------------------------------------------

# (M, N, K), (bm, bn, bk), dtype: whole and ragged tiles on every axis, one and two warpgroups along
# either side, several blocks of rows a warpgroup, fewer steps than stages and more.
PRODUCTS = [
    ((128, 64, 128), (128, 64, 64), bf16),
    ((130, 72, 200), (128, 64, 64), f16),
    ((300, 40, 136), (256, 32, 64), bf16),
    ((70, 100, 328), (64, 96, 128), bf16),
    ((64, 24, 1032), (64, 24, 64), f16),
]


@needs_compiler
@pytest.mark.parametrize(("sizes", "tile", "dtype"), PRODUCTS)
def test_product(
    gpu: EmulatedDevice, sizes: tuple[int, int, int], tile: tuple[int, int, int], dtype: DType
) -> None:
    check_product(gpu, sizes, tile, dtype)
    assert is_pipelined(gpu)


LARGE = [
    ((1000, 1032, 1096), (128, 256, 64), bf16),
    ((2048, 2560, 4096), (128, 256, 64), bf16),
    ((4096, 2048, 1024), (256, 128, 64), f16),
    ((513, 6144, 2560), (128, 128, 64), bf16),
    ((64, 4096, 4096), (64, 256, 128), bf16),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("sizes", "tile", "dtype"), [*PRODUCTS, *LARGE])
def test_product_on_a_gpu(
    sizes: tuple[int, int, int], tile: tuple[int, int, int], dtype: DType
) -> None:
    device = hopper()
    check_product(device, sizes, tile, dtype)


@needs_compiler
@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    tile=st.sampled_from([(64, 24), (64, 64), (128, 40), (128, 64), (256, 32)]),
    rows=st.integers(1, 300),
    columns=st.integers(1, 150),
    depth=st.integers(9, 60).map(lambda n: 8 * n),
    dtype=st.sampled_from([bf16, f16]),
    wide=st.booleans(),
)
def test_any_product(
    tile: tuple[int, int], rows: int, columns: int, depth: int, dtype: DType, wide: bool
) -> None:
    gpu = EmulatedDevice("sm_90a")
    a, a64 = data(gpu, (rows, depth), dtype)
    b, b64 = data(gpu, (columns, depth), dtype, seed=1)
    y = Frame(gpu, (rows, columns), f32 if wide else dtype)
    product(y.piece(*tile), a, b, bk=64).sync()
    assert is_pipelined(gpu)
    y.check(a64 @ b64.T, steps=depth, scale=np.abs(a64) @ np.abs(b64.T))


@needs_compiler
def test_widest_tile_of_an_order_in_bands(
    gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipelined, "BAND", 2)
    a, a64 = data(gpu, (5 * 64 - 9, 72), bf16)
    b, b64 = data(gpu, (2 * 256 + 16, 72), bf16, seed=1)
    y = Frame(gpu, (5 * 64 - 9, 2 * 256 + 16), f32)
    product(y.piece(64, 256), a, b, bk=64).sync()
    assert is_pipelined(gpu)
    y.check(a64 @ b64.T, steps=72, scale=np.abs(a64) @ np.abs(b64.T))


@needs_compiler
@pytest.mark.parametrize("dtype", [bf16, f32])
@pytest.mark.parametrize(
    ("columns", "tile"), [(72, (128, 64)), (72, (64, 64)), (104, (128, 96)), (36, (128, 32))]
)
def test_epilogue(gpu: EmulatedDevice, columns: int, tile: tuple[int, int], dtype: DType) -> None:
    check_epilogue(gpu, (140, columns, 192), tile, dtype)
    assert is_pipelined(gpu)
    # Rows of 36 elements end within eight.
    assert ("exchange_pairs(u.w)" in last_text(gpu)) == (dtype == f32 and columns != 36)


@needs_compiler
@pytest.mark.parametrize("tile", [(64, 64), (128, 72)])
def test_row_reduction_of_the_sums(gpu: EmulatedDevice, tile: tuple[int, int]) -> None:
    check_row_reduction(gpu, tile)
    assert is_pipelined(gpu)


@needs_compiler
def test_loaded_scalars_say_what_is_copied(gpu: EmulatedDevice) -> None:
    """Steps: all, none, some; the matrices: one outside the array, which is zeros."""
    k = 3 * 64
    a, a64 = data(gpu, (5 * 64, k), bf16)
    b, b64 = data(gpu, (3, 40, k), bf16, seed=1)
    expert, steps = [2, 0, 1, 3, -1], [3, 0, 2, 3, 1]
    y = Frame(gpu, (5 * 64, 40), f32)
    by_expert(y.piece(64, 40), a, b, ints(gpu, expert), ints(gpu, steps)).sync()
    assert is_pipelined(gpu)
    want = np.zeros((5 * 64, 40))
    for i, (e, s) in enumerate(zip(expert, steps, strict=True)):
        if 0 <= e < 3:
            rows = slice(64 * i, 64 * i + 64)
            want[rows] = a64[rows, : 64 * s] @ b64[e, :, : 64 * s].T
    y.check(want, steps=k, scale=4.0 * k)


@needs_compiler
def test_several_products_a_step(gpu: EmulatedDevice) -> None:
    a, a64 = data(gpu, (128, 136), bf16)
    b, b64 = data(gpu, (128, 136), bf16, seed=1)
    c, c64 = data(gpu, (128, 136), bf16, seed=2)
    y = Frame(gpu, (128, 128), f32)
    two_products(y.piece(64, 64), a, b, c).sync()
    assert is_pipelined(gpu)
    y.check(a64 @ (b64 + c64).T - c64 @ b64.T, steps=3 * 136, scale=12.0 * 136)


@needs_compiler
def test_sums_that_move_between_threads(gpu: EmulatedDevice) -> None:
    a, a64 = data(gpu, (200, 136), bf16)
    b, b64 = data(gpu, (40, 136), bf16, seed=1)
    y = Frame(gpu, (40, 200), bf16)
    transposed(y.piece(32, 64), a, b).sync()
    assert is_pipelined(gpu)
    y.check((a64 @ b64.T).T, steps=136, scale=4.0 * 136)


# -- what it does not take -----------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("kernel", [right_as_it_is, scaled_operand, looks_at_sums])
def test_kernels_of_another_form_are_compiled_as_before(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for names in ("pipelined", "none"):
        monkeypatch.setenv(schedules.VARIABLE, names)
        device = TargetDevice("sm_90a")
        y = tilert.empty((128, 128), f32, device)
        a = tilert.empty((128, 128), bf16, device)
        kernel(y.partition(64, 64), a, a)
        assert not is_pipelined(device)
        texts.append(last_text(device))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("tile", "width", "dtype"),
    [((36, 56, 64), 128, bf16), ((64, 64, 32), 128, bf16), ((64, 64, 64), 132, bf16),
     ((64, 64, 64), 128, f32), ((128, 320, 64), 128, bf16)],
)  # fmt: skip
def test_tiles_and_arrays_that_do_not_fit_it(
    tile: tuple[int, int, int], width: int, dtype: DType
) -> None:
    device = TargetDevice("sm_90a")
    y = tilert.empty((128, 320), f32, device)
    a, b = (tilert.empty((rows, width), dtype, device) for rows in (128, 320))
    product(y.partition(*tile[:2]), a, b, bk=tile[2])
    assert not is_pipelined(device)


@pytest.mark.parametrize(("arch", "names"), [("sm_80", "pipelined"), ("sm_90a", "none")])
def test_off_where_it_is_left_out_and_for_other_targets(
    arch: str, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(schedules.VARIABLE, names)
    device = TargetDevice(arch)
    y = tilert.empty((128, 128), f32, device)
    a = tilert.empty((128, 128), bf16, device)
    product(y.partition(64, 64), a, a, bk=64)
    assert not is_pipelined(device)


def test_on_unless_it_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(schedules.VARIABLE, raising=False)
    assert schedules.enabled() == {"pipelined"}
    monkeypatch.setenv(schedules.VARIABLE, "")
    assert schedules.enabled() == {"pipelined"}


def test_broadcast_operands_are_not_copied_by_boxes() -> None:
    """The copy engine takes no stride of 0."""
    device = TargetDevice("sm_90a")
    y = tilert.empty((128, 128), f32, device)
    a = tilert.empty((1, 128), bf16, device).broadcast_to((128, 128))
    product(y.partition(64, 64), a, a, bk=64).run()
    assert not is_pipelined(device)


def test_a_schedule_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(schedules.VARIABLE, "pipelined, quick")
    with pytest.raises(
        CompileError, match=r"TILERT_SCHEDULES names 'quick'; there are 'pipelined', 'none'"
    ):
        schedules.enabled()


# -- mistakes show -------------------------------------------------------------------------------

MISTAKES = {
    "operands are not waited for": ("barrier_wait(full + 8 * stage, turn);", ""),
    "the phase that is over": ("barrier_wait(full + 8 * stage, turn);",
                               "barrier_wait(full + 8 * stage, turn ^ 1);"),
    "a stage in use is filled": ("barrier_wait(empty + 8 * stage, turn ^ 1);", ""),
    "nothing is ever free": ("barrier_wait(empty + 8 * stage, turn ^ 1);",
                             "barrier_wait(empty + 8 * stage, turn);"),
    "phases never change": ("{ stage = 0; turn ^= 1; }", "{ stage = 0; }"),
    "fewer bytes are waited for": ("barrier_expect(full + 8 * stage, 20480);",
                                   "barrier_expect(full + 8 * stage, 16384);"),
    "a stage is given back too early": ("wgmma_wait<1>();", ""),
    "sums are read too early": ("wgmma_wait<0>();", ""),
    "a product before its fence": ("wgmma_begin();", ""),
    "every thread gives back": (" && threadIdx.x % 32 == 0", ""),
    "a step along k is skipped": ("a + 2, b + 2", "a + 4, b + 2"),
    "rows of the other warpgroup": ("group * 8192", "(1 - group) * 8192"),
    "eight rows too near": ("(u64)(1024 >> 4) << 32", "(u64)(512 >> 4) << 32"),
    "no swizzle": ("(u64)1 << 62", "(u64)0 << 62"),
    "coordinates in the other order": (", coordinate((i64)i6 * 64), coordinate((i64)v1 * 128)",
                                       ", coordinate((i64)v1 * 128), coordinate((i64)i6 * 64)"),
    "scratch over the barriers": ("const u32 full = ring + 61440", "const u32 full = ring + 57344"),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MOST_STAGES", 3)
    device = EmulatedDevice("sm_90a")
    a, a64 = data(device, (3 * 128, 4 * 64), bf16)
    b, b64 = data(device, (32, 4 * 64), bf16, seed=1)

    def run() -> None:
        y = Frame(device, (3 * 128, 32), f32)
        product(y.piece(128, 32), a, b, bk=64).sync()
        y.check(a64 @ b64.T, steps=4 * 64, scale=np.abs(a64) @ np.abs(b64.T))

    mistaken(monkeypatch, *MISTAKES[mistake])
    with pytest.raises(AssertionError):
        run()


# -- the device ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tile", "threads", "stages"),
    [((128, 256, 64), 384, 4), ((128, 128, 64), 384, 6), ((64, 256, 64), 384, 4),
     ((256, 128, 64), 384, 4), ((64, 24, 64), 256, 8), ((128, 128, 128), 384, 3)],
)  # fmt: skip
def test_compiled(tile: tuple[int, int, int], threads: int, stages: int) -> None:
    device = compiled((512, 512, 512), tile)
    (kernel,) = device.kernels
    assert kernel.threads == threads
    assert f"if (++stage == {stages})" in kernel.text
    assert kernel.shared_bytes <= 227 * 1024
    assert kernel.resources.spill_stores == 0
    _, log = nvrtc._compile(kernel.text, kernel.entry, "sm_90a", ("--ptxas-options=--verbose",))
    # What the assembler says where wgmma waits for itself, or setmaxnreg is ignored.
    assert "C75" not in log


def test_machine_code() -> None:
    (kernel,) = compiled((512, 512, 512), (128, 256, 64)).kernels
    (lines,) = sass.disassemble([kernel.cubin], "sm_90a")
    found = Counter(sass.names(lines))
    assert found["HGMMA.64x256x16.F32.BF16"] == 4
    assert found["UTMALDG.2D"] == 2
    assert found["USETMAXREG.DEALLOC.CTAPOOL"] == 1 and found["USETMAXREG.TRY_ALLOC.CTAPOOL"] > 0
    assert found["SYNCS.PHASECHK.TRANS64.TRYWAIT"] >= 2
    assert found["UTMASTG.2D"] == 4
    assert not [name for name in found if re.match(r"(LDL|STL|HMMA)\b", name)]


def test_what_the_page_quotes(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "codegen.md").read_text()
    blocks = re.findall(r"^```(python|cpp)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    path = tmp_path / "example.py"
    path.write_text(blocks[0][1])
    spec = importlib.util.spec_from_file_location("example", path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    device = TargetDevice("sm_90a")
    y = tilert.empty((1024, 1024), bf16, device)
    a = tilert.empty((1024, 512), bf16, device)
    example.matmul(y.partition(128, 256), a, a, bk=64)
    lines = [line.strip() for line in last_text(device).splitlines()]
    quoted = [line for kind, text in blocks if kind == "cpp" for line in text.splitlines()]
    assert len(quoted) == 10
    assert [line for line in quoted if line not in lines] == []
