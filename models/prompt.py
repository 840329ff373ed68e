"""Tokens of one or several sequences on their way through a prefill."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import tilert
from models.kv_cache import KVCache
from tilert import Array, Device, UniqueIndex, i32

__all__ = ["Prompt", "PromptChunk"]


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Tokens of one sequence that are run together.

    tokens: integer ids, [T] with T >= 1.
    start: position of the first; the keys and values of earlier ones are in the cache.
    """

    tokens: np.ndarray[Any, Any]
    start: int

    @property
    def stop(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)


class Prompt:
    """Device inputs of a prefill of up to `size` tokens of up to `slots` sequences.

    What is missing is padding: it runs through the model as tokens that attend to nothing and
    leave nothing in the cache, so one recorded prefill serves every smaller one.

    Attributes:
        ids, positions: i32[size], of each token.
        slots: i32[size], which sequence it is of; `len(starts)` for padding.
        begins: i32[slots + 1], first token of each sequence and the number of tokens.
        starts: i32[slots], position of each sequence's first token.
        last: i32[slots], the last token of each sequence.
        index: where keys and values go.
    """

    def __init__(self, size: int, slots: int, device: Device) -> None:
        self.size = size
        # Each begins at 16 bytes, or kernels would be others for sizes where it does not.
        self._tokens = tilert.zeros((3, -(-size // 4) * 4), i32, device)
        self.ids, self.positions, self.slots = (self._tokens[at, :size] for at in range(3))
        self._bounds = tilert.zeros((3, slots + 1), i32, device)
        self.begins: Array = self._bounds[0]
        self.starts: Array = self._bounds[1, :slots]
        self.last: Array = self._bounds[2, :slots]
        self.index = UniqueIndex.checked(np.full(size, -1, np.int32), device)

    def set(self, cache: KVCache, rows: Sequence[int], chunks: Sequence[PromptChunk]) -> None:
        """Upload chunks, each of which goes to a row of the cache."""
        tokens = np.zeros(self._tokens.shape, np.int32)
        bounds = np.zeros(self._bounds.shape, np.int32)
        places = np.full(self.size, -1, np.int32)
        tokens[2] = len(self.starts)
        end = 0
        for slot, (row, chunk) in enumerate(zip(rows, chunks, strict=True)):
            begin, end = end, end + len(chunk.tokens)
            tokens[0, begin:end] = chunk.tokens
            tokens[1, begin:end] = np.arange(chunk.start, chunk.stop)
            tokens[2, begin:end] = slot
            bounds[:, slot] = begin, chunk.start, end - 1
            places[begin:end] = cache.table.slot_numbers(row, chunk.start, len(chunk.tokens))
        bounds[0, len(chunks) :] = end
        self._tokens.copy_from(tokens)
        self._bounds.copy_from(bounds)
        self.index.update(places)
