"""The model's CUDA text run on the host: its logits without a GPU, with the tiles of a GPU."""

import numpy as np
import pytest

from models.batch import Slot
from models.prompt import PromptChunk
from models.transformer import Transformer
from tests.models.test_transformer import (
    CONFIGS,
    MAX_LEN,
    VOCABULARY,
    Rig,
    error,
    logits_of,
    reference,
    weights_of,
)
from tests.tilert.emulator import EmulatedDevice, compiler
from tilert import bf16

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler here"),
    pytest.mark.timeout(600),
]


class EmulatedGPU(EmulatedDevice):
    """Takes the tiles, the recordings and the kernels of a GPU."""

    kind = "cuda"


@pytest.mark.parametrize("check", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_prefill_and_decode(check: bool) -> None:
    tokens = np.random.default_rng(9).integers(0, VOCABULARY, 120).astype(np.int32)
    weights = weights_of(CONFIGS["qwen3"])
    expected = reference(weights, tokens)
    rig = Rig(Transformer.load(weights, EmulatedGPU(check=check), bf16, max_len=MAX_LEN))
    for count in (1, 100):
        assert error(rig.prefill(tokens[:count]), expected[count - 1]) < 5e-2
    rows, lengths = (0, 3, 1), (70, 1, 50)
    padding = Slot(row=-1, token=0, position=0)
    batch = rig.model.new_batch(rig.cache, 4)
    batch.set([*(Slot(row=row, token=0, position=0) for row in rows), padding])
    chunks = [PromptChunk(tokens[:n], 0) for n in lengths]
    rig.model.prefill(rig.cache, batch, chunks)
    for logits, n in zip(logits_of(batch), lengths, strict=False):
        assert error(logits, expected[n - 1]) < 5e-2
    slots = [Slot(r, int(tokens[n]), n) for r, n in zip(rows, lengths, strict=True)]
    for size in (1, 4):
        few = [*slots, padding][:size]
        decoded = rig.decode(batch.head(size), few)
        for logits, n, slot in zip(decoded, lengths, few, strict=False):
            if slot.row >= 0:
                assert error(logits, expected[n]) < 5e-2
