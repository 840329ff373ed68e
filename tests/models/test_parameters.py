"""Weights from a checkpoint to a device: read by several threads, whole or not at all."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilert
from models.errors import LoadError
from models.parameters import Parameters
from models.safetensors_loader import SafetensorsCheckpoint
from models.stored import Held, Stored
from tests.models.builders import canonical, hf_tensors, llama_config, qwen3_config
from tests.tilert.fake_cuda import FakeCudaDevice, fake_cuda
from tilert import bf16, f32

MakeFolder = Callable[..., Path]


@pytest.fixture(params=["cpu", "cuda", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The cpu, and a GPU whose driver is made up and completes work late."""
    if request.param == "cpu":
        return tilert.device("cpu")
    if request.param == "gpu":
        return tilert.device("cuda")
    # Tensors of tests are small: here they take several pinned buffers each.
    monkeypatch.setattr("tilert.cuda_device._SMALL", 100)
    monkeypatch.setattr("tilert.staging._CHUNK", 1 << 10)
    return fake_cuda(monkeypatch, 1)


def loaded(parameters: Parameters) -> dict[str, Any]:
    return {name: place.numpy() for name, place in parameters._places.items()}


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("dtype", [bf16, f32])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_weight_is_where_it_belongs(
    make_folder: MakeFolder, device: tilert.Device, stored: Any, dtype: tilert.DType, shards: int
) -> None:
    config = qwen3_config(tie_word_embeddings=False)
    tensors = hf_tensors(config, stored)
    checkpoint = SafetensorsCheckpoint(make_folder(config, tensors, shards))
    told: list[tuple[int, int]] = []
    found = loaded(Parameters.load(checkpoint, device, dtype, lambda *at: told.append(at)))
    expected = canonical(tensors)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array.astype(dtype.numpy), err_msg=name)
    # Bytes come one tensor after another, to the last.
    assert len(told) == len(expected)
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert told[-1] == (checkpoint.nbytes, checkpoint.nbytes)


@pytest.mark.parametrize("keep", [-1, 3000])
def test_a_file_that_is_cut_short_while_it_is_read(
    make_folder: MakeFolder, device: tilert.Device, keep: int
) -> None:
    folder = make_folder(llama_config())
    checkpoint = SafetensorsCheckpoint(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(LoadError, match=r"model\.safetensors: the file was cut short"):
        Parameters.load(checkpoint, device, f32)
    usable(device)


def test_a_file_that_has_gone(make_folder: MakeFolder, device: tilert.Device) -> None:
    folder = make_folder(llama_config(), shards=2)
    checkpoint = SafetensorsCheckpoint(folder)
    sorted(folder.glob("*.safetensors"))[-1].unlink()
    with pytest.raises(LoadError, match=r"model-00002-of-00002\.safetensors: cannot be read: No"):
        Parameters.load(checkpoint, device, f32)
    usable(device)


class Made:
    """A checkpoint of arrays, one of which cannot be read."""

    def __init__(self, checkpoint: SafetensorsCheckpoint, bad: str, error: Exception) -> None:
        self.config, self.id, self.nbytes = checkpoint.config, "made", checkpoint.nbytes
        self._checkpoint, self._bad, self._error = checkpoint, bad, error
        self.read: list[str] = []
        self.failed = threading.Event()

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        for name, tensor in self._checkpoint.tensors():
            yield name, Held(tensor.shape, tensor.dtype, lambda n=name, t=tensor: self._make(n, t))

    def _make(self, name: str, tensor: Stored) -> Any:
        if name == self._bad:
            self.failed.set()
            raise self._error
        # Whoever comes later than the failure has to wait for it.
        assert self.failed.wait(60)
        self.read.append(name)
        return np.asarray(tensor)


@pytest.mark.parametrize("error", [LoadError("a bad block"), MemoryError(), ValueError("odd")])
def test_an_error_in_a_reading_thread_ends_the_load(
    make_folder: MakeFolder, device: tilert.Device, error: Exception
) -> None:
    checkpoint = SafetensorsCheckpoint(make_folder(qwen3_config(num_hidden_layers=8)))
    made = Made(checkpoint, "embed", error)
    with pytest.raises(type(error)) as caught:
        Parameters.load(made, device, f32)  # type: ignore[arg-type]
    assert caught.value is error
    usable(device)


def usable(device: tilert.Device) -> None:
    """Copies of many buffers still work, in both directions."""
    values = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    for _ in range(5):
        array = tilert.from_numpy(values, device)
        np.testing.assert_array_equal(array.numpy(), values)


def test_tensors_that_do_not_fit_are_refused(make_folder: MakeFolder) -> None:
    checkpoint = SafetensorsCheckpoint(make_folder(llama_config()))

    class Odd(Made):
        def tensors(self) -> Iterator[tuple[str, Stored]]:
            yield from list(checkpoint.tensors())[:-1]
            yield "another", Held((2, 2), np.dtype(np.float32), lambda: np.zeros((2, 2)))

    odd: Any = Odd(checkpoint, "", ValueError())
    with pytest.raises(LoadError, match=r"tensor another of shape \[2, 2\] does not fit"):
        Parameters.load(odd, tilert.device("cpu"), f32)

    class Fewer(Made):
        def tensors(self) -> Iterator[tuple[str, Stored]]:
            yield from list(checkpoint.tensors())[1:]

    fewer: Any = Fewer(checkpoint, "", ValueError())
    with pytest.raises(LoadError, match=r"made: tensor \S+ is missing"):
        Parameters.load(fewer, tilert.device("cpu"), f32)


# -- tilert.fill_from ----------------------------------------------------------------------------


def test_fill_from_asks_for_each_byte_once(device: tilert.Device) -> None:
    values = np.arange(3000, dtype=np.float32)
    raw, asked = values.view(np.uint8), []

    def read(start: int, buffer: Any) -> None:
        asked.append((start, buffer.size))
        buffer[:] = raw[start : start + buffer.size]

    array = tilert.empty((30, 100), f32, device)
    tilert.fill_from(array, read)
    np.testing.assert_array_equal(array.numpy().reshape(-1), values)
    ends = [start + size for start, size in asked]
    assert [0, *ends] == [*(start for start, _ in asked), raw.size]
    assert len(asked) == (-(-raw.size // 1024) if isinstance(device, FakeCudaDevice) else 1)


def test_fill_from_keeps_the_order_of_work(device: tilert.Device) -> None:
    array, copy = tilert.zeros((4000,), f32, device), tilert.empty((4000,), f32, device)
    for value in range(1, 6):
        tilert.fill_from(array, lambda _, buffer, v=value: buffer.view(np.float32).fill(v))
        copy.copy_from(array)
        tilert.fill_from(array, lambda _, buffer: buffer.fill(0))
        np.testing.assert_array_equal(copy.numpy(), np.full(4000, value, np.float32))


def test_fill_from_refuses_what_cannot_be_filled(device: tilert.Device) -> None:
    array = tilert.zeros((4, 6), f32, device)
    with pytest.raises(ValueError, match="it is not contiguous"):
        tilert.fill_from(array[:, ::2], lambda *_: None)
    tilert.fill_from(array[:0], lambda *_: 1 / 0)  # type: ignore[arg-type,return-value]
    held = array.partition(1, 6)
    with pytest.raises(tilert.MovedError):
        tilert.fill_from(array, lambda *_: None)
    held.release()
    with pytest.raises(ZeroDivisionError):
        tilert.fill_from(array, lambda *_: 1 / 0)  # type: ignore[arg-type,return-value]
    usable(device)
