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
        ("max_tokens", -1),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", True),
        ("max_tokens", 2.0),
        ("stop", ("",)),
        ("stop", "text"),
        ("stop", (1,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", ("a",)),
        ("ignore_eos", 1),
        ("presence_penalty", 2.1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.inf),
        ("logit_bias", ((1, 101.0),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
        ("logit_bias", (1, 2)),
        ("logit_bias", tuple((token, 1.0) for token in range(301))),
        ("min_tokens", -1),
        ("min_tokens", 1.0),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("grammar", "a+"),
        ("priority", 0.5),
        ("priority", 2**63),
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


def test_what_is_at_the_limits_is_taken() -> None:
    bias: Any = [[token, -100] for token in range(300)]
    params = SamplingParams(
        presence_penalty=-2, frequency_penalty=2.0, logprobs=20, logit_bias=bias, priority=-5
    )
    assert params.logit_bias[299] == (299, -100)
    assert params.penalises
    assert SamplingParams(repetition_penalty=1.1).penalises
    assert not SamplingParams(logit_bias=bias).penalises
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4
    with pytest.raises(InvalidSamplingParams, match=r"min_tokens must be at most max_tokens \(3\)"):
        SamplingParams(min_tokens=4, max_tokens=3)


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
