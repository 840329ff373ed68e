"""Rule O4 on streams: host accesses, frees, threads, and what streams are on each device."""

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilert
from tests.tilert.fake_cuda import FakeCudaDevice, fake_cuda
from tests.tilert.host_fakes import FakeCpu
from tests.tilert.simulated import SimulatedDevice
from tests.tilert.stream_devices import KINDS, make_device, plus
from tilert import CheckError, LaunchError, driver, f32
from tilert.borrowed import borrow
from tilert.fault import RECORD, Faults, Site, Watch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=KINDS)
def dev(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tilert.Device]:
    device = make_device(request.param, monkeypatch)
    yield device
    gc.collect()
    device.synchronize()


def ones(dev: tilert.Device, value: float = 1.0) -> tilert.Array:
    return tilert.full((4, 8), value, f32, dev)


def test_a_stream_sees_what_came_before_and_what_comes_after_sees_it(dev: tilert.Device) -> None:
    a, b, c = ones(dev), ones(dev, 0), ones(dev, 0)
    with dev.stream() as stream:
        plus(b, a).on(stream).run()
        plus(c, b).run()
        plus(a, c).on(stream).run()
        assert repr(stream) == f"<stream of {dev.name}>"
    plus(b, a).run()
    assert [x.numpy()[0, 0] for x in (a, b, c)] == [4, 5, 3]


def test_host_accesses_while_memory_is_in_flight(dev: tilert.Device) -> None:
    a, b, c = ones(dev), ones(dev, 0), ones(dev, 0)
    out = tilert.pinned((4, 8), f32, dev)
    with dev.stream() as one, dev.stream() as two:
        # A read waits for what writes.
        plus(b, a).on(one).run()
        assert (b.numpy() == 2).all()
        # A write comes after what reads.
        plus(c, b).on(two).run()
        b.copy_from(np.full((4, 8), 50, np.float32))
        assert (c.numpy() == 3).all() and (b.numpy() == 50).all()
        # A copy on the device, and one to pinned memory, come after what writes.
        plus(a, b).on(one).run()
        c.copy_from(a)
        plus(a, c).on(two).run()
        out.copy_from(a)
        dev.record_event().wait()
        assert (out.numpy == 52).all() and (c.numpy() == 51).all()
        # Lending waits for everything.
        plus(b, a).on(two).run()
        loan = b.lend()
        with pytest.raises(tilert.MovedError, match="O5 move"):
            plus(b, a)
        del loan
    assert (b.numpy() == 53).all()


def test_memory_is_freed_after_every_stream_that_uses_it(dev: tilert.Device) -> None:
    b = ones(dev, 0)
    with dev.stream() as one, dev.stream() as two:
        for turn in range(6):
            a, c = ones(dev, turn), ones(dev, 0)
            plus(c, a).on(one).run()
            plus(b, c).on(two).run()
            del a, c
            # Takes what was just freed.
            poison = [ones(dev, -9) for _ in range(3)]
            assert (b.numpy() == turn + 2).all()
            assert (poison[0].numpy() == -9).all()


def test_new_memory_is_there_for_every_stream(dev: tilert.Device) -> None:
    with dev.stream() as one, dev.stream() as two:
        a = ones(dev, 3)
        b = tilert.empty((4, 8), f32, dev)
        plus(b, a).on(one).run()
        c = tilert.empty((4, 8), f32, dev)
        plus(c, b).on(two).run()
        assert (c.numpy() == 5).all()


def test_events_and_waits_of_a_stream(dev: tilert.Device) -> None:
    a, b = ones(dev), ones(dev, 0)
    with dev.stream() as stream:
        plus(b, a).on(stream).run()
        event = stream.record_event()
        event.wait()
        assert event.done()
        stream.synchronize()
        plus(a, b).on(stream).run()
        dev.synchronize()
    assert (a.numpy() == 3).all()


def test_a_dropped_stream_is_closed(dev: tilert.Device) -> None:
    a, b = ones(dev), ones(dev, 0)
    plus(b, a).on(dev.stream()).run()
    gc.collect()
    plus(a, b).run()
    assert (a.numpy() == 3).all()
    if isinstance(dev, SimulatedDevice):
        waits, marks = dev.waits, dev.marks
        plus(b, a).run()
        assert (dev.waits, dev.marks) == (waits, marks)


def test_streams_come_from_a_pool() -> None:
    dev = SimulatedDevice()
    for _ in range(10):
        with dev.stream(), dev.stream():
            pass
    assert len(dev.queues) == 3


def test_wrong_streams(dev: tilert.Device) -> None:
    a, b = ones(dev), ones(dev, 0)
    stream = dev.stream()
    op = plus(b, a).on(stream)
    stream.close()
    stream.close()
    closed = "O4 in flight: this stream is closed; take another with device.stream()"
    assert {refused(use) for use in (op.run, stream.synchronize, stream.record_event)} == {closed}
    # The op has given its arrays back.
    plus(b, a).run()
    op = plus(b, a)
    assert refused(lambda: op.on(stream)) == closed
    with FakeCpu().stream() as other:
        assert f"is on {dev.name} and cannot run on a stream of cpu" in refused(
            lambda: op.on(other)
        )
    assert "runs on a stream of device.stream(), got int" in refused(lambda: op.on(3))  # type: ignore[arg-type]
    op.run()
    graph = tilert.capture(dev, lambda: plus(b, a).run())
    assert refused(lambda: graph.replay(stream)) == closed
    with FakeCpu().stream() as other:
        elsewhere = f"O4 in flight: work of {dev.name} cannot run on a stream of cpu"
        assert refused(lambda: graph.replay(other)) == elsewhere
        assert refused(lambda: dev.record_event(stream=other)) == elsewhere


def refused(fn: Callable[[], object]) -> str:
    with pytest.raises(LaunchError) as caught:
        fn()
    return str(caught.value)


def test_a_capture_refuses_to_wait_for_a_stream(dev: tilert.Device) -> None:
    with dev.stream() as stream, pytest.raises(LaunchError, match="O6 graphs: recording an event"):
        tilert.capture(dev, stream.synchronize)


def test_threads_with_streams_of_their_own(dev: tilert.Device) -> None:
    shared, failures = ones(dev, 7), []

    def work(seed: int) -> None:
        try:
            for turn in range(10):
                with dev.stream() as stream:
                    a = tilert.from_numpy(np.full((4, 8), seed * 100 + turn, np.float32), dev)
                    b, c = ones(dev, 0), ones(dev, 0)
                    plus(b, a).on(stream).run()
                    plus(c, shared).on(stream).run()
                    plus(a, b).run()
                    assert (a.numpy() == seed * 100 + turn + 2).all()
                    assert (c.numpy() == 8).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_copy_in_parts_is_in_order_as_a_whole() -> None:
    """Another thread's work on the memory waits until all parts are enqueued."""
    dev = SimulatedDevice(late=1.0)
    a, b = ones(dev), ones(dev, 0)
    between, seen = threading.Event(), []

    def other() -> None:
        with dev.stream() as stream:
            between.wait()
            plus(b, a).on(stream).run()
            seen.append(dev.waits)

    thread = threading.Thread(target=other)
    thread.start()
    with dev.transfer((a.storage, a.region, True)):
        with dev.lock:
            dev.queue.put(lambda: a.storage.host[:64].fill(0))  # type: ignore[index]
        between.set()
        # It cannot go on while the copy is half enqueued.
        thread.join(0.2)
        assert thread.is_alive() and not seen
        with dev.lock:
            dev.queue.put(lambda: a.storage.host[64:].fill(0))  # type: ignore[index]
    thread.join()
    assert (b.numpy() == 1).all()


def while_waiting(dev: SimulatedDevice, a: tilert.Array, work: Any, then: Any) -> list[str]:
    """Errors of `work` in a thread that waits for a copy to `a`, while this one does `then`."""
    said: list[str] = []

    def other() -> None:
        try:
            work()
        except tilert.TilertError as error:
            said.append(str(error))

    waiting = threading.Event()
    wait = dev._transferred.wait

    def tell(*arguments: Any) -> bool:
        waiting.set()
        return wait(*arguments)

    dev._transferred.wait = tell  # type: ignore[method-assign]
    thread = threading.Thread(target=other, daemon=True)
    try:
        with dev.transfer((a.storage, a.region, True)):
            thread.start()
            assert waiting.wait(60)
            with dev.lock:
                # The other thread has let go of the lock: it waits.
                then()
    finally:
        thread.join(20)
        assert not thread.is_alive()
    return said


def test_a_stream_that_is_closed_while_work_for_it_waits() -> None:
    dev = SimulatedDevice(late=1.0)
    a, b = ones(dev), ones(dev, 0)
    stream = dev.stream()
    op = plus(b, a).on(stream)
    (said,) = while_waiting(dev, a, op.run, stream.close)
    assert "this stream is closed" in said
    assert (b.numpy() == 0).all()


def test_a_graph_that_is_rebound_or_closed_while_its_replay_waits() -> None:
    dev = SimulatedDevice(late=1.0)
    a, b, c, d = ones(dev), ones(dev, 0), ones(dev, 5), ones(dev, 0)
    graph = tilert.capture(dev, lambda: plus(b, a).run())
    with dev.stream() as stream:
        rebind = lambda: graph.rebind({a: c, b: d})  # noqa: E731
        assert while_waiting(dev, a, lambda: graph.replay(stream), rebind) == []
        assert dev.waits == 1
        np.testing.assert_array_equal(d.numpy(), np.full((4, 8), 6))
        assert dev.waits == 2
        (said,) = while_waiting(dev, c, lambda: graph.replay(stream), graph.close)
        assert "this graph is closed" in said


def test_lending_waits_for_all_parts_of_a_copy() -> None:
    dev = SimulatedDevice(late=1.0)
    a, seen = ones(dev), []

    def lend() -> None:
        loan = a.lend()
        seen.append(a.storage.host.view(np.float32).copy())  # type: ignore[union-attr]
        del loan

    def rest() -> None:
        dev.queue.put(lambda: a.storage.host.view(np.float32).fill(5))  # type: ignore[union-attr]

    assert while_waiting(dev, a, lend, rest) == []
    assert (seen[0] == 5).all()


def test_a_copy_in_parts_that_fails_lets_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    dev = SimulatedDevice(late=1.0)
    a, b = ones(dev), ones(dev, 0)

    def lost(*_: object) -> None:
        raise tilert.DeviceError("lost")

    with dev.stream() as stream:
        op = plus(b, a).on(stream)
        with monkeypatch.context() as patch, pytest.raises(tilert.DeviceError, match="lost"):
            while_waiting(dev, a, op.run, lambda: patch.setattr(dev, "put_mark", lost))


def test_waiting_for_all_streams_while_another_thread_closes_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dev = SimulatedDevice(late=1.0)
    a, b = ones(dev), ones(dev, 0)
    dev.synchronize()
    stream = dev.stream()
    plus(b, a).on(stream).run()
    wait = dev.wait_queue

    def wait_queue(queue: Any) -> None:
        wait(queue)
        thread = threading.Thread(target=stream.close)
        thread.start()
        thread.join()

    monkeypatch.setattr(dev, "wait_queue", wait_queue)
    dev.synchronize()
    assert (b.storage.host.view(np.float32) == 2).all()  # type: ignore[union-attr]


def test_what_the_host_frees_is_left_while_it_is_in_use() -> None:
    """A dropped import goes back once all work is complete; no launch waits for that."""
    dev = SimulatedDevice(late=1.0)
    a, b = ones(dev), ones(dev, 0)
    given: list[str] = []
    stream = dev.stream()
    plus(b, a).on(stream).run()
    dev.after_work(lambda: given.append("first"))
    waited = dev.run_until
    dev.run_until = lambda over: pytest.fail("waited")  # type: ignore[method-assign]
    # Asking whether it is over does not wait, and a capture does not even ask.
    dev.passed = lambda mark: mark.now.done  # type: ignore[method-assign]
    for _ in range(3):
        plus(b, a).run()
    graph = tilert.capture(dev, lambda: plus(b, a).run())
    assert given == [] and dev.garbage
    dev.run_until = waited  # type: ignore[method-assign]
    stream.close()
    dev.synchronize()
    assert given == ["first"] and not dev.garbage
    dev.after_work(lambda: given.append("second"))
    dev.wait_queue(dev.queue)
    dev.collect()
    dev.wait_queue(dev.queue)
    graph.replay()
    assert given == ["first", "second"]


@pytest.mark.parametrize("what", ["synchronize_stream", "free_host", "destroy_graph"])
def test_others_launch_while_one_thread_waits_to_free(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dev = fake_cuda(monkeypatch, 1, late=1.0)
    a, b = ones(dev), ones(dev, 0)
    graph = tilert.capture(dev, lambda: plus(b, a).run())
    buffer = tilert.pinned((4, 8), f32, dev)
    buffer.copy_from(b)
    graph.replay()
    slow, waiting, launched = getattr(driver, what), threading.Event(), threading.Event()
    lasted: list[bool] = []

    def wait(handle: Any) -> None:
        if threading.current_thread() is thread:
            waiting.set()
            lasted.append(launched.wait(60))
        slow(handle)

    def free() -> None:
        nonlocal buffer
        del buffer
        graph.close()
        tilert.pinned((4, 8), f32, dev)

    monkeypatch.setattr(driver, what, wait)
    thread = threading.Thread(target=free)
    thread.start()
    assert waiting.wait(60)
    plus(b, a).run()
    launched.set()
    thread.join()
    assert lasted and all(lasted)
    dev.synchronize()
    assert (b.numpy() == 2).all() and not dev.garbage


def test_borrowing_in_a_thread_that_has_not_used_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dev = make_device("fake cuda", monkeypatch)
    host, arrays = np.zeros(32, np.float32), []

    def take() -> None:
        arrays.append(borrow(dev, host.ctypes.data, (4, 8), (8, 1), f32, True, lambda: None))

    with dev.stream():
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
    (array,) = arrays
    assert [record.write for record in array.storage.leases] == [True]


def test_a_copy_between_gpus_is_no_part_of_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes through host memory, which is gone at the replay."""
    dev = make_device("fake cuda", monkeypatch)
    assert isinstance(dev, FakeCudaDevice)
    a, b = ones(dev), ones(FakeCudaDevice(dev.fake), 5)
    with pytest.raises(LaunchError, match="O6 graphs: a copy between devices cannot be part"):
        tilert.capture(dev, lambda: a.copy_from(b))
    a.copy_from(b)
    assert (a.numpy() == 5).all()


@pytest.mark.parametrize("later", [1 << 14, 1 << 20])
def test_buffers_keep_their_size(monkeypatch: pytest.MonkeyPatch, later: int) -> None:
    """A device's copies fit its buffers, however large those of the next device are."""
    monkeypatch.setattr("tilert.staging._CHUNK", 1 << 16)
    dev = make_device("fake cuda", monkeypatch)
    given = np.arange(1 << 17, dtype=np.float32)
    a = tilert.from_numpy(given, dev)
    monkeypatch.setattr("tilert.staging._CHUNK", later)
    b = tilert.from_numpy(-given, dev)
    np.testing.assert_array_equal(a.numpy(), given)
    np.testing.assert_array_equal(b.numpy(), -given)


def test_large_copies_on_the_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilert.staging._CHUNK", 1 << 16)
    dev = make_device("fake cuda", monkeypatch)
    assert isinstance(dev, FakeCudaDevice)
    given = np.arange(1 << 16, dtype=np.float32).reshape(256, 256)
    a, b, c = (tilert.from_numpy(given * factor, dev) for factor in (1, 2, 3))
    with dev.stream() as one, dev.stream() as two:
        plus(b, a).on(one).run()
        dev.fake.calls.clear()
        a.copy_from(-given)
        assert dev.fake.calls["cuMemcpyHtoDAsync"] == 4
        # It waits once for the reader, and what reads next waits once for it.
        assert dev.fake.calls["cuStreamWaitEvent"] == 1
        plus(c, a).on(two).run()
        assert dev.fake.calls["cuStreamWaitEvent"] == 2
        np.testing.assert_array_equal(b.numpy(), given + 1)
        np.testing.assert_array_equal(c.numpy(), 1 - given)
        np.testing.assert_array_equal(a.numpy(), -given)


@pytest.mark.parametrize("rows", [4, 4096])
def test_a_host_array_may_change_once_it_is_copied(rows: int, dev: tilert.Device) -> None:
    """Also pinned memory, which a device could read later."""
    pinned = tilert.pinned((rows, 8), tilert.f32, dev)
    pinned.numpy[:] = 1
    a = tilert.empty((rows, 8), tilert.f32, dev)
    a.copy_from(pinned.numpy)
    pinned.numpy[:] = 2
    assert (a.numpy() == 1).all()


def test_a_fault_is_raised_by_waits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where work is enqueued and memory is freed, which must do all that they do."""
    dev = make_device("fake cuda", monkeypatch)
    assert isinstance(dev, FakeCudaDevice)
    faults = Faults(dev.pinned_block(RECORD.itemsize))
    monkeypatch.setattr(dev, "watch", Watch(faults))
    function = tilert.ir.Function("earlier", [], (1,), tilert.ir.Block(), __file__)
    _, kernel = faults.arguments(function, (Site("row", None, "y"),))
    host, returned = np.zeros(32, np.float32), []
    borrowed = borrow(
        dev, host.ctypes.data, (4, 8), (8, 1), f32, True, lambda: returned.append(True)
    )
    pinned = tilert.pinned((4, 8), f32, dev)
    address = pinned.numpy.ctypes.data
    # So many records that complete ones are looked for.
    a, rows = ones(dev), tilert.zeros((80, 8), f32, dev)
    with dev.stream() as one, dev.stream() as two:
        for at in range(32):
            plus(rows[2 * at : 2 * at + 1], a[:1]).on(one).run()
        del borrowed, pinned
        faults._record[0] = (2, kernel, 0, 0, [1] * 32, 9, 4)
        plus(rows[79:], a[3:]).on(one).run()
        plus(a[3:], rows[:1]).on(two).run()
        with pytest.raises(CheckError, match="row 9"):
            dev.synchronize()
        dev.synchronize()
        assert rows.numpy()[79, 0] == 2
    assert returned == [True] and address not in dev.fake.pinned


PROGRAM = """
import asyncio, sys
import numpy as np
import tilert
from tests.tilert.host_fakes import add_one
{make}

a, b, c = (tilert.zeros((4, 8), tilert.f32, dev) for _ in range(3))
one, two = dev.stream(), dev.stream()
{kernel}(b.partition(1, 8), a).on(one).run()
left = {kernel}(c.partition(1, 8), b).on(two)
graph = tilert.capture(dev, lambda: {kernel}(a.partition(1, 8), b).run())
graph.replay(one)


async def waits():
    await {kernel}(b.partition(1, 8), a).on(two)


async def main():
    task = asyncio.ensure_future(waits())
    await asyncio.sleep(0)
    return task

loop = asyncio.new_event_loop()
task = loop.run_until_complete(main())
task.cancel()
kept = loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
loop.close()
print("ends")
"""


@pytest.mark.parametrize(
    ("make", "kernel"),
    [
        ("from tests.tilert.host_fakes import FakeCpu\ndev = FakeCpu()", "add_one()"),
        (
            "from tests.tilert.simulated import SimulatedDevice\ndev = SimulatedDevice(late=1.0)",
            "add_one()",
        ),
        pytest.param(
            'from tests.tilert.stream_devices import more\ndev = tilert.device("cuda")',
            "more",
            marks=pytest.mark.gpu,
        ),
    ],
)
def test_a_program_ends_with_work_in_flight(make: str, kernel: str, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(make=make, kernel=kernel), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True, text=True, check=False, timeout=100,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")
