"""Arrays: views, copies and their errors on the cpu."""

import math
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilert
from tilert import DeviceError, OwnershipError
from tilert.dtypes import f32

cpu = tilert.device("cpu")


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_device_names() -> None:
    assert tilert.device("cpu") is cpu
    assert cpu.kind == "cpu"
    assert repr(cpu) == "device('cpu')"
    with pytest.raises(DeviceError, match=r"unknown device 'gpu'; use cpu, cuda, cuda:<number> or"):
        tilert.device("gpu")
    with pytest.raises(DeviceError, match="unknown device 'cuda:-1'"):
        tilert.device("cuda:-1")
    free, total = cpu.memory()
    assert 0 < free <= total
    assert {"kind", "name"} <= cpu.info().keys()


@pytest.mark.parametrize(
    "dtype",
    [np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.int32, np.uint32, np.uint8, np.bool_],
)
def test_round_trip(dtype: type) -> None:
    data = (numbers(3, 5) % 2).astype(dtype)
    array = tilert.from_numpy(data, cpu)
    assert array.shape == (3, 5)
    assert array.strides == (5, 1)
    assert array.dtype.numpy == np.dtype(dtype)
    assert array.nbytes == data.nbytes
    assert array.address % 64 == 0
    back = array.numpy()
    np.testing.assert_array_equal(back, data)
    back[:] = 0
    np.testing.assert_array_equal(array.numpy(), data)


def test_unknown_dtype() -> None:
    with pytest.raises(TypeError, match="numpy dtype float64 has no tilert type") as caught:
        tilert.from_numpy(np.zeros(3), cpu)
    assert str(caught.value).endswith("; .astype(np.float32) converts")
    with pytest.raises(TypeError, match=r"known: [a-z0-9, ]*$"):
        tilert.from_numpy(np.zeros(3, np.complex64), cpu)


def test_zeros_full_empty() -> None:
    np.testing.assert_array_equal(tilert.zeros(4, tilert.i32, cpu).numpy(), np.zeros(4, np.int32))
    two = tilert.full((2, 2), 2.5, tilert.bf16, cpu).numpy()
    assert two.dtype == ml_dtypes.bfloat16
    assert (two == 2.5).all()
    assert tilert.empty((0, 3), tilert.f32, cpu).numpy().shape == (0, 3)
    assert tilert.full((), -1, tilert.i64, cpu).numpy() == -1
    with pytest.raises(ValueError, match="negative extent"):
        tilert.empty((2, -1), tilert.f32, cpu)


@pytest.mark.parametrize(
    ("value", "dtype", "shown"),
    [
        (2**40, tilert.i32, "1099511627776"),
        (-1, tilert.u32, "-1"),
        (256, tilert.u8, "256"),
        (2.5, tilert.i32, "2.5"),
        (math.nan, tilert.i32, "nan"),
        (math.inf, tilert.i64, "inf"),
        (1e40, tilert.i64, "1e+40"),
        (10**400, tilert.i64, "an int of 1329 bits"),
        (2, tilert.bool_, "2"),
        (math.nan, tilert.bool_, "nan"),
        (10**400, tilert.f32, "an int of 1329 bits"),
    ],
)
def test_full_refuses_what_does_not_fit(value: float, dtype: tilert.DType, shown: str) -> None:
    want = f"an array of {dtype.name} cannot be filled with {shown}"
    with pytest.raises(ValueError, match=f"^{re.escape(want)}$"):
        tilert.full(2, value, dtype, cpu)


def test_full_takes_what_fits() -> None:
    for value, dtype, want in [
        (2**32 - 1, tilert.u32, 2**32 - 1),
        (-(2**63), tilert.i64, -(2**63)),
        (2**63 - 1, tilert.i64, 2**63 - 1),
        (3.0, tilert.i32, 3),
        (True, tilert.i32, 1),
        (np.int64(7), tilert.u8, 7),
        (np.float32(0.5), tilert.f16, 0.5),
        (1e300, tilert.f32, math.inf),
        (-math.inf, tilert.bf16, -math.inf),
        (True, tilert.bool_, True),
        (1, tilert.bool_, True),
    ]:
        assert tilert.full((), value, dtype, cpu).numpy() == want
    assert np.isnan(tilert.full(2, math.nan, tilert.f32, cpu).numpy()).all()
    assert np.signbit(tilert.full(2, -0.0, tilert.f32, cpu).numpy()).all()
    for odd in ("1", None, [1, 2], np.zeros(2), 1j):
        with pytest.raises(ValueError, match="an array is filled with a number, got"):
            tilert.full(2, odd, tilert.f32, cpu)  # type: ignore[arg-type]


def test_absurd_arrays() -> None:
    for shape in [(2**40, 2**40), (0, 2**70), (2**62, 2)]:
        with pytest.raises(DeviceError, match="cpu is out of memory: an array of shape"):
            tilert.empty(shape, tilert.f32, cpu)
    with pytest.raises(DeviceError, match="cpu is out of memory"):
        tilert.empty(2**57, tilert.f32, cpu)
    many = "an array has at most 32 axes, got 33"
    with pytest.raises(ValueError, match=many):
        tilert.empty((1,) * 33, tilert.f32, cpu)
    with pytest.raises(ValueError, match=many):
        tilert.from_numpy(np.zeros((1,) * 33, np.float32), cpu)
    array = tilert.zeros((1,) * 32, tilert.f32, cpu)
    np.testing.assert_array_equal(array.numpy(), np.zeros((1,) * 32))
    for view in (array.reshape, array.broadcast_to):
        with pytest.raises(ValueError, match=many):
            view((1,) * 33)
    with pytest.raises(ValueError, match=r"a view of shape \[.*\] has too many elements"):
        tilert.zeros(1, tilert.f32, cpu).broadcast_to(2**40, 2**40)


index = st.one_of(
    st.integers(-4, 3),
    st.slices(4).filter(lambda s: s.step is None or s.step > 0),
)


@given(st.lists(index, max_size=3), st.permutations([0, 1, 2]))
def test_indexing_is_numpys(keys: list, axes: list[int]) -> None:
    data = numbers(4, 4, 4)
    array = tilert.from_numpy(data, cpu)
    got = array.permute(*axes)[tuple(keys)]
    want = data.transpose(axes)[tuple(keys)]
    assert got.shape == want.shape
    np.testing.assert_array_equal(got.numpy(), want)
    np.testing.assert_array_equal(got.T.numpy(), want.T)
    assert got.is_contiguous == want.flags.c_contiguous


@given(
    st.sampled_from([(2, 3, 4), (4, 6), (24,), (2, 1, 12), (1, 24, 1), (3, -1), (2, 2, 6)]),
    st.permutations([0, 1, 2]),
    st.sampled_from([slice(None), slice(0, 1), slice(0, None, 2)]),
)
def test_reshape_is_numpys_view(shape: tuple[int, ...], axes: list[int], cut: slice) -> None:
    data = numbers(2, 3, 4).transpose(axes)[cut]
    array = tilert.from_numpy(numbers(2, 3, 4), cpu).permute(*axes)[cut]
    base = data.view()
    try:
        want = base.reshape(shape)
    except ValueError:
        with pytest.raises(ValueError, match="cannot reshape"):
            array.reshape(*shape)
        return
    if np.shares_memory(want, data):
        np.testing.assert_array_equal(array.reshape(shape).numpy(), want)
    else:
        with pytest.raises(ValueError, match="copy it into a contiguous array first"):
            array.reshape(shape)


def test_index_errors() -> None:
    array = tilert.from_numpy(numbers(2, 3), cpu)
    with pytest.raises(IndexError, match="index 2 is out of range for axis 0 with 2 elements"):
        array[2]
    with pytest.raises(IndexError, match="3 indices for an array of shape"):
        array[0, 0, 0]
    with pytest.raises(IndexError, match="positive steps"):
        array[::-1]
    with pytest.raises(IndexError, match="must be an int or a slice, got str"):
        array["a"]
    with pytest.raises(IndexError, match="bool indices"):
        array[True]
    np.testing.assert_array_equal(array[..., 1].numpy(), [1, 4])
    with pytest.raises(ValueError, match="no order of the axes"):
        array.permute(0, 0)


def test_views_share_memory() -> None:
    array = tilert.zeros((4, 4), tilert.f32, cpu)
    array[1:3, ::2].copy_from(np.ones((2, 2), np.float32))
    want = np.zeros((4, 4), np.float32)
    want[1:3, ::2] = 1
    np.testing.assert_array_equal(array.numpy(), want)
    np.testing.assert_array_equal(array.view(tilert.i32)[1, 0].numpy(), 0x3F800000)
    with pytest.raises(ValueError, match="the sizes differ"):
        array.view(tilert.f16)
    wide = array[1].broadcast_to(3, 4)
    np.testing.assert_array_equal(wide.numpy(), np.broadcast_to(want[1], (3, 4)))
    with pytest.raises(ValueError, match=r"cannot broadcast \[4, 4\] to \[3, 4\]"):
        array.broadcast_to(3, 4)


def test_copy_between_arrays() -> None:
    source = tilert.from_numpy(numbers(3, 4), cpu)
    target = tilert.empty((4, 3), tilert.f32, cpu)
    target.copy_from(source.T)
    np.testing.assert_array_equal(target.numpy(), numbers(3, 4).T)
    with pytest.raises(ValueError, match=r"cannot copy shape \[3, 4\] into an array of shape"):
        target.copy_from(source)
    with pytest.raises(ValueError, match="cannot copy i32 into an array of f32"):
        target.copy_from(np.zeros((4, 3), np.int32))
    with pytest.raises(OwnershipError, match="O3 alias xor mutate: the source of copy_from"):
        source[:2].copy_from(source[1:])
    source[0::2].copy_from(source[1::2].broadcast_to(2, 4))
    np.testing.assert_array_equal(source.numpy()[2], [4, 5, 6, 7])


def test_a_broadcast_view_cannot_be_written() -> None:
    row = tilert.zeros((1, 4), tilert.f32, cpu)
    with pytest.raises(
        OwnershipError, match="O3 alias xor mutate: copy_from on a broadcast view of shape"
    ):
        row.broadcast_to(3, 4).copy_from(np.zeros((3, 4), np.float32))
    with pytest.raises(
        OwnershipError, match="O3 alias xor mutate: partition on a broadcast view of shape"
    ):
        row.broadcast_to(3, 4).partition(1, 4)


def test_pinned_and_events() -> None:
    array = tilert.from_numpy(numbers(5), cpu)
    buffer = tilert.pinned(5, tilert.f32, cpu)
    buffer.copy_from(array)
    event = cpu.record_event(timing=True)
    event.wait()
    assert event.done()
    assert cpu.record_event(timing=True).since(event) >= 0
    np.testing.assert_array_equal(buffer.numpy, numbers(5))
    with pytest.raises(ValueError, match=r"cannot copy f32\[3\] into a pinned buffer of f32\[5\]"):
        buffer.copy_from(array[:3])
    cpu.synchronize()


MAKERS: dict[str, Callable[..., Any]] = {
    "empty": tilert.empty,
    "zeros": tilert.zeros,
    "full": lambda shape, dtype, device: tilert.full(shape, 0.0, dtype, device),
    "pinned": tilert.pinned,
}


@pytest.mark.parametrize("maker", MAKERS)
def test_a_dtype_and_a_device_that_are_none(maker: str) -> None:
    cpu, make = tilert.device("cpu"), MAKERS[maker]
    wrong = {
        "device('cpu')": (cpu, f32),
        "float32; use tilert.f32": (np.float32, cpu),
        "dtype('int32'); use tilert.i32": (np.dtype("int32"), cpu),
        "'bool'; use tilert.bool_": ("bool", cpu),
        "float64": (np.float64, cpu),
        "None": (None, cpu),
    }
    for shown, two in wrong.items():
        with pytest.raises(TypeError) as caught:
            make((4, 6), *two)
        assert str(caught.value) == f"expected a dtype such as tilert.f32, got {shown}"
    with pytest.raises(TypeError) as caught:
        make((4, 6), f32, "cpu")
    assert str(caught.value) == 'expected a device, got str; tilert.device("cpu") gives one'


def test_sources_that_are_no_arrays() -> None:
    cpu = tilert.device("cpu")
    x = tilert.zeros(1, f32, cpu)
    wrong: dict[str, Callable[[], Any]] = {
        "copy_from takes a NumPy array or an Array, got list; np.asarray(values, dtype) makes"
        " one": lambda: x.copy_from([1]),  # type: ignore[arg-type]
        "from_numpy takes a NumPy array, got list; np.asarray(values, dtype) makes one": lambda: (
            tilert.from_numpy([1], cpu)
        ),  # type: ignore[arg-type]
        "a pinned buffer copies from an Array, got ndarray": lambda: tilert.pinned(
            1, f32, cpu
        ).copy_from(np.zeros(1, np.float32)),  # type: ignore[arg-type]
        'expected a device, got str; tilert.device("cpu") gives one': lambda: tilert.from_numpy(
            np.zeros(1, np.float32),
            "cpu",  # type: ignore[arg-type]
        ),
        "expected a dtype such as tilert.f32, got float32; use tilert.f32": lambda: x.view(
            np.float32  # type: ignore[arg-type]
        ),
    }
    for said, fn in wrong.items():
        with pytest.raises(TypeError) as caught:
            fn()
        assert str(caught.value) == said
    assert (x.numpy() == 0).all()
