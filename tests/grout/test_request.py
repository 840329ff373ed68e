import math
from typing import Any

import pytest

from grout import ConfigError, EngineConfig, GroutError, PromptTooLong, SamplingParams
from grout.errors import InvalidSamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", 2**63),
        ("seed", 1.0),
        ("max_tokens", 0),
        ("max_tokens", 2.0),
        ("stop", ("",)),
        ("stop", "text"),
        ("stop", (1,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", ("a",)),
        ("ignore_eos", 1),
    ],
)
def test_a_bad_parameter_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidSamplingParams, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert isinstance(caught.value, GroutError)


def test_equal_settings_are_spelled_equally() -> None:
    lists: Any = {"stop": ["a"], "stop_token_ids": [1]}
    assert SamplingParams(top_k=-1, **lists) == SamplingParams(stop=("a",), stop_token_ids=(1,))
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams().greedy


def test_a_prompt_too_long_names_both_sizes() -> None:
    error = PromptTooLong(100, 64)
    assert (error.prompt_tokens, error.max_model_len) == (100, 64)
    assert "100 tokens" in str(error)
    assert "64 tokens" in str(error)
    assert "63" in str(error)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "tpu"),
        ("device", "cuda:"),
        ("device", "cpu:0"),
        ("dtype", "fp8"),
        ("load_format", "pt"),
        ("max_model_len", 1),
        ("max_num_seqs", 0),
        ("max_num_seqs", True),
        ("gpu_memory_utilization", 0),
        ("gpu_memory_utilization", 1.5),
        ("prefill_chunk", 0),
        ("model", ""),
        ("seed", "x"),
    ],
)
def test_a_bad_setting_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        EngineConfig(**{field: value})


def test_auto_settings_follow_the_device() -> None:
    assert EngineConfig(device="cuda:1").resolve("cuda").dtype == "bfloat16"
    assert EngineConfig().resolve("cpu").dtype == "float32"
    assert EngineConfig(dtype="float16").resolve("cpu").dtype == "float16"
    assert EngineConfig().resolve("cpu").prefill_chunk == 256
    assert EngineConfig(prefill_chunk=7).resolve("cuda").prefill_chunk == 7
