"""Log probabilities of prompts, and replies of no tokens, over the pseudo-model."""

from itertools import pairwise

import pytest

from grout.engine import Engine
from grout.errors import BadLogits, PromptTooLong
from grout.request import Delta, SamplingParams, TokenLogprob
from grout.scorer import SCORED_TOGETHER
from grout.streams import BlockingStream, merged, parts
from tests.grout.fakes import BAD_TOKEN, VOCAB, expected, make_engine, model_of

pytestmark = pytest.mark.usefixtures("fake_device")

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def asking(top: int = 0, tokens: int = 3) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, prompt_logprobs=top, logprobs=0
    )


def scores(prompt: list[int], top: int = 0) -> list[TokenLogprob | None]:
    """What `FakeTransformer.score` has for a prompt."""
    found: list[TokenLogprob | None] = [None]
    for before, token in pairwise(prompt):
        tops = tuple((before + i, -float(i)) for i in range(top))
        found.append(TokenLogprob(token, pytest.approx(-(before + token / 100)), tops))
    return found


def prompt_of(size: int, seed: int = 0) -> list[int]:
    return [(7 * n + seed) % BAD_TOKEN for n in range(size)]


def run_all(engine: Engine) -> None:
    while engine.step():
        pass
    stats = engine.stats()
    assert stats["pages_free"] == stats["pages_total"]
    assert model_of(engine).cache.in_use == set()


def drain(stream: BlockingStream) -> list[Delta]:
    found: list[Delta] = []
    while not stream.empty:
        found.append(stream.get())
    return found


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("chunk", [3, 8, 64])
@pytest.mark.parametrize("size", [1, 2, 3, 9, SCORED_TOGETHER + 1, 40])
def test_every_token_of_a_prompt_has_one(size: int, chunk: int, kind: str) -> None:
    engine = make_engine(device_kind=kind, prefill_chunk=chunk)
    prompt = prompt_of(size)
    plain = engine.generate_sync(prompt, GREEDY)
    assert plain.prompt_logprobs == ()
    for top in (0, 2):
        # Nothing is taken from the cache, where the first run has left it.
        reply = engine.generate_sync(prompt, asking(top))
        assert list(reply.prompt_logprobs) == scores(prompt, top)
        assert reply.token_ids == plain.token_ids[:3]
        assert len(reply.logprobs) == 3
        assert reply.cached_tokens == 0
    again = engine.generate_sync(prompt, GREEDY)
    assert again.cached_tokens == (size - 1) // 4 * 4
    assert again.token_ids == plain.token_ids


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_it_runs_alone_among_others(kind: str) -> None:
    engine = make_engine(device_kind=kind, max_num_seqs=8, prefill_chunk=16)
    wanted = [prompt_of(5 + n, n) for n in range(7)]
    streams = [BlockingStream() for _ in wanted]
    for number, (prompt, stream) in enumerate(zip(wanted, streams, strict=True)):
        engine.add(prompt, asking(1) if number % 3 == 1 else GREEDY, stream)
    run_all(engine)
    for number, (prompt, stream) in enumerate(zip(wanted, streams, strict=True)):
        first, *rest = drain(stream)
        asked = number % 3 == 1
        assert list(first.prompt_logprobs) == (scores(prompt, 1) if asked else [])
        assert not any(delta.prompt_logprobs for delta in rest)
        tokens = [token for delta in (first, *rest) for token in delta.token_ids]
        assert tokens == expected(prompt, 3 if asked else 10)
    assert len(model_of(engine).launches) < len(wanted)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_giving_way_repeats_none(kind: str) -> None:
    """Once while its prompt is run in chunks, and again among its reply."""
    engine = make_engine(max_num_seqs=3, pages=16, prefill_chunk=4, device_kind=kind)
    streams = [BlockingStream() for _ in range(3)]
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompt = prompt_of(20)
    engine.add([1, 2], long, streams[0])
    engine.add([3], long, streams[1])
    sequence = engine.add(prompt, asking(tokens=25), streams[2])
    while not sequence.scored:
        engine.step()
    engine._loop._collect()
    engine._loop.scheduler._preempt(sequence)
    run_all(engine)
    assert engine.stats()["preemptions"] > 1
    first, *rest = drain(streams[2])
    assert list(first.prompt_logprobs) == scores(prompt)
    assert not any(delta.prompt_logprobs for delta in rest)
    tokens = [token for delta in (first, *rest) for token in delta.token_ids]
    assert tokens == expected(prompt, 25)


def test_deltas_taken_together_keep_them() -> None:
    first = Delta("a", (1,), None, (), 4, (None, TokenLogprob(5, -1.0)))
    whole = merged([first, Delta("b", (2,), "stop")])
    assert (whole.text, whole.cached_tokens) == ("ab", 4)
    assert whole.prompt_logprobs == first.prompt_logprobs
    assert parts(whole) == (first, Delta("b", (2,), "stop"))


def test_nan_among_them_ends_the_request_alone() -> None:
    engine = make_engine()
    streams = [BlockingStream(), BlockingStream()]
    engine.add([1, BAD_TOKEN, *prompt_of(20)], asking(), streams[0])
    engine.add([3], GREEDY, streams[1])
    run_all(engine)
    with pytest.raises(BadLogits, match="NaN"):
        streams[0].get()
    assert streams[0].empty
    assert model_of(engine).cache.scrubbed
    assert [t for delta in drain(streams[1]) for t in delta.token_ids] == expected([3], 10)
    assert engine.stats()["requests_failed"] == 1


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_reply_of_no_tokens(kind: str) -> None:
    engine = make_engine(device_kind=kind, max_model_len=64)
    none = SamplingParams(temperature=0, max_tokens=0)
    full = prompt_of(64)
    streams = [BlockingStream() for _ in range(3)]
    engine.add(full, none, streams[0])
    engine.add([5], GREEDY, streams[1])
    engine.add(full, asking(tokens=0), streams[2])
    run_all(engine)
    assert drain(streams[0]) == [Delta("", (), "length")]
    assert [t for delta in drain(streams[1]) for t in delta.token_ids] == expected([5], 10)
    [delta] = drain(streams[2])
    assert list(delta.prompt_logprobs) == scores(full)
    assert (delta.token_ids, delta.text, delta.finish_reason) == ((), "", "length")
    assert engine.stats()["generated_tokens"] == 10
    with pytest.raises(PromptTooLong):
        engine.check(full, GREEDY)
    with pytest.raises(PromptTooLong):
        engine.check([*full, 1], none)
    assert max(full) < VOCAB
