"""Every malformed GGUF file is refused at load, in one line that names it once."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models import ConfigError, LoadError, open_checkpoint
from tests.models.builders import llama_config
from tests.models.refusal import INF, NAN, MakeGGUF, refusal

GGUF_FIELDS: list[tuple[str, list[Any]]] = [
    ("llama.attention.head_count", [0, -1, "x"]),
    ("llama.attention.head_count_kv", [0]),
    ("llama.attention.key_length", [0]),
    ("llama.embedding_length", [0, NAN, True]),
    ("llama.feed_forward_length", [0, INF]),
    ("llama.context_length", [0, 2**32 - 1]),
    ("llama.block_count", [0, 2**32 - 1, NAN]),
    ("llama.attention.layer_norm_rms_epsilon", [NAN, -1.0, 0.0, INF, "x", True]),
    ("llama.rope.freq_base", [0.0, NAN, -5.0, INF, "x"]),
    ("llama.rope.scaling.factor", [NAN, -2.0, INF, "x"]),
    ("llama.rope.scaling.type", [5]),
    ("llama.expert_count", ["x", NAN]),
    ("general.alignment", [0, NAN, "x"]),
    ("tokenizer.ggml.tokens", [5, "x", [1, 2]]),
    ("tokenizer.ggml.bos_token_id", ["x", -1, NAN]),
    ("tokenizer.ggml.eos_token_id", ["x", -1]),
]


def add_signed(monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    unsigned = gguf.GGUFWriter.add_uint32

    def add(writer: gguf.GGUFWriter, key: str, value: int) -> None:
        if value < 0:
            writer.add_int32(key, value)
        else:
            unsigned(writer, key, value)

    monkeypatch.setattr(gguf.GGUFWriter, "add_uint32", add)


@pytest.mark.parametrize(
    ("key", "value"), [(key, bad) for key, some in GGUF_FIELDS for bad in some]
)
def test_gguf_metadata(
    make_gguf: MakeGGUF, monkeypatch: pytest.MonkeyPatch, key: str, value: Any
) -> None:
    add_signed(monkeypatch)
    path = make_gguf(llama_config(), metadata={key: value})
    message = refusal(lambda: open_checkpoint(path), "tiny.gguf", ConfigError)
    assert f"tiny.gguf: {key} must be " in message and ", not " in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.rope.scaling.factor": 0.5}, "factor must be at least 1"),
        (
            {
                "llama.rope.scaling.factor": 1e6,
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.original_context_length": 2**20,
            },
            "beyond 2147483647",
        ),
    ],
)
def test_gguf_rope(make_gguf: MakeGGUF, changes: dict[str, Any], message: str) -> None:
    path = make_gguf(llama_config(), metadata=changes)
    assert message in refusal(lambda: open_checkpoint(path), "tiny.gguf", ConfigError)


@pytest.mark.parametrize("bad", [0.0, -1.0, NAN, INF])
def test_gguf_rope_divisors(make_gguf: MakeGGUF, bad: float) -> None:
    divisors = np.array([1, 1, 2, 4, 8, 8, 8, bad], np.float32)
    path = make_gguf(llama_config(), extra={"rope_freqs.weight": divisors})
    assert "divisors" in refusal(lambda: open_checkpoint(path), "tiny.gguf")
    path = make_gguf(llama_config(), extra={"rope_freqs.weight": np.ones(8, np.int32)})
    assert "has type I32" in refusal(lambda: open_checkpoint(path), "tiny.gguf")


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer.chat_template": 5},
        {"tokenizer.chat_templates": ["absent"]},
        {"tokenizer.chat_templates": 5},
        {"tokenizer.ggml.token_type": 5},
        {"tokenizer.ggml.merges": 5},
        {"tokenizer.ggml.pre": 5},
        {"tokenizer.ggml.model": 5},
        {"tokenizer.ggml.add_bos_token": "x"},
    ],
)
def test_gguf_tokenizers_and_templates(make_gguf: MakeGGUF, changes: dict[str, Any]) -> None:
    path = make_gguf(llama_config(), metadata=changes)

    def load() -> None:
        checkpoint = open_checkpoint(path)
        checkpoint.tokenizer()
        checkpoint.chat_template()

    refusal(load, "tiny.gguf")


def test_gguf_nested_too_deeply(tmp_path: Path) -> None:
    path = tmp_path / "deep.gguf"
    nested = struct.pack("<IQ", 9, 1) * 100_000
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k"
    path.write_bytes(head + struct.pack("<I", 9) + nested)
    assert "nested too deeply" in refusal(lambda: open_checkpoint(path), "deep.gguf")


def test_gguf_ids_beyond_the_embedding(make_gguf: MakeGGUF) -> None:
    tokens = [f"t{number}" for number in range(300)]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * 300}
    path = make_gguf(llama_config(), metadata={**metadata, "tokenizer.ggml.merges": ["a b"]})
    with pytest.raises(LoadError, match=r"tiny\.gguf"):
        open_checkpoint(path).tokenizer()
