"""Checked CUDA kernels: bounds checks in the text, run on the host and on a GPU."""

import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilert
from tests.tilert import test_language_control as control
from tests.tilert import test_language_memory as language_memory
from tests.tilert import test_language_mma as products
from tests.tilert import test_language_order as order
from tests.tilert.checks import Frame, ints
from tests.tilert.emulator import EmulatedDevice, compiler
from tilert import (
    Accumulate,
    CheckError,
    Const,
    DeviceError,
    Dyn,
    IndexMap,
    IndexProof,
    KernelError,
    Mut,
    Ref,
    RepeatedIndex,
    bf16,
    f32,
    i32,
    opt_out,
)
from tilert.checks import Check, Checks, checks_of
from tilert.codegen import bounds
from tilert.codegen import memory as codegen_memory
from tilert.cpu_device import CpuDevice
from tilert.fault import RECORD, Faults, Site, Watch
from tilert.kernel import Kernel
from tilert.language import debug_assert, span, take
from tilert.target_device import TargetDevice

EMULATED = pytest.param(
    "emulated", marks=pytest.mark.skipif(compiler() is None, reason="no C++ compiler here")
)
BACKENDS = ["cpu", EMULATED, pytest.param("cuda", marks=pytest.mark.gpu)]
Make = Callable[[Check], tilert.Device]


@pytest.fixture(params=BACKENDS)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes a checked device of each backend."""
    monkeypatch.setattr(opt_out, "_known", {})
    made: list[tilert.Device] = []

    def device(check: Check) -> tilert.Device:
        if request.param == "cpu":
            made.append(CpuDevice(check))
        elif request.param == "emulated":
            made.append(EmulatedDevice(check=check))
        else:
            from tilert.cuda_device import CudaDevice

            made.append(CudaDevice(0, check))
        return made[-1]

    yield device
    for one in made:
        one.synchronize()


def said(run: Callable[[], object], kernel: Kernel, kind: type[Exception] = CheckError) -> str:
    """What an error says, with lines counted from the kernel's first."""
    with pytest.raises(kind) as caught:
        run()
    place = re.escape(__file__) + r":(\d+)"
    first = kernel.source.first_line - 1
    return re.sub(place, lambda m: f"line {int(m[1]) - first}", str(caught.value))


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


class Believed(IndexMap, proof=IndexProof("Believed", "a test")):
    """Entries as they come."""


# Index maps (rule O7): the same error on every backend


@tilert.kernel
def scatter(y: Mut[Dyn], x: Ref[Dyn]):
    i, j = y.index
    y.store(x[i, j])


@tilert.kernel
def gather_add(y: Mut[Dyn, Accumulate.Add], x: Ref[Dyn]):
    i, j = y.index
    y.add(x[i, j])


@tilert.kernel
def twice(y: Mut[Dyn]):
    y.store(y.load() * 2.0)


ROWS: list[tuple[Kernel, str, str, bool]] = [
    (scatter, "line 4", "y.store(x[i, j])", True),
    (gather_add, "line 4", "y.add(x[i, j])", True),
    (twice, "line 3", "y.store(y.load() * 2.0)", False),
]


@pytest.mark.parametrize(("kernel", "line", "text", "reads"), ROWS)
def test_an_index_map_that_reaches_too_far(
    make: Make, kernel: Kernel, line: str, text: str, reads: bool
) -> None:
    dev = make(True)
    y, x = Frame(dev, (4, 6), margin=8, values=numbers(4, 6)), tilert.from_numpy(numbers(3, 6), dev)
    index = Believed(tilert.from_numpy(np.array([2, 9, -1], np.int32), dev), 4)

    def run() -> None:
        arguments = (y.view.partition_at(index, 1, 6), *([x] if reads else []))
        kernel(*arguments).sync()

    found = said(run, kernel)
    assert found == (
        f"O7 indexed pieces: the index map of 'y' gives program (1, 0) of kernel '{kernel.name}'"
        " row 9, the array has 4 rows\n"
        f"  program (1, 0) reaches for row 9, {line}\n"
        f"        {text}\n"
        "        ^"
    )
    # Nothing was written beside the piece that is there, and the device goes on.
    want = numbers(4, 6)
    want[2] = {"scatter": numbers(3, 6)[0], "twice": want[2] * 2}.get(
        kernel.name, want[2] + numbers(3, 6)[0]
    )
    y.check_exact(want)
    y.array.copy_from(y.before)
    good = Believed(tilert.from_numpy(np.array([2, -1, -1], np.int32), dev), 4)
    kernel(y.view.partition_at(good, 1, 6), *([x] if reads else [])).sync()
    y.check_exact(want)


def test_every_wait_reports_and_an_error_comes_once(make: Make) -> None:
    dev = make(True)
    x = tilert.from_numpy(numbers(2, 6), dev)
    y = tilert.zeros((4, 6), f32, dev)
    index = Believed(tilert.from_numpy(np.array([1, 4], np.int32), dev), 4)
    if dev.kind == "cpu" and not isinstance(dev, EmulatedDevice):
        pytest.skip("the cpu reports at the launch")
    waits: list[Callable[[], object]] = [dev.synchronize, y.numpy]
    if dev.kind == "cuda":
        waits.append(lambda: dev.record_event().wait())
    for wait in waits:
        scatter(y.partition_at(index, 1, 6), x).run()
        scatter(y.partition_at(index, 1, 6), x).run()
        with pytest.raises(CheckError, match="program \\(1, 0\\) of kernel 'scatter' row 4") as got:
            wait()
        assert all(f"created at {__file__}:" in note for note in got.value.__notes__)
        assert got.value.__notes__[0].startswith("enqueued as op 'scatter' created at")
        dev.synchronize()
    with tilert.capture(dev, lambda: scatter(y.partition_at(index, 1, 6), x).run()) as graph:
        for _ in range(2):
            graph.replay()
            with pytest.raises(CheckError, match="row 4"):
                dev.synchronize()
    assert y.numpy().tolist() == [[0] * 6, numbers(2, 6)[0].tolist(), [0] * 6, [0] * 6]


def test_rows_that_repeat_and_one_that_reaches_too_far(make: Make) -> None:
    dev = make(True)
    y, x = Frame(dev, (4, 6), values=numbers(4, 6)), tilert.from_numpy(numbers(3, 6), dev)
    index = RepeatedIndex(ints(dev, [2, 2, 4]), 4)
    with pytest.raises(CheckError, match=r"program \(2, 0\) of kernel 'gather_add' row 4, the arr"):
        gather_add(y.view.partition_at(index, 1, 6), x).sync()
    want = numbers(4, 6)
    want[2] += numbers(3, 6)[:2].sum(0)
    y.check_exact(want)


@tilert.kernel
def walked(y: Mut[Dyn, Dyn], x: Ref[Dyn, Dyn]):
    for piece in y.pieces():
        i, j = piece.index
        piece.store(x[i, j])


@pytest.mark.parametrize("count", [1, 2, 5])
def test_walking_programs_are_named_by_piece(make: Make, count: int) -> None:
    dev = make(True)
    dev.concurrent = count
    y, x = tilert.zeros((4, 6), f32, dev), tilert.from_numpy(numbers(5, 6), dev)
    index = Believed(tilert.from_numpy(np.array([3, 0, -1, 1, 4], np.int32), dev), 4)
    with pytest.raises(CheckError, match=r"program \(4, [01]\) of kernel 'walked' row 4"):
        walked(y.partition_at(index, 1, 3), x).sync()
    assert y.numpy().tolist() == [*numbers(5, 6)[[1, 3]].tolist(), [0] * 6, [0, 1, 2, 3, 4, 5]]


# Strict checks


@tilert.kernel
def rows_of(y: Mut[Dyn], x: Ref[Dyn], at: Ref[Dyn]):
    i, j = y.index
    y.store(x[at.load(i, fill=0), j])


@tilert.kernel
def points(y: Mut, x: Ref, at: Ref):
    y.store(x[at[0], at[1]])


@tilert.kernel
def spans(y: Mut, x: Ref, at: Ref):
    y.store(x[span(at[0], 3), 0])


@tilert.kernel
def taken(y: Mut, x: Ref, at: Ref):
    y.store(take(x[0, :], at[:], axis=0))


STRICT: list[tuple[Kernel, Any, list[int], list[int], int, str]] = [
    # kernel, piece of y, indices inside, outside, the bad one, what is read.
    (rows_of, (8, 4), [4, 0, 2], [4, -1, 2], -1, "axis 0 of 'x', which has 5"),
    (rows_of, (2, 4), [4, 0, 2], [4, 1, 5], 5, "axis 0 of 'x', which has 5"),
    (points, (1,), [4, 3], [1, 4], 4, "axis 1 of 'x', which has 4"),
    (points, (1,), [0, 0], [-2, 0], -2, "axis 0 of 'x', which has 5"),
    (spans, (3,), [-2], [-3], -3, "axis 0 of 'x', which has 5"),
    (spans, (3,), [4], [5], 5, "axis 0 of 'x', which has 5"),
    (taken, (2,), [3, 0], [3, 4], 4, "axis 0 of a tile, which has 4"),
]


@pytest.mark.parametrize(("kernel", "tile", "good", "bad", "index", "of"), STRICT)
def test_reads_outside_are_errors_where_checks_are_strict(
    make: Make, kernel: Kernel, tile: Any, good: Any, bad: Any, index: int, of: str
) -> None:
    shape = (3, 4) if kernel is rows_of else tile

    def run(check: Check, at: list[int]) -> np.ndarray:
        dev = make(check)
        x = tilert.from_numpy(numbers(5, 4) + 1, dev)
        y = Frame(dev, shape)
        kernel(y.piece(*tile), x, ints(dev, at)).sync()
        return y._inside()

    run("strict", good)
    # Otherwise they read as 0.
    assert (run(True, bad) == 0).any()
    found = said(lambda: run("strict", bad), kernel).split("\n")
    assert found[0] == (
        f"strict bounds: kernel '{kernel.name}' reads at index {index} on {of} elements; unless"
        " checks are strict it reads as the fill value"
    )
    assert re.fullmatch(r"  program \(\d(, \d)?\) reads it, line [34]", found[1])


@tilert.kernel
def shifted(y: Mut[Dyn], x: Ref[Dyn], by: Const[int]):
    i = y.index[0]
    y.store(x[span(i.start + by, i.size)])


def test_an_edge_is_no_fault(make: Make) -> None:
    dev = make("strict")
    y, x = Frame(dev, (10,)), tilert.from_numpy(numbers(10) + 1, dev)
    shifted(y.piece(4), x, 1).sync()
    y.check_exact(np.append(numbers(10)[1:] + 1, 0))
    with pytest.raises(CheckError, match=r"at index 12 on axis 0 of 'x', which has 10 elements"):
        shifted(y.piece(4), x, 4).sync()


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler here")
@settings(max_examples=15)
@given(data=st.data())
def test_an_error_if_and_only_if_an_index_is_outside(data: st.DataObject) -> None:
    dev = EmulatedDevice(check="strict")
    at = data.draw(st.lists(st.integers(-2, 6), min_size=1, max_size=9))
    y = Frame(dev, (len(at), 4))
    x = tilert.from_numpy(numbers(5, 4) + 1, dev)
    outside = {i for i in at if not 0 <= i < 5}
    want = np.where(np.isin(at, list(outside))[:, None], 0, (numbers(5, 4) + 1)[np.clip(at, 0, 4)])
    op = rows_of(y.piece(2, 4), x, ints(dev, at))
    if not outside:
        op.sync()
    else:
        with pytest.raises(CheckError) as caught:
            op.sync()
        found = re.search(r"at index (-?\d+) on axis 0 of 'x'", str(caught.value))
        assert found is not None and int(found[1]) in outside
    y.check_exact(want)


# debug_assert


@tilert.kernel
def careful(y: Mut[Dyn, Dyn], x: Ref[Dyn, Dyn], limit: Ref):
    i, j = y.index
    v = x[i, j]
    debug_assert(limit[0] > 0.0, "no limit")
    if j.number == 1:
        debug_assert(v < limit[0], "too large")
    y.store(v)


def test_asserts_leave_the_device_usable(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILERT_DEBUG", "1")
    dev = make(True)
    x = tilert.from_numpy(numbers(4, 6), dev)
    y = tilert.zeros((4, 6), f32, dev)

    def run(limit: float) -> None:
        careful(y.partition(2, 3), x, tilert.full(1, limit, f32, dev)).sync()

    run(24)
    assert (y.numpy() == numbers(4, 6)).all()
    assert said(lambda: run(23), careful, KernelError) == (
        "debug_assert failed in program (1, 1), element [1, 2]: too large\n"
        "  line 7\n"
        '            debug_assert(v < limit[0], "too large")\n'
        "            ^"
    )
    # Of several the first is told, whichever that is.
    found = said(lambda: run(-1), careful, KernelError).split("\n")[0]
    assert re.fullmatch(r"debug_assert failed in program .*: (no limit|too large)", found)
    run(24)


# What the compiler takes to be inside


@tilert.kernel
def copied(y: Mut, x: Ref):
    y.store(x[y.index[0]])


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler here")
def test_a_wrong_proof_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every index that no check guards in an ordinary kernel has one in a checked kernel."""
    monkeypatch.setattr(codegen_memory, "_upper_bound", lambda e, index: 1)
    dev = EmulatedDevice(check=True)
    x = tilert.from_numpy(numbers(8), dev)[:4]
    y = Frame(dev, (8,), values=numbers(8))
    found = said(lambda: copied(y.piece(2), x).sync(), copied)
    assert found == (
        "bounds: kernel 'copied' is at index 4 on axis 0 of 'x', which has 4 elements; the compiler"
        " takes it to be inside, so please report this\n"
        "  program (2) reads it, line 3\n"
        "        y.store(x[y.index[0]])\n"
        "        ^"
    )
    y.check_exact(np.array([0, 1, 2, 3, 0, 0, 0, 0], np.float32))


# The text


CASES: list[tuple[Callable[..., None], dict[str, Any]]] = [
    (language_memory.test_gather, {"tile": (4, 32), "dtype": bf16}),
    (language_memory.test_indexed_pieces, {"dtype": bf16}),
    (language_memory.test_in_place, {"shape": (17, 130), "dtype": bf16}),
    (control.test_tiles_between_run_time_bounds, {}),
    (language_memory.test_point, {"dtype": f32}),
    (language_memory.test_span, {"size": 16, "dtype": bf16}),
    (order.test_take_along, {"source": (1, 7), "index": (6, 9), "axis": 1}),
    (control.test_binary_search, {}),
    (products.test_attention, {"tile": 64, "bk": 32, "dtype": bf16}),
    (products.test_thin_product, {"bm": 3, "dtype": bf16}),
    (products.test_product_in_a_loop, {"loop": ((64, 128), 64, 200), "dtype": bf16}),
]


def name(value: object) -> str:
    return getattr(value, "__name__", "")


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90a"])
@pytest.mark.parametrize(
    ("function", "arguments"),
    [*CASES[:-1], pytest.param(*CASES[-1], marks=pytest.mark.slow)],
    ids=name,
)
def test_checked_kernels_compile(
    arch: str, function: Callable[..., None], arguments: dict[str, Any]
) -> None:
    device = TargetDevice(arch, "strict")
    function(device, **arguments)
    assert any("fault_sure(" in kernel.text for kernel in device.kernels)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler here")
@pytest.mark.parametrize(("function", "arguments"), CASES[1:5] + CASES[8:9], ids=name)
def test_checks_change_no_value(function: Callable[..., None], arguments: dict[str, Any]) -> None:
    device = EmulatedDevice(check=True)
    function(device, **arguments)
    device.synchronize()


def test_ordinary_kernels_have_no_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so a checked kernel has another text, which is what compiled kernels are kept by."""
    monkeypatch.setattr("tilert.nvrtc.build", lambda *_: (b"", None))
    # Checked kernels have the first schedule alone, and read nothing ahead.
    monkeypatch.setenv("TILERT_SCHEDULES", "none")
    compiler = importlib.import_module("tilert.codegen.generate")
    monkeypatch.setattr(compiler, "find_ahead", lambda _: None)
    monkeypatch.setattr(compiler, "first_wait", lambda _: (None, ()))

    def texts(check: Check) -> list[str]:
        device = TargetDevice("sm_90a", check)
        for function, arguments in CASES:
            function(device, **arguments)
        return [kernel.text for kernel in device.kernels]

    checked, strict = texts(True), texts("strict")
    monkeypatch.setattr(bounds, "note", lambda *_: pytest.fail("a check in an ordinary kernel"))
    plain = texts(False)
    assert not any("fault" in text for text in plain)
    for other in (checked, strict):
        # Where every index is compared with its extent already, nothing is left to check.
        assert [p == o for p, o in zip(plain, other, strict=True)] == [
            "fault_record* fault_to" not in o for o in other
        ]
    assert plain != checked
    assert checked != strict


# What the host makes of records


class _Block:
    def __init__(self) -> None:
        self.host: Any = np.full(RECORD.itemsize + 8, 0xA5, np.uint8)
        self.address = self.host.ctypes.data


def test_records() -> None:
    block = _Block()
    faults = Faults(block)
    watch = Watch(faults)
    function = tilert.ir.Function("k", [], (3, None, 4), tilert.ir.Block(), __file__)
    assert faults.arguments(function, None) == []
    assert faults.arguments(function, (Site("row", None, "y"),)) == [block.address, 0]
    sites = (Site("row", None, "y"), Site("outside", None, "x", 1, "reads", 4, 3))
    assert faults.arguments(function, sites) == [block.address, 1]
    record = block.host[: RECORD.itemsize].view(RECORD)
    with watch:
        pass
    # One that is being written is for later.
    record[0] = (1, 1, 1, 23, [3, 5, 4] + [0] * 29, 12, 11)
    with watch:
        pass
    record["state"] = 2
    with (
        pytest.raises(CheckError, match=r"reads at index 36 on axis 1 of 'x', which has 32") as got,
        watch,
    ):
        pass
    assert "program (1, 0, 3) reads it" in str(got.value)
    assert record["state"][0] == 0
    with watch:
        pass


# How to have it


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting, checks in (
        ("", Checks.NONE),
        ("0", Checks.NONE),
        ("1", Checks.RULES),
        ("strict", Checks.STRICT),
    ):
        monkeypatch.setenv("TILERT_CHECK", setting)
        assert checks_of(None) == checks
        assert checks_of(False) == Checks.NONE and checks_of(True) == Checks.RULES
    monkeypatch.setenv("TILERT_CHECK", "yes")
    with pytest.raises(DeviceError, match=r"^TILERT_CHECK='yes'; use 0, 1 or strict$"):
        CpuDevice()
    monkeypatch.delenv("TILERT_CHECK")
    assert checks_of(None) == Checks.NONE
    with tilert.checking(strict=True) as dev:
        x = tilert.from_numpy(numbers(5, 4), dev)
        with pytest.raises(CheckError, match="strict bounds"):
            points(tilert.zeros(1, f32, dev).partition(1), x, tilert.full(2, 7, i32, dev)).run()
