"""Replays of a decode step on a GPU: whatever kernels run beside each other, the same numbers."""

from dataclasses import replace

import numpy as np
import pytest

import tilert
from models.batch import Slot
from models.presets import PRESETS
from models.transformer import Transformer
from tilert import bf16

LAYERS, REPLAYS = 4, 60


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("preset", "size"), [("qwen3-1.7b", 2), ("qwen3-1.7b", 8), ("qwen3-0.6b", 3), ("qwen3-4b", 2)]
)
def test_replays_from_a_cold_cache_are_what_ops_compute(preset: str, size: int) -> None:
    """In these shapes blocks that read ahead share multiprocessors with blocks whose operands come
    through rings: there, what a ring gives back too soon is overwritten while it is read."""
    gpu = tilert.device("cuda")
    model = Transformer.random(replace(PRESETS[preset], num_layers=LAYERS), gpu, bf16, max_len=512)
    cache = model.new_cache(8 * size, size)
    for row in range(size):
        cache.set_pages(row, list(range(8 * row, 8 * row + 8)))
    batch = model.new_batch(cache, size)
    kept = [array for layer in range(LAYERS) for array in cache.places(layer)]
    zeros = [np.zeros(array.shape, array.dtype.numpy) for array in kept]

    def begin() -> None:
        # Copies from the host leave the second-level cache without weights.
        for array, value in zip(kept, zeros, strict=True):
            array.copy_from(value)
        batch.set([Slot(row=row, token=77 + row, position=18) for row in range(size)])
        gpu.synchronize()

    begin()
    model.decode(cache, batch)
    wanted = batch.logits.numpy()
    assert np.isfinite(wanted.astype(np.float32)).all()
    with tilert.capture(gpu, lambda: model.decode(cache, batch)) as graph:
        wrong = 0
        for _ in range(REPLAYS):
            begin()
            graph.replay()
            wrong += bool((batch.logits.numpy() != wanted).any())
    assert wrong == 0
