"""How often each row's sequence has had each token, for penalties."""

from collections.abc import Sequence

import numpy as np

import tilert
from models.kernels.logit_edits import PROMPT_BIT
from models.tile_sizes import CHUNK, chunks_of
from tilert import Array, Device, i32

__all__ = ["History"]


class History:
    """Token counts of the rows of a KV cache, in device memory that the first use takes.

    A row counts the tokens in front of the newest one: a decode step counts the token that it
    reads, which is the newest until then. Prefill counts nothing; `set` gives it all it needs. Rows
    stay where they are when batches change, so a sequence is uploaded once.
    """

    def __init__(self, rows: int, vocabulary: int, device: Device) -> None:
        self._shape = (rows, chunks_of(vocabulary), CHUNK)
        self._vocabulary = vocabulary
        self._device = device
        self._counts: Array | None = None

    @property
    def nbytes(self) -> int:
        """Device memory of the counts, whether taken yet or not."""
        rows, chunks, length = self._shape
        return rows * chunks * length * i32.itemsize

    @property
    def counts(self) -> Array:
        """i32[rows, S, L], see `PROMPT_BIT`.

        Raises:
            tilert.DeviceError: if the device's memory is too small.
        """
        if self._counts is None:
            self._counts = tilert.zeros(self._shape, i32, self._device)
        return self._counts

    def take(self) -> None:
        """Take the memory now: a recording that takes it clears it at every replay."""
        self._counts = self.counts

    def set(self, row: int, prompt: Sequence[int], produced: Sequence[int] = ()) -> None:
        """Count a row's tokens anew.

        Args:
            prompt: ids of the prompt. produced: ids of the reply in front of the newest one.

        Raises:
            IndexError: if there is no such row, or an id is outside the vocabulary.
        """
        if not 0 <= row < self._shape[0]:
            raise IndexError(f"there is no row {row}: the history has {self._shape[0]}")
        _, chunks, length = self._shape
        counts = np.zeros(chunks * length, np.int32)
        for name, tokens in (("prompt", prompt), ("produced", produced)):
            ids = np.asarray(tokens, np.int64)
            wrong = ids[(ids < 0) | (ids >= self._vocabulary)]
            if wrong.size:
                raise IndexError(f"{name} holds token {wrong[0]}, outside {self._vocabulary} ids")
            if name == "prompt":
                counts[ids] = PROMPT_BIT
            else:
                counts += np.bincount(ids, minlength=counts.size).astype(np.int32)
        self.counts[row].copy_from(counts.reshape(chunks, length))
