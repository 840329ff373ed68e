"""Device state of the sequences that one step works on."""

from collections.abc import Sequence
from typing import Any

import numpy as np

import tilert
from models.config import ModelConfig
from models.kv_cache import KVCache
from models.prompt import Prompt
from models.scratch import Scratch
from models.slot import MAX_BIASES, Features, Slot
from models.tiling import CHUNK, chunks_of
from tilert import Array, Device, DType, UniqueIndex, f32, i32, u32

__all__ = ["TOP_LOGPROBS", "Batch", "Features", "Slot"]

TOP_LOGPROBS = 20
"""Likeliest tokens that a step with log probabilities reports."""


class _Memory:
    """Arrays of all slots of the largest batch; smaller ones take views of their first slots.

    What only some requests need is allocated when the first of them comes.
    """

    def __init__(self, config: ModelConfig, device: Device, size: int) -> None:
        self.device = device
        self.size = size
        self.chunks = chunks_of(config.vocab_size)
        shape = (size, self.chunks)
        self.plain = {
            # What pads a row is no token.
            "logits": tilert.full((size, self.chunks * CHUNK), float("-inf"), f32, device),
            "ids": self._zeros(i32),
            "positions": self._zeros(i32),
            "bad": self._zeros(i32),
            "temperature": self._zeros(f32),
            "top_k": self._zeros(i32),
            "top_p": tilert.full((size,), 1.0, f32, device),
            "min_p": self._zeros(f32),
            "seeds": self._zeros(u32, 2),
            "filters": self._zeros(i32),
            "lowest": self._zeros(f32),
            "best": tilert.zeros(shape, f32, device),
            "index": tilert.zeros(shape, i32, device),
            "broken": tilert.zeros(shape, i32, device),
            "rank": tilert.zeros(shape, i32, device),
            "order": tilert.zeros(shape, i32, device),
            "score": tilert.zeros(shape, f32, device),
            "token": tilert.zeros(shape, i32, device),
        }
        self.edits: dict[str, Array] = {}
        self.logprobs: dict[str, Array] = {}

    def _zeros(self, dtype: DType, *shape: int) -> Array:
        return tilert.zeros((self.size, *shape), dtype, self.device)

    def need_edits(self) -> dict[str, Array]:
        """Inputs and output of `edit_logits`."""
        if not self.edits:
            self.edits = {
                "edited": self._zeros(f32, self.chunks, CHUNK),
                "presence": self._zeros(f32),
                "frequency": self._zeros(f32),
                "repetition": tilert.full((self.size,), 1.0, f32, self.device),
                "biases": self._zeros(i32),
                "bias_ids": self._zeros(i32, MAX_BIASES),
                "bias_values": self._zeros(f32, MAX_BIASES),
                "masked": self._zeros(i32),
                "allowed": self._zeros(u32, self.chunks, CHUNK // 32),
            }
        return self.edits

    def need_logprobs(self) -> dict[str, Array]:
        """Working memory and outputs of `logprobs`."""
        if not self.logprobs:
            self.logprobs = {
                "wanted": self._zeros(i32),
                "best": self._zeros(f32, self.chunks),
                "rank": self._zeros(i32, self.chunks),
                "order": self._zeros(i32, self.chunks),
                "mass": self._zeros(f32, self.chunks),
                "chosen": self._zeros(f32),
                "top_ids": self._zeros(i32, TOP_LOGPROBS),
                "top_values": self._zeros(f32, TOP_LOGPROBS),
            }
        return self.logprobs


class Batch:
    """Slots of one step, and the memory it works in.

    Attributes:
        size: number of slots.
        ids: i32[size], the newest token of each.
        positions: i32[size], where that token goes.
        bad: i32[size], 1 from the step on whose logits held NaN, until `set`.
        logits: f32[size, V], of the last step, before temperature and edits.
        features: what the slots that were last `set` need.
        index: where each slot's keys and values go.
        rows: the cache row of each slot, on the host; -1 for padding.
        row_index: the same as an index map; up to date where features has edits.
        prefills: recorded prefills of a batch of one slot, by size and features.
    """

    def __init__(
        self, config: ModelConfig, device: Device, dtype: DType, cache: KVCache, size: int
    ) -> None:
        """Padding slots only, until `set`."""
        if size < 1:
            raise ValueError(f"a batch needs at least one slot, got {size}")
        self._cache = cache
        self._vocabulary = config.vocab_size
        memory = _Memory(config, device, size)
        self._bind(size, memory, Scratch(config, device, dtype, size))

    def _bind(self, size: int, memory: _Memory, scratch: Scratch) -> None:
        self.size = size
        self._memory = memory
        self.scratch = scratch
        self.arrays = {name: array[:size] for name, array in memory.plain.items()}
        self.ids = self.arrays["ids"]
        self.positions = self.arrays["positions"]
        self.bad = self.arrays["bad"]
        self.logits = self.arrays["logits"][:, : self._vocabulary]
        self.features = Features.of(())
        self.index = self._cache.table.decode_index(size)
        self.rows = np.full(size, -1, np.int64)
        self.row_index = UniqueIndex.checked(self.rows, memory.device)
        self.prefills: dict[tuple[int, Features], tuple[Prompt, tilert.Graph]] = {}

    @property
    def chunks(self) -> Array:
        """f32[size, S, L]: logits in chunks, -inf past the vocabulary."""
        return self.arrays["logits"].reshape(self.size, -1, CHUNK)

    @property
    def edits(self) -> dict[str, Array]:
        """Inputs and output of `edit_logits`; takes memory on first use."""
        return {name: a[: self.size] for name, a in self._memory.need_edits().items()}

    @property
    def logprobs(self) -> dict[str, Array]:
        """Log probabilities of the last step, before temperature, filters and edits.

        "chosen": f32[size], of the ids. "top_ids": i32[size, K], "top_values": f32[size, K]: the
        likeliest K tokens. Takes memory on first use.
        """
        return {name: a[: self.size] for name, a in self._memory.need_logprobs().items()}

    def head(self, size: int) -> "Batch":
        """A batch of the first slots, whose arrays are views of this one's.

        Its rows are its own: what runs on it is what was last `set` on it.
        """
        if not 1 <= size <= self.size:
            raise ValueError(f"a batch of {self.size} slots has no first {size}")
        batch = object.__new__(Batch)
        batch._cache = self._cache
        batch._vocabulary = self._vocabulary
        batch._bind(size, self._memory, self.scratch.head(size))
        return batch

    def set(self, slots: Sequence[Slot]) -> None:
        """Upload every slot.

        Raises:
            ValueError: if their number is not `size`, or a slot has more than `MAX_BIASES` biases.
            tilert.OwnershipError: if a row occurs twice.
            IndexError: if a row does not exist.
        """
        if len(slots) != self.size:
            raise ValueError(f"a batch of {self.size} slots got {len(slots)}")
        for slot in slots:
            if len(slot.logit_bias) > MAX_BIASES:
                raise ValueError(
                    f"a slot takes at most {MAX_BIASES} biases, got {len(slot.logit_bias)}"
                )
        rows = np.array([slot.row for slot in slots], np.int64)
        self.index.set_rows(rows)
        self.rows = np.maximum(rows, -1)
        self.features = Features.of(slots)
        to = self.arrays
        _upload(to["ids"], [slot.token for slot in slots])
        _upload(to["positions"], [slot.position for slot in slots])
        _upload(to["bad"], [0] * self.size)
        _upload(to["temperature"], [slot.temperature for slot in slots])
        _upload(to["top_k"], [slot.top_k for slot in slots])
        _upload(to["top_p"], [slot.top_p for slot in slots])
        _upload(to["min_p"], [slot.min_p for slot in slots])
        _upload(to["filters"], [slot.filters for slot in slots])
        words = [(slot.seed & 0xFFFFFFFF, slot.seed >> 32 & 0xFFFFFFFF) for slot in slots]
        _upload(to["seeds"], words)
        # Once there is memory for them, a recorded step may read them.
        if self.features.edits or self._memory.edits:
            self._set_edits(slots)
        if self.features.logprobs or self._memory.logprobs:
            _upload(self.logprobs["wanted"], [slot.logprobs for slot in slots])

    def _set_edits(self, slots: Sequence[Slot]) -> None:
        to = self.edits
        self.row_index.update(self.rows)
        _upload(to["presence"], [slot.presence_penalty for slot in slots])
        _upload(to["frequency"], [slot.frequency_penalty for slot in slots])
        _upload(to["repetition"], [slot.repetition_penalty for slot in slots])
        _upload(to["masked"], [slot.masked for slot in slots])
        _upload(to["biases"], [len(slot.logit_bias) for slot in slots])
        if any(slot.logit_bias for slot in slots):
            ids = np.zeros((self.size, MAX_BIASES), np.int32)
            values = np.zeros((self.size, MAX_BIASES), np.float32)
            for number, slot in enumerate(slots):
                for place, (token, value) in enumerate(slot.logit_bias):
                    ids[number, place], values[number, place] = token, value
            to["bias_ids"].copy_from(ids)
            to["bias_values"].copy_from(values)

    def allow(self, slot: int, words: np.ndarray[Any, Any]) -> None:
        """Upload the tokens that a masked slot may choose in steps enqueued from now on.

        Args:
            words: 32-bit words; bit i % 32 of word i / 32 allows token i. Missing words allow none.

        Raises:
            IndexError: if there is no such slot.
            ValueError: if there are more words than the vocabulary takes.
        """
        if not 0 <= slot < self.size:
            raise IndexError(f"a batch of {self.size} slots has no slot {slot}")
        room = self._memory.chunks * CHUNK // 32
        if words.ndim != 1 or words.itemsize != 4 or len(words) > room:
            raise ValueError(
                f"a mask has up to {room} 32-bit words, got {words.dtype}{list(words.shape)}"
            )
        whole = np.zeros(room, np.uint32)
        whole[: len(words)] = words.view(np.uint32)
        self.edits["allowed"][slot].copy_from(whole.reshape(-1, CHUNK // 32))


def _upload(array: Array, values: Sequence[Any]) -> None:
    array.copy_from(np.array(values, array.dtype.numpy))
