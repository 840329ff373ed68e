"""Rule O6 on the cpu: capture records and executes nothing, replay is a launch."""

import re
import threading

import numpy as np
import pytest

import tilert
from tests.tilert.host_fakes import FakeCpu, add_one
from tests.tilert.simulated import SimulatedDevice
from tilert import LaunchError, MovedError
from tilert.cpu_device import CpuDevice


@pytest.fixture
def dev() -> FakeCpu:
    return FakeCpu()


def test_capture_and_replay(dev: FakeCpu) -> None:
    a, b, c = (tilert.zeros((2, 3), tilert.f32, dev) for _ in range(3))
    out = tilert.pinned((2, 3), tilert.f32, dev)
    out.numpy[:] = -1

    def step() -> None:
        add_one()(b.partition(1, 3), a).run()
        c.copy_from(b)
        a.copy_from(c)
        out.copy_from(a)

    graph = tilert.capture(dev, step)
    assert (out.numpy == -1).all()
    assert (b.numpy() == 0).all()
    for count in (1, 2, 3):
        graph.replay()
        assert (a.numpy() == count).all()
        assert (out.numpy == count).all()
    a.copy_from(np.full((2, 3), 10, np.float32))
    graph.replay()
    assert (c.numpy() == 11).all()


def test_zeros_are_recorded(dev: FakeCpu) -> None:
    made = []
    graph = tilert.capture(dev, lambda: made.append(tilert.zeros(3, tilert.f32, dev)))
    made[0].copy_from(np.ones(3, np.float32))
    graph.replay()
    assert (made[0].numpy() == 0).all()


def test_what_a_graph_cannot_hold(dev: FakeCpu) -> None:
    a = tilert.zeros((2, 3), tilert.f32, dev)
    x = tilert.zeros((2, 3), tilert.f32, dev)
    empty = tilert.capture(dev, lambda: None)
    cases = {
        "reading an array on the host": a.numpy,
        "a copy from the host": lambda: a.copy_from(np.zeros((2, 3), np.float32)),
        "recording an event": dev.record_event,
        "waiting for the device": dev.synchronize,
        "waiting for an op": lambda: add_one()(a.partition(1, 3), x).sync(),
        "another capture": lambda: tilert.capture(dev, lambda: None),
        "the replay of another graph": empty.replay,
    }
    for what, fn in cases.items():
        with pytest.raises(LaunchError) as caught:
            tilert.capture(dev, fn)
        assert str(caught.value) == (
            f"O6 graphs: {what} cannot be part of a captured graph; do it before tilert.capture,"
            " or after a replay"
        )
        del caught
        a.numpy()
    assert dev.recorder is None


def test_a_closed_graph_lets_go(dev: FakeCpu) -> None:
    import weakref

    a, b = tilert.zeros((1, 4), tilert.f32, dev), tilert.zeros((1, 4), tilert.f32, dev)
    storage = weakref.ref(b.storage)
    with tilert.capture(dev, lambda: add_one()(b.partition(1, 4), a).run()) as graph:
        b = a
        assert storage() is not None
        graph.replay()
    assert storage() is None
    with pytest.raises(LaunchError, match="O6 graphs: this graph is closed; capture it again"):
        graph.replay()
    graph.close()


def test_replay_checks_moves(dev: FakeCpu) -> None:
    a, b = tilert.zeros((2, 4), tilert.f32, dev), tilert.zeros((2, 4), tilert.f32, dev)
    graph = tilert.capture(dev, lambda: add_one()(b.partition(1, 4), a).run())
    for array in (a, b):
        part = array[1:].partition(1, 4)
        with pytest.raises(MovedError, match=r"O5 move: .* is held by a partition made at"):
            graph.replay()
        del part
    graph.replay()


class Broken(Exception):
    pass


def test_a_dropped_capture_gives_arrays_back(dev: FakeCpu) -> None:
    """Also while its exception, and with it the frames of the function, are kept."""
    a, b, c = (tilert.zeros((2, 4), tilert.f32, dev) for _ in range(3))
    outside = b.partition(1, 4)
    left: list[tilert.Op] = []

    def step() -> None:
        add_one()(c.partition(1, 4), a).run()
        op = add_one()(outside, a)
        left.append(op)
        part = a.partition(2, 4)
        raise Broken(repr((op, part)))

    with pytest.raises(Broken) as caught:
        tilert.capture(dev, step)
    kept = caught.value
    for array in (a, b, c):
        array.copy_from(np.ones((2, 4), np.float32))
    assert kept.__traceback__ is not None
    with pytest.raises(LaunchError) as refused:
        left[0].run()
    assert "was made in a capture that failed; call the kernel again to make another" in str(
        refused.value
    )
    assert (b.numpy() == 1).all()
    op = add_one()(b.partition(1, 4), a)
    left[0].release()
    with pytest.raises(MovedError):
        b.numpy()
    op.run()
    assert (b.numpy() == 2).all()


def test_a_capture_keeps_what_it_leaves(dev: FakeCpu) -> None:
    """What a capture that ends well has not run may run later; what it drops is free at once."""
    a, b = tilert.zeros((1, 4), tilert.f32, dev), tilert.zeros((1, 4), tilert.f32, dev)
    left: list[tilert.Op] = []

    def step() -> None:
        tilert.zeros(1, tilert.f32, dev)
        a.partition(1, 4)
        add_one()(a.partition(1, 4), b)
        left.append(add_one()(b.partition(1, 4), a))

    tilert.capture(dev, step)
    with pytest.raises(MovedError, match="is held by op 'add_one'"):
        b.numpy()
    left[0].run()
    assert (b.numpy() == 1).all()


def test_another_threads_op_survives_a_dropped_capture(dev: FakeCpu) -> None:
    a, b = tilert.zeros((1, 4), tilert.f32, dev), tilert.zeros((1, 4), tilert.f32, dev)
    inside = threading.Event()
    made: list[tilert.Op] = []

    def other() -> None:
        inside.wait()
        made.append(add_one()(b.partition(1, 4), a))

    def step() -> None:
        inside.set()
        thread.join(0.2)
        raise Broken

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(Broken):
        tilert.capture(dev, step)
    thread.join()
    made[0].run()
    assert (b.numpy() == 1).all()


def test_other_threads_wait_for_the_capture(dev: FakeCpu) -> None:
    a, b = tilert.zeros((1, 4), tilert.f32, dev), tilert.zeros((1, 4), tilert.f32, dev)
    order: list[str] = []
    inside = threading.Event()

    def other() -> None:
        inside.wait()
        b.copy_from(np.ones((1, 4), np.float32))
        order.append("copied")

    thread = threading.Thread(target=other)
    thread.start()

    def step() -> None:
        inside.set()
        thread.join(0.2)
        order.append("captured")

    graph = tilert.capture(dev, step)
    thread.join()
    assert order == ["captured", "copied"]
    graph.replay()
    assert (a.numpy() == 0).all()
    assert (b.numpy() == 1).all()


def test_work_that_the_function_returns_is_run(dev: FakeCpu) -> None:
    a, b, c = (tilert.zeros((1, 4), tilert.f32, dev) for _ in range(3))

    def step() -> tilert.Work:
        op = add_one()(b.partition(1, 4), a)
        return op.then(lambda b: add_one()(c.partition(1, 4), b))

    graph = tilert.capture(dev, step)
    assert (c.numpy() == 0).all()
    graph.replay()
    assert (b.numpy() == 1).all() and (c.numpy() == 2).all()


def test_an_op_that_has_run_may_be_returned(dev: FakeCpu) -> None:
    a, b = tilert.zeros((1, 4), tilert.f32, dev), tilert.zeros((1, 4), tilert.f32, dev)

    def step() -> tilert.Op:
        op = add_one()(b.partition(1, 4), a)
        op.run()
        return op

    graph = tilert.capture(dev, step)
    graph.replay()
    assert (b.numpy() == 1).all()


def test_work_is_captured(dev: FakeCpu) -> None:
    a, b = tilert.zeros((1, 4), tilert.f32, dev), tilert.zeros((1, 4), tilert.f32, dev)
    graph = tilert.capture(dev, add_one()(b.partition(1, 4), a))
    assert (b.numpy() == 0).all()
    graph.replay()
    assert (b.numpy() == 1).all()
    op = add_one()(b.partition(1, 4), a)
    for given in (op, lambda: op):
        with pytest.raises(LaunchError, match=r"is on .*cpu and cannot be captured on checked"):
            tilert.capture(CpuDevice(check=True), given)
    op.run()
    for given in (op, op.run):
        with pytest.raises(LaunchError, match="has already run"):
            tilert.capture(dev, given)
    with pytest.raises(LaunchError) as caught:
        tilert.capture(dev, a)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "O6 graphs: capture takes a function without parameters, or work, got Array"
    )
    assert dev.recorder is None


def test_a_capture_of_ops_that_never_ran_is_refused(dev: FakeCpu) -> None:
    a, b = tilert.zeros((1, 4), tilert.f32, dev), tilert.zeros((1, 4), tilert.f32, dev)
    kept = []

    def step() -> None:
        kept.append(add_one()(b.partition(1, 4), a))

    for fn in (step, lambda: [add_one()(b.partition(1, 4), a)]):
        with pytest.raises(LaunchError) as caught:
            tilert.capture(dev, fn)
        assert re.fullmatch(
            r"O6 graphs: the capture recorded nothing: op 'add_one' created at \S+:\d+ was made in"
            r" it and never run; call \.run\(\) on it, or return it from the function",
            str(caught.value),
        )
        assert (b.numpy() == 0).all()


def test_graphs_and_events_say_what_they_are(dev: FakeCpu) -> None:
    a, b = tilert.zeros((1, 4), tilert.f32, dev), tilert.zeros((1, 4), tilert.f32, dev)
    graph = tilert.capture(dev, lambda: add_one()(b.partition(1, 4), a))
    place = rf"{re.escape(__file__)}:\d+"
    assert re.fullmatch(f"<graph of cpu captured at {place}, 1 piece of work>", repr(graph))
    graph.close()
    assert re.fullmatch(f"<closed graph of cpu captured at {place}>", repr(graph))
    assert repr(dev.record_event()) == "<event, passed>"
    assert repr(SimulatedDevice().record_event()) == "<event>"
