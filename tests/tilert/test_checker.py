"""The checker (rule O8): what it finds, in which words, and what it lets pass."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tilert
from tilert import (
    Accumulate,
    CheckError,
    Dyn,
    IndexMap,
    IndexProof,
    Mut,
    Ref,
    UniqueIndex,
    f32,
    i32,
    opt_out,
)
from tilert.cpu_device import CpuDevice
from tilert.kernel import Kernel
from tilert.language import debug_assert, mma, sort, span, sum, where, zeros


@pytest.fixture
def dev(monkeypatch: pytest.MonkeyPatch) -> Iterator[tilert.Device]:
    monkeypatch.setattr(opt_out, "_known", {})
    with tilert.checking() as device:
        yield device


def numbers(device: tilert.Device, *shape: int, dtype: Any = np.float32) -> tilert.Array:
    return tilert.from_numpy(np.arange(np.prod(shape)).astype(dtype).reshape(shape), device)


def message(run: Callable[[], object], kernel: Kernel | None = None) -> str:
    """What the checker says, with lines counted from the kernel's first."""
    with pytest.raises(CheckError) as caught:
        run()
    first = kernel.source.first_line - 1 if kernel else 0
    place = re.escape(__file__) + r":(\d+)"
    return re.sub(place, lambda m: f"line {int(m[1]) - first}", str(caught.value))


@tilert.kernel
def double(y: Mut[Dyn], x: Ref[Dyn]):
    v = x.tile_like(y)
    y.store(v * 2.0)


@tilert.kernel
def scatter(y: Mut[Dyn], x: Ref[Dyn]):
    i, j = y.index
    y.store(x[i, j])


# O8: unwritten memory


def test_a_read_of_what_nothing_has_written(dev: tilert.Device) -> None:
    x, y = tilert.empty(8, f32, dev), tilert.zeros(8, f32, dev)
    x[:5].copy_from(np.ones(5, np.float32))
    assert message(lambda: double(y.partition(4), x).run(), double) == (
        "O8 initialised reads: nothing has written element [5] of 'x', which kernel 'double'"
        " reads; write it first\n"
        "  program (1) reads it, line 3\n"
        "        v = x.tile_like(y)\n"
        "        ^\n"
        "  program (1) stores it, line 4\n"
        "        y.store(v * 2.0)\n"
        "        ^"
    )
    # Only what was read counts, and an error gives the array back.
    assert double(y[:5].partition(4), x[:5]).run().numpy().tolist() == [2] * 5


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.copy_from(np.ones(8, np.float32)),
        lambda x: x.copy_from(tilert.full(8, 1, f32, x.device)),
        lambda x: double(x.partition(3), tilert.full(8, 0.5, f32, x.device)).run(),
        lambda x: np.from_dlpack(x).fill(1),
        lambda x: x.view(i32).copy_from(np.ones(8, np.float32).view(np.int32)),
    ],
    ids=["host", "device", "kernel", "borrower", "another type"],
)
def test_everything_that_writes(dev: tilert.Device, write: Callable[..., object]) -> None:
    x = tilert.empty(8, f32, dev)
    write(x)
    assert double(tilert.empty(8, f32, dev).partition(4), x).run().numpy().tolist() == [2] * 8


def test_a_copy_of_the_unwritten_is_unwritten(dev: tilert.Device) -> None:
    x = tilert.zeros(8, f32, dev)
    x[2:4].copy_from(tilert.empty(2, f32, dev))
    found = message(lambda: double(tilert.empty(8, f32, dev).partition(4), x).run())
    assert found.startswith("O8 initialised reads: nothing has written element [2] of 'x'")


def test_memory_of_others_counts_as_written(dev: tilert.Device) -> None:
    host = np.ones(4, np.float32)
    y = double(tilert.empty(4, f32, dev).partition(4), tilert.from_dlpack(host)).run()
    assert y.numpy().tolist() == [2] * 4


@tilert.kernel
def chosen(y: Mut, x: Ref[Dyn], count: Ref):
    i = y.index[0]
    v = x.load(span(i.start - 1, 4), fill=7.0)
    y.store(where(i.offsets <= count[0], v, 0.0))


def test_what_is_left_out_is_not_used(dev: tilert.Device) -> None:
    x = tilert.empty(10, f32, dev)
    x[:5].copy_from(np.ones(5, np.float32))

    def run(count: int) -> tilert.Array:
        to = tilert.empty(6, f32, dev)
        at = tilert.full(1, count, i32, dev)
        return chosen(to.partition(4), x, at).run()

    # Element 0 is the fill value; elements 6 and 7 of the last piece lie outside of y.
    assert run(5).numpy().tolist() == [7, 1, 1, 1, 1, 1]
    assert run(3).numpy().tolist() == [7, 1, 1, 1, 0, 0]
    assert run(9).numpy()[0] == 7  # 5 elements are written, and y has no room for more


@tilert.kernel
def branching(y: Mut, x: Ref):
    if x[0] > 0.0:
        y.store(1.0)
    else:
        y.store(2.0)


@tilert.kernel
def counting(y: Mut, n: Ref):
    total = 0.0
    for _ in range(n[0]):
        total = total + 1.0
    y.store(total)


@tilert.kernel
def gathering(y: Mut, x: Ref, n: Ref):
    y.store(x[n[:]])


@tilert.kernel
def asserting(y: Mut, x: Ref):
    debug_assert(x[:] > 0.0, "positive")
    y.store(0.0)


@tilert.kernel
def multiplying(y: Mut, x: Ref):
    y.store(mma(x[:, :], x[:, :].T, zeros((2, 2), f32)))


@tilert.kernel
def ordering(y: Mut, x: Ref):
    y.store(sum(sort(x[:].reshape(2, 2), axis=1), axis=0))


@tilert.kernel
def adding(y: Mut[Accumulate.Add]):
    y.add(1.0)


@pytest.mark.parametrize(
    ("where", "use", "run"),
    [
        ("[0] of 'x'", "branches on it", lambda y, x: branching(y.partition(2), x)),
        ("[0] of 'n'", "counts a loop by it", lambda y, x: counting(y.partition(2), x.view(i32))),
        (
            "[3] of 'n'",
            "reads at that index",
            lambda y, x: gathering(y.partition(4), numbers(y.device, 9), x.view(i32)),
        ),
        ("[3] of 'x'", "asserts it", lambda y, x: asserting(y.partition(2), x)),
        (
            "[1, 1] of 'x'",
            "stores it",
            lambda y, x: multiplying(y.reshape(2, 2).partition(2, 2), x.reshape(2, 2)),
        ),
        ("[3] of 'x'", "stores it", lambda y, x: ordering(y[:2].partition(2), x)),
        ("[3] of 'y'", "adds to it", lambda y, x: adding(x.partition(4))),
    ],
)
def test_every_use(dev: tilert.Device, where: str, use: str, run: Callable[..., tilert.Op]) -> None:
    y, x = tilert.zeros(4, f32, dev), tilert.empty(4, f32, dev)
    if not where.startswith("[0]"):
        x[:3].copy_from(np.ones(3, np.float32))
    found = message(lambda: run(y, x).run())
    assert found.startswith(f"O8 initialised reads: nothing has written element {where}, which")
    assert f" {use}, line " in found


# O2 and O7: races


def trusted(device: tilert.Device, *rows: int) -> UniqueIndex:
    proof = IndexProof("a test", "it is wrong")
    return UniqueIndex.trusted(np.array(rows, np.int32), device, proof)


def test_two_programs_write_one_element(dev: tilert.Device) -> None:
    y, x = tilert.zeros((4, 6), f32, dev), numbers(dev, 4, 6)
    index = trusted(dev, 1, -1, 3, 1)
    assert message(lambda: scatter(y.partition_at(index, 1, 3), x).run(), scatter) == (
        "O7 indexed pieces: programs (0, 0) and (3, 0) of kernel 'scatter' race for element"
        " [1, 0] of 'y'\n"
        "  program (0, 0) writes it, line 4\n"
        "        y.store(x[i, j])\n"
        "        ^\n"
        "  program (3, 0) writes it, line 4\n"
        "        y.store(x[i, j])\n"
        "        ^"
    )
    y = scatter(y.partition_at(trusted(dev, 1, -1, 3, 0), 1, 3), x).run()
    assert (y.numpy()[[1, 3, 0]] == x.numpy()[[0, 2, 3]]).all()


@tilert.kernel
def some_read(y: Mut[Dyn], z: Mut[Dyn], reads: Ref[Dyn]):
    if reads[z.index[0].number] > 0:
        z.store(y.load())
    else:
        y.store(5.0)


@pytest.mark.parametrize(("reads", "verbs"), [([1, 0], "reads writes"), ([0, 1], "writes reads")])
def test_one_program_reads_what_another_writes(
    dev: tilert.Device, reads: list[int], verbs: str
) -> None:
    y, z = tilert.zeros((4, 2), f32, dev), tilert.zeros((2, 2), f32, dev)
    index, given = trusted(dev, 3, 3), tilert.from_numpy(np.array(reads, np.int32), dev)
    found = message(
        lambda: some_read(y.partition_at(index, 1, 2), z.partition(1, 2), given).run(), some_read
    )
    lines = {"reads": ("4", "z.store(y.load())"), "writes": ("6", "y.store(5.0)")}
    want = (
        "O7 indexed pieces: programs (0, 0) and (1, 0) of kernel 'some_read' race for element"
        " [3, 0] of 'y'"
    )
    for program, verb in enumerate(verbs.split()):
        line, text = lines[verb]
        want += f"\n  program ({program}, 0) {verb} it, line {line}\n            {text}\n"
        want += "            ^"
    assert found == want


def test_two_programs_may_read(dev: tilert.Device) -> None:
    y, z = numbers(dev, 4, 2), tilert.empty((2, 2), f32, dev)
    ones = tilert.full(2, 1, i32, dev)
    _, z = some_read(y.partition_at(trusted(dev, 3, 3), 1, 2), z.partition(1, 2), ones).run()
    assert z.numpy().tolist() == [[6, 7], [6, 7]]


class Believed(IndexMap, proof=IndexProof("Believed", "a test")):
    """Entries as they come."""


def test_an_index_map_that_reaches_too_far(dev: tilert.Device) -> None:
    y, x = tilert.zeros((4, 6), f32, dev), numbers(dev, 4, 6)
    index = Believed(tilert.from_numpy(np.array([2, 9], np.int32), dev), 4)
    assert message(lambda: scatter(y.partition_at(index, 1, 6), x).run(), scatter) == (
        "O7 indexed pieces: the index map of 'y' gives program (1, 0) of kernel 'scatter' row 9,"
        " the array has 4 rows\n"
        "  program (1, 0) reaches for row 9, line 4\n"
        "        y.store(x[i, j])\n"
        "        ^"
    )
    index = Believed(tilert.empty(2, i32, dev), 4)
    assert message(lambda: scatter(y.partition_at(index, 1, 6), x).run(), scatter) == (
        "O8 initialised reads: kernel 'scatter' is launched with an index map of 'y' whose entry"
        " 0 nothing has written"
    )


# O1 and O2: references of unsafe kernels


def unsafe(reference: Callable[..., None]) -> Any:
    text = (
        'extern "C" __global__ void k(float* y, const int* y_map, int n,'
        " const float* x, int m, int g) {}"
    )

    @tilert.unsafe_kernel(source=text, reference=reference, reason="a test")
    def k(y: Mut[Dyn], x: Ref[Dyn]) -> None: ...

    return k


def honest(y: np.ndarray, x: np.ndarray, y_map: np.ndarray) -> None:
    y[y_map] = x


def to_its_ref(y: np.ndarray, x: np.ndarray, y_map: np.ndarray) -> None:
    x.flags.writeable = True
    x[1] = 9


def to_any_row(y: np.ndarray, x: np.ndarray, y_map: np.ndarray) -> None:
    y[1:] = 9


def beside(y: np.ndarray, x: np.ndarray, y_map: np.ndarray) -> None:
    np.lib.stride_tricks.as_strided(y, (6,))[5] = 9


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        (
            to_its_ref,
            "O1 exclusive write: the reference of unsafe kernel 'k' writes element [1] of 'x',"
            " which is a Ref; make it a Mut",
        ),
        (
            to_any_row,
            "O2 disjoint pieces: the reference of unsafe kernel 'k' writes element [1] of 'y',"
            " which is in no program's piece",
        ),
        (
            beside,
            "O1 exclusive write: the reference of unsafe kernel 'k' writes beside 'y', to byte 22"
            " of the buffer that it is a view of",
        ),
    ],
)
def test_references_write_what_they_say(
    dev: tilert.Device, reference: Callable[..., None], said: str
) -> None:
    y, x = tilert.zeros(6, f32, dev)[:4], numbers(dev, 2)
    index = UniqueIndex.checked(np.array([3, 0]), dev)
    assert unsafe(honest)(y.partition_at(index, 1), x).run().numpy().tolist() == [1, 0, 0, 0]
    found = message(lambda: unsafe(reference)(y.partition_at(index, 1), x).run())
    head, place, text, caret = found.split("\n")
    assert head == said
    assert re.fullmatch(r"  unsafe kernel 'k', line \d+", place)
    assert text.startswith("        @tilert.unsafe_kernel(source=text")
    assert caret == "        ^"


# How to have it


def test_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(device: tilert.Device) -> None:
        double(tilert.empty(4, f32, device).partition(4), tilert.empty(4, f32, device)).run()

    for setting in ("", "0"):
        monkeypatch.setenv("TILERT_CHECK", setting)
        run(CpuDevice())
    monkeypatch.setenv("TILERT_CHECK", "1")
    with pytest.raises(CheckError):
        run(CpuDevice())
    before = tilert.device("cpu")
    with tilert.checking() as checked:
        assert tilert.device("cpu") is checked
    assert tilert.device("cpu") is before


def test_graphs(dev: tilert.Device) -> None:
    x, y = tilert.empty(4, f32, dev), tilert.empty(4, f32, dev)
    with tilert.capture(dev, lambda: double(y.partition(2), x).run()) as graph:
        with pytest.raises(CheckError, match="element \\[0\\] of 'x'"):
            graph.replay()
        x.copy_from(np.ones(4, np.float32))
        graph.replay()
    assert y.numpy().tolist() == [2] * 4
