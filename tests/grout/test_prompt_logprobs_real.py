"""Log probabilities of a prompt against float64, with a real model on the cpu."""

from collections.abc import Iterator

import numpy as np
import pytest

import tilert
from grout.config import EngineConfig
from grout.engine import Engine
from grout.pages import PagePool
from grout.request import SamplingParams
from grout.runner import Runner
from grout.scheduler import Scheduler
from models.tokenizer import Tokenizer
from models.transformer import Transformer
from tests.models.test_transformer import CONFIGS, Weights, reference, weights_of
from tilert import f32

LENGTH = 150


@pytest.fixture(scope="module", params=list(CONFIGS))
def weights(request: pytest.FixtureRequest) -> Weights:
    return weights_of(CONFIGS[request.param])


@pytest.fixture(scope="module")
def engine(weights: Weights) -> Iterator[Engine]:
    """Prompts are run in chunks of 50."""
    model = Transformer.load(weights, tilert.device("cpu"), f32, max_len=200)
    runner = Runner(model, model.new_cache(12, 4), max_num_seqs=4)
    scheduler = Scheduler(PagePool(12), page_size=64, max_num_seqs=4, prefill_chunk=50)
    with Engine(
        EngineConfig(device="cpu", max_num_seqs=4),
        runner,
        scheduler,
        Tokenizer.byte_level(),
        model_id="tiny",
        max_model_len=200,
        vocab_size=weights.config.vocab_size,
    ) as engine:
        yield engine


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_they_are_those_of_float64(engine: Engine, weights: Weights, max_tokens: int) -> None:
    prompt = np.random.default_rng(max_tokens).integers(0, weights.config.vocab_size, LENGTH)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, prompt_logprobs=5, logprobs=5)
    # Again with all of its pages in the cache.
    for _ in range(2):
        reply = engine.generate_sync(prompt.tolist(), params)
        tokens = np.array([*prompt, *reply.token_ids], np.int32)
        want = reference(weights, tokens)
        want -= np.log(np.exp(want).sum(axis=1, keepdims=True))
        first, *rest = reply.prompt_logprobs
        assert first is None
        entries = [entry for entry in (*rest, *reply.logprobs) if entry is not None]
        assert [entry.token_id for entry in entries] == tokens[1:].tolist()
        assert len(entries) == LENGTH - 1 + max_tokens
        for entry, row in zip(entries, want, strict=False):
            assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-4)
            best = np.sort(row)[::-1][:5]
            np.testing.assert_allclose([value for _, value in entry.top], best, atol=1e-4)
            np.testing.assert_allclose([row[token] for token, _ in entry.top], best, atol=1e-4)
