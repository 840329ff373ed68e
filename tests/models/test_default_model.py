"""The real default model, where an earlier run has put it into the user's cache."""

import numpy as np
import pytest

from models import PRESETS, Checkpoint, default_model, expected_shapes
from models.gguf_loader import GGUFCheckpoint

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    file = default_model.cached_gguf()
    if file is None:
        pytest.skip("the default model is not cached")
    return GGUFCheckpoint(file, default_model.HUB_ID)


def test_config(checkpoint: Checkpoint) -> None:
    preset = PRESETS["smollm2-135m"]
    assert expected_shapes(checkpoint.config) == expected_shapes(preset)
    assert checkpoint.config.rope == preset.rope
    assert checkpoint.config.rms_norm_eps == preset.rms_norm_eps
    assert checkpoint.config.max_position_embeddings == preset.max_position_embeddings
    assert checkpoint.config.eos_token_ids == (2, 0)


def test_prompt(checkpoint: Checkpoint) -> None:
    template, tokenizer = checkpoint.chat_template(), checkpoint.tokenizer()
    assert template is not None
    prompt = template.render([{"role": "user", "content": "It's 2024!"}])
    ids = tokenizer.encode(prompt)
    # <|im_start|>system\nYou are a helpful AI assistant
    assert ids[:10] == [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365]
    assert [tokenizer.token_bytes(token) for token in ids[-14:]] == [
        b"It",
        b"'s",
        b" ",
        b"2",
        b"0",
        b"2",
        b"4",
        b"!",
        b"<|im_end|>",
        b"\n",
        b"<|im_start|>",
        b"ass",
        b"istant",
        b"\n",
    ]
    assert tokenizer.decode(ids, skip_special_tokens=False) == prompt


def test_weights(checkpoint: Checkpoint) -> None:
    total = 0
    for _, array in checkpoint.tensors():
        assert array.dtype == np.float32
        assert np.isfinite(array).all()
        total += array.nbytes
    assert total == checkpoint.nbytes == 4 * 134_515_008
