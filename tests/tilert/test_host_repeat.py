"""Launches with the arrays of an earlier one: bound once, checked for what may have moved since."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest

import tilert
from tests.tilert.host_fakes import FakeCpu, FakeKernel, add_one, const, mut, ref
from tilert import LaunchError, MovedError, Mut, OwnershipError


class Counting(FakeCpu):
    """Counts what it binds."""

    bound = 0

    def compile(self, function: Any) -> Any:
        launcher = super().compile(function)
        bind = launcher.bind

        def counted(*arguments: Any) -> Any:
            self.bound += 1
            return bind(*arguments)

        launcher.bind = counted
        return launcher


@pytest.fixture
def dev() -> Counting:
    return Counting()


def some(dev: Counting, *shape: int) -> tilert.Array:
    return tilert.from_numpy(np.arange(np.prod(shape), dtype=np.float32).reshape(shape), dev)


@tilert.kernel
def double(y: Mut) -> None:
    for piece in y.pieces():
        piece.store(piece.load() + 2.0)


def kept(y: tilert.Array) -> int:
    return sum([len(tiling.repeats or ()) for tiling in (y.tilings or {}).values()])


def test_a_repeated_launch_is_bound_once(dev: Counting) -> None:
    kernel, y, x = add_one(), some(dev, 4, 4), some(dev, 4, 4)
    for count in range(6):
        x.copy_from(np.full((4, 4), count, np.float32))
        kernel(y.partition(1, 4), x).run()
        assert (y.numpy() == count + 1).all()
    # Most views are written once, so the first launch is not kept.
    assert dev.bound == 2
    kernel(y.partition(2, 4), x).run()
    kernel(y.partition(1, 4), some(dev, 4, 4)).run()
    assert dev.bound == 4


def test_constants_of_other_bits_are_other_launches(dev: Counting) -> None:
    def body(y: np.ndarray, **_: Any) -> None:
        y[...] = 1

    kernel = FakeKernel("fill", [mut("y"), const("value")], body)
    y = some(dev, 4)
    kernel(y.partition(4), 0.0).run()
    for values, bound in (((0.0, 0.0), 2), ((-0.0, -0.0), 3), ((float("nan"),) * 2, 4)):
        for value in values:
            kernel(y.partition(4), value).run()
        assert dev.bound == bound


def test_moves_are_checked_every_time(dev: Counting) -> None:
    kernel, y, x = add_one(), some(dev, 4, 4), some(dev, 4, 4)
    for _ in range(3):
        kernel(y.partition(1, 4), x).run()
    held = x.partition(1, 4)
    with pytest.raises(MovedError, match=r"O5 move: array of shape .* is held by a partition made"):
        kernel(y.partition(1, 4), x)
    y.numpy()
    del held
    op = kernel(y.partition(1, 4), x)
    with pytest.raises(MovedError, match=r"O5 move: array of shape .* is held by op 'add_one'"):
        kernel(y.partition(1, 4), x)
    part = x[:1].partition(1, 4)
    with pytest.raises(MovedError):
        op.run()
    del part
    op.run()
    part = y.partition(1, 4)
    kernel(part, x).run()
    with pytest.raises(
        MovedError, match=r"O5 move: the partition made at .* is used a second time"
    ):
        kernel(part, x)


def test_parts_of_one_buffer(dev: Counting) -> None:
    a = some(dev, 4, 4)
    y, x = a[:2], a[2:]
    kernel = add_one()
    for _ in range(3):
        kernel(y.partition(1, 4), x).run()
    assert dev.bound == 2
    with pytest.raises(OwnershipError, match="O3 alias xor mutate: argument 'x' of kernel"):
        kernel(y.partition(1, 4), a[1:3])
    part = a[3:].partition(1, 4)
    with pytest.raises(MovedError):
        kernel(y.partition(1, 4), x)
    del part


def test_index_maps_repeat_too(dev: Counting) -> None:
    def body(y: np.ndarray, x: np.ndarray, maps: dict, **_: Any) -> None:
        y[maps[0]] = x

    kernel = FakeKernel("scatter", [mut("y"), ref("x")], body)
    y, x = some(dev, 5, 2), some(dev, 2, 2)
    index = tilert.UniqueIndex.checked(np.array([4, 0]), dev)
    for rows in ([4, 0], [1, 2], [2, 3]):
        index.update(np.array(rows))
        kernel(y.partition_at(index, 1, 2), x).run()
        np.testing.assert_array_equal(y.numpy()[rows], x.numpy())
    assert dev.bound == 2
    other = tilert.UniqueIndex.checked(np.array([0, 4]), dev)
    kernel(y.partition_at(other, 1, 2), x).run()
    assert dev.bound == 3


def test_parts_repeat_by_what_they_are(dev: Counting) -> None:
    grids = []
    kernel = FakeKernel("grids", [mut("y"), mut("z")], lambda *_, grid, **__: grids.append(grid))
    y, z = some(dev, 4, 4), some(dev, 4, 4)
    ways: list[dict[str, Any]] = [
        {"pieces": slice(0, 2)},
        {"pieces": slice(1, 4)},
        {"map": lambda i: (i, 0), "grid": (2,)},
        {},
    ]
    for way in ways * 4:
        kernel(y.partition(1, 4, **way), z.partition(1, 4, **way)).run()
    assert grids == [(2, 1), (3, 1), (2,), (4, 1)] * 4
    # All but the very first are kept.
    assert dev.bound == len(ways) + 1
    kernel(y.partition(1, 4, pieces=slice(0, 2)), z.partition(1, 4, pieces=slice(2, 4))).run()
    assert dev.bound == len(ways) + 2
    with pytest.raises(OwnershipError, match="O2 disjoint pieces: the Muts of kernel 'grids' disa"):
        kernel(y.partition(1, 4, pieces=slice(0, 2)), z.partition(1, 4))
    assert not y.storage.holds and not z.storage.holds


def test_the_number_of_programs_is_part_of_a_repeat() -> None:
    dev = tilert.device("cpu")
    y = tilert.zeros((4, 4), tilert.f32, dev)
    for count, programs in enumerate([None, 2, None, 3, 2, None]):
        double(y.partition(1, 4, programs=programs)).run()
        assert (y.numpy() == 2.0 * (count + 1)).all()
    assert kept(y) == 3


def test_wrong_arguments_of_what_repeats(dev: Counting) -> None:
    def body(y: np.ndarray, z: np.ndarray, *_: Any, **__: Any) -> None:
        y[...] = z[...] = 1

    kernel = FakeKernel("both", [mut("y"), mut("z"), ref("x")], body)
    y, z, x = some(dev, 4), some(dev, 4), some(dev, 4)
    for _ in range(3):
        kernel(y.partition(4), z.partition(4), x).run()
    for wrong in (
        lambda: kernel(y.partition(4), z, x),
        lambda: kernel(y.partition(4), z.partition(4), x.partition(4)),
        lambda: kernel(y.partition(4), z.partition(4), id(x)),
    ):
        with pytest.raises(LaunchError, match=r"argument 'x' of|writes 'z'"):
            wrong()
    kernel(y.partition(4), z.partition(4), x).run()
    assert dev.bound == 2


def test_repeats_go_with_their_arrays(dev: Counting) -> None:
    kernel, y = add_one(), some(dev, 4, 4)
    gc.disable()
    try:
        for _ in range(3):
            x = some(dev, 4, 4)
            kernel(y.partition(1, 4), x).run()
            kernel(y.partition(1, 4), x).run()
            memory = weakref.ref(x.storage)
            del x
            # At once, without the collector: memory must not wait for it.
            assert memory() is None
            assert not kept(y)
        x = some(dev, 4, 4)
        for _ in range(2):
            kernel(y.partition(1, 4), x).run()
        memory = weakref.ref(y.storage)
        del y
        assert memory() is None
    finally:
        gc.enable()


def test_repeats_are_bounded(dev: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilert.repeat._MOST", 4)
    kernel, y = add_one(), some(dev, 4)
    inputs = [some(dev, 4) for _ in range(11)]
    for x in inputs:
        kernel(y.partition(4), x).run()
    assert 1 <= kept(y) <= 4
