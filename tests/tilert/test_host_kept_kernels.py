"""What is compiled for shapes that do not come again is forgotten; what is in use stays."""

import gc
import sys
import weakref
from typing import Any

import numpy as np
import pytest

import tilert
from tests.tilert.host_fakes import FakeCpu, FakeKernel, const, mut
from tilert import Const, Mut, f32
from tilert.cpu_device import CpuDevice
from tilert.device import Launcher
from tilert.ir import Function


class Counting(FakeCpu):
    """A device that keeps four, and knows what it has compiled."""

    kept_launchers = 4

    def __init__(self) -> None:
        super().__init__()
        self.compiled = 0
        self.alive: weakref.WeakSet[Launcher] = weakref.WeakSet()

    def compile(self, function: Function) -> Launcher:
        self.compiled += 1
        launcher = super().compile(function)
        self.alive.add(launcher)
        return launcher


def launch(kernel: FakeKernel, device: tilert.Device, value: int) -> None:
    kernel(tilert.empty(2, f32, device).partition(2), value).run()


def test_no_more_than_twice_as_many_as_are_kept() -> None:
    device, kernel = Counting(), FakeKernel("k", [mut("y"), const("c")])
    for value in range(100):
        launch(kernel, device, value)
    gc.collect()
    assert 4 <= len(device.alive) <= 8
    assert device.compiled == 100


def test_what_is_used_is_not_compiled_again() -> None:
    device, kernel = Counting(), FakeKernel("k", [mut("y"), const("c")])
    for value in range(100):
        launch(kernel, device, value)
        launch(kernel, device, -1)
        launch(kernel, device, -2)
        launch(kernel, device, value)
    assert device.compiled == 102


@pytest.mark.parametrize("back", [1, 2, 3, 4])
def test_as_many_as_are_kept_stay_for_certain(back: int) -> None:
    for count in range(4, 20):
        device, kernel = Counting(), FakeKernel("k", [mut("y"), const("c")])
        for value in range(count):
            launch(kernel, device, value)
        launch(kernel, device, count - back)
        assert device.compiled == count


@tilert.kernel
def put(y: Mut, c: Const[float]):
    y.store(c)


def test_a_kernel_that_comes_back_after_it_was_forgotten() -> None:
    device = CpuDevice()
    device.kept_launchers = 2

    def first(value: int) -> Any:
        y = tilert.empty(2, f32, device)
        return put(y.partition(2), value).sync().numpy()[0]

    for _ in range(2):
        assert [first(value) for value in range(9)] == list(range(9))


def test_specialisations_are_forgotten_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["tilert.kernel"], "_KEPT_SPECIALISATIONS", 3)
    device = CpuDevice()
    device.kept_launchers = 2

    @tilert.kernel
    def forgotten(y: Mut, c: Const[float]):
        y.store(c)

    def alive() -> int:
        gc.collect()
        # isinstance would ask lazy modules for attributes, some of which warn.
        functions = [found for found in gc.get_objects() if type(found) is Function]
        return sum(function.name == "forgotten" for function in functions)

    for value in range(20):
        y = tilert.empty(2, f32, device)
        np.testing.assert_array_equal(forgotten(y.partition(2), value).sync().numpy(), [value] * 2)
    assert 3 <= alive() <= 3 + 4
