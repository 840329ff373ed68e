"""Rule O6: branches of a graph, replays on streams, and other memory between replays."""

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

import tilert
from tests.tilert.fake_cuda import FakeCudaDevice
from tests.tilert.host_fakes import FakeCpu, FakeKernel, mut, ref
from tests.tilert.simulated import SimulatedDevice
from tests.tilert.stream_devices import KINDS, make_device, plus
from tilert import LaunchError, MovedError, OwnershipError, f32


@pytest.fixture(params=KINDS)
def dev(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tilert.Device]:
    device = make_device(request.param, monkeypatch)
    yield device
    gc.collect()
    device.synchronize()


def some(dev: tilert.Device, *values: float) -> list[tilert.Array]:
    return [tilert.full((4, 8), value, f32, dev) for value in values]


# Branches


def test_branches_of_a_graph(dev: tilert.Device) -> None:
    a, b, c, d = some(dev, 1, 0, 0, 0)

    def step() -> None:
        with dev.stream() as one, dev.stream() as two:
            plus(b, a).on(one).run()
            plus(c, a).on(two).run()
            plus(d, b).on(two).run()
        a.copy_from(d)

    with tilert.capture(dev, step) as graph:
        assert (b.numpy() == 0).all()
        for count in range(1, 4):
            graph.replay()
            assert [x.numpy()[0, 0] for x in (a, b, c, d)] == [
                1 + 2 * count, 2 * count, 2 * count, 1 + 2 * count,
            ]  # fmt: skip


def test_independent_branches_do_not_wait() -> None:
    dev = SimulatedDevice()
    a, b, c, d = some(dev, 1, 0, 0, 0)
    one, two = dev.stream(), dev.stream()

    def waits(*works: Callable[[], tilert.Op]) -> tuple[int, int]:
        graph: Any = tilert.capture(dev, lambda: [work().run() for work in works])
        return len(graph._executable.queues), graph._executable.waits

    # One queue: no order to ask for.
    assert waits(lambda: plus(b, a), lambda: plus(c, b)) == (1, 0)
    # A fork and a join for each branch.
    assert waits(lambda: plus(b, a).on(one), lambda: plus(d, c).on(two)) == (3, 4)
    assert waits(lambda: plus(b, a).on(one), lambda: plus(c, b).on(two)) == (3, 4)
    assert waits(lambda: plus(b, a), lambda: plus(d, c).on(two)) == (2, 2)
    one.close()
    two.close()
    before = dev.waits
    graph = tilert.gather(plus(b, a), plus(d, c)).capture()
    graph.replay()
    assert [x.numpy()[0, 0] for x in (b, d)] == [2, 1]
    # The stream that the gather takes begins behind the device's own; it was not used.
    assert dev.waits - before == 1


def test_a_graph_of_composed_work(dev: tilert.Device) -> None:
    a, b, c, d = some(dev, 1, 0, 0, 0)
    work = tilert.gather(plus(b, a), plus(c, a)).then(lambda both: plus(d, both[1]))
    with work.capture() as graph:
        graph.replay()
        assert [x.numpy()[0, 0] for x in (b, c, d)] == [2, 2, 3]


def test_replays_on_streams(dev: tilert.Device) -> None:
    a, b, c = some(dev, 1, 0, 0)
    with (
        tilert.capture(dev, lambda: plus(b, a).run()) as there,
        tilert.capture(dev, lambda: plus(a, b).run()) as back,
        dev.stream() as one,
        dev.stream() as two,
    ):
        for _ in range(5):
            there.replay(one)
            back.replay(two)
            plus(c, a).run()
        assert [x.numpy()[0, 0] for x in (a, b, c)] == [11, 10, 12]


def test_a_closed_graph_completes_its_replays(dev: tilert.Device) -> None:
    a, b = some(dev, 1, 0)
    kept, given = b, [a]
    graph = tilert.capture(dev, lambda: plus(b, given[0]).run())
    with dev.stream() as stream:
        graph.replay(stream)
        memory = weakref.ref(a.storage)
        del a
        given.clear()
        graph.close()
        assert memory() is None
        poison = some(dev, -9, -9)
        assert (kept.numpy() == 2).all()
        assert (poison[0].numpy() == -9).all()


def test_what_is_lent_to_be_read_may_be_read(dev: tilert.Device) -> None:
    a, b = some(dev, 1, 0)
    graph = tilert.capture(dev, lambda: plus(b, a).run())
    loan = a.lend(write=False)
    graph.replay()
    other = b.lend(write=False)
    with pytest.raises(MovedError, match="O5 move"):
        graph.replay()
    del loan, other
    graph.replay()
    assert (b.numpy() == 2).all()


# Rebinding


def test_rebinding_inputs_and_outputs(dev: tilert.Device) -> None:
    a, b, c, d = some(dev, 1, 0, 10, 0)
    with tilert.capture(dev, lambda: plus(b, a).run()) as graph:
        graph.replay()
        graph.rebind({a: c})
        graph.replay()
        assert (b.numpy() == 11).all()
        # The keys are what the graph uses now.
        graph.rebind({c: a, b: d})
        graph.replay()
        assert [x.numpy()[0, 0] for x in (a, b, c, d)] == [1, 11, 10, 2]
        with pytest.raises(LaunchError, match="O6 graphs: the graph does not use the memory of"):
            graph.rebind({b: c})
        graph.rebind({a: d, d: a})
        graph.replay()
        assert (a.numpy() == 3).all()


def test_views_go_along(dev: tilert.Device) -> None:
    a, b, c, d = some(dev, 1, 0, 0, 0)
    a.copy_from(np.arange(32, dtype=np.float32).reshape(4, 8))
    c.copy_from(-a.numpy())

    def step() -> None:
        plus(b[1:3], a[2:4]).run()
        b[3].copy_from(a[0])
        b[:1, :4].copy_from(a[:1, 4:])

    with tilert.capture(dev, step) as graph:
        graph.replay()
        graph.rebind({a: c, b: d})
        graph.replay()
        for out, of in ((b, a), (d, c)):
            want, given = np.zeros((4, 8), np.float32), of.numpy()
            want[1:3], want[3], want[0, :4] = given[2:4] + 1, given[0], given[0, 4:]
            np.testing.assert_array_equal(out.numpy(), want)
        # A part of what was recorded, where it is used by itself.
        graph.rebind({c[2:4]: b[2:4]})
        with pytest.raises(LaunchError, match=r"together with memory beside it"):
            graph.rebind({d[1:2]: a[1:2]})


def test_fills_and_pinned_copies_go_along(dev: tilert.Device) -> None:
    (a,) = some(dev, 5)
    out = tilert.pinned((4, 8), f32, dev)
    made: list[tilert.Array] = []

    def step() -> None:
        made.append(tilert.full((4, 8), 3, f32, dev))
        out.copy_from(made[0])

    with tilert.capture(dev, step) as graph:
        graph.rebind({made[0]: a})
        graph.replay()
        dev.synchronize()
        assert (out.numpy == 3).all()
        assert (a.numpy() == 3).all()


def test_replays_in_flight_keep_their_memory(dev: tilert.Device) -> None:
    a, b, c, d = some(dev, 1, 0, 10, 0)
    given = [a]
    with tilert.capture(dev, lambda: plus(b, given[0]).run()) as graph, dev.stream() as stream:
        graph.replay(stream)
        graph.rebind({a: c, b: d})
        memory = weakref.ref(a.storage)
        del a
        given.clear()
        assert memory() is None
        graph.replay(stream)
        poison = some(dev, -9, -9)
        assert [x.numpy()[0, 0] for x in (b, d)] == [2, 11]
        assert (poison[0].numpy() == -9).all()


def test_a_rebound_graph_holds_its_memory(dev: tilert.Device) -> None:
    a, b, c = some(dev, 1, 0, 10)
    with tilert.capture(dev, lambda: plus(b, a).run()) as graph:
        graph.rebind({a: c})
        memory = weakref.ref(c.storage)
        del c
        graph.replay()
        assert (b.numpy() == 11).all() and memory() is not None
    assert memory() is None


def test_new_memory_can_bring_new_order(dev: tilert.Device) -> None:
    """Two branches were independent; one buffer for both puts them in order."""
    a, b, c, d = some(dev, 1, 0, 5, 0)
    with dev.stream() as one, dev.stream() as two:

        def step() -> None:
            plus(b, a).on(one).run()
            plus(d, c).on(two).run()

        graph = tilert.capture(dev, step)
    graph.rebind({c: b})
    for _ in range(3):
        b.copy_from(np.zeros((4, 8), np.float32))
        graph.replay()
        assert [x.numpy()[0, 0] for x in (b, d)] == [2, 3]
    if isinstance(dev, FakeCudaDevice):
        # The executable graph could not be updated to that, and was made anew.
        assert dev.fake.calls["cuGraphExecUpdate"] == 1
        assert dev.fake.calls["cuGraphInstantiate"] == 2
    graph.close()


def test_an_executable_graph_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    dev = make_device("fake cuda", monkeypatch)
    assert isinstance(dev, FakeCudaDevice)
    a, b, c = some(dev, 1, 0, 10)
    graph = tilert.capture(dev, lambda: plus(b, a).run())
    graph.rebind({a: c})
    graph.replay()
    assert (b.numpy() == 11).all()
    assert dev.fake.calls["cuGraphExecUpdate"] == dev.fake.calls["cuGraphInstantiate"] == 1


REFUSED: list[tuple[str, Callable[[tilert.Device], Mapping[str, tilert.Array]], str]] = [
    (
        "shape",
        lambda dev: {"a": tilert.zeros((4, 4), f32, dev)},
        "O6 graphs: Array([4, 8], f32, cpu) with strides [8, 1] cannot be rebound to Array([4, 4],"
        " f32, cpu) with strides [4, 1]; shape, strides and dtype are those of the recording",
    ),
    (
        "dtype",
        lambda dev: {"a": tilert.zeros((4, 8), tilert.i32, dev)},
        "O6 graphs: Array([4, 8], f32, cpu) with strides [8, 1] cannot be rebound to Array([4, 8],"
        " i32, cpu) with strides [8, 1]; shape, strides and dtype are those of the recording",
    ),
    (
        "device",
        lambda dev: {"a": tilert.zeros((4, 8), f32, SimulatedDevice())},
        "O6 graphs: a graph of cpu is rebound from arrays of cpu to arrays of simulated; all are on"
        " the graph's device",
    ),
    (
        "read-only",
        lambda dev: {"b": tilert.zeros((4, 8), f32, dev).as_readonly("it is a constant")},
        "O6 graphs: the graph writes Array([4, 8], f32, cpu), and Array([4, 8], f32, cpu) is"
        " read-only: it is a constant",
    ),
    (
        "no array",
        lambda dev: {"a": np.ones((4, 8), np.float32)},
        "O6 graphs: rebind takes arrays of cpu by arrays, got ndarray",
    ),
    (
        "alignment",
        lambda dev: {"a": tilert.zeros(33, f32, dev)[1:].reshape(4, 8)},
        "O6 graphs: the graph was recorded for memory aligned to 16 bytes, which that of"
        " Array([4, 8], f32, cpu) is not",
    ),
]


@pytest.mark.parametrize(("what", "make", "said"), REFUSED, ids=[case[0] for case in REFUSED])
def test_what_does_not_fit_is_refused(what: str, make: Callable[..., Any], said: str) -> None:
    dev = FakeCpu()
    a, b = some(dev, 1, 0)
    graph = tilert.capture(dev, lambda: plus(b, a).run())
    named = {"a": a, "b": b}
    with pytest.raises(tilert.TilertError) as caught:
        graph.rebind({named[name]: new for name, new in make(dev).items()})
    assert str(caught.value) == said
    if what in ("read-only", "alignment"):
        assert "while rebinding op 'add_one' created at" in caught.value.__notes__[0]
    # Nothing has changed.
    graph.replay()
    assert (b.numpy() == 2).all()


def test_rules_of_a_launch_hold_for_what_is_rebound(dev: tilert.Device) -> None:
    a, b, c = some(dev, 1, 0, 0)
    with tilert.capture(dev, lambda: plus(b, a).run()) as graph:
        for wrong in ({a: b}, {b: a}, {a: c, b: c}):
            with pytest.raises(OwnershipError, match="O3 alias xor mutate: the work would reach"):
                graph.rebind(wrong)
        with pytest.raises(LaunchError, match="two of the arrays to rebind share memory"):
            graph.rebind({a: c, a[1:]: c[1:]})
        part = c.partition(1, 8)
        graph.rebind({a: c})
        with pytest.raises(MovedError, match="O5 move"):
            graph.replay()
        del part
        graph.replay()
        assert (b.numpy() == 1).all()
    with pytest.raises(LaunchError, match="O6 graphs: this graph is closed"):
        graph.rebind({c: a})


def test_index_maps_stay() -> None:
    dev = FakeCpu()

    def body(y: np.ndarray, x: np.ndarray, maps: Any, **_: Any) -> None:
        y[maps[0]] = x

    scatter = FakeKernel("scatter", [mut("y"), ref("x")], body)
    index = tilert.UniqueIndex.checked(np.array([3, 1]), dev)
    other = tilert.UniqueIndex.checked(np.array([0, 1]), dev)
    y, z, x = (tilert.zeros((n, 2), f32, dev) for n in (4, 4, 2))
    x.copy_from(np.array([[1, 2], [3, 4]], np.float32))
    graph = tilert.capture(dev, lambda: scatter(y.partition_at(index, 1, 2), x).run())
    with pytest.raises(OwnershipError, match=r"O7 .*: the memory of .* is an index map"):
        graph.rebind({index.array: other.array})
    graph.rebind({y: z})
    graph.replay()
    assert z.numpy().tolist() == [[0, 0], [3, 4], [0, 0], [1, 2]] and (y.numpy() == 0).all()
