"""Device state of the sequences that one step works on."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

import tilert
from models import kernels
from models.config import ModelConfig
from models.kv_cache import KVCache
from models.prompt import Prompt
from models.scratch import Scratch
from models.slot import FROM_SLOT, KEPT, MAX_BIASES, PADDING, WORDS, Features, Slot
from models.tile_sizes import CHUNK, chunks_of
from tilert import Array, Device, DType, UniqueIndex, f32, i32, u32

__all__ = ["TOP_LOGPROBS", "Batch", "Features", "Slot"]

TOP_LOGPROBS = 20
"""Likeliest tokens that a step with log probabilities reports."""

_WIDTHS = {name: len(form) for name, form in WORDS.items()}
_STARTS = dict(zip(WORDS, accumulate(_WIDTHS.values(), initial=0), strict=False))
_DTYPES = {"i": i32, "f": f32, "II": u32}
_SOURCE, _NEEDS = _STARTS["source"], _STARTS["needs"]


class _Memory:
    """Arrays of all slots of the largest batch; smaller ones take views of their first slots.

    What only some requests need is allocated when the first of them comes.
    """

    def __init__(self, config: ModelConfig, device: Device, size: int) -> None:
        self.device = device
        self.size = size
        self.chunks = chunks_of(config.vocab_size)
        shape = (size, self.chunks)
        # What the host knows of each slot, one upload for all of it; and its rows of the cache.
        self.words = np.zeros((size, sum(_WIDTHS.values())), np.int32)
        self.words[:] = np.frombuffer(PADDING.words(), np.int32)
        self.rows = np.full(size, -1, np.int64)
        self.given = tilert.from_numpy(self.words, device)
        self.results = self._zeros(i32, first=2)
        self.before = self._zeros(i32)
        self.plain = {
            # What pads a row is no token.
            "logits": tilert.full((size, self.chunks * CHUNK), float("-inf"), f32, device),
            "positions": self._zeros(i32),
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
        self.masks = np.zeros((0, 0, 0), np.uint32)
        self.logprobs: dict[str, Array] = {}

    def _zeros(self, dtype: DType, *shape: int, first: int | None = None) -> Array:
        lead = () if first is None else (first,)
        return tilert.zeros((*lead, self.size, *shape), dtype, self.device)

    def need_edits(self) -> dict[str, Array]:
        """Inputs and output of `edit_logits`, but for its words of the slots."""
        if not self.edits:
            self.edits = {
                "edited": self._zeros(f32, self.chunks, CHUNK),
                "bias_ids": self._zeros(i32, MAX_BIASES),
                "bias_values": self._zeros(f32, MAX_BIASES),
                "allowed": self._zeros(u32, self.chunks, CHUNK // 32),
            }
            self.masks = np.zeros(self.edits["allowed"].shape, np.uint32)
        return self.edits

    def need_logprobs(self) -> dict[str, Array]:
        """Working memory and outputs of `logprobs`."""
        if not self.logprobs:
            self.logprobs = {
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
        bad: i32[size], 1 from the step on whose logits held NaN, until the slot changes.
        results: i32[2, slots], `ids` and `bad` of every slot of the memory, for one copy of both.
        logits: f32[size, V], of the last step, before temperature and edits.
        features: what the slots need.
        index: where each slot's keys and values go.
        rows: the cache row of each slot, on the host; -1 for padding.
        row_index: the same as an index map; up to date where features has edits.
        prefills: recorded layers of prefills, their inputs and where they work, by size.
        prefill_samplings: recordings of what follows, by features.
    """

    def __init__(
        self, config: ModelConfig, device: Device, dtype: DType, cache: KVCache, size: int
    ) -> None:
        """Padding slots only, until `set` or `change`."""
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
        self._words = {name: _field(memory.given[:size], name) for name in WORDS}
        self.results = memory.results
        self.ids, self.bad = memory.results[0, :size], memory.results[1, :size]
        self.arrays = {name: array[:size] for name, array in memory.plain.items()} | self._words
        self.positions = self.arrays["positions"]
        self.logits = self.arrays["logits"][:, : self._vocabulary]
        self.features = Features.of(0)
        self.index = self._cache.table.decode_index(size)
        self.rows = np.full(size, -1, np.int64)
        self.row_index = UniqueIndex.checked(self.rows, memory.device)
        self._seating: tuple[Array, tilert.Graph] | None = None
        self.prefills: dict[int, tuple[Prompt, Scratch, tilert.Graph]] = {}
        self.prefill_samplings: dict[Features, tilert.Graph] = {}

    @property
    def chunks(self) -> Array:
        """f32[size, S, L]: logits in chunks, -inf past the vocabulary."""
        return self.arrays["logits"].reshape(self.size, -1, CHUNK)

    @property
    def edits(self) -> dict[str, Array]:
        """Inputs and output of `edit_logits`; takes memory on first use."""
        own = {name: array[: self.size] for name, array in self._memory.need_edits().items()}
        return self._words | own

    @property
    def logprobs(self) -> dict[str, Array]:
        """Log probabilities of the last step, before temperature, filters and edits.

        "chosen": f32[size], of the ids. "top_ids": i32[size, K], "top_values": f32[size, K]: the
        likeliest K tokens. Takes memory on first use.
        """
        own = {name: array[: self.size] for name, array in self._memory.need_logprobs().items()}
        return self._words | own

    def head(self, size: int) -> "Batch":
        """A batch of the first slots, which has them in common with this one.

        A change to either is one to the slots of both, but what runs on a batch is what was there
        when it was last changed itself.
        """
        if not 1 <= size <= self._memory.size:
            raise ValueError(f"a batch of {self._memory.size} slots has no first {size}")
        batch = object.__new__(Batch)
        batch._cache = self._cache
        batch._vocabulary = self._vocabulary
        batch._bind(size, self._memory, self.scratch.head(size))
        return batch

    def set(self, slots: Sequence[Slot]) -> None:
        """Replace every slot.

        Raises:
            ValueError: if their number is not `size`; otherwise as `change`.
        """
        if len(slots) != self.size:
            raise ValueError(f"a batch of {self.size} slots got {len(slots)}")
        self.change(dict(enumerate(slots)))

    def change(self, slots: Mapping[int, Slot], fresh: Array | None = None) -> None:
        """Replace some slots, by number; the others go on from where the steps so far leave them.

        Nothing is read back, so the steps so far need not be done. Slots past `size` are to be
        padding: they are when a larger batch of the same memory is changed next.

        Args:
            fresh: i32[P], for slots whose token is taken from there.

        Raises:
            ValueError: if a slot has more than `MAX_BIASES` biases, or its token comes from where
                none is.
            tilert.OwnershipError: if a row occurs twice.
            IndexError: if a row or a slot does not exist. After any of them the batch is to be
                `set` before it is used again.
        """
        memory, size = self._memory, self.size
        entries = 0 if fresh is None else fresh.shape[0]
        biased = []
        for number, slot in slots.items():
            self._check(number, slot.source, entries)
            memory.words[number] = np.frombuffer(slot.words(), np.int32)
            memory.rows[number] = max(slot.row, -1)
            if slot.logit_bias:
                biased.append(number)
        if not np.array_equal(self.rows, memory.rows[:size]):
            self.index.set_rows(memory.rows[:size])
            self.rows = memory.rows[:size].copy()
        words = memory.words[:size]
        self.features = Features.of(int(np.bitwise_or.reduce(words[:, _NEEDS])))
        self.need(self.features)
        if self.features.edits:
            self.row_index.update(self.rows)
        memory.given[:size].copy_from(words)
        for number in biased:
            self._set_biases(number, slots[number].logit_bias)
        self._seat(memory.before if fresh is None else fresh)
        words[:, _SOURCE] = KEPT

    def need(self, features: Features) -> None:
        """Take the memory of these parts of the sampler: a recording would clear it each time."""
        if features.edits:
            self._memory.need_edits()
            self._cache.history.take()
        if features.logprobs:
            self._memory.need_logprobs()

    def _seat(self, fresh: Array) -> None:
        """Enqueue what `change` has the device do, recorded: launching its op takes longer."""
        if self._seating is None or self._seating[0] is not fresh:
            self._seating = fresh, tilert.capture(self._memory.device, lambda: self._take(fresh))
        self._seating[1].replay()

    def _take(self, fresh: Array) -> None:
        memory, words = self._memory, self._words
        memory.before.copy_from(memory.results[0])
        kernels.seat(
            self.ids.partition(1),
            self.positions.partition(1),
            self.bad.partition(1),
            words["source"],
            words["id"],
            words["start"],
            memory.before,
            fresh,
        ).run()

    def _check(self, number: int, source: int, entries: int) -> None:
        """Refuse a slot that does not exist, or takes its token from where none is."""
        size = self._memory.size
        if not 0 <= number < size:
            raise IndexError(f"a batch of {size} slots has no slot {number}")
        if not -entries <= source < FROM_SLOT + size:
            raise ValueError(
                f"slot {number} has source {source}: there are {size} slots and {entries} fresh ids"
                " to take a token from"
            )

    def _set_biases(self, number: int, pairs: Sequence[tuple[int, float]]) -> None:
        to = self._memory.need_edits()
        ids, values = np.zeros(MAX_BIASES, np.int32), np.zeros(MAX_BIASES, np.float32)
        ids[: len(pairs)] = [token for token, _ in pairs]
        values[: len(pairs)] = [value for _, value in pairs]
        to["bias_ids"][number].copy_from(ids)
        to["bias_values"][number].copy_from(values)

    def allow(self, masks: Mapping[int, np.ndarray[Any, Any]]) -> None:
        """Upload the tokens that masked slots, by number, may choose in steps enqueued from now on.

        Args:
            masks: 32-bit words; bit i % 32 of word i / 32 allows token i. Missing words allow none.

        Raises:
            IndexError: if there is no such slot.
            ValueError: if there are more words than the vocabulary takes.
        """
        if not masks:
            return
        allowed = self._memory.need_edits()["allowed"]
        whole = self._memory.masks
        room = whole[0].size
        for number, words in masks.items():
            if not 0 <= number < self.size:
                raise IndexError(f"a batch of {self.size} slots has no slot {number}")
            if words.ndim != 1 or words.itemsize != 4 or len(words) > room:
                raise ValueError(
                    f"a mask has up to {room} 32-bit words, got {words.dtype}{list(words.shape)}"
                )
            flat = whole[number].reshape(-1)
            flat[: len(words)] = words.view(np.uint32)
            flat[len(words) :] = 0
        # One copy of all between the first and the last: each has a price of its own.
        first, last = min(masks), max(masks) + 1
        allowed[first:last].copy_from(whole[first:last])


def _field(words: Array, name: str) -> Array:
    """A field of each slot: [slots], or [slots, n] for one of several words."""
    start, width = _STARTS[name], _WIDTHS[name]
    dtype = _DTYPES[WORDS[name]]
    whole = words[:, start] if width == 1 else words[:, start : start + width]
    return whole if dtype == i32 else whole.view(dtype)
