"""When launches share a specialisation: constants go by bits, outside names by values."""

import math
import struct
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilert
from tests.tilert.host_fakes import FakeCpu, FakeKernel, const, mut
from tilert import Const, DType, KernelError, Mut, bf16, f16, f32
from tilert.constant import constant_key
from tilert.cpu_device import CpuDevice


@pytest.fixture
def dev() -> CpuDevice:
    """A device of its own: what it has compiled is what the test has compiled."""
    return CpuDevice()


def run(kernel: tilert.Kernel, dev: tilert.Device, dtype: DType = f32, **consts: Any) -> Any:
    """The first element of what the kernel writes, its bits kept."""
    return kernel(tilert.empty(2, dtype, dev).partition(2), **consts).sync().numpy()[0]


# Constants


@tilert.kernel
def put(y: Mut, c: Const[float]):
    y.store(c)


def test_zeros_of_both_signs(dev: CpuDevice) -> None:
    for value in (0.0, -0.0, 0.0):
        assert math.copysign(1, run(put, dev, c=value)) == math.copysign(1, value)
    assert len(dev.launchers) == 2


def test_nan_compiles_once(dev: CpuDevice) -> None:
    for _ in range(3):
        assert np.isnan(run(put, dev, c=float("nan")))
    assert len(dev.launchers) == 1


def test_an_int_for_a_float_is_that_float(dev: CpuDevice) -> None:
    for value in (1, 1.0):
        assert run(put, dev, c=value) == 1
    assert len(dev.launchers) == 1


def test_equal_constants_of_other_types() -> None:
    dev = FakeCpu()
    kernel = FakeKernel("k", [mut("y"), const("c")])
    values = [1, 1.0, True, 0, 0.0, -0.0, False, float("nan"), "1", None, (0.0,), (-0.0,), (0,)]
    for value in [*values, *values]:
        kernel(tilert.empty(2, f32, dev).partition(2), value).run()
    seen = [consts[0][1] for _, _, consts in kernel.seen]
    assert [repr(v) for v in seen] == [repr(v) for v in values]


def test_branches_that_set_zeros_of_both_signs(dev: CpuDevice) -> None:
    @tilert.kernel
    def k(y: Mut):
        v = 1.0
        if y.index[0].number > 0:
            v = 0.0
            y.store(v)
        else:
            v = -0.0
        y.store(v)

    y = k(tilert.zeros(2, f32, dev).partition(1)).sync().numpy()
    assert [math.copysign(1, v) for v in y] == [-1, 1]


numbers = st.one_of(st.integers(), st.booleans(), st.floats(), st.text(max_size=2), st.none())
trees = st.recursive(numbers, lambda inner: st.tuples(inner, inner), max_leaves=4)


def bits(value: Any) -> Any:
    if isinstance(value, float):
        return "float", struct.pack("<d", value)
    if isinstance(value, tuple):
        return "tuple", [bits(v) for v in value]
    return type(value).__name__, repr(value)


@given(trees, trees)
def test_keys_are_equal_exactly_for_equal_bits(a: Any, b: Any) -> None:
    assert (constant_key(a) == constant_key(b)) == (bits(a) == bits(b))
    assert constant_key(a) == constant_key(a)
    assert hash(constant_key(a)) == hash(constant_key(a))


def test_keys_of_other_objects() -> None:
    one, two = [1], [1]
    assert constant_key(one) == constant_key(one) != constant_key(two)
    assert constant_key(np.float32(0.0)) != constant_key(np.float32(-0.0))
    assert constant_key(np.float32(1)) != constant_key(np.float64(1))
    assert constant_key(f32) == constant_key(DType("f32", "f", 32)) != constant_key(f16)
    assert constant_key(slice(0.0, 1)) != constant_key(slice(-0.0, 1))
    assert constant_key(complex(0.0, 0)) != constant_key(complex(-0.0, 0))


# Names outside the body

SCALE: Any = 1.0
PAIR: Any = (1.0, 2.0)


@tilert.inline
def helper(v):
    return v * SCALE


HELPER: Any = helper


@tilert.kernel
def outside(y: Mut, add: Const[bool] = False):
    v = HELPER(PAIR[0] + 1.0)
    if add:
        v = v + PAIR[1]
    y.store(v)


def test_a_changed_number_applies(dev: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(outside, dev) == 2
    # Two specialisations of one kernel, in one program: both must see the present value.
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert run(outside, dev, bf16) == 6
    assert run(outside, dev) == 6
    monkeypatch.setitem(globals(), "PAIR", (0.0, 5.0))
    assert run(outside, dev) == 3
    assert run(outside, dev, add=True) == 8
    monkeypatch.undo()
    count = len(dev.launchers)
    assert run(outside, dev) == 2
    assert len(dev.launchers) == count
    monkeypatch.setitem(globals(), "PAIR", (0.0, 7.0))
    assert run(outside, dev, add=True) == 8
    monkeypatch.setitem(globals(), "SCALE", -0.0)
    assert math.copysign(1, run(outside, dev)) == -1


def test_equal_values_share(dev: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    run(outside, dev)
    count = len(dev.launchers)
    monkeypatch.setitem(globals(), "PAIR", (float("1"), float("2")))
    monkeypatch.setitem(globals(), "SCALE", float("1"))
    assert run(outside, dev) == 2
    assert len(dev.launchers) == count


def test_another_helper_applies(dev: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    @tilert.inline
    def other(v):
        return v * 100.0

    assert run(outside, dev) == 2
    monkeypatch.setitem(globals(), "HELPER", other)
    assert run(outside, dev) == 200


def test_a_closure_applies(dev: CpuDevice) -> None:
    factor: Any = 2.0

    @tilert.kernel
    def k(y: Mut):
        y.store(factor)

    assert run(k, dev) == 2
    factor = 5
    assert run(k, dev) == 5


def test_attributes_apply(dev: CpuDevice) -> None:
    config = SimpleNamespace(inner=SimpleNamespace(size=1.0))

    @tilert.inline
    def size_of(what):
        return what.size

    @tilert.kernel
    def k(y: Mut):
        y.store(size_of(config.inner))

    assert run(k, dev) == 1
    config.inner.size = 2.0
    assert run(k, dev) == 2
    config.inner = SimpleNamespace(size=3.0)
    assert run(k, dev) == 3


def test_a_name_that_hides_a_builtin_applies(dev: CpuDevice) -> None:
    scope = globals()

    @tilert.inline
    def mine(a, b):
        return a - b

    @tilert.kernel
    def k(y: Mut):
        y.store(max(1.0, 5.0))

    try:
        assert run(k, dev) == 5
        scope["max"] = mine
        assert run(k, dev) == -4
    finally:
        scope.pop("max", None)
    assert run(k, dev) == 5


def test_a_name_that_goes_away(dev: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    run(outside, dev)
    monkeypatch.delitem(globals(), "PAIR")
    with pytest.raises(KernelError, match="'PAIR' is not defined"):
        run(outside, dev)
    monkeypatch.undo()
    assert run(outside, dev) == 2


@dataclass(frozen=True)
class Sizes:
    n: int


def test_a_value_new_at_every_launch_fills_no_memory(dev: CpuDevice) -> None:
    sizes: Any = Sizes(0)

    @tilert.kernel
    def k(y: Mut):
        y.store(sizes.n * 1.0)

    assert run(k, dev) == 0
    for n in range(1, 80):
        sizes = Sizes(n)
        assert run(k, dev) == n
    assert len(k._captured._states) == 64


changing: Any = 0.5


@tilert.kernel
def twice(y: Mut):
    y.store(changing)
    if changing != 0:
        y.store(changing * 2)


@given(st.lists(st.sampled_from([0, 0.0, -0.0, 1, 1.0, True, math.nan, 2.0]), max_size=8))
def test_the_present_value_always_applies(values: list[Any]) -> None:
    global changing
    dev = tilert.device("cpu")
    for value in values:
        changing = value
        got = run(twice, dev)
        want = np.float32(value if value == 0 else value * 2)
        assert got.tobytes() == want.tobytes() or (np.isnan(got) and np.isnan(want))
