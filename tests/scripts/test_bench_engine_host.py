"""The engine's host benchmark end to end, and the clock it goes by."""

import json
import time

import pytest

from scripts import bench_engine_host
from scripts.bench_engine_host import Clock, SimulatedDevice


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--sequences", "1", "4", "--warm", "10", "--steps", "60", "--new", "20"]
    features = ["--features", "logprobs", "penalties", "grammar", "--stop", "nowhere to be found"]
    for more in ([], features):
        assert bench_engine_host.main([*argv, *more]) == 0
        runs = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]
        assert [run["sequences"] for run in runs] == [1, 4]
        for run in runs:
            assert run["steps"] <= 60
            assert run["tokens"] > 0.8 * run["steps"] * run["sequences"]
            assert run["requests"] > 0
            assert run["host_us_per_step"] > 0
            # Two recordings, and what takes the results to the host.
            assert 1.5 < run["calls_per_step"]["replay"] < 4
            assert 0 <= run["device_idle"] < 1
            assert run["step_ms"] > 2.5


def test_time_is_the_devices_where_the_host_waits() -> None:
    clock = Clock()
    device = SimulatedDevice(clock, call_seconds=0.25)
    start, host = clock.now(), clock.host()
    device.busy(100.0)
    event = device.record_event()
    assert not event.done()
    event.wait()
    assert event.done()
    # The wait took no time here, and the call was charged for within it.
    assert 100 <= clock.now() - start < 101
    assert clock.host() - host < 90
    clock.skip(7.0)
    device.busy(1.0)
    assert 7 <= device.idle < 8 + start


def test_what_is_outside_does_not_count() -> None:
    clock = Clock()
    before = clock.host()

    def work() -> None:
        at, end = clock.now(), time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        assert clock.now() == at

    clock.outside(work)
    assert clock.host() - before < 0.05
