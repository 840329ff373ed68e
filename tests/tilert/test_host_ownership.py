"""Rules O2, O3, O5 and O7 on the host: exact overlap, moves, grids, index maps."""

import gc
import itertools
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilert
from tests.tilert.host_fakes import FakeCpu, FakeKernel, add_one, const, mut, ref
from tilert import Device, LaunchError, MovedError, OwnershipError
from tilert.cpu_device import CpuDevice
from tilert.op import make_op
from tilert.ownership import Region, overlap


def here() -> int:
    return sys._getframe(1).f_lineno


@pytest.fixture
def dev() -> FakeCpu:
    return FakeCpu()


def array(dev: Device, *shape: int) -> tilert.Array:
    return tilert.from_numpy(np.arange(np.prod(shape), dtype=np.float32).reshape(shape), dev)


regions = st.integers(0, 4).flatmap(
    lambda rank: st.builds(
        Region,
        st.integers(0, 40),
        st.tuples(*[st.integers(0, 4)] * rank),
        st.tuples(*[st.integers(-9, 9)] * rank),
        st.sampled_from([1, 2, 4]),
    )
)


def elements(region: Region) -> list[set[int]]:
    out = []
    for at in itertools.product(*map(range, region.shape)):
        start = region.start + sum(i * s for i, s in zip(at, region.strides, strict=True))
        out.append(set(range(start, start + region.itemsize)))
    return out


@settings(max_examples=500)
@given(regions, regions)
def test_overlap_is_exact(a: Region, b: Region) -> None:
    bytes_a: set[int] = set().union(*elements(a))
    bytes_b: set[int] = set().union(*elements(b))
    assert overlap(a, b) == overlap(b, a) == bool(bytes_a & bytes_b)
    places = elements(a)
    assert a.overlaps_itself == any(p & q for p, q in itertools.combinations(places, 2))
    if bytes_a:
        assert (a.low, a.high) == (min(bytes_a), max(bytes_a) + 1)
        if a.dense:
            assert bytes_a == set(range(a.low, a.high))


slices = st.slices(5).filter(lambda s: s.step is None or s.step > 0)


@given(st.tuples(slices, slices), st.tuples(slices, slices), st.booleans())
def test_launch_refuses_exactly_overlapping_views(
    one: tuple[slice, slice], two: tuple[slice, slice], swap: bool
) -> None:
    dev = FakeCpu()
    a = array(dev, 5, 5)
    y, x = a[one], a.T[two] if swap else a[two]
    grid = np.arange(25).reshape(5, 5)
    shared = set(grid[one].flat) & set((grid.T if swap else grid)[two].flat)
    kernel = FakeKernel("k", [mut("y"), ref("x")])
    if shared:
        with pytest.raises(OwnershipError, match="O3 alias xor mutate: argument 'x' of kernel 'k'"):
            kernel(y.partition(1, 1), x)
    else:
        kernel(y.partition(1, 1), x).run()
    assert not a.storage.holds


def test_alias_message(dev: FakeCpu) -> None:
    a = array(dev, 4, 4)
    with pytest.raises(OwnershipError) as caught:
        add_one()(a[:3].partition(1, 4), a[1:])
    assert str(caught.value) == (
        "O3 alias xor mutate: argument 'x' of kernel 'add_one' overlaps the memory that 'y' writes;"
        " copy one of them into its own array"
    )
    add_one()(a[:2].partition(1, 4), a[2:]).run()
    add_one()(a[:, ::2].partition(1, 2), a[:, 1::2]).run()
    np.testing.assert_array_equal(a.numpy()[0], [11, 10, 13, 12])


def test_moved_message_names_the_op(dev: FakeCpu) -> None:
    y, x = array(dev, 2, 8), array(dev, 2, 8)
    op = make_op(add_one(), (y.partition(1, 8), x))
    line = here() - 1
    want = (
        f"O5 move: array of shape [2, 8] is held by op 'add_one' created at {__file__}:{line};"
        " use what its .run() or .sync() returns"
    )
    for use in (
        y.numpy,
        lambda: y.copy_from(x),
        lambda: x.copy_from(y),
        lambda: y.partition(1, 8),
        lambda: add_one()(x.partition(1, 8), y),
    ):
        with pytest.raises(MovedError) as caught:
            use()
        assert str(caught.value) == want
    with pytest.raises(MovedError, match=r"array of shape \[8\] is held by op 'add_one'"):
        y[1].numpy()
    back = op.run()
    assert back.shape == (2, 8)
    np.testing.assert_array_equal(y.numpy(), x.numpy() + 1)


def test_moved_message_names_the_partition(dev: FakeCpu) -> None:
    y = array(dev, 4, 8)
    half = y[:2].partition(1, 8)
    line = here() - 1
    with pytest.raises(MovedError) as caught:
        y.numpy()
    assert str(caught.value) == (
        f"O5 move: array of shape [4, 8] is held by a partition made at {__file__}:{line},"
        " which has its memory to itself; pass it to a kernel and use what the op returns, or drop"
        " it"
    )
    np.testing.assert_array_equal(y[2:].numpy()[0, 0], 16)
    y[2:].partition(1, 8)
    del half
    y.numpy()


def test_dropped_op_gives_the_array_back(dev: FakeCpu) -> None:
    y, x = array(dev, 2, 2), array(dev, 2, 2)
    op = add_one()(y.partition(1, 2), x)
    del op
    gc.collect()
    np.testing.assert_array_equal(y.numpy(), x.numpy())


def test_a_read_array_may_not_have_moved_when_the_op_runs(dev: FakeCpu) -> None:
    x, y, z = (array(dev, 2, 2) for _ in range(3))
    kernel = add_one()
    first = make_op(kernel, (y.partition(1, 2), x))
    line = here() - 1
    second = kernel(x.partition(1, 2), z)
    with pytest.raises(
        MovedError, match=r"O5 move: .* is held by op 'add_one' created at"
    ) as caught:
        first.run()
    assert caught.value.__notes__ == [f"read by op 'add_one' created at {__file__}:{line}"]
    with pytest.raises(MovedError):
        y.numpy()
    second.run()
    first.run()
    np.testing.assert_array_equal(y.numpy(), z.numpy() + 2)


def test_an_op_may_read_beside_what_it_writes(dev: FakeCpu) -> None:
    a = array(dev, 4, 2)
    op = add_one()(a[:2].partition(1, 2), a[2:])
    other = a[3:].partition(1, 2)
    with pytest.raises(MovedError, match="is held by a partition made at"):
        op.run()
    del other
    op.run()
    np.testing.assert_array_equal(a.numpy()[:2], a.numpy()[2:] + 1)


def test_an_error_keeps_nobody_who_was_in_the_way(dev: FakeCpu) -> None:
    y, x = array(dev, 2, 2), array(dev, 2, 2)
    part = y.partition(1, 2)
    gone = weakref.ref(part)
    errors = []
    for use in (y.numpy, lambda: y.partition(2, 2), lambda: add_one()(x.partition(1, 2), y)):
        with pytest.raises(MovedError) as caught:
            use()
        errors.append(caught.value)
    del part
    assert gone() is None
    assert all(error.__traceback__ is not None for error in errors)
    y.copy_from(x)


def test_one_of_many_threads_has_an_array(dev: FakeCpu) -> None:
    """Partitions of one array at the same moment, and of halves: who is refused holds nothing."""
    whole = array(dev, 8, 4)
    kinds = [whole, whole[:4], whole[4:]]
    start = threading.Barrier(6)

    def take(number: int) -> None:
        for _ in range(200):
            start.wait()
            try:
                taken[number] = kinds[number % 3].partition(1, 4)
            except MovedError:
                taken[number] = None
            start.wait()
            if number == 0:
                found.append(tuple(part is not None for part in taken))
                taken[:] = [None] * 6
            start.wait()

    taken: list[Any] = [None] * 6
    found: list[tuple[bool, ...]] = []
    threads = [threading.Thread(target=take, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 200
    for had in found:
        all_of_it, first, second = (had[kind] + had[kind + 3] for kind in range(3))
        assert (all_of_it, first, second) in ((1, 0, 0), (0, 1, 1))
    assert not whole.storage.holds


def test_places_are_lines(dev: FakeCpu) -> None:
    y, x = array(dev, 2, 2), array(dev, 2, 2)
    kernel = add_one()
    places = []
    for _ in range(2):
        part = y.partition(1, 2)
        places.append((part.place.line, here() - 1))
        op = make_op(
            kernel,
            (part, x),
        )
        places.append((op.place.line, here() - 4))
        assert str(op.place) == f"{__file__}:{op.place.line}"
        op.run()
    assert all(got == want for got, want in places)


def test_failed_call_gives_the_array_back(dev: FakeCpu) -> None:
    y = array(dev, 2, 2)
    part = y.partition(1, 2)
    with pytest.raises(LaunchError):
        add_one()(part, 3)
    y.numpy()
    with pytest.raises(MovedError, match=r"is used a second time, by kernel 'add_one'"):
        add_one()(part, y)


def test_failed_run_gives_the_array_back(dev: FakeCpu) -> None:
    def body(*_: object, **__: object) -> None:
        raise tilert.DeviceError("broken")

    y = array(dev, 2, 2)
    op = make_op(FakeKernel("bad", [mut("y")], body), (y.partition(1, 2),))
    line = here() - 1
    with pytest.raises(tilert.DeviceError, match="broken") as caught:
        op.run()
    assert caught.value.__notes__ == [f"while running op 'bad' created at {__file__}:{line}"]
    y.numpy()


def test_an_op_runs_once(dev: FakeCpu) -> None:
    y, x = array(dev, 2, 2), array(dev, 2, 2)
    op = make_op(add_one(), (y.partition(1, 2), x))
    line = here() - 1
    op.sync()
    with pytest.raises(LaunchError) as caught:
        op.run()
    assert str(caught.value) == (
        f"op 'add_one' created at {__file__}:{line} has already run; call the kernel again to make"
        " another"
    )


def test_a_partition_is_used_once(dev: FakeCpu) -> None:
    y, x = array(dev, 2, 2), array(dev, 2, 2)
    part = y.partition(1, 2)
    op = add_one()(part, x)
    with pytest.raises(MovedError, match=r"op 'add_one' created at .* has taken it"):
        add_one()(part, x)
    with pytest.raises(MovedError):
        y.numpy()
    op.run()


def test_tile_errors(dev: FakeCpu) -> None:
    y = array(dev, 4, 6)
    with pytest.raises(LaunchError, match=r"^partition takes one size for each axis: got one size"):
        y.partition(2)
    with pytest.raises(LaunchError, match=r"^the sizes of a piece are at least 1, got \[0, 2\]$"):
        y.partition(0, 2)
    assert y.partition(3, 4).grid == (2, 2)
    y.numpy()


def test_grids_must_agree(dev: FakeCpu) -> None:
    y, z = array(dev, 4, 4), array(dev, 4, 2)
    two = FakeKernel("two", [mut("y"), mut("z")])
    with pytest.raises(OwnershipError) as caught:
        two(y.partition(1, 2), z.partition(2, 1))
    assert str(caught.value) == (
        "O2 disjoint pieces: the Muts of kernel 'two' disagree on the grid: 'y' has [4, 2] pieces"
        " and 'z' [2, 2]"
    )
    got = two(y.partition(1, 2), z.partition(1, 1)).run()
    assert [a.shape for a in got] == [(4, 4), (4, 2)]
    row = array(dev, 4)
    two(y.partition(1, 4), row.partition(1)).run()
    assert two.seen[-1][1] == (4, 1)


def test_argument_errors(dev: FakeCpu) -> None:
    y, x = array(dev, 2, 2), array(dev, 2, 2)
    kernel = add_one()
    with pytest.raises(LaunchError, match=r"writes 'y': pass y.partition\(tile0, tile1\), not the"):
        kernel(y, x)
    with pytest.raises(LaunchError, match="'y' of kernel 'add_one' must be a partition of an Arr"):
        kernel(3, x)
    with pytest.raises(LaunchError, match="'x' of kernel 'add_one' must be an Array, got ndarray;"):
        kernel(y.partition(1, 2), np.zeros((2, 2)))
    with pytest.raises(LaunchError, match="got Partition; the kernel only reads it"):
        kernel(y.partition(1, 2), x.partition(1, 2))
    other = array(FakeCpu(), 2, 2)
    with pytest.raises(LaunchError, match="'y' is on cpu and 'x' on cpu; all arrays of a launch"):
        kernel(y.partition(1, 2), other)
    other = array(CpuDevice(check=True), 2, 2)
    with pytest.raises(LaunchError, match="'x' on checked cpu; all arrays of a launch"):
        kernel(y.partition(1, 2), other)
    dyn = FakeKernel("dyn", [mut("y"), ref("x", 0, 1, 2)])
    with pytest.raises(LaunchError, match=r"run-time axis 2, got shape \[2, 2\]"):
        dyn(y.partition(1, 2), x)
    y.numpy()


def test_specialisation(dev: FakeCpu) -> None:
    kernel = FakeKernel("k", [mut("y", 0), ref("x", 0, 1), ref("w"), const("n")])
    y, x, w = array(dev, 4, 6), array(dev, 4, 6, 2), array(dev, 3, 8)
    kernel(y.partition(2, 3), x, w[:, 1:5], 5).run()
    params, grid, consts = kernel.seen[0]
    assert grid == (None, 2)
    assert consts == (("n", 5),)
    assert [(p.name, p.position, p.kind) for p in params] == [
        ("y", 0, "mut"),
        ("x", 1, "ref"),
        ("w", 2, "ref"),
    ]
    assert (params[0].shape, params[0].strides, params[0].tile) == ((None, 6), (6, 1), (2, 3))
    assert (params[1].shape, params[1].strides) == ((None, None, 2), (None, 2, 1))
    assert (params[2].shape, params[2].strides, params[2].aligned) == ((3, 4), (8, 1), False)
    assert params[0].aligned

    bigger = array(dev, 8, 6)
    kernel(bigger.partition(2, 3), array(dev, 3, 5, 2), w[:, 1:5], 5).run()
    assert len(kernel.seen) == 1
    kernel(y.partition(2, 3), x, w[:, 1:5], 5.0).run()
    kernel(y.partition(2, 3), x, w[:, 4:], 5).run()
    assert len(kernel.seen) == 3
    assert kernel.seen[2][0][2].aligned


def test_an_empty_grid_does_nothing(dev: FakeCpu) -> None:
    kernel = add_one()
    y = tilert.empty((0, 4), tilert.f32, dev)
    assert kernel(y.partition(1, 4), tilert.empty((0, 4), tilert.f32, dev)).run().shape == (0, 4)
    assert kernel.seen == []


def test_extents_fit_in_32_bits(dev: FakeCpu) -> None:
    y = array(dev, 1, 2)
    x = array(dev, 1).broadcast_to(2**31)
    with pytest.raises(LaunchError, match=r"'x' of kernel 'k' has shape \[2147483648\]; an axis"):
        FakeKernel("k", [mut("y"), ref("x")])(y.partition(1, 2), x)


@given(st.lists(st.integers(-3, 12), max_size=12))
def test_index_is_unique(rows: list[int]) -> None:
    dev = FakeCpu()
    real = [row for row in rows if row >= 0]
    values = np.array(rows, np.int64)
    if len(set(real)) != len(real):
        with pytest.raises(OwnershipError, match=r"O7 indexed pieces: row .* occurs twice in the"):
            tilert.UniqueIndex.checked(values, dev)
        return
    index = tilert.UniqueIndex.checked(values, dev)
    assert len(index) == len(rows)
    np.testing.assert_array_equal(index.array.numpy(), np.maximum(values, -1))
    assert index.upper == max(real, default=-1) + 1


def test_index_errors(dev: FakeCpu) -> None:
    with pytest.raises(OwnershipError) as caught:
        tilert.UniqueIndex.checked(np.array([4, 7, -1, 7]), dev)
    assert str(caught.value) == (
        "O7 indexed pieces: row 7 occurs twice in the index map, at entries 1 and 3"
    )
    with pytest.raises(ValueError, match="takes integers on one axis, got float32"):
        tilert.UniqueIndex.checked(np.zeros(3, np.float32), dev)
    with pytest.raises(ValueError, match="does not fit in 32 bits"):
        tilert.UniqueIndex.checked(np.array([2**31]), dev)


def test_partition_at(dev: FakeCpu) -> None:
    def body(y: np.ndarray, x: np.ndarray, maps: dict, grid: tuple[int, ...]) -> None:
        assert grid == (3, 2)
        for i, row in enumerate(maps[0]):
            if row >= 0:
                y[row] = x[i]

    scatter = FakeKernel("scatter", [mut("y"), ref("x")], body)
    y, x = tilert.zeros((5, 4), tilert.f32, dev), array(dev, 3, 4)
    index = tilert.UniqueIndex.checked(np.array([4, -1, 0]), dev)
    part = y.partition_at(index, 1, 2)
    assert part.grid == (3, 2)
    scatter(part, x).run()
    want = np.zeros((5, 4), np.float32)
    want[[4, 0]] = x.numpy()[[0, 2]]
    np.testing.assert_array_equal(y.numpy(), want)
    params, grid, _ = scatter.seen[0]
    assert params[0].indexed
    assert grid == (None, 2)

    index.update(np.array([1, 2, 3]))
    np.testing.assert_array_equal(index.array.numpy(), [1, 2, 3])
    with pytest.raises(OwnershipError, match="row 1 occurs twice"):
        index.update(np.array([1, 1, 3]))
    with pytest.raises(OwnershipError, match="row 5 is outside an array of 5 rows"):
        index.update(np.array([5, 1, 3]))
    with pytest.raises(ValueError, match="has 3 entries, got 1"):
        index.update(np.array([0]))
    np.testing.assert_array_equal(index.array.numpy(), [1, 2, 3])

    with pytest.raises(LaunchError, match=r"places single rows, so the tile begins with 1; got \["):
        y.partition_at(index, 2, 2)
    with pytest.raises(LaunchError, match="the index map reaches row 3, the array has 2 rows"):
        y[:2].partition_at(index, 1, 4)
    with pytest.raises(OwnershipError, match="belongs to an index map, whose entries must stay un"):
        index.array.partition(1)
    with pytest.raises(OwnershipError, match="copy_from: O7 indexed pieces"):
        index.array[:2].copy_from(np.zeros(2, np.int32))
