"""`tilert.explain`: what it says of kernels of each schedule, of real arrays and without compilers,
and that docs/codegen.md shows what it prints."""

import re
import runpy
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilert
from models import kernels
from tilert import Const, Dyn, Mut, Ref, bf16, f32, i32, nvrtc
from tilert.errors import CompileError, KernelError, LaunchError, OwnershipError
from tilert.estimate import Estimate
from tilert.language import exp, fma, mma, sum, tiles, zeros
from tilert.target_device import TargetDevice

PAGE = Path(__file__).resolve().parents[2] / "docs" / "codegen.md"


@tilert.kernel
def matmul(y: Mut, a: Ref, b: Ref, bk: Const[int]):
    m, n = y.index
    acc = zeros(y.shape, f32)
    for k in tiles(a, axis=1, size=bk):
        acc = mma(a[m, k], b[n, k].T, acc)
    y.store(acc)


@tilert.kernel
def scaled(y: Mut, a: Ref, b: Ref, bk: Const[int]):
    """A left operand that is computed."""
    m, n = y.index
    acc = zeros(y.shape, f32)
    for k in tiles(a, axis=1, size=bk):
        acc = mma((a[m, k].to(f32) * 2.0).to(bf16), b[n, k].T, acc)
    y.store(acc)


@tilert.kernel
def twice(y: Mut, x: Ref):
    y.store(x.tile_like(y) * 2.0)


def explained(tile: tuple[int, int], arch: str = "sm_90a", kernel: Any = matmul) -> Any:
    shape = 512, 512
    return tilert.explain(
        kernel, (shape, f32, tile), (shape, bf16), (shape, bf16), bk=64, arch=arch
    )


def test_a_pipelined_product() -> None:
    found = explained((128, 256))
    assert (found.kernel, found.arch, found.schedule) == ("matmul", "sm_90a", "pipelined")
    assert (found.grid, found.blocks, found.threads) == ((4, 2), None, 384)
    assert found.resources is not None and found.resources.spill_stores == 0
    assert found.resources.registers == 168
    # 8 programs of 8 steps with 128 + 256 rows of 64 elements; each array once.
    assert found.estimate == Estimate(
        2 * 512**3, 8 * 8 * 384 * 64 * 2 + 512 * 512 * 4, 512 * 512 * 8, True
    )
    assert set(found.refused) == {"streaming", "skinny", "staged", "thin", "attention"}
    assert found.missing == []
    assert any(line.startswith("HGMMA") for line in found.machine_code)
    assert "wgmma_n256" in found.source
    assert "%13: f32[128, 256] = mma(%10, %12, %9)" in found.tile_ir
    shown = str(found)
    assert shown == repr(found)
    assert shown.startswith(
        "kernel 'matmul' for sm_90a\n  schedule        pipelined: the copy engine"
    )
    assert "4 x 2 programs, which as many blocks as run at once take in turns" in shown
    assert "168 registers, no spills" in shown
    assert "2.1 MB, 4.19 MB asked for by all programs" in shown
    assert "268 MFLOP, 128 for each byte" in shown
    assert " 4 HGMMA.64x256x16.F32.BF16," in shown
    # The helpers are left out.
    assert shown.count("wgmma_n256") == 4


PIPELINED = "pipelined comes first where a kernel has its form"
THIN = "its products have 128 rows; up to 4 are taken, of few elements"


@pytest.mark.parametrize(
    ("tile", "arch", "kernel", "schedule", "refused"),
    [
        (
            (128, 256), "sm_90a", matmul, "pipelined",
            {"streaming": "it has products of tiles", "skinny": THIN, "staged": PIPELINED,
             "thin": "its products have 128 rows; pipelined is for so many",
             "attention": "it does not have two products of which one feeds the other"},
        ),
        (
            (128, 256), "sm_80", matmul, "staged",
            {"streaming": "it has products of tiles", "skinny": THIN,
             **dict.fromkeys(("pipelined", "thin", "attention"),
                             "sm_80 has no warpgroup products; sm_90a alone has them")},
        ),
        (
            (1, 64), "sm_90a", matmul, "skinny",
            {"streaming": "it has products of tiles",
             "staged": "its products have 1 rows, which is skinny",
             **dict.fromkeys(("pipelined", "thin"),
                             "its products of tiles are not all in one loop by themselves"),
             "attention": "it does not have two products of tiles in one loop"},
        ),
        (
            (8, 64), "sm_90a", matmul, "thin",
            {"streaming": "it has products of tiles",
             "skinny": THIN.replace("128", "8"),
             "staged": PIPELINED.replace("pipelined", "thin"),
             "pipelined": "its products have 8 rows; thin is for so many",
             "attention": "it does not have two products of which one feeds the other"},
        ),
        (
            (128, 64), "sm_90a", scaled, "staged",
            {"streaming": "it has products of tiles", "skinny": THIN,
             **dict.fromkeys(("pipelined", "thin"),
                             "the copy engine cannot bring a left operand as products want it"),
             "attention": "it does not have two products of tiles in one loop"},
        ),
        (
            (128, 4), "sm_90a", matmul, "staged",
            {"streaming": "it has products of tiles", "skinny": THIN,
             **dict.fromkeys(("pipelined", "thin"),
                             "warpgroups cannot share sums of 128 x 4 out"),
             "attention": "it does not have two products of tiles in one loop"},
        ),
    ],
)  # fmt: skip
def test_schedules(
    tile: tuple[int, int], arch: str, kernel: Any, schedule: str, refused: dict[str, str]
) -> None:
    found = explained(tile, arch, kernel)
    assert (found.schedule, found.refused) == (schedule, refused)
    for name, why in refused.items():
        assert f"not {name}: {why}\n" in str(found)


def test_a_kernel_without_products() -> None:
    found = tilert.explain(twice, ((64, 4096), f32, (1, 4096)), ((64, 4096), f32), arch="sm_89")
    assert (found.schedule, found.blocks, found.threads) == ("streaming", 64, 512)
    assert found.refused["staged"] == found.refused["skinny"] == "it has no products of tiles"
    assert "64 x 1 programs, a block each" in str(found)
    assert found.estimate == Estimate(64 * 4096, 2 * 64 * 4096 * 4, 2 * 64 * 4096 * 4, True)


def test_attention_of_prompts() -> None:
    tokens, heads, pages = 128, (8, 2), 4
    found = tilert.explain(
        kernels.prefill_attention, ((tokens, heads[0], 128), bf16, (128, 1, 128)),
        ((tokens, heads[0], 128), bf16), ((pages, 64, heads[1], 128), bf16),
        ((pages, 64, heads[1], 128), bf16), ((1, pages), i32), ((1,), i32), ((tokens,), i32),
        ((2,), i32), ((1,), i32), scale=0.1, pages=2, arch="sm_90a",
    )  # fmt: skip
    assert found.schedule == "attention" and found.blocks is None
    assert (
        found.refused["pipelined"] == "its products of tiles are not all in one loop by themselves"
    )
    # How many keys there are, positions say.
    assert not found.estimate.complete
    assert ", with one turn of each loop whose length arrays hold" in str(found)


def test_switches_and_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILERT_SCHEDULES", "none")
    assert explained((128, 256)).refused["pipelined"] == "TILERT_SCHEDULES leaves it out"
    monkeypatch.delenv("TILERT_SCHEDULES")
    gpu = TargetDevice("sm_90a", check=True)
    y, a = tilert.empty((512, 512), f32, gpu), tilert.empty((512, 512), bf16, gpu)
    found = tilert.explain(matmul, y.partition(128, 256), a, a, bk=64)
    why = "the copy engine's accesses cannot be checked one by one"
    assert (found.arch, found.schedule, found.refused["attention"]) == ("sm_90a", "staged", why)


def test_real_arrays_are_only_looked_at() -> None:
    cpu = tilert.device("cpu")
    x = tilert.from_numpy(np.arange(4100, dtype=np.float32).reshape(1, 4100), cpu)
    y = tilert.zeros((1, 4096), f32, cpu)
    aligned, past = (
        tilert.explain(twice, y.partition(1, 1024), x[:, i : i + 4096], arch="sm_90a")
        for i in (0, 1)
    )
    assert any(line.startswith("LDG.E.128") for line in aligned.machine_code)
    assert not any(line.startswith("LDG.E.128") for line in past.machine_code)
    assert aligned.grid == (1, 4)
    # The array is back, and untouched.
    np.testing.assert_array_equal(y.numpy(), np.zeros((1, 4096), np.float32))
    np.testing.assert_array_equal(
        twice(y.partition(1, 4096), x[:, 4:]).sync().numpy(), x.numpy()[:, 4:] * 2
    )


def test_pieces_that_maps_place() -> None:
    cpu = tilert.device("cpu")
    y = tilert.zeros((8, 64), f32, cpu)
    rows = tilert.UniqueIndex.checked([5, 1, 2], cpu)
    found = tilert.explain(twice, y.partition_at(rows, 1, 64), ((3, 64), f32), arch="sm_90a")
    assert found.grid == (3, 1) and "a_y_map[" in found.source
    part = y.partition(1, 64, pieces=(slice(0, 4), slice(None)))
    half = tilert.explain(twice, part, ((8, 64), f32), arch="sm_90a")
    assert half.grid == (4, 1)


@tilert.kernel
def triangle(y: Mut, x: Ref):
    m, _ = y.index
    acc = zeros(y.shape, f32)
    for k in range(m.number + 1):
        acc = fma(x[k, 0], 2.0, acc)
    y.store(exp(acc))


@tilert.kernel
def counted(y: Mut, x: Ref, count: Ref):
    acc = zeros(y.shape, f32)
    for k in range(count[0]):
        acc = acc + x[k, 0]
    y.store(sum(acc, axis=1)[:, None] + y.load())


@tilert.kernel
def walked(y: Mut[Dyn], x: Ref[Dyn]):
    for piece in y.pieces():
        piece.store(x.tile_like(piece) + 1.0)


def test_estimates() -> None:
    found = tilert.explain(triangle, ((4, 32), f32, (1, 32)), ((4, 32), f32), arch="sm_80")
    # Rows have 1, 2, 3 and 4 turns.
    assert found.estimate == Estimate(10 * 64 + 4 * 32, 10 * 4 + 512, 10 * 4 + 512, True)
    found = tilert.explain(
        counted, ((4, 32), f32, (1, 32)), ((9, 32), f32), ((1,), i32), arch="sm_80"
    )
    assert found.estimate == Estimate(4 * 3 * 32, 4 * (4 + 4 + 256), 4 + 16 + 1024, False)
    found = tilert.explain(walked, ((100, 32), f32, (16, 32)), ((100, 32), f32), arch="sm_80")
    assert found.blocks is None
    assert found.estimate == Estimate(7 * 512, 2 * 7 * 2048, 2 * 12800, True)


def test_without_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        patch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
        found = explained((128, 256))
        assert found.resources is not None and found.machine_code == []
        assert "missing         machine code cannot be read without nvdisasm; inst" in str(found)

    def absent() -> Any:
        raise CompileError("NVRTC cannot be loaded (no module)")

    monkeypatch.setattr(nvrtc, "_nvrtc", absent)
    found = explained((128, 256))
    assert found.resources is None and found.schedule == "pipelined"
    assert found.missing == ["NVRTC cannot be loaded (no module)"]
    assert "a thread has    not known: it was not compiled" in str(found)
    assert "missing         NVRTC cannot be loaded (no module)" in str(found)


@tilert.unsafe_kernel(
    source='extern "C" __global__ void one(float* y) { *y = 1.0f; }', threads=32,
    reference=lambda y: y.fill(1), reason="A test of explain.",
)  # fmt: skip
def one(y: Mut): ...


def test_an_unsafe_kernel() -> None:
    found = tilert.explain(one, ((1,), f32, (1,)), arch="sm_90a")
    assert (found.schedule, found.threads, found.estimate) == ("unsafe", 32, None)
    assert "*y = 1.0f;" in str(found) and "an unsafe kernel has none" in str(found)


SHAPE = (64, 64)
Y, X = (SHAPE, f32, (1, 64)), (SHAPE, f32)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((len, 1), LaunchError, "explain takes a kernel that tilert.kernel made, got builtin"),
        ((twice, Y), LaunchError, "kernel 'twice': argument 'x' is missing"),
        ((twice, X, X), LaunchError, r"argument 'y' of kernel 'twice': what stands for a Mut is"
         r" \(shape, dtype, tile\), such as \(\(512, 512\), tilert.bf16, \(128, 64\)\); got"),
        ((twice, Y, Y), LaunchError, r"argument 'x' of kernel 'twice': what stands for a Ref is"
         r" \(shape, dtype\), such as \(\(512, 512\), tilert.bf16\); got"),
        ((twice, Y, (SHAPE, "f32")), LaunchError, "what stands for a Ref is"),
        ((twice, Y, (64, f32)), LaunchError, "what stands for a Ref is"),
        ((twice, (SHAPE, f32, (1,)), X), LaunchError, "partition takes one size for each axis"),
        ((twice, Y, 3.0), LaunchError, "must be an Array, got float"),
        ((twice, ((0, 64), f32, (1, 64)), X), LaunchError, "the grid has no programs"),
        ((matmul, Y, X, X, 0), KernelError, "size"),
    ],
)  # fmt: skip
def test_what_cannot_be_explained(
    arguments: tuple[Any, ...], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        tilert.explain(*arguments, arch="sm_90a")


def test_an_op_and_aliases() -> None:
    cpu = tilert.device("cpu")
    y, x = tilert.zeros(SHAPE, f32, cpu), tilert.zeros(SHAPE, f32, cpu)
    with pytest.raises(LaunchError, match=r"write explain\(twice, ...\) in place of explain\(twic"):
        tilert.explain(twice(y.partition(1, 64), x))
    with pytest.raises(OwnershipError, match="O3"):
        tilert.explain(twice, y.partition(1, 64), y, arch="sm_90a")


# -- the page ------------------------------------------------------------------------------------


def test_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    kernel, shown, listing = (text for kind, text in blocks if kind == "python")
    path = tmp_path / "example.py"
    path.write_text(kernel + shown + listing)
    result = runpy.run_path(str(path))
    printed = capsys.readouterr().out
    quoted = [text for kind, text in blocks if kind == "text"]
    assert len(quoted) == 4
    for text in quoted:
        # Each line, as far as it is quoted, in this order.
        lines = iter(printed.splitlines())
        for start in text.splitlines():
            if start != "...":
                assert any(line.startswith(start) for line in lines), start
    assert result["found"].schedule == "pipelined"
