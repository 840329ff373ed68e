"""The engine on the cuda device's own code, with a driver whose work is done late and in any order.

A step that the host reads too early, a buffer that it writes while the device still reads it, or a
page that is given away too soon changes what comes out.
"""

from typing import Any

import numpy as np
import pytest

import tilert
from grout import EngineConfig, SamplingParams, create_engine
from grout.streams import BlockingStream
from tests.tilert.fake_cuda import fake_cuda
from tilert.device import standing_in

GREEDY: dict[str, Any] = {"temperature": 0.0}
ASKED: list[dict[str, Any]] = [
    GREEDY,
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 5},
    GREEDY | {"logprobs": 3},
    GREEDY | {"presence_penalty": 0.5, "logit_bias": ((7, 2.0),)},
    GREEDY,
    {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.2, "seed": 9},
    GREEDY | {"min_tokens": 4},
]


def answers(device: str, cache: int) -> tuple[list[list[int]], list[float], int]:
    """Ids and log probabilities of seven requests at once, and how often one had to give way."""
    config = EngineConfig(
        model="tiny-qwen3",
        load_format="dummy",
        device=device,
        dtype="float32",
        max_num_seqs=4,
        max_model_len=160,
        seed=1,
        kv_cache_memory=cache,
    )
    draw = np.random.default_rng(0)
    shared = draw.integers(0, 200, 40).tolist()
    prompts = [draw.integers(0, 200, n).tolist() for n in (41, 43, 45, 70, 5)]
    prompts += [shared, [*shared, 3, 1, 4]]
    with create_engine(config, lambda _: None) as engine:
        streams = []
        for prompt, asked in zip(prompts, ASKED, strict=True):
            streams.append(BlockingStream())
            params = SamplingParams(max_tokens=90, ignore_eos=True, **asked)
            engine.add(prompt, params, streams[-1])
        ids: list[list[int]] = []
        logprobs: list[float] = []
        for stream in streams:
            ids.append([])
            while True:
                delta = stream.get()
                ids[-1] += delta.token_ids
                logprobs += [token.logprob for token in delta.logprobs]
                if delta.finish_reason is not None:
                    break
        stats = engine.stats()
    assert (stats["running"], stats["waiting"], stats["rows_free"]) == (0, 0, 4)
    assert stats["pages_free"] == stats["pages_total"]
    return ids, logprobs, stats["preemptions"]


@pytest.mark.parametrize(("cache", "seed"), [(1 << 22, 1), (6 << 16, 2)], ids=["room", "tight"])
def test_answers_are_those_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch, cache: int, seed: int
) -> None:
    ids, logprobs, gave_way = answers("cpu", cache)
    assert (gave_way > 0) == (cache < 1 << 22)
    device = fake_cuda(monkeypatch, seed)
    with standing_in(device):
        assert tilert.device("cuda") is device
        late_ids, late_logprobs, _ = answers("cuda", cache)
    assert late_ids == ids
    assert late_logprobs == pytest.approx(logprobs, abs=1e-4)
    # Steps are replays of graphs, and were not waited for one by one.
    assert device.fake.calls["cuGraphLaunch"] > 100
