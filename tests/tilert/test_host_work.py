"""Composed ops: then, gather, await, and what is left of them when something goes wrong."""

import asyncio
import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tilert
from tests.tilert.fake_cuda import FakeCudaDevice
from tests.tilert.host_fakes import FakeKernel, mut, ref
from tests.tilert.simulated import SimulatedDevice
from tests.tilert.stream_devices import KINDS, make_device, more, plus
from tilert import DeviceError, LaunchError, MovedError, f32


@pytest.fixture(params=KINDS)
def dev(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tilert.Device]:
    device = make_device(request.param, monkeypatch)
    yield device
    gc.collect()
    device.synchronize()


def some(dev: tilert.Device, *values: float) -> list[tilert.Array]:
    return [tilert.full((2, 4), value, f32, dev) for value in values]


def test_then_runs_what_follows(dev: tilert.Device) -> None:
    a, b, c = some(dev, 1, 0, 0)
    got = plus(b, a).then(lambda y: plus(c, y)).then(lambda y: plus(a, y)).sync()
    assert got is a
    assert [x.numpy()[0, 0] for x in (a, b, c)] == [4, 2, 3]


def test_then_gives_what_is_no_work(dev: tilert.Device) -> None:
    a, b = some(dev, 1, 0)
    assert plus(b, a).then(lambda y: ("done", y.shape)).run() == ("done", (2, 4))
    assert tilert.ready(3).then(lambda n: n + 1).run() == 4
    assert tilert.ready(3).then(lambda n: plus(b, a)).sync() is b
    # What it is called with is enqueued, not waited for.
    seen: list[Any] = []
    plus(a, b).then(seen.append).run()
    assert seen == [a]


def test_gather_gives_results_in_order(dev: tilert.Device) -> None:
    a, b, c, d = some(dev, 1, 0, 0, 0)
    work = tilert.gather(
        plus(b, a), tilert.ready("x"), plus(c, a).then(lambda y: plus(d, y)), tilert.gather()
    )
    assert work.sync() == (b, "x", d, ())
    assert [x.numpy()[0, 0] for x in (b, c, d)] == [2, 2, 3]
    # What follows has all of it.
    assert tilert.gather(plus(a, b), plus(c, d)).then(lambda both: plus(d, both[0])).sync() is d
    assert d.numpy()[0, 0] == 4


def test_gather_uses_streams_beside() -> None:
    dev = SimulatedDevice(0, late=1.0)
    arrays = some(dev, *range(24))
    waits = dev.waits
    tilert.gather(*(plus(arrays[i], arrays[i + 12]) for i in range(12))).run()
    # One from the device's own, and eight more, which take turns.
    assert len(dev.queues) == 9
    # Each begins behind the device's own, which goes on behind each; nothing else waits.
    assert dev.waits - waits == 16
    assert [arrays[i].numpy()[0, 0] for i in range(12)] == [i + 13 for i in range(12)]
    only = plus(arrays[0], arrays[1])
    waits = dev.waits
    tilert.gather(only, tilert.ready(1)).run()
    assert dev.waits == waits


def test_work_on_a_stream(dev: tilert.Device) -> None:
    a, b, c, d = some(dev, 1, 0, 0, 0)
    with dev.stream() as stream, dev.stream() as other:
        assert plus(b, a).then(lambda y: plus(c, y).on(other)).on(stream).sync() is c
        works = tilert.gather(plus(a, c), plus(d, b)).on(stream)
        assert works.sync() == (a, d)
        assert plus(c, a).on(stream).then(lambda y: plus(b, y)).sync() is b
    assert [x.numpy()[0, 0] for x in (a, b, c, d)] == [4, 6, 5, 3]


def test_work_runs_once(dev: tilert.Device) -> None:
    a, b = some(dev, 1, 0)
    op = plus(b, a)
    whole = op.then(lambda y: y)
    whole.run()
    for work, said in (
        (op, r"op '\w+' created at .* has already run; call the kernel again"),
        (whole, r"<op '\w+' created at .*, has run>.then\(.*\) has already run; make it again"),
    ):
        for way in (work.run, work.sync):
            with pytest.raises(LaunchError, match=said):
                way()
    with pytest.raises(LaunchError, match="gather was given one work twice"):
        tilert.gather(op, op)
    with pytest.raises(LaunchError, match=r"got list; pass its items one by one: gather\(\*ops\)"):
        tilert.gather([])  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match=r"gather takes ops .*, got Array; tilert.ready\(value\)"):
        tilert.gather(op, a)  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match="then takes a function of the result, got int"):
        op.then(3)  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match=r"ready\(int\) has no device"):
        tilert.ready(3).capture()


class Broken(Exception):
    pass


def broken(result: Any) -> Any:
    raise Broken


def test_what_raises_between_launches_leaves_nothing_held(dev: tilert.Device) -> None:
    a, b, c, d = some(dev, 1, 0, 0, 0)
    work = tilert.gather(
        plus(b, a), plus(c, a).then(broken), tilert.ready(0), plus(d, a).then(lambda y: plus(a, y))
    )
    with pytest.raises(Broken) as caught:
        work.run()
    assert [note.split(" ")[0] for note in caught.value.__notes__] == ["not", "not"]
    assert "not run for that reason: ready(int)" in caught.value.__notes__
    # What was enqueued completes, and nothing is held, also while the exception is kept.
    assert [x.numpy()[0, 0] for x in (a, b, c, d)] == [1, 2, 2, 0]
    for x in (a, b, c, d):
        x.copy_from(np.zeros((2, 4), np.float32))


def test_what_moved_meanwhile_is_given_back_too(dev: tilert.Device) -> None:
    a, b, c = some(dev, 1, 0, 0)
    work = tilert.gather(plus(b, a), plus(c, a))
    part = a.partition(1, 4)
    with pytest.raises(MovedError):
        work.run()
    assert (b.numpy() == 0).all() and (c.numpy() == 0).all()
    del part


def test_what_follows_and_cannot_run_is_given_back(dev: tilert.Device) -> None:
    a, b, c, d = some(dev, 1, 0, 0, 0)
    parts: list[Any] = []

    def follow(_: Any) -> tilert.Work:
        op = plus(c, a)
        parts.append(a.partition(1, 4))
        return op

    late = plus(b, a).then(follow)
    with pytest.raises(MovedError):
        late.run()
    parts.clear()
    early = plus(d, a).then(lambda y: y)
    parts.append(a.partition(1, 4))
    with pytest.raises(MovedError):
        early.run()
    parts.clear()
    assert [x.numpy()[0, 0] for x in (a, b, c, d)] == [1, 2, 0, 0]
    for x in (a, b, c, d):
        x.copy_from(np.zeros((2, 4), np.float32))
    # Nor can work follow itself.
    itself = plus(b, a).then(lambda _: tilert.gather(tilert.ready(0), itself))
    with pytest.raises(LaunchError, match="has already run"):
        itself.run()


def test_work_is_no_array(dev: tilert.Device) -> None:
    a, b = some(dev, 1, 0)
    op = plus(b, a)
    with pytest.raises(AttributeError, match=r"^<op '\w+' created at .*, not run> has no attr"):
        op.nothing  # noqa: B018
    both = tilert.gather(op)
    for work in (op, both, op.then(lambda y: y)):
        for name in ("numpy", "shape", "partition"):
            with pytest.raises(AttributeError) as caught:
                getattr(work, name)
            end = f" has no attribute '{name}'; call .sync() first: what it gives has .{name}"
            assert str(caught.value) == f"{work!r}{end}"
    assert not hasattr(op, "__array_interface__")
    assert op.sync().numpy()[0, 0] == 2


def test_dropped_and_released_work(dev: tilert.Device) -> None:
    a, b, c = some(dev, 1, 0, 0)
    work = tilert.gather(plus(b, a), plus(c, a).then(lambda y: y))
    with pytest.raises(MovedError):
        b.numpy()
    del work
    gc.collect()
    assert (b.numpy() == 0).all()
    work = tilert.gather(plus(b, a), plus(c, a).then(lambda y: y))
    work.release()
    assert (c.numpy() == 0).all()
    op = plus(b, a)
    op.release()
    assert (b.numpy() == 0).all()
    with pytest.raises(LaunchError, match="was released, or was made in a capture that failed"):
        op.run()


def test_sync_waits_for_its_work_alone() -> None:
    dev = SimulatedDevice(0, late=1.0)
    a, b, c, d = some(dev, 1, 0, 0, 0)
    dev.synchronize()
    with dev.stream() as one, dev.stream() as two:
        slow = plus(b, a).on(one)
        slow.run()
        # The other stream has no need to move.
        for queue in dev.queues:
            if queue is one.lane(dev).queue:
                dev.queues.remove(queue)
                break
        plus(d, c).on(two).sync()
        assert d.storage.host is not None and d.storage.host.view(np.float32)[0] == 1
        assert b.storage.host is not None and b.storage.host.view(np.float32)[0] == 0
        dev.queues.append(one.lane(dev).queue)
    assert (b.numpy() == 2).all()


# Await


def test_await(dev: tilert.Device) -> None:
    a, b, c = some(dev, 1, 0, 0)
    ticks: list[int] = []

    async def beside() -> None:
        for i in range(3):
            ticks.append(i)
            await asyncio.sleep(0)

    async def main() -> Any:
        other = asyncio.ensure_future(beside())
        got = await plus(b, a)
        # The loop went on meanwhile, at least once.
        assert ticks
        await other
        both = await asyncio.gather(plus(c, b), asyncio.wait_for(plus(a, b), 60))
        return got, both, await tilert.ready(7), await tilert.gather(plus(b, c), tilert.ready(1))

    got, both, seven, gathered = asyncio.run(main())
    assert got is b and both == [c, a] and seven == 7 and gathered == (b, 1)
    assert [x.numpy()[0, 0] for x in (a, b, c)] == [3, 4, 3]


def test_a_cancelled_await(dev: tilert.Device) -> None:
    a, b, c = some(dev, 1, 0, 0)

    async def wait(work: tilert.Work) -> Any:
        return await work

    async def main() -> None:
        begun = asyncio.ensure_future(wait(plus(b, a)))
        await asyncio.sleep(0)
        begun.cancel()
        never = asyncio.ensure_future(wait(plus(c, a)))
        never.cancel()
        for task in (begun, never):
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    gc.collect()
    # The first was enqueued and completes; the second has not run, and its arrays are back.
    assert [x.numpy()[0, 0] for x in (b, c)] == [2, 0]
    c.copy_from(np.ones((2, 4), np.float32))


def test_waits_are_refused_in_a_capture(dev: tilert.Device) -> None:
    a, b = some(dev, 1, 0)

    def awaited() -> None:
        next(plus(b, a).__await__())

    def found_late() -> None:
        tilert.ready(0).then(lambda _: plus(b, a)).sync()

    both = lambda: tilert.gather(plus(b, a)).sync()  # noqa: E731
    for wait in (awaited, lambda: plus(b, a).sync(), both, found_late):
        with pytest.raises(LaunchError, match=r"O6 graphs: waiting for .* cannot be part of"):
            tilert.capture(dev, wait)
    b.copy_from(a)


def test_failures_name_the_work() -> None:
    class Failing(SimulatedDevice):
        def wait_mark(self, mark: Any) -> None:
            raise DeviceError("the device is on fire")

        def passed(self, mark: Any) -> bool:
            raise DeviceError("the device is on fire")

    dev = Failing()
    (a,) = some(dev, 1)
    kernel = FakeKernel("burns", [mut("y")], lambda y, **_: None)

    async def awaits() -> None:
        await kernel(a.partition(1, 4))

    ways: list[Callable[[], Any]] = [
        lambda: kernel(a.partition(1, 4)).sync(),
        lambda: asyncio.run(awaits()),
        lambda: kernel(a.partition(1, 4)).then(lambda y: y).sync(),
    ]
    for way in ways:
        with pytest.raises(DeviceError, match="on fire") as caught:
            way()
        (note,) = caught.value.__notes__
        assert "while waiting for <op 'burns' created at" in note
    # The arrays came back all the same.
    kernel(a.partition(1, 4)).run()


def stack() -> list[types.FrameType]:
    """The frames of whoever calls this, outermost last."""
    frame, found = sys._getframe(1), []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


@pytest.mark.parametrize("way", ["run", "sync", "await"])
@pytest.mark.parametrize("kind", ["cpu", "fake cuda"])
def test_who_keeps_the_stack_of_a_launch_keeps_no_memory(
    kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tools do that want to say later where a kernel was launched."""
    kept: list[types.FrameType] = []
    dev = make_device(kind, monkeypatch)
    if isinstance(dev, FakeCudaDevice):
        enqueue = dev.fake._cuLaunchKernel
        monkeypatch.setattr(
            dev.fake, "_cuLaunchKernel", lambda *args: (kept.extend(stack()), enqueue(*args))[1]
        )
        kernel: Any = more
    else:
        kernel = FakeKernel("keeps", [mut("y"), ref("x")], lambda *_, **__: kept.extend(stack()))

    def launch() -> list[Any]:
        y, x = some(dev, 0, 1)
        memory = [weakref.ref(y.storage), weakref.ref(x.storage)]
        op = kernel(y.partition(1, y.shape[1]), x)
        if way == "run":
            y = op.run()
        elif way == "sync":
            y = op.sync()
        else:
            asyncio.run(finished(op))
        del y, x
        return memory

    async def finished(op: tilert.Op) -> None:
        await op

    gc.disable()
    try:
        memory = launch()
        assert {"launch", "run"} <= {frame.f_code.co_name for frame in kept}
        assert [one() for one in memory] == [None, None]
    finally:
        gc.enable()
    dev.synchronize()
