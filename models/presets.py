"""Configurations known by name, for runs with generated weights.

Sizes: the public config.json of each Hugging Face repository. The tiny ones exist for tests.
"""

from models.config import ModelConfig, RopeConfig


def _qwen3(hidden: int, layers: int, heads: int, feed_forward: int, *, tied: bool) -> ModelConfig:
    return ModelConfig(
        architecture="qwen3",
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=feed_forward,
        vocab_size=151936,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e6),
        max_position_embeddings=40960,
        tie_word_embeddings=tied,
        qk_norm=True,
        eos_token_ids=(151645, 151643),
        bos_token_id=151643,
        default_sampling={"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
    )


def _tiny(architecture: str, *, tied: bool) -> ModelConfig:
    qwen3 = architecture == "qwen3"
    return ModelConfig(
        architecture="qwen3" if qwen3 else "llama",
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32 if qwen3 else 16,
        intermediate_size=96,
        vocab_size=320,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=10000.0),
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        qk_norm=qwen3,
        eos_token_ids=(258,),
        bos_token_id=256,
    )


PRESETS: dict[str, ModelConfig] = {
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12288, tied=False),
    "qwen3-14b": _qwen3(5120, 40, 40, 17408, tied=False),
    "qwen3-32b": _qwen3(5120, 64, 64, 25600, tied=False),
    "smollm2-135m": ModelConfig(
        architecture="llama",
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=49152,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=100000.0),
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        qk_norm=False,
        eos_token_ids=(2,),
        bos_token_id=1,
    ),
    "tiny-llama": _tiny("llama", tied=True),
    "tiny-qwen3": _tiny("qwen3", tied=False),
}
