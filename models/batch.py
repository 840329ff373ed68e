"""Device state of the sequences that one step works on."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import tilert
from models.config import ModelConfig
from models.kv_cache import KVCache
from models.prompt import Prompt
from models.scratch import Scratch
from models.tiling import tiling
from tilert import Array, Device, DType, f32, i32, u32

__all__ = ["Batch", "Slot"]


@dataclass(frozen=True, slots=True)
class Slot:
    """One sequence's place in a batch.

    row: of the KV cache, or -1 for a padding slot. token: id that the next step reads.
    position: of that token. temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off.
    min_p: 0 is off. seed: any integer, taken modulo 2^64.
    """

    row: int
    token: int
    position: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


class Batch:
    """Slots of one step, and the memory it works in.

    Attributes:
        size: number of slots.
        ids: i32[size], the newest token of each.
        positions: i32[size], where that token goes.
        logits: f32[size, V], of the last step.
        index: where each slot's keys and values go.
        rows: the cache row of each slot, on the host; -1 for padding.
        prefills: recorded prefills of a batch of one slot, by size.
    """

    def __init__(
        self, config: ModelConfig, device: Device, dtype: DType, cache: KVCache, size: int
    ) -> None:
        """Padding slots only, until `set`."""
        if size < 1:
            raise ValueError(f"a batch needs at least one slot, got {size}")
        chunks = -(-config.vocab_size // tiling(device.kind).vocabulary(config.vocab_size))
        self._cache = cache
        self._bind(
            size,
            {
                "ids": tilert.zeros((size,), i32, device),
                "positions": tilert.zeros((size,), i32, device),
                "logits": tilert.zeros((size, config.vocab_size), f32, device),
                "temperature": tilert.zeros((size,), f32, device),
                "top_k": tilert.zeros((size,), i32, device),
                "top_p": tilert.full((size,), 1.0, f32, device),
                "min_p": tilert.zeros((size,), f32, device),
                "seeds": tilert.zeros((size, 2), u32, device),
                "chunk_best": tilert.zeros((size, chunks), f32, device),
                "chunk_index": tilert.zeros((size, chunks), i32, device),
            },
            Scratch(config, device, dtype, size),
        )

    def _bind(self, size: int, arrays: dict[str, Array], scratch: Scratch) -> None:
        self.size = size
        self._arrays = arrays
        self.scratch = scratch
        self.ids = arrays["ids"]
        self.positions = arrays["positions"]
        self.logits = arrays["logits"]
        self.temperature = arrays["temperature"]
        self.top_k = arrays["top_k"]
        self.top_p = arrays["top_p"]
        self.min_p = arrays["min_p"]
        self.seeds = arrays["seeds"]
        self.chunk_best = arrays["chunk_best"]
        self.chunk_index = arrays["chunk_index"]
        self.index = self._cache.table.decode_index(size)
        self.rows = np.full(size, -1, np.int64)
        self.prefills: dict[int, tuple[Prompt, tilert.Graph]] = {}

    def head(self, size: int) -> "Batch":
        """A batch of the first slots, whose arrays are views of this one's.

        Its rows are its own: what runs on it is what was last `set` on it.
        """
        if not 1 <= size <= self.size:
            raise ValueError(f"a batch of {self.size} slots has no first {size}")
        batch = object.__new__(Batch)
        batch._cache = self._cache
        arrays = {name: array[:size] for name, array in self._arrays.items()}
        batch._bind(size, arrays, self.scratch.head(size))
        return batch

    def set(self, slots: Sequence[Slot]) -> None:
        """Upload every slot.

        Raises:
            ValueError: if their number is not `size`.
            tilert.OwnershipError: if a row occurs twice.
            IndexError: if a row does not exist.
        """
        if len(slots) != self.size:
            raise ValueError(f"a batch of {self.size} slots got {len(slots)}")
        rows = np.array([slot.row for slot in slots], np.int64)
        self.index.set_rows(rows)
        self.rows = np.maximum(rows, -1)

        def upload(array: Array, values: Sequence[float]) -> None:
            array.copy_from(np.array(values, array.dtype.numpy))

        upload(self.ids, [slot.token for slot in slots])
        upload(self.positions, [slot.position for slot in slots])
        upload(self.temperature, [slot.temperature for slot in slots])
        upload(self.top_k, [slot.top_k for slot in slots])
        upload(self.top_p, [slot.top_p for slot in slots])
        upload(self.min_p, [slot.min_p for slot in slots])
        words = [(slot.seed & 0xFFFFFFFF, slot.seed >> 32 & 0xFFFFFFFF) for slot in slots]
        self.seeds.copy_from(np.array(words, np.uint32))
