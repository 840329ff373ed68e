"""Rule O4, who waits for whom: exactly what conflicts, once, with few records."""

import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilert
from tests.tilert.fake_cuda import fake_cuda
from tests.tilert.host_fakes import add_one
from tests.tilert.simulated import SimulatedDevice
from tilert import f32
from tilert.order import Lane, Order, Record
from tilert.ownership import Region, covers


class Written:
    """Queues that only write down what they are told. Marks are numbers."""

    def __init__(self) -> None:
        self.waits: list[tuple[str, int]] = []
        self.complete = 0
        self.reused: list[int] = []
        self._next = 0

    def mark(self, queue: str) -> int:
        self._next += 1
        return self._next

    def hold(self, queue: str, mark: int) -> None:
        self.waits.append((queue, mark))

    def passed(self, mark: int) -> bool:
        return mark <= self.complete

    def reuse(self, mark: int) -> None:
        self.reused.append(mark)


class Memory:
    """What an order needs of a storage."""

    def __init__(self) -> None:
        self.leases: list[Record] = []


def span(low: int, high: int) -> Region:
    return Region(low, (high - low,), (1,), 1)


class Setting:
    def __init__(self) -> None:
        self.queues = Written()
        self.order = Order(self.queues)
        self.lanes = {name: Lane(name) for name in "abc"}
        self.memory = Memory()

    def work(self, lane: str, *uses: tuple[int, int, bool], memory: Any = None) -> int:
        """Some work; gives the mark behind it."""
        given = [(memory or self.memory, span(low, high), write) for low, high, write in uses]
        self.order.before(self.lanes[lane], given)
        return self.order.after(self.lanes[lane], given).mark


@pytest.mark.parametrize(
    ("first", "second", "waits"),
    [
        ((0, 8, True), (8, 16, True), 0),
        ((0, 8, False), (0, 8, False), 0),
        ((0, 8, True), (4, 12, False), 1),
        ((0, 8, False), (7, 8, True), 1),
        ((0, 8, True), (0, 8, True), 1),
    ],
)
def test_conflicts_wait_and_nothing_else_does(first: Any, second: Any, waits: int) -> None:
    one = Setting()
    mark = one.work("a", first)
    one.work("b", second)
    assert one.queues.waits == [("b", mark)] * waits
    # And not again.
    one.work("b", second)
    assert len(one.queues.waits) == waits


def test_the_work_of_one_queue_never_waits() -> None:
    one = Setting()
    for _ in range(5):
        one.work("a", (0, 8, True), (8, 16, False))
    assert one.queues.waits == []


def test_what_a_queue_waited_for_carries_over() -> None:
    """c waits for b, which waited for a: so c is behind a."""
    one = Setting()
    first = one.work("a", (0, 8, True))
    second = one.work("b", (0, 8, False), (8, 16, True))
    third = one.work("c", (8, 16, False), (0, 8, True))
    assert one.queues.waits == [("b", first), ("c", second)]
    # a is behind neither, and c is behind b.
    one.work("a", (8, 16, True))
    assert one.queues.waits[2:] == [("a", third)]


def test_of_several_works_the_newest_is_waited_for() -> None:
    one = Setting()
    for low in range(0, 64, 8):
        newest = one.work("a", (low, low + 8, True))
    one.work("b", (0, 64, False))
    assert one.queues.waits == [("b", newest)]


def test_new_records_take_the_place_of_old_ones() -> None:
    one = Setting()
    for _ in range(50):
        one.work("a", (0, 8, False))
    assert len(one.memory.leases) == 1
    one.work("b", (0, 16, True))
    assert [(r.region, r.write) for r in one.memory.leases] == [(span(0, 16), True)]
    # A read does not hide a write that others have to wait for.
    one.work("a", (0, 16, False))
    assert len(one.memory.leases) == 2


@pytest.mark.parametrize("complete", [True, False])
def test_records_stay_few(complete: bool) -> None:
    """Also where nothing is ever complete, and every piece of memory is another."""
    one = Setting()
    gc.disable()
    try:
        for step in range(10_000):
            mark = one.work("abc"[step % 3], (step, step + 1, step % 7 == 0))
            one.queues.complete = mark - 5 if complete else 0
            assert len(one.memory.leases) <= 33
        # Marks come back at once, so there are few of them.
        assert len(one.queues.reused) > 9_900
    finally:
        gc.enable()
    # What was joined is still ordered.
    one.queues.complete = 0
    one.queues.waits.clear()
    one.work("a", (0, 10_000, True))
    assert {queue for queue, _ in one.queues.waits} == {"a"}
    assert one.lanes["a"].behind(one.lanes["b"].last)  # type: ignore[arg-type]
    assert one.lanes["a"].behind(one.lanes["c"].last)  # type: ignore[arg-type]


uses = st.tuples(st.integers(0, 12), st.integers(1, 6), st.booleans())
steps = st.lists(st.tuples(st.sampled_from("abc"), st.lists(uses, min_size=1, max_size=3)))


@given(steps)
def test_every_conflict_is_ordered(program: list[Any]) -> None:
    """Against all pairs: who has to be behind whom is, by the waits that were made."""
    one = Setting()
    behind: dict[int, set[int]] = {}
    latest: dict[str, set[int]] = {name: set() for name in "abc"}
    done: list[tuple[int, list[tuple[int, int, bool]]]] = []
    for lane, asked in program:
        spans = [(low, low + size, write) for low, size, write in asked]
        made = len(one.queues.waits)
        mark = one.work(lane, *spans)
        for _, waited in one.queues.waits[made:]:
            latest[lane] |= behind[waited] | {waited}
        for other, others in done:
            if any(
                (w or v) and low < b and a < high for low, high, w in spans for a, b, v in others
            ):
                assert other in latest[lane]
        behind[mark] = set(latest[lane])
        latest[lane].add(mark)
        done.append((mark, spans))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=2, max_size=2), st.data())
def test_a_view_is_covered_by_what_it_was_made_of(cut: list[Any], data: st.DataObject) -> None:
    whole = np.arange(6 * 8 * 10).reshape(6, 8, 10)
    outer = whole[cut[0][0] :: cut[0][1], :, cut[1][0] :: cut[1][1]]
    keys = tuple(data.draw(st.slices(n).filter(lambda s: (s.step or 1) > 0)) for n in outer.shape)
    inner = outer[keys].transpose(data.draw(st.permutations([0, 1, 2])))
    assert covers(region(whole, outer), region(whole, inner))


def region(whole: np.ndarray, view: np.ndarray) -> Region:
    start = view.ctypes.data - whole.ctypes.data if view.size else 0
    return Region(start, view.shape, view.strides, view.itemsize)


cuts = st.tuples(*[st.tuples(st.integers(0, 4), st.integers(1, 4), st.integers(1, 3))] * 2)


@given(cuts, cuts)
def test_what_counts_as_covered_is(first: Any, second: Any) -> None:
    whole = np.arange(64).reshape(8, 8)
    views = [
        whole[tuple(slice(low, low + size * step, step) for low, size, step in cut)]
        for cut in (first, second)
    ]
    if covers(region(whole, views[0]), region(whole, views[1])):
        assert set(views[1].ravel().tolist()) <= set(views[0].ravel().tolist())


# On devices


def test_disjoint_work_waits_for_nothing() -> None:
    dev = SimulatedDevice()
    a, b, c, d = (tilert.zeros((2, 4), f32, dev) for _ in range(4))
    with dev.stream() as one, dev.stream() as two:
        before = dev.waits
        for _ in range(4):
            add_one()(a.partition(1, 4), b).on(one).run()
            add_one()(c.partition(1, 4), d).on(two).run()
        assert dev.waits == before
        add_one()(d.partition(1, 4), a).on(two).run()
        assert dev.waits == before + 1
        add_one()(d.partition(1, 4), a).on(two).run()
        assert dev.waits == before + 1
    assert (d.numpy() == 2).all()


def test_halves_of_one_buffer_are_disjoint() -> None:
    dev = SimulatedDevice()
    a, b = tilert.zeros((4, 8), f32, dev), tilert.zeros((4, 8), f32, dev)
    with dev.stream() as one, dev.stream() as two:
        before = dev.waits
        add_one()(a[:, :4].partition(1, 4), b[:, :4]).on(one).run()
        add_one()(a[:, 4:].partition(1, 4), b[:, 4:]).on(two).run()
        assert dev.waits == before
        add_one()(b[1:2].partition(1, 8), a[1:2]).on(one).run()
        assert dev.waits == before + 1
    assert (b.numpy()[1] == 2).all()


def test_without_streams_nothing_is_written_down() -> None:
    dev = SimulatedDevice()
    a, b = tilert.zeros((2, 4), f32, dev), tilert.zeros((2, 4), f32, dev)
    with dev.stream():
        pass
    marks, waits = dev.marks, dev.waits
    for _ in range(20):
        add_one()(a.partition(1, 4), b).run()
        b.copy_from(a)
        tilert.zeros((2, 4), f32, dev)
    assert (dev.marks, dev.waits) == (marks, waits)
    assert a.storage.leases == b.storage.leases == []
    assert (b.numpy() == 20).all()


def test_a_launch_is_one_call_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    dev = fake_cuda(monkeypatch, 0)
    a, b = tilert.zeros((2, 4), f32, dev), tilert.zeros((2, 4), f32, dev)

    @tilert.kernel
    def more(y: tilert.Mut, x: tilert.Ref) -> None:
        y.store(x.tile_like(y) + 1.0)

    def launch() -> None:
        more(a.partition(1, 4), b).run()

    def counted(what: Any) -> dict[str, int]:
        for _ in range(3):
            what()
        dev.fake.calls.clear()
        what()
        return dict(dev.fake.calls)

    assert counted(launch) == {"cuLaunchKernel": 1}
    assert counted(lambda: b.copy_from(a)) == {"cuMemcpyDtoDAsync": 1}
    with tilert.capture(dev, launch) as graph:
        assert counted(graph.replay) == {"cuGraphLaunch": 1}
    # A launch may ask whether a graph that was closed is over.
    asking = counted(launch)
    assert asking.pop("cuEventQuery", 0) <= 1 and asking == {"cuLaunchKernel": 1}
    dev.synchronize()
    assert counted(launch) == {"cuLaunchKernel": 1}
    assert counted(dev.record_event)["cuEventRecord"] == 1
    with dev.stream() as stream:
        # An event behind the work, that others may have to wait for.
        assert counted(launch) == {"cuLaunchKernel": 1, "cuEventRecord": 1}
        assert counted(lambda: more(a.partition(1, 4), b).on(stream).run()) == {
            "cuLaunchKernel": 1, "cuEventRecord": 1,
        }  # fmt: skip
    assert counted(launch) == {"cuLaunchKernel": 1}
