"""Rule O9: unsafe kernels follow the launch rules, and every opt-out is listed with its reason."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import tilert
from tests.tilert.checks import Frame
from tilert import (
    CompileError,
    Const,
    Dyn,
    IndexMap,
    IndexProof,
    KernelError,
    LaunchError,
    MovedError,
    Mut,
    OwnershipError,
    Ref,
    UniqueIndex,
    f32,
    opt_out,
)
from tilert.target_device import TargetDevice
from tilert.unsafe_kernel import UnsafeKernel

cpu = tilert.device("cpu")

SOURCE = """
extern "C" __global__ void scaled(
    float* y, int y_dim0, const float* x, int x_dim0, int grid0) {  // y, and x
  int i = blockIdx.x * tilert::y_tile0 + threadIdx.x;
  if (threadIdx.x < tilert::y_tile0 && i < y_dim0)
    y[i] = x[i] * (float)tilert::by + (tilert::shift ? (float)tilert::steps : 0.0f);
}
"""


def reference(
    y: np.ndarray, x: np.ndarray, *, by: float, steps: int = 0, shift: bool = False
) -> None:
    y[...] = x * by + (steps if shift else 0)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opt_out, "_known", dict(opt_out._known))


def made(**changed: Any) -> UnsafeKernel:
    def scaled(
        y: Mut[Dyn],
        x: Ref[Dyn],
        by: Const[float],
        steps: Const[int] = 0,
        shift: Const[bool] = False,
    ) -> None: ...

    given: dict[str, Any] = {"source": SOURCE, "reference": reference, "reason": "a test"}
    return tilert.unsafe_kernel(**given | changed)(scaled)


def some(device: tilert.Device, n: int = 100) -> tilert.Array:
    return tilert.from_numpy(np.arange(n, dtype=np.float32), device)


def test_text_and_reference_give_the_same(device: tilert.Device) -> None:
    """The reference runs on the cpu, the text on a GPU."""
    for size in (0, 1, 32, 100):
        y = Frame(device, (size,))
        part = y.piece(32)
        out = made()(part, some(device, size), by=2, steps=3, shift=True).run()
        assert out is part.array
        y.check_exact(np.arange(size, dtype=np.float32) * 2 + 3)


@tilert.kernel
def twin(y: Mut[Dyn], x: Ref[Dyn], by: Const[float], steps: Const[int] = 0):
    y.store(x.tile_like(y) * by + steps)


@pytest.mark.parametrize("size", [0, 1, 31, 1000])
def test_safe_and_unsafe_twins_are_equal(device: tilert.Device, size: int) -> None:
    x = some(device, size)
    one, two = Frame(device, (size,)), Frame(device, (size,))
    made()(one.piece(32), x, 0.5, 7, True).run()
    twin(two.piece(32), x, 0.5, 7).run()
    one.check_exact(np.arange(size, dtype=np.float32) * 0.5 + 7)
    assert one.array.numpy().tobytes() == two.array.numpy().tobytes()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_source_compiles_with_the_constants_of_the_launch(arch: str) -> None:
    device = TargetDevice(arch)
    kernel = made(threads=64)
    kernel(tilert.zeros(100, f32, device).partition(32), some(device), 0.1, -(2**63)).run()
    kernel(tilert.zeros(200, f32, device).partition(32), some(device, 200), 0.1, -(2**63)).run()
    (compiled,) = device.kernels
    assert (compiled.entry, compiled.threads, compiled.name) == ("scaled", 64, "scaled")
    assert "constexpr double by = 0x1.999999999999ap-4;" in compiled.text
    assert "constexpr long long steps = (-9223372036854775807LL - 1);" in compiled.text
    assert "constexpr bool shift = false;" in compiled.text
    assert "constexpr int y_tile0 = 32;" in compiled.text
    assert device.launches == ["scaled", "scaled"]
    with pytest.raises(CompileError, match="kernel 'scaled' does not compile for") as caught:
        made(source=SOURCE.replace("y[i] =", "y[j] ="))(
            tilert.zeros(100, f32, device).partition(32), some(device), 0.1
        )
    # Lines are those of the text, not of what is put before it.
    assert "scaled(6): error" in str(caught.value)


def test_launch_rules_hold() -> None:
    kernel, y, x = made(), some(cpu), some(cpu)
    with pytest.raises(
        OwnershipError, match="O3 alias xor mutate: argument 'x' of kernel 'scaled'"
    ):
        kernel(y.partition(32), y, 1.0)
    op = kernel(y.partition(32), x, 1.0)
    with pytest.raises(MovedError, match=r"O5 move: .* is held by op 'scaled' created at"):
        y.numpy()
    op.run()
    with pytest.raises(LaunchError) as caught:
        kernel(y.partition(32, pieces=slice(0, 1)), x, 1.0)
    assert str(caught.value) == (
        "O9 opt-out: unsafe kernel 'scaled' cannot be told where the pieces of 'y' are; partition"
        " it without pieces= and map="
    )
    with pytest.raises(LaunchError, match="kernel 'scaled': argument 'by' is missing"):
        kernel(y.partition(32), x)
    device = TargetDevice("sm_80")
    with pytest.raises(LaunchError, match=r"'by' is inf, which CUDA C\+\+ has no constant for"):
        kernel(some(device).partition(32), some(device), float("inf"))
    with pytest.raises(
        LaunchError, match="was partitioned for 2 programs, but each program of ker"
    ):
        kernel(y.partition(32, programs=2), x, 1.0)
    y.numpy()


def test_index_maps_reach_text_and_reference(device: tilert.Device) -> None:
    def scatter(y: Mut[Dyn], x: Ref[Dyn]) -> None: ...

    def rows(y: np.ndarray, x: np.ndarray, y_map: np.ndarray) -> None:
        y[y_map[y_map >= 0]] = x[y_map >= 0]

    text = """
extern "C" __global__ void scatter(
    float* y, const int* map, int y_dim0, const float* x, int x_dim0, int grid0) {
  if (map[blockIdx.x] >= 0)
    y[map[blockIdx.x] * tilert::y_stride0 + threadIdx.x] = x[blockIdx.x * 4 + threadIdx.x];
}"""
    options: Any = {"reference": rows, "reason": "a test", "threads": 4}
    kernel = tilert.unsafe_kernel(source=text, **options)(scatter)
    before, x = np.full((5, 4), -1, np.float32), np.arange(12, dtype=np.float32).reshape(3, 4)
    for entries in ([4, -1, 0], []):
        y = Frame(device, (5, 4), values=before)
        index = UniqueIndex.checked(np.array(entries, np.int32), device)
        source = tilert.from_numpy(x[: len(entries)], device)
        kernel(y.view.partition_at(index, 1, 4), source).run()
        want = before.copy()
        want[[4, 0][: len(entries)]] = x[[0, 2][: len(entries)]]
        y.check_exact(want)
    target = TargetDevice("sm_80")
    index = UniqueIndex.checked(np.array([4, -1, 0]), target)
    on = tilert.zeros((5, 4), f32, target).partition_at(index, 1, 4)
    kernel(on, tilert.zeros((3, 4), f32, target)).run()
    assert target.kernels[0].entry == "scatter"


def test_a_reference_that_writes_to_a_ref() -> None:
    def wrong(y: np.ndarray, x: np.ndarray, **_: Any) -> None:
        x[0] = 1

    op = made(reference=wrong)(some(cpu).partition(32), some(cpu), 1.0)
    with pytest.raises(OwnershipError) as caught:
        op.run()
    assert str(caught.value) == (
        "O1 exclusive write: the reference of unsafe kernel 'scaled' writes to a Ref; make it a Mut"
    )

    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("shapes differ")

    with pytest.raises(ValueError, match="shapes differ"):
        made(reference=broken)(some(cpu).partition(32), some(cpu), 1.0).run()


NO_KERNEL = (
    "O9 opt-out: the source of unsafe kernel 'scaled' has no extern \"C\" __global__ void scal"
)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (
            {"reason": " "},
            OwnershipError,
            f"O9 opt-out: unsafe kernel '{__name__}.scaled' gives no reason; say in reason= why it"
            " is right, for those who read the audit",
        ),
        (
            {"reference": None},
            OwnershipError,
            "O9 opt-out: unsafe kernel 'scaled' needs reference=, a NumPy function of the same"
            " arguments",
        ),
        ({"source": ""}, LaunchError, NO_KERNEL + "ed(...)"),
        ({"source": SOURCE.replace("__global__", "")}, LaunchError, NO_KERNEL + "ed(...)"),
        ({"source": f"/* {SOURCE} */"}, LaunchError, NO_KERNEL + "ed(...)"),
        (
            {"threads": 2000},
            LaunchError,
            "unsafe kernel 'scaled' takes 1 to 1024 threads and no negative shared_bytes, got 2000"
            " and 0",
        ),
    ],
)
def test_wrong_definitions(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        made(**changed)
    assert str(caught.value) == message


def test_a_body_is_refused() -> None:
    def scaled(y: Mut) -> None:
        y.store(0.0)

    with pytest.raises(KernelError) as caught:
        tilert.unsafe_kernel(source=SOURCE, reference=reference, reason="a test")(scaled)
    assert caught.value.message == (
        "O9 opt-out: the body of an unsafe kernel is its source= text; write ... here"
    )


def test_a_source_with_other_parameters() -> None:
    short = made(source=SOURCE.replace(", int grid0", ""))
    with pytest.raises(LaunchError) as caught:
        short(some(cpu).partition(32), some(cpu), 1.0)
    assert str(caught.value) == (
        "O9 opt-out: the source of unsafe kernel 'scaled' takes 4 parameters, this launch passes 5:"
        " f32* y, int y_dim0, const f32* x, int x_dim0, int grid0"
    )


def test_audit_lists_what_is_defined() -> None:
    before = set(tilert.audit())
    kernel = made(reason="one  pass\n over x")
    line = sys._getframe().f_lineno - 1
    proof = IndexProof("Mine", "rows count up")
    new = [one for one in tilert.audit() if one not in before]
    assert kernel.opt_out in new and proof.opt_out in new and len(new) == 2
    mine = proof.opt_out
    assert (mine.kind, mine.name, mine.reason) == ("index proof", "Mine", "rows count up")
    assert (mine.filename, mine.line) == (__file__, line + 2)
    assert (kernel.opt_out.kind, kernel.opt_out.reason) == ("unsafe kernel", "one pass over x")
    assert kernel.opt_out.name == f"{__name__}.scaled"
    assert str(mine) == f"index proof Mine: rows count up ({__file__}:{line + 2})"


def test_index_maps_have_a_proof() -> None:
    rows = tilert.from_numpy(np.arange(3, dtype=np.int32), cpu)
    with pytest.raises(OwnershipError) as caught:
        IndexMap(rows, 3)
    assert str(caught.value) == (
        "O7 indexed pieces: an IndexMap by itself proves nothing; use UniqueIndex.checked or a"
        " PageTable"
    )
    with pytest.raises(OwnershipError) as caught:
        UniqueIndex(rows, 3)
    assert str(caught.value) == (
        "O7 indexed pieces: UniqueIndex.checked(values, device) makes an index map; it looks at"
        " every row"
    )
    with pytest.raises(OwnershipError) as caught:

        class Mine(IndexMap):
            pass

    assert str(caught.value) == (
        "O7 indexed pieces: the index map type 'Mine' does not say why its rows are distinct; give"
        " proof=IndexProof(name, reason)"
    )
    with pytest.raises(OwnershipError, match="O9 opt-out: index proof 'Mine' gives no reason"):
        IndexProof("Mine", "")

    class Counting(IndexMap, proof=IndexProof("Counting", "rows count up")):
        pass

    index = Counting(rows, 3)
    part = tilert.zeros((4, 2), f32, cpu).partition_at(index, 1, 2)
    assert part.grid == (3, 1)


def test_serving_has_no_unsafe_kernel() -> None:
    # In a process of its own: what serving imports, and nothing that tests define.
    code = "import sys; from server.cli import main; sys.exit(main(['audit']))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    *listed, last = done.stdout.splitlines()
    assert last == "0 unsafe kernels, 2 index proofs"
    assert [one.split(":")[0] for one in listed] == [
        "index proof PageTable.slots",
        "index proof DecodeIndex",
    ]
