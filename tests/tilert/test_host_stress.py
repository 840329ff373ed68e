"""Rule O4 under stress: random programs see on every device what they see on the cpu, where work is
done at once and in order.

TILERT_STRESS=3000 runs so many programs a device instead of a few.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

import tilert
from tests.tilert.fake_cuda import fake_cuda
from tests.tilert.simulated import Forgetful, SimulatedDevice
from tests.tilert.stress import collected, play, same
from tilert.cpu_device import CpuDevice

PROGRAMS = int(os.environ.get("TILERT_STRESS", "0"))
# The same ones every time in CI; elsewhere it is worth to try others.
FIRST = 0 if os.environ.get("CI") else int.from_bytes(os.urandom(3), "big")
LATE = (0.3, 0.8, 0.97, 1.0)


def mismatches(make: Callable[[int], tilert.Device], count: int, first: int = FIRST) -> list[int]:
    """Seeds of programs that see something else than on the cpu."""
    serial = CpuDevice(check=False)
    seeds = range(first, first + count)
    return [seed for seed in seeds if not same(play(serial, seed), play(make(seed), seed))]


@pytest.mark.timeout(0 if PROGRAMS else 300)
def test_on_queues_that_run_late() -> None:
    assert mismatches(lambda s: SimulatedDevice(s, LATE[s % 4]), PROGRAMS or 30) == []


@pytest.mark.timeout(0 if PROGRAMS else 300)
def test_on_the_driver_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mismatches(lambda s: fake_cuda(monkeypatch, s, LATE[s % 4]), PROGRAMS or 20) == []


@pytest.mark.parametrize(
    "kind", ["simulated", "fake cuda", pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_threads_with_programs_of_their_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share the device and its streams, and see what they see alone."""
    make: dict[str, Callable[[int], tilert.Device]] = {
        "simulated": lambda s: SimulatedDevice(s, LATE[s % 4]),
        "fake cuda": lambda s: fake_cuda(monkeypatch, s, LATE[s % 4]),
        "cuda": lambda s: tilert.device("cuda"),
    }
    for turn in range(4):
        device = make[kind](turn)
        seeds = range(FIRST + 4 * turn, FIRST + 4 * turn + 4)
        with ThreadPoolExecutor(4) as pool:
            seen = list(pool.map(lambda seed, device=device: play(device, seed), seeds))
        serial = CpuDevice(check=False)
        for seed, got in zip(seeds, seen, strict=True):
            assert same(play(serial, seed), got), seed
        collected(device)


def test_orders_that_are_forgotten_show() -> None:
    assert len(mismatches(lambda s: Forgetful(s, LATE[s % 4]), 12, first=0)) > 6


@pytest.mark.gpu
@pytest.mark.timeout(0 if PROGRAMS else 300)
def test_on_a_gpu() -> None:
    device = tilert.device("cuda")
    assert mismatches(lambda s: device, PROGRAMS or 1000) == []
    collected(device)
