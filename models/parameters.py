"""A model's weights on a device: `Parameters`, read from a checkpoint or made up."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial

import numpy as np

import tilert
from models.config import ModelConfig
from models.errors import LoadError
from models.kernels import fill_normal
from models.stored import Stored
from models.tiling import tiling
from models.weights import Checkpoint, expected_shapes
from tilert import Array, Device, DType

__all__ = ["LayerParameters", "Parameters", "Progress"]

Progress = Callable[[int, int], None]
"""Called with bytes read so far and in all."""

_READERS = 8
"""Threads that read tensors: of a disk, as many requests at a time."""

RANDOM_STD = 0.02
"""Standard deviation of made-up matrices (`initializer_range` of Qwen3 and llama configs)."""


@dataclass(frozen=True)
class LayerParameters:
    """Weights of one layer; projections are [outputs, inputs].

    input_norm, post_norm: [H]. qkv: [(Hq + 2 Hkv) D, H]: queries, keys, values. o: [H, Hq D].
    q_norm, k_norm: [2, D/2]; ones, and unused, where the model has no such norm.
    gate_up: [2, F, H]. down: [H, F].
    """

    input_norm: Array
    qkv: Array
    q_norm: Array
    k_norm: Array
    o: Array
    post_norm: Array
    gate_up: Array
    down: Array


class Parameters:
    """All weights of a model in one dtype.

    embed: [V, H]. norm: [H]. head: [V, H], which is `embed` itself where the model ties them.
    """

    def __init__(self, config: ModelConfig, device: Device, dtype: DType) -> None:
        """Allocate, contents undefined. Raises `tilert.DeviceError` if the memory is too small."""
        self.config = config
        self.device = device
        self.dtype = dtype
        hidden, half = config.hidden_size, config.head_dim // 2
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

        def empty(*shape: int) -> Array:
            return tilert.empty(shape, dtype, device)

        self.embed = empty(config.vocab_size, hidden)
        self.layers: list[LayerParameters] = []
        self._places: dict[str, Array] = {"embed": self.embed}
        ones = None if config.qk_norm else tilert.full((2, half), 1.0, dtype, device)
        for number in range(config.num_layers):
            layer = LayerParameters(
                input_norm=empty(hidden),
                qkv=empty(queries + 2 * keys, hidden),
                q_norm=ones or empty(2, half),
                k_norm=ones or empty(2, half),
                o=empty(hidden, queries),
                post_norm=empty(hidden),
                gate_up=empty(2, config.intermediate_size, hidden),
                down=empty(hidden, config.intermediate_size),
            )
            self.layers.append(layer)
            self._place(f"layers.{number}.", layer)
        self.norm = self._places["norm"] = empty(hidden)
        self.head = self.embed
        if not config.tie_word_embeddings:
            self.head = self._places["head"] = empty(config.vocab_size, hidden)

    def _place(self, prefix: str, layer: LayerParameters) -> None:
        """Where the canonical tensors of a layer lie in the merged arrays."""
        config = self.config
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        places = {
            "input_norm": layer.input_norm,
            "q": layer.qkv[:queries],
            "k": layer.qkv[queries : queries + keys],
            "v": layer.qkv[queries + keys :],
            "o": layer.o,
            "post_norm": layer.post_norm,
            "gate": layer.gate_up[0],
            "up": layer.gate_up[1],
            "down": layer.down,
        }
        if config.qk_norm:
            places |= {"q_norm": layer.q_norm.reshape(-1), "k_norm": layer.k_norm.reshape(-1)}
        self._places |= {prefix + name: array for name, array in places.items()}

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        device: Device,
        dtype: DType,
        progress: Progress | None = None,
    ) -> "Parameters":
        """Upload a checkpoint's tensors, several at a time, rounded to `dtype` on the host.

        Raises:
            LoadError: if a tensor is missing, cannot be read or does not belong to the model.
            tilert.DeviceError: if the device's memory is too small.
        """
        self = cls(checkpoint.config, device, dtype)
        pairs = self._paired(checkpoint)
        done, total = 0, checkpoint.nbytes
        with ThreadPoolExecutor(_READERS, thread_name_prefix="grout-weights") as pool:
            reading = {
                pool.submit(tilert.fill_from, place, partial(tensor.read_as, dtype.numpy)): (
                    tensor.nbytes
                )
                for place, tensor in pairs
            }
            try:
                for read in as_completed(reading):
                    read.result()
                    done += reading.pop(read)
                    if progress is not None:
                        progress(done, total)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return self

    def _paired(self, checkpoint: Checkpoint) -> Iterator[tuple[Array, Stored]]:
        """Each tensor with where it goes. Raises LoadError, for what is missing at the end."""
        waiting = dict(self._places)
        for name, tensor in checkpoint.tensors():
            place = waiting.pop(name, None)
            if place is None or tuple(tensor.shape) != place.shape:
                raise LoadError(
                    f"{checkpoint.id}: tensor {name} of shape {list(tensor.shape)} does not fit"
                    " the model's configuration"
                )
            yield place, tensor
        if waiting:
            raise LoadError(f"{checkpoint.id}: tensor {min(waiting)} is missing")

    @classmethod
    def random(
        cls, config: ModelConfig, device: Device, dtype: DType, seed: int = 0
    ) -> "Parameters":
        """Make matrices up on the device, normal with deviation `RANDOM_STD`; norms are 1."""
        self = cls(config, device, dtype)
        words = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
        tile = tiling(device.kind).fill
        for stream, (name, place) in enumerate(self._places.items()):
            if name.endswith("norm"):
                ones = np.ones(place.shape, dtype.numpy)
                place.copy_from(ones)
            else:
                key = tilert.from_numpy(np.array([*words, stream], np.uint32), device)
                fill_normal(place.reshape(-1).partition(tile), key, std=RANDOM_STD).run()
        return self

    @property
    def bytes_per_token(self) -> int:
        """Bytes of weights that decoding one token reads: all but an untied embedding's rows."""
        shapes = expected_shapes(self.config)
        if not self.config.tie_word_embeddings:
            shapes["embed"] = (1, self.config.hidden_size)
        return sum(int(np.prod(s)) for s in shapes.values()) * self.dtype.itemsize
