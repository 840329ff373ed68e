"""Rules O2 and O7 where programs do not simply write the piece of their own number."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilert
from tests.tilert.checks import Frame
from tests.tilert.host_fakes import FakeCpu
from tilert import (
    Const,
    Dyn,
    KernelError,
    LaunchError,
    Mut,
    OwnershipError,
    PieceMap,
    Ref,
    bf16,
    f32,
)
from tilert.language import mma, tiles, zeros
from tilert.partition import Partition
from tilert.target_device import TargetDevice

cpu = tilert.device("cpu")


@tilert.kernel
def copy(y: Mut[Dyn, Dyn], x: Ref[Dyn, Dyn]) -> None:
    y.store(x.tile_like(y))


@tilert.kernel
def add(y: Mut, x: Ref) -> None:
    y.store(y.load() + x.tile_like(y))


@tilert.kernel
def copy_upper(y: Mut[Dyn], x: Ref[Dyn], below: Const[int]) -> None:
    (i,) = y.index
    if i.number < below:
        y.store(x[i])


@tilert.kernel
def walk(y: Mut[Dyn], z: Mut[Dyn], x: Ref[Dyn], gain: Ref) -> None:
    by = gain[0]
    for piece in y.pieces():
        v = x.tile_like(piece) * by
        piece.store(v)
        z.store(v + 1)


@tilert.kernel
def product(c: Mut, a: Ref, b: Ref, bk: Const[int] = 16) -> None:
    for piece in c.pieces():
        m, n = piece.index
        acc = zeros(piece.shape, f32)
        for k in tiles(a, axis=1, size=bk):
            acc = mma(a[m, k], b[n, k].T, acc)
        piece.store(acc)


def numbers(*shape: int) -> np.ndarray:
    return np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)


def written(part: Partition) -> np.ndarray:
    """How often each element of the array is written, by the pieces of all programs."""
    array, placement = part.array, part.placement
    count = np.zeros(array.shape, int)
    for program in itertools.product(*map(range, part.grid)):
        piece = program
        if placement is not None and placement.place is not None:
            piece = tuple(
                start + sum(k * i for k, i in zip(steps, program, strict=True))
                for start, steps in placement.place
            )
        assert all(0 <= p * t < n for p, t, n in zip(piece, part.tile, array.shape, strict=True))
        cut = tuple(slice(p * t, p * t + t) for p, t in zip(piece, part.tile, strict=True))
        count[cut] += 1
    return count


def held(part: Partition) -> set[int]:
    """Elements of the array's storage that the partition holds."""
    region = part.region
    found = set()
    for at in itertools.product(*map(range, region.shape)):
        byte = region.start + sum(i * s for i, s in zip(at, region.strides, strict=True))
        found.add(byte // region.itemsize)
    return found


maps = st.integers(1, 3).flatmap(
    lambda rank: st.tuples(
        st.lists(
            st.tuples(st.integers(0, 3), st.tuples(*[st.integers(-2, 3)] * rank)),
            min_size=1,
            max_size=3,
        ),
        st.tuples(*[st.integers(1, 4)] * rank),
    )
)


@settings(max_examples=300)
@given(maps, st.lists(st.integers(1, 3), min_size=3, max_size=3), st.integers(0, 1))
def test_a_map_is_taken_exactly_if_no_two_programs_share_a_piece(
    drawn: tuple, tiling: list[int], cut: int
) -> None:
    place, grid = drawn
    tile = tuple(tiling[: len(place)])
    counts = [4] * len(place)
    shape = [n * t - min(cut, t - 1) for n, t in zip(counts, tile, strict=True)]
    array = tilert.zeros(tuple(shape), f32, FakeCpu())

    def fn(*coordinates: Any) -> Any:
        return tuple(
            start + sum(k * c for k, c in zip(steps, coordinates, strict=True))
            for start, steps in place
        )

    pieces = [fn(*program) for program in itertools.product(*map(range, grid))]
    inside = all(0 <= p < n for piece in pieces for p, n in zip(piece, counts, strict=True))
    names = ["a", "b", "c"][: len(grid)]
    mapped = PieceMap(eval(f"lambda {', '.join(names)}: fn({', '.join(names)})", {"fn": fn}))
    if not inside:
        with pytest.raises(OwnershipError, match=r"O2 disjoint pieces: program \(.*\) would write"):
            array.partition(*tile, map=mapped, grid=grid)
    elif len(set(pieces)) != len(pieces):
        with pytest.raises(OwnershipError, match="O7 indexed pieces: the map is not injective: pr"):
            array.partition(*tile, map=mapped, grid=grid)
    else:
        part = array.partition(*tile, map=mapped, grid=grid)
        count = written(part)
        assert count.max() == 1
        assert {int(i) for i in np.flatnonzero(count)} <= held(part)
        if cut == 0:
            assert {int(i) for i in np.flatnonzero(count)} == held(part)


cuts = st.one_of(st.slices(4), st.integers(-4, 3))


def check_pieces(device: tilert.Device, pieces: tuple, rows: int, columns: int) -> None:
    # Four pieces on each axis, the last one partial where a piece has several elements.
    shape = (4 * rows - 1, 4 * columns - (columns > 1))
    x, before = numbers(*shape), -numbers(*shape)
    y = Frame(device, shape, values=before)
    part = y.view.partition(rows, columns, pieces=pieces)
    mask = written(part) > 0
    copy(part, tilert.from_numpy(x, device)).run()
    y.check_exact(np.where(mask, x, before))


@pytest.mark.parametrize("name", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@settings(max_examples=150)
@given(st.tuples(cuts, cuts), st.integers(2, 3), st.integers(1, 2))
def test_chosen_pieces_are_written_and_nothing_else(
    name: str, pieces: tuple, rows: int, columns: int
) -> None:
    check_pieces(tilert.device(name), pieces, rows, columns)


@pytest.mark.parametrize(
    "pieces",
    [
        (slice(0, 2), slice(None)),
        (slice(3, 1, -1), slice(1, 4, 2)),
        (-1, slice(None, None, -1)),
        (slice(2, 2), slice(None)),
        (1, -1),
    ],
)
def test_sub_grids(everywhere: tilert.Device, pieces: tuple) -> None:
    check_pieces(everywhere, pieces, 3, 2)


@pytest.mark.parametrize(
    ("mapping", "grid"),
    [
        (lambda i, j: (j, i), None),
        (lambda i, j: (3 - i, j), None),
        (lambda i, j: (i, 2 * j + 1), None),
        (lambda i, j: (2 * i + j, 0), (2, 2)),
        (lambda i, j, k: (2 * i + j, 3 - k), (2, 2, 4)),
        (lambda i: (i, 3 - i), None),
    ],
)
@pytest.mark.parametrize("shape", [(8, 12), (7, 10)])
def test_mapped_pieces_in_place(
    everywhere: tilert.Device, mapping: Any, grid: Any, shape: tuple[int, int]
) -> None:
    x, before = numbers(*shape), 100 * numbers(*shape)
    y = Frame(everywhere, shape, values=before)
    part = y.view.partition(2, 3, map=mapping, grid=grid)
    mask = written(part) > 0
    add(part, tilert.from_numpy(x, everywhere)).run()
    y.check_exact(np.where(mask, before + x, before))


def test_masked_stores_of_mapped_pieces(everywhere: tilert.Device) -> None:
    x = numbers(10)
    for size in (4, 5):
        y = Frame(everywhere, (10,), values=np.zeros(10))
        pieces = y.view.partition(size, pieces=slice(None, None, -1))
        copy_upper(pieces, tilert.from_numpy(x, everywhere), 1).run()
        y.check_exact(np.where(np.arange(10) < size, x, 0))


def on(values: Any) -> tilert.Array:
    return tilert.from_numpy(np.asarray(values, np.float32), cpu)


def test_the_rest_of_the_buffer_stays_usable() -> None:
    y = on(numbers(6, 4))
    first = y.partition(1, 4, pieces=slice(0, 2))
    second = y.partition(1, 4, pieces=slice(2, 6, 2))
    with pytest.raises(tilert.MovedError, match="O5 move: array of shape"):
        y.partition(1, 4, pieces=slice(4, 5))
    np.testing.assert_array_equal(y[3].numpy(), numbers(6, 4)[3])
    third = y.partition(1, 4, pieces=(slice(3, 6, 2), 0))
    copy(first, on(np.zeros((6, 4)))).run()
    # The same launch may read what it does not write.
    copy(y.partition(1, 4, pieces=slice(0, 1)), y[1:2]).run()
    del second, third
    np.testing.assert_array_equal(y[:3].numpy(), [[0] * 4, [0] * 4, numbers(6, 4)[2]])


def test_run_time_extents_share_a_specialisation() -> None:
    device = TargetDevice("sm_80")
    for n in (64, 128, 200):
        y, x = tilert.zeros((n, 96), bf16, device), tilert.zeros((n, 96), bf16, device)
        copy(y.partition(32, 32, map=lambda i, j: (j, i)), x).run()
    assert [k.name for k in device.kernels] == ["copy"]
    copy(y.partition(32, 32), x).run()
    assert len(device.kernels) == 2


WRONG_MAPS: list[tuple[Any, Any, type[Exception], str]] = [
    (
        lambda i, j: (i + j, 0), (2, 2), OwnershipError,
        "O7 indexed pieces: the map is not injective: programs (0, 1) and (1, 0) would both write"
        " piece (1, 0)",
    ),
    (
        lambda i, j: (i, 0), (4, 2), OwnershipError,
        "O7 indexed pieces: the map is not injective: programs (0, 0) and (0, 1) would both write"
        " piece (0, 0)",
    ),
    (
        lambda i, j: (j, i), (4, 3), OwnershipError,
        "O2 disjoint pieces: program (3, 0) would write piece 3 of axis 1, which has 3 pieces",
    ),
    (
        lambda i, j: (i - 1, j), (4, 3), OwnershipError,
        "O2 disjoint pieces: program (0, 0) would write piece -1 of axis 0, which has 4 pieces",
    ),
    (
        lambda i, j: (i * j, j), (1, 1), OwnershipError,
        "O7 indexed pieces: a piece map adds coordinates, and multiplies them by ints; it has a"
        " product of two coordinates. What depends on data goes through partition_at and an index"
        " map",
    ),
    (
        lambda i, j: (i // 2, j), (1, 1), OwnershipError,
        "O7 indexed pieces: a piece map adds coordinates, and multiplies them by ints; it has //, %"
        " or a comparison. What depends on data goes through partition_at and an index map",
    ),
    (
        lambda i, j: (i * 0.5, j), (1, 1), OwnershipError,
        "O7 indexed pieces: a piece map adds coordinates, and multiplies them by ints; it has *"
        " with float 0.5. What depends on data goes through partition_at and an index map",
    ),
    (
        lambda i: i, None, LaunchError,
        "O7 indexed pieces: the map gives 1 numbers, an array with 2 axes needs 2",
    ),
    (
        lambda i, j: (i, j), (4,), LaunchError,
        "O7 indexed pieces: the map takes 2 coordinates, grid=[4] does not give their extents",
    ),
    (
        lambda i, j: (i + j, 0), None, LaunchError,
        "O7 indexed pieces: the map adds coordinates, so the grid does not follow from it; give"
        " grid=(...)",
    ),
    (
        lambda i, j: (i, 0), None, LaunchError,
        "O7 indexed pieces: no axis follows coordinate 1 of the map, so the programs along it would"
        " write one piece; leave it out, or give grid=(...)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("mapping", "grid", "error", "message"), WRONG_MAPS)
def test_wrong_maps(mapping: Any, grid: Any, error: type[Exception], message: str) -> None:
    y = on(np.zeros((8, 9)))
    with pytest.raises(error) as caught:
        y.partition(2, 3, map=mapping, grid=grid)
    assert str(caught.value) == message
    y.numpy()


def test_maps_that_cannot_be_decided_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilert.lattice._MAX_WORK", 0)
    y = tilert.zeros((40, 40), f32, FakeCpu())
    with pytest.raises(OwnershipError, match="O7 indexed pieces: it could not be proven that the"):
        y.partition(1, 1, map=lambda i, j, k: (3 * i + 5 * j + 7 * k, i), grid=(3, 3, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pieces": (0, 0, 0)}, "pieces= names 3 axes, the array has 2"),
        ({"pieces": 4}, "pieces= takes slices and ints for axis 0 with 4 pieces, got 4"),
        ({"pieces": "ab"}, "pieces= takes slices and ints for axis 0 with 4 pieces, got 'ab'"),
        ({"grid": (4, 3)}, "grid= belongs to map=; pieces give their own"),
        (
            {"pieces": 0, "map": lambda i, j: (i, j)},
            "give pieces= or map=, not both; a map may add the first piece",
        ),
        ({"programs": 0}, "programs= is a positive int, got 0"),
    ],
)
def test_wrong_pieces(arguments: dict[str, Any], message: str) -> None:
    y = on(np.zeros((8, 9)))
    with pytest.raises(LaunchError) as caught:
        y.partition(2, 3, **arguments)
    assert str(caught.value) == f"O2 disjoint pieces: {message}"
    y.numpy()


# Programs that walk their pieces


@pytest.mark.parametrize("size", [0, 1, 10, 16])
def test_the_number_of_programs_does_not_change_the_result(
    everywhere: tilert.Device, size: int
) -> None:
    x, gain = numbers(size), tilert.from_numpy(np.array([3], np.float32), everywhere)
    for programs in (1, 3, 100, None):
        y, z = Frame(everywhere, (size,)), Frame(everywhere, (size,))
        pieces = y.view.partition(4, programs=programs)
        walk(pieces, z.piece(4), tilert.from_numpy(x, everywhere), gain).run()
        y.check_exact(x * 3)
        z.check_exact(x * 3 + 1)


def test_a_walked_product(everywhere: tilert.Device) -> None:
    # Whole numbers, so that every order of adding gives the same.
    a, b = numbers(40, 32) % 7, numbers(24, 32) % 5
    for programs in (1, 2, None):
        c = Frame(everywhere, (40, 24))
        on_device = [tilert.from_numpy(value, everywhere) for value in (a, b)]
        product(c.view.partition(16, 16, programs=programs), *on_device).run()
        c.check_exact(a @ b.T)


@given(st.integers(1, 50), st.integers(1, 60))
def test_walked_pieces_are_disjoint_and_all_there(programs: int, pieces: int) -> None:
    owned = [set(range(p, pieces, programs)) for p in range(programs)]
    assert sum(map(len, owned)) == pieces
    assert set().union(*owned) == set(range(pieces))


def test_walking_kernels_compile() -> None:
    for arch in ("sm_80", "sm_90a"):
        device = TargetDevice(arch)

        def some(*shape: int, dtype: tilert.DType = f32, on: TargetDevice = device) -> tilert.Array:
            return tilert.zeros(shape, dtype, on)

        walk(some(1000).partition(64), some(1000).partition(64), some(1000), some(1)).run()
        c, a, b = (some(*s, dtype=bf16) for s in ((256, 128), (256, 64), (128, 64)))
        product(c.partition(64, 64, programs=4), a, b).run()
        product(c.partition(64, 64, programs=7), a, b).run()
        assert [k.name for k in device.kernels] == ["walk", "product"]
        assert all(k.resources.spill_stores == 0 for k in device.kernels)
        text = device.kernels[0].text
        assert "piece4 += gridDim.x" in text and text.index("a_gain") < text.index("piece4")
    mapped = TargetDevice("sm_80")
    y, x = tilert.zeros((96, 64), f32, mapped), tilert.zeros((96, 64), f32, mapped)
    copy(y.partition(32, 32, map=lambda i, j: (2 - j, i)), x).run()
    assert "(2 + -1 * p1)" in mapped.kernels[0].text


def test_programs_belong_to_kernels_that_walk() -> None:
    y, z = on(np.zeros(8)), on(np.zeros(8))
    with pytest.raises(LaunchError) as caught:
        copy_upper(y.partition(4, programs=2), z, 1)
    assert str(caught.value) == (
        "O2 disjoint pieces: 'y' was partitioned for 2 programs, but each program of kernel"
        " 'copy_upper' writes one piece; leave programs= out, or write `for piece in y.pieces()` in"
        " the kernel"
    )
    with pytest.raises(OwnershipError) as refused:
        walk(y.partition(4, programs=2), z.partition(4, programs=3), on(numbers(8)), on([1]))
    assert str(refused.value) == (
        "O2 disjoint pieces: the Muts of kernel 'walk' were partitioned for 2 and for 3 programs;"
        " the pieces of all are walked together"
    )
    y.numpy(), z.numpy()


def refusal(kernel: Any, *arguments: Any) -> str:
    with pytest.raises(KernelError) as caught:
        tilert.kernel(kernel)(*arguments)
    return caught.value.message


def test_wrong_walks() -> None:
    def nested(y: Mut, x: Ref) -> None:
        for i in range(3):
            for piece in y.pieces():
                piece.store(x[0] + i)

    def in_a_branch(y: Mut, n: Const[int] = 1) -> None:
        if n:
            for piece in y.pieces():
                piece.store(0.0)

    def renamed(y: Mut, x: Ref) -> None:
        z = y
        for piece in z.pieces():
            piece.store(x[0])

    def carried(y: Mut, x: Ref) -> None:
        total = x[0]
        for piece in y.pieces():
            total = total + x[1]
            piece.store(total)

    def two_names(y: Mut) -> None:
        for a, b in y.pieces():
            y.store(a + b)

    def argument(y: Mut) -> None:
        for piece in y.pieces(2):
            piece.store(0.0)

    def loose(y: Mut) -> None:
        p = y.pieces()
        y.store(p)

    def before(y: Mut, x: Ref) -> None:
        i = y.index
        for piece in y.pieces():
            piece.store(x[i])

    def after(y: Mut) -> None:
        for piece in y.pieces():
            last = 1.0
            piece.store(last)
        y.store(last)

    own_body = (
        "O2 disjoint pieces: pieces() stands only in a for statement of the kernel's own body, not"
        " inside another loop or an if"
    )
    y, x = on(np.zeros(8)), on(np.zeros(8))
    assert refusal(nested) == refusal(in_a_branch) == refusal(loose) == own_body
    assert refusal(two_names) == "a loop over pieces has one variable, the piece"
    assert refusal(argument) == "expected y.pieces() without arguments"
    assert refusal(renamed, y.partition(4), x) == (
        "O2 disjoint pieces: pieces() stands only in a for statement of the kernel's own body,"
        " right after the name of a Mut"
    )
    assert refusal(carried, y.partition(4), x) == (
        "O2 disjoint pieces: 'total' is a f32 scalar before the loop over pieces and changes in it;"
        " nothing is carried from piece to piece, so give it another name in the loop"
    )
    outside = (
        "O2 disjoint pieces: outside `for piece in y.pieces()` a program of this kernel holds no"
        " piece of 'y'; use it inside the loop"
    )
    assert refusal(before, y.partition(4), x) == outside
    assert refusal(after, y.partition(4)) == "'last' is set only inside a loop"
    y.numpy()
