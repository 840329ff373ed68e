from typing import Any

import pytest

from models import PRESETS, ConfigError, ModelConfig, parameter_count
from tests.models.builders import llama_config, qwen3_config

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_qwen3_config() -> None:
    config = ModelConfig.from_hf(qwen3_config())
    assert config.architecture == "qwen3"
    assert (config.hidden_size, config.num_layers, config.intermediate_size) == (32, 2, 48)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert config.qk_norm and not config.tie_word_embeddings
    assert config.rope.theta == 1e6 and config.rope.type == "default"
    assert config.bos_token_id == 261


def test_llama_head_dim_is_hidden_over_heads() -> None:
    config = ModelConfig.from_hf(llama_config(head_dim=None))
    assert config.head_dim == 64 // 4
    assert not config.qk_norm


def test_qwen3_head_dim_defaults_to_transformers_value() -> None:
    assert ModelConfig.from_hf(qwen3_config(head_dim=...)).head_dim == 128


def test_model_type_is_enough() -> None:
    assert ModelConfig.from_hf(llama_config(architectures=...)).architecture == "llama"


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "default"},
        {"type": "linear", "factor": 2.0},
        LLAMA3,
        YARN,
        {**YARN, "attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2, "truncate": False},
        {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
        {"rope_type": "yarn", "factor": 2.0},
    ],
)
def test_both_spellings_of_rope_are_identical(scaling: dict[str, Any] | None) -> None:
    old = ModelConfig.from_hf(qwen3_config(rope_theta=5e5, rope_scaling=scaling))
    parameters = {"rope_type": "default", **(scaling or {}), "rope_theta": 5e5}
    if scaling and "type" in scaling:
        parameters["rope_type"] = scaling["type"]
    new = ModelConfig.from_hf(
        qwen3_config(rope_theta=..., rope_scaling=..., rope_parameters=parameters)
    )
    assert old == new
    assert old.rope.theta == 5e5


def test_yarn_extends_the_length() -> None:
    config = ModelConfig.from_hf(qwen3_config(max_position_embeddings=40960, rope_scaling=YARN))
    assert config.max_length == 131072
    assert ModelConfig.from_hf(qwen3_config()).max_length == 128


def test_yarn_without_factor_takes_the_ratio() -> None:
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 32}
    assert ModelConfig.from_hf(qwen3_config(rope_scaling=scaling)).rope.factor == 4.0


@pytest.mark.parametrize(
    ("main", "generation", "expected"),
    [
        (263, [263, 261], (263, 261)),
        ([1, 2], 3, (1, 2, 3)),
        (None, 7, (7,)),
        (7, None, (7,)),
        (None, None, ()),
        (0, [0], (0,)),
    ],
)
def test_eos_is_the_union(main: Any, generation: Any, expected: tuple[int, ...]) -> None:
    config = ModelConfig.from_hf(qwen3_config(eos_token_id=main), {"eos_token_id": generation})
    assert config.eos_token_ids == expected


def test_default_sampling_is_kept() -> None:
    generation = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "x": 1}
    config = ModelConfig.from_hf(qwen3_config(), {**generation, "min_p": None})
    assert config.default_sampling == {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "'Qwen3MoeForCausalLM' is not supported"),
        ({"architectures": ..., "model_type": "gemma"}, "'gemma' is not supported"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_size": "many"}, "hidden_size must be an integer, not 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer from 1 to 10000, not 0"),
        ({"head_dim": 24}, "head_dim is 24, but only multiples of 16"),
        ({"num_key_value_heads": 3}, "4 query heads cannot be shared evenly by 3"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config .method 'fp8'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            "sliding_window 64 is in use",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE type 'dynamic'"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "RoPE type 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor must be a number of"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "must be below high_freq_factor"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": None}}, "high_freq_factor is missing"),
        ({"rope_scaling": YARN, "rope_parameters": LLAMA3}, "contradict"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "between layers"),
        ({"rope_parameters": [1]}, "must be an object"),
        ({"eos_token_id": "end"}, "config.json: eos_token_id"),
    ],
)
def test_refusals_name_the_cause(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(qwen3_config(**changes))


def test_llama_head_dim_must_divide() -> None:
    with pytest.raises(ConfigError, match="hidden_size 66 is not a multiple of"):
        ModelConfig.from_hf(llama_config(hidden_size=66))


def test_sliding_window_not_in_use_is_accepted() -> None:
    ModelConfig.from_hf(qwen3_config(use_sliding_window=False, sliding_window=64))
    ModelConfig.from_hf(qwen3_config(use_sliding_window=True, sliding_window=None))
    ModelConfig.from_hf(
        qwen3_config(use_sliding_window=True, sliding_window=64, max_window_layers=2)
    )
    with pytest.raises(ConfigError, match="sliding_window 64"):
        ModelConfig.from_hf(llama_config(sliding_window=64))


def test_null_kv_heads_means_heads() -> None:
    assert ModelConfig.from_hf(llama_config(num_key_value_heads=None)).num_kv_heads == 4


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # Totals of the model cards: 0.6B, 1.7B, 4.0B, 8.2B, 14.8B, 32.8B and 134.5M.
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_preset_sizes(name: str, parameters: int) -> None:
    assert parameter_count(PRESETS[name]) == parameters


def test_config_is_hashable() -> None:
    assert len({PRESETS["qwen3-4b"], PRESETS["qwen3-4b"], PRESETS["qwen3-8b"]}) == 2
