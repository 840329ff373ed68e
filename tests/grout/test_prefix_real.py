"""The prefix cache and company, with a real model on the cpu in float32."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from grout.config import EngineConfig
from grout.engine import Engine
from grout.loading import create_engine
from grout.request import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
TEXT = [(31 * n * n + 17 * n + 5) % 250 for n in range(230)]
PAGE = 64


def make(model: str, prefix_caching: bool, **settings: int) -> Engine:
    return create_engine(
        EngineConfig(
            model=model,
            device="cpu",
            load_format="dummy",
            seed=4,
            prefix_caching=prefix_caching,
            **settings,  # type: ignore[arg-type]
        )
    )


@pytest.fixture(scope="module", params=["tiny-qwen3", "tiny-llama"])
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine]]:
    """One with a prefix cache, one without."""
    with make(request.param, True) as caching, make(request.param, False) as plain:
        yield caching, plain


def first_logits(engine: Engine, prompt: list[int]) -> np.ndarray:
    """Logits of the first token of a reply."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    engine.generate_sync(prompt, params)
    logits: np.ndarray = engine.runner._prompt.logits.numpy()
    return logits


@pytest.mark.parametrize("size", [63, 64, 65, 128, 129, 200])
def test_a_cached_prefix_gives_the_same_logits_and_tokens(
    engines: tuple[Engine, Engine], size: int
) -> None:
    caching, plain = engines
    prompt = [size, *TEXT[: size - 1]]
    want = plain.generate_sync(prompt, GREEDY)
    assert want.cached_tokens == 0
    cold, warm = caching.generate_sync(prompt, GREEDY), caching.generate_sync(prompt, GREEDY)
    assert cold.cached_tokens == 0
    assert warm.cached_tokens == (size - 1) // PAGE * PAGE
    assert cold.token_ids == warm.token_ids == want.token_ids
    # A product of fewer rows rounds differently in the last place.
    got, expected = first_logits(caching, prompt), first_logits(plain, prompt)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6)


def test_another_tail_shares_the_head(engines: tuple[Engine, Engine]) -> None:
    caching, plain = engines
    for tail in ([1], [2, 3], [4] * 40):
        prompt = [9, *TEXT[:139], *tail]
        reply = caching.generate_sync(prompt, GREEDY)
        assert reply.token_ids == plain.generate_sync(prompt, GREEDY).token_ids
    assert reply.cached_tokens == 128


@pytest.mark.slow
def test_thirty_two_at_once_equal_each_alone() -> None:
    prompts = [[n, *TEXT[: 3 + n]] if n % 3 else TEXT[: 70 + n] for n in range(32)]
    with make("tiny-qwen3", False) as alone:
        want = [alone.generate_sync(prompt, GREEDY).token_ids for prompt in prompts]

    async def together(engine: Engine) -> list[tuple[int, ...]]:
        async def one(prompt: list[int]) -> tuple[int, ...]:
            deltas = [delta async for delta in engine.generate(prompt, GREEDY)]
            return tuple(token for delta in deltas for token in delta.token_ids)

        return await asyncio.gather(*map(one, prompts))

    with make("tiny-qwen3", True, max_num_seqs=32, prefill_chunk=128) as engine:
        assert asyncio.run(together(engine)) == want
        assert asyncio.run(together(engine)) == want
        stats = engine.stats()
        assert stats["pages_free"] == stats["pages_total"]
        assert stats["prefix_hits"] > 0


@pytest.mark.slow
def test_a_tiny_cache_makes_requests_give_way_and_changes_nothing() -> None:
    prompts = [[n, *TEXT[: 40 + n]] for n in range(5)]
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    with make("tiny-qwen3", False) as alone:
        want = [alone.generate_sync(prompt, params).token_ids for prompt in prompts]
        page_bytes = alone.runner.transformer.page_bytes()

    async def together(engine: Engine) -> list[tuple[int, ...]]:
        async def one(prompt: list[int]) -> tuple[int, ...]:
            deltas = [delta async for delta in engine.generate(prompt, params)]
            return tuple(token for delta in deltas for token in delta.token_ids)

        return await asyncio.gather(*map(one, prompts))

    with make(
        "tiny-qwen3", True, max_num_seqs=5, kv_cache_memory=6 * page_bytes, max_model_len=160
    ) as engine:
        assert asyncio.run(together(engine)) == want
        stats = engine.stats()
        assert stats["pages_total"] == 6
        assert stats["pages_free"] == 6
        assert stats["preemptions"] > 0
