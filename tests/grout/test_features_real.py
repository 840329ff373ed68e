"""Sampling features end to end, with a real model on the cpu."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from grout.config import EngineConfig
from grout.engine import Engine
from grout.errors import BadLogits
from grout.grammar import Grammar
from grout.loading import create_engine
from grout.readback import Readback
from grout.request import Delta, SamplingParams
from grout.sequence import Sequence

PLAIN = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = [5, 80, 33, 7, 120]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    config = EngineConfig(model="tiny-qwen3", device="cpu", load_format="dummy", seed=3)
    with create_engine(config) as engine:
        yield engine


def together(engine: Engine, *params: SamplingParams) -> list[list[Delta] | Exception]:
    """The replies to one prompt with several settings at once."""

    async def one(params: SamplingParams) -> list[Delta] | Exception:
        try:
            return [delta async for delta in engine.generate(PROMPT, params)]
        except BadLogits as error:
            return error

    async def main() -> list[list[Delta] | Exception]:
        return await asyncio.gather(*map(one, params))

    return asyncio.run(main())


def test_every_feature_beside_every_other(engine: Engine) -> None:
    settings = [
        PLAIN,
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logit_bias=((65, 100.0),)),
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, frequency_penalty=2.0),
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, repetition_penalty=50.0),
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3),
        SamplingParams(temperature=0.9, seed=2, max_tokens=12, ignore_eos=True, presence_penalty=1),
        SamplingParams(temperature=0, max_tokens=60, grammar=Grammar.json_schema(SCHEMA)),
        SamplingParams(temperature=1.5, seed=8, max_tokens=30, grammar=Grammar.regex("[a-c]{7}")),
    ]
    alone = [engine.generate_sync(PROMPT, params) for params in settings]
    for reply, deltas in zip(alone, together(engine, *settings), strict=True):
        assert isinstance(deltas, list)
        assert tuple(token for delta in deltas for token in delta.token_ids) == reply.token_ids
        assert "".join(delta.text for delta in deltas) == reply.text
    plain, biased, frequency, repetition, logprobs, _, schema, regex = alone
    assert set(biased.token_ids) == {65}
    # The logits of made-up weights differ by less than the penalty.
    assert len(set(frequency.token_ids)) == 12
    assert len({*repetition.token_ids, *PROMPT}) == 12 + len(PROMPT)
    assert logprobs.token_ids == plain.token_ids
    for token, at in zip(plain.token_ids, logprobs.logprobs, strict=True):
        assert at.token_id == token == at.top[0][0]
        assert at.logprob == at.top[0][1] <= 0
        assert [value for _, value in at.top] == sorted((v for _, v in at.top), reverse=True)
        assert len(at.top) == 3
    assert set(json.loads(schema.text)) == {"ok"}
    assert schema.finish_reason == "stop"
    assert len(regex.text) == 7
    assert set(regex.text) <= set("abc")


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"enum": [True, False, "perhaps"]}},
    "required": ["ok"],
    "additionalProperties": False,
}


def test_logprobs_are_those_of_the_logits(engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=20)
    (got,) = engine.generate_sync(PROMPT, params).logprobs
    logits = engine.runner._prompt.logits.numpy()[0].astype(np.float64)
    want = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    order = np.argsort(-want, kind="stable")[:20]
    assert [token for token, _ in got.top] == order.tolist()
    np.testing.assert_allclose([value for _, value in got.top], want[order], atol=1e-5)


def test_min_tokens_with_a_real_sampler(engine: Engine) -> None:
    first = engine.generate_sync(PROMPT, PLAIN).token_ids[0]
    stops = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(first,), ignore_eos=True)
    assert engine.generate_sync(PROMPT, stops).token_ids == (first,)
    held = SamplingParams(
        temperature=0, max_tokens=12, stop_token_ids=(first,), ignore_eos=True, min_tokens=6
    )
    assert first not in engine.generate_sync(PROMPT, held).token_ids[:6]


def test_nan_in_one_requests_cache_ends_that_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value in its pages is spoilt once it runs; the pages are sound again for the next."""
    want = engine.generate_sync(PROMPT, PLAIN).token_ids
    runner, cache = engine.runner, engine.runner.cache
    spoilt: list[int] = []
    decode = runner.decode

    def spoil_and_decode(sequences: tuple[Sequence, ...], *rest: Any) -> Readback:
        for sequence in sequences:
            if sequence.params.priority == 7 and not spoilt:
                spoilt.extend(sequence.pages)
                _, values = cache.pages(0)
                values[sequence.pages[0], 1].copy_from(np.full(values.shape[2:], np.nan, "f"))
        return decode(sequences, *rest)

    monkeypatch.setattr(runner, "decode", spoil_and_decode)
    victim = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, priority=7)
    first, error, last = together(engine, PLAIN, victim, PLAIN)
    assert isinstance(error, BadLogits)
    for deltas in (first, last):
        assert isinstance(deltas, list)
        assert tuple(token for delta in deltas for token in delta.token_ids) == want
    _, values = cache.pages(0)
    assert not np.isnan(values[spoilt[0]].numpy()).any()
    stats = engine.stats()
    assert stats["pages_free"] == stats["pages_total"]
    assert stats["requests_failed"] == 1
    assert engine.generate_sync(PROMPT, PLAIN).token_ids == want
