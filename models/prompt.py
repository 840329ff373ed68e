"""Tokens of one sequence on their way through a prefill."""

import numpy as np

import tilert
from models.kv_cache import KVCache
from tilert import Array, Device, UniqueIndex, i32

__all__ = ["Prompt"]


class Prompt:
    """Device inputs of a prefill of up to `size` tokens; what is missing is padding.

    Padding runs through the model like tokens that follow, except that it leaves nothing in the
    cache, so one recorded prefill serves every shorter prompt.

    Attributes:
        ids: i32[size]. positions: i32[size], rising by one.
        index: where keys and values go. last: i32[1], which token is the last real one.
    """

    def __init__(self, size: int, device: Device) -> None:
        self.size = size
        self.ids: Array = tilert.zeros((size,), i32, device)
        self.positions: Array = tilert.zeros((size,), i32, device)
        self.last: Array = tilert.zeros((1,), i32, device)
        self.index = UniqueIndex.checked(np.full(size, -1, np.int32), device)

    def set(self, cache: KVCache, row: int, tokens: np.ndarray, start: int) -> None:
        """Upload tokens, which go to positions from `start` on of a row of the cache."""
        count = len(tokens)
        ids = np.zeros(self.size, np.int32)
        ids[:count] = tokens
        slots = np.full(self.size, -1, np.int32)
        slots[:count] = cache.table.slot_numbers(row, start, count)
        self.ids.copy_from(ids)
        self.positions.copy_from(np.arange(start, start + self.size, dtype=np.int32))
        self.last.copy_from(np.array([count - 1], np.int32))
        self.index.update(slots)
