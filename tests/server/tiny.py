"""A real engine on a tiny model of made-up weights, whose context takes it long to fill."""

import json
from pathlib import Path
from typing import Any

import grout

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "vocab_size": 320,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 100_000,
    "tie_word_embeddings": True,
}


def open_tiny(folder: Path, **config: Any) -> grout.Engine:
    """An engine in which a request that ignores the end of sequence runs for a minute or more."""
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return grout.create_engine(
        grout.EngineConfig(
            str(folder),
            device="cpu",
            load_format="dummy",
            seed=1,
            **{"max_model_len": 50_000, "kv_cache_memory": 2**28, **config},
        )
    )
