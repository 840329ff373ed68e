"""Runs our model on a checkpoint folder, token by token or in chunks, and keeps every logit."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import models
import tilert
from models.batch import Slot
from models.prompt import PromptChunk
from models.transformer import Transformer

MAX_LENGTH = 128
# The row of the cache the sequence lives in: not the first, so that a row mixed up shows.
ROW = 1


class Session:
    """One sequence on a model, alone in its cache, on pages that are not in order."""

    def __init__(self, folder: Path, device: tilert.Device, dtype: tilert.DType) -> None:
        checkpoint = models.open_checkpoint(str(folder))
        self.model = Transformer.load(checkpoint, device, dtype, max_len=MAX_LENGTH)
        pages = -(-MAX_LENGTH // self.model.page_size)
        self.cache = self.model.new_cache(num_pages=pages + 1, max_seqs=ROW + 1)
        self.cache.set_pages(ROW, list(range(pages, 0, -1)))
        self.batch = self.model.new_batch(self.cache, 1)

    def prefill(self, tokens: NDArray[np.int32], start: int = 0) -> NDArray[np.float32]:
        """Run `tokens` at positions start and up; the last one's logits: float32 [vocabulary]."""
        self._place(token=0, position=start)
        chunk = PromptChunk(np.asarray(tokens, np.int32), start)
        self.model.prefill(self.cache, self.batch, [chunk])
        return self._logits()

    def decode(self, token: int, position: int) -> NDArray[np.float32]:
        """One decode step for `token` at `position`; its logits: float32 [vocabulary]."""
        self._place(token, position)
        self.model.decode(self.cache, self.batch)
        return self._logits()

    def chunks(self, tokens: NDArray[np.int32], sizes: Sequence[int]) -> NDArray[np.float32]:
        """Prefill `tokens` in chunks of `sizes`; the logits at each chunk's end."""
        rows, start = [], 0
        for size in sizes:
            rows.append(self.prefill(tokens[start : start + size], start))
            start += size
        return np.stack(rows)

    def greedy(self, prompt: NDArray[np.int32], count: int) -> list[int]:
        """`count` tokens after `prompt`, each chosen on the device, as generation does it."""
        self.prefill(prompt)
        tokens = [self._sampled()]
        while len(tokens) < count:
            self.model.decode(self.cache, self.batch)
            tokens.append(self._sampled())
        return tokens

    def _place(self, token: int, position: int) -> None:
        slot = Slot(
            row=ROW,
            token=token,
            position=position,
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=0,
        )
        self.batch.set([slot])

    def _logits(self) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self.batch.logits.numpy()[0].astype(np.float32)
        return logits

    def _sampled(self) -> int:
        return int(self.batch.ids.numpy()[0])


def relative_error(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Largest difference over the largest expected size; NaN anywhere gives NaN."""
    return float(np.abs(actual - expected).max() / np.abs(expected).max())
