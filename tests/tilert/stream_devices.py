"""The devices that tests of streams run on, and one op on each of them."""

from typing import Any

import pytest

import tilert
from tests.tilert.fake_cuda import fake_cuda
from tests.tilert.host_fakes import FakeCpu, add_one
from tests.tilert.simulated import SimulatedDevice

__all__ = ["KINDS", "make_device", "plus"]

KINDS = ["cpu", "simulated", "fake cuda", pytest.param("cuda", marks=pytest.mark.gpu)]


def make_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> tilert.Device:
    """One of `KINDS`. Those that are not real do nothing before the host waits for it."""
    if kind == "cpu":
        return FakeCpu()
    if kind == "simulated":
        return SimulatedDevice(1, late=1.0)
    if kind == "fake cuda":
        return fake_cuda(monkeypatch, 1, late=1.0)
    return tilert.device("cuda")


@tilert.kernel
def more(y: tilert.Mut, x: tilert.Ref) -> None:
    y.store(x.tile_like(y) + 1.0)


def plus(y: tilert.Array, x: tilert.Array) -> tilert.Op:
    """y = x + 1"""
    kernel: Any = add_one() if isinstance(y.device, FakeCpu) else more
    return kernel(y.partition(1, y.shape[1]), x)
