"""Kernels on memory of other libraries: what is around it stays as it was."""

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tilert
from tilert import Dyn, MovedError, Mut, OwnershipError, Ref

POISON = np.float32(-1234.5)
LENGTH = 96


@tilert.kernel
def add(y: Mut[Dyn, Dyn], x: Ref[Dyn, Dyn]):
    y.store(y.load() + x.tile_like(y))


class HostMemory:
    """A NumPy array, exchanged through DLPack."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values.copy()

    def part(self, start: int, shape: tuple[int, int], pitch: int, readonly: bool = False) -> Any:
        """Import a part of it."""
        view = np.lib.stride_tricks.as_strided(self._values[start:], shape, (4 * pitch, 4))
        return tilert.from_dlpack(view, readonly=readonly)

    def values(self) -> np.ndarray:
        return self._values.copy()


class GpuMemory:
    """Memory of the driver, exchanged through the CUDA array interface."""

    def __init__(self, values: np.ndarray) -> None:
        from tilert import driver

        self._device = tilert.device("cuda")
        self._device.synchronize()
        self._size = values.size
        self._address = driver.allocate(values.nbytes)
        self.part(0, (1, values.size), values.size).copy_from(values[None])
        self._device.synchronize()

    def part(self, start: int, shape: tuple[int, int], pitch: int, readonly: bool = False) -> Any:
        """Import a part of it."""

        producer = SimpleNamespace(
            __cuda_array_interface__={
                "version": 3,
                "shape": shape,
                "strides": (4 * pitch, 4),
                "typestr": "<f4",
                "data": (self._address + 4 * start, False),
                "stream": None,
            }
        )
        return tilert.from_cuda_array(producer, readonly=readonly)

    def values(self) -> np.ndarray:
        found: np.ndarray = self.part(0, (1, self._size), self._size, readonly=True).numpy()[0]
        return found

    def __del__(self) -> None:
        from tilert import driver

        gc.collect()
        self._device.synchronize()
        driver.free(self._address)


Memory = Callable[[np.ndarray], Any]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def memory(request: pytest.FixtureRequest) -> Memory:
    return HostMemory if request.param == "cpu" else GpuMemory


def device_of(memory: Memory) -> tilert.Device:
    return tilert.device("cpu" if memory is HostMemory else "cuda")


@pytest.mark.parametrize("start", [0, 4, 5])
@pytest.mark.parametrize("shape", [(0, 6), (3, 0), (1, 1), (5, 6), (7, 9)])
def test_a_kernel_writes_what_was_borrowed(
    memory: Memory, start: int, shape: tuple[int, int]
) -> None:
    """Rows lie apart, aligned or not, and the last tiles of both axes are ragged."""
    device, pitch = device_of(memory), shape[1] + 3
    before = np.full(LENGTH, POISON)
    rows = start + pitch * np.arange(shape[0])[:, None] + np.arange(shape[1])
    values = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape)
    before[rows] = values
    theirs = memory(before)
    y = theirs.part(start, shape, pitch)
    x = tilert.from_numpy(100 * values + 1, device)
    y = add(y.partition(2, 4), x).sync()
    del y
    gc.collect()
    device.synchronize()
    want = before.copy()
    want[rows] = 101 * values + 1
    np.testing.assert_array_equal(theirs.values(), want)


def test_two_parts_of_one_memory(memory: Memory) -> None:
    """Columns that interleave are borrowed side by side and meet in one launch; rows that two want
    to write are refused."""
    before = np.arange(LENGTH, dtype=np.float32)
    theirs = memory(before)
    left, right = theirs.part(0, (8, 3), 6), theirs.part(3, (8, 3), 6)
    with pytest.raises(OwnershipError, match="O3 alias xor mutate: the memory is borrowed already"):
        theirs.part(5, (2, 6), 6)
    op = add(left.partition(3, 2), right)
    with pytest.raises(MovedError):
        left.numpy()
    op.sync()
    want = before.copy()
    want[:48].reshape(8, 6)[:, :3] += want[:48].reshape(8, 6)[:, 3:]
    del op, left, right
    gc.collect()
    device_of(memory).synchronize()
    np.testing.assert_array_equal(theirs.values(), want)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_what_was_lent_to_be_read_is_read_by_kernels(device: tilert.Device, rows: int) -> None:
    """Our own array, out and in again as another library on the same device would hand it on."""
    values = np.arange(rows * 6, dtype=np.float32).reshape(rows, 6)
    array = tilert.from_numpy(values, device)

    class Relay:
        def __dlpack_device__(self) -> tuple[int, int]:
            return array.__dlpack_device__()

        def __dlpack__(self, **asked: Any) -> Any:
            return array.as_readonly("lent").__dlpack__(**asked)

    again = tilert.from_dlpack(Relay(), readonly=True)
    y = tilert.zeros((rows, 3), tilert.f32, device)
    y = add(y.partition(2, 2), again[:, ::2]).sync()
    np.testing.assert_array_equal(y.numpy(), values[:, ::2])
    if rows:
        with pytest.raises(OwnershipError, match="may only be read"):
            again.partition(1, 6)
    del again
    gc.collect()
    device.synchronize()
    array.partition(2, 2)
