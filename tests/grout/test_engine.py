"""The engine over a pseudo-model: what comes out, and what is left behind."""

import threading
from codecs import utf_8_decode

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grout.config import EngineConfig
from grout.engine import Engine
from grout.errors import (
    ConfigError,
    EngineClosed,
    EngineDead,
    InvalidPrompt,
    InvalidSamplingParams,
    PromptTooLong,
    RequestAborted,
    StepFailed,
)
from grout.request import Delta, SamplingParams
from grout.streams import BlockingStream
from tests.grout.fakes import EOS, VOCAB, FakeTokenizer, expected, make_engine, model_of

pytestmark = pytest.mark.usefixtures("fake_device")

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def text_of(tokens: list[int]) -> str:
    parts = [FakeTokenizer().token_bytes(token) for token in tokens if token != EOS]
    return utf_8_decode(b"".join(parts), "replace", False)[0]


def drain(stream: BlockingStream) -> list[Delta]:
    deltas = [stream.get()]
    while deltas[-1].finish_reason is None:
        deltas.append(stream.get())
    return deltas


def ids(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def run_all(engine: Engine) -> None:
    for _ in range(5000):
        if not engine.step():
            return
    raise AssertionError("the engine does not come to rest")


def assert_at_rest(engine: Engine) -> None:
    """Every page is back, on the engine's and on the cache's books."""
    stats = engine.stats()
    assert (stats["running"], stats["waiting"]) == (0, 0)
    assert stats["pages_free"] == stats["pages_total"]
    assert engine._loop.runner.cache.in_use == set()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 30])
def test_one_request_gives_the_models_tokens(length: int, eager: bool, kind: str) -> None:
    engine = make_engine(enforce_eager=eager, device_kind=kind)
    prompt = [(7 * n) % VOCAB for n in range(length)]
    reply = engine.generate_sync(prompt, GREEDY)
    assert list(reply.token_ids) == expected(prompt, 10)
    assert text_of(prompt) + reply.text == text_of(prompt + expected(prompt, 10))
    assert reply.finish_reason == "length"
    run_all(engine)
    assert_at_rest(engine)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
            st.integers(1, 20),
            st.sampled_from([0.0, 0.7]),
        ),
        min_size=1,
        max_size=9,
    ),
    st.integers(1, 5),
    st.integers(10, 60),
    st.integers(1, 12),
    st.integers(0, 2**32),
)
def test_batched_is_the_same_as_alone(
    requests: list[tuple[list[int], int, float]],
    rows: int,
    pages: int,
    chunk: int,
    seed: int,
) -> None:
    engine = make_engine(
        max_num_seqs=rows, pages=pages, max_model_len=40, prefill_chunk=chunk, device_seed=seed
    )
    streams = [BlockingStream() for _ in requests]
    for at, (prompt, count, temperature) in enumerate(requests):
        params = SamplingParams(
            temperature=temperature, max_tokens=count, ignore_eos=at % 2 == 0, seed=at
        )
        engine.add(prompt, params, streams[at])
        for _ in range(seed >> at & 3):
            engine.step()
    run_all(engine)
    for at, (prompt, count, temperature) in enumerate(requests):
        want = expected(prompt, count, seed=at, temperature=temperature)
        if at % 2 and EOS in want:
            want = want[: want.index(EOS) + 1]
        assert ids(drain(streams[at])) == want
    assert_at_rest(engine)


def test_steps_run_ahead_of_reading() -> None:
    engine = make_engine()
    stream = BlockingStream()
    engine.add([1, 2], GREEDY, stream)
    engine.step()
    engine.step()
    # The first token was read, and the step for the second enqueued, before anything came of it.
    assert len(ids([stream.get()])) == 1
    assert stream.empty
    run_all(engine)
    # The batch was uploaded once for the prompt and once for nine steps, tokens 2..10.
    assert model_of(engine).decodes == 9
    assert model_of(engine).device.uploads == 2


def test_the_cpu_reads_each_token_at_once_and_runs_no_surplus_step() -> None:
    tokens = expected([5, 6], 10)
    engine = make_engine(device_kind="cpu")
    stream = BlockingStream()
    params = SamplingParams(temperature=0, stop_token_ids=(tokens[4],), ignore_eos=True)
    engine.add([5, 6], params, stream)
    for token in tokens[: tokens.index(tokens[4]) + 1]:
        engine.step()
        assert stream.get().token_ids == (token,)
    assert not engine.step()
    assert model_of(engine).decodes == tokens.index(tokens[4])


def test_a_surplus_token_after_the_end_is_dropped() -> None:
    prompt = [5, 6]
    tokens = expected(prompt, 10)
    stop = tokens[4]
    engine = make_engine()
    params = SamplingParams(temperature=0, stop_token_ids=(stop,), ignore_eos=True)
    stream = BlockingStream()
    engine.add(prompt, params, stream)
    run_all(engine)
    first = tokens.index(stop)
    assert ids(drain(stream)) == tokens[: first + 1]
    assert stream.empty
    assert model_of(engine).decodes == first + 1
    assert_at_rest(engine)


def test_end_ids_stop_without_text() -> None:
    prompt = [3, 1, 4]
    tokens = expected(prompt, 60)
    end = tokens[6]
    first = tokens.index(end)
    engine = make_engine(eos=(EOS, end))
    assert engine.eos_token_ids == tuple(sorted((EOS, end)))
    reply = engine.generate_sync(prompt, SamplingParams(temperature=0))
    assert list(reply.token_ids) == tokens[: first + 1]
    assert reply.text == text_of(tokens[:first])
    assert reply.finish_reason == "stop"
    ignoring = engine.generate_sync(prompt, GREEDY)
    assert list(ignoring.token_ids) == tokens[:10]
    assert ignoring.finish_reason == "length"


def test_stop_texts_cut_exactly() -> None:
    prompt = [9, 9]
    tokens = expected(prompt, 20)
    text = text_of(tokens)
    stop = text[7:10]  # begins and ends inside a token's text
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=(stop,))
    engine = make_engine()
    stream = BlockingStream()
    engine.add(prompt, params, stream)
    run_all(engine)
    deltas = drain(stream)
    assert "".join(delta.text for delta in deltas) == text[: text.index(stop)]
    assert deltas[-1].finish_reason == "stop"
    assert ids(deltas) == tokens[: len(deltas)]
    assert_at_rest(engine)


def test_a_full_context_ends_with_length() -> None:
    engine = make_engine(max_model_len=16)
    prompt = list(range(10))
    params = SamplingParams(temperature=0, ignore_eos=True)
    reply = engine.generate_sync(prompt, params)
    assert list(reply.token_ids) == expected(prompt, 6)
    assert reply.finish_reason == "length"
    longest = engine.generate_sync(list(range(15)), params)
    assert len(longest.token_ids) == 1
    assert longest.finish_reason == "length"


def test_seeds() -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    seeded = SamplingParams(max_tokens=12, ignore_eos=True, seed=7)
    replies = {engine.generate_sync([1], params).token_ids for _ in range(4)}
    assert len(replies) > 1
    assert len({engine.generate_sync([1], seeded).token_ids for _ in range(3)}) == 1
    fixed = [make_engine(seed=3).generate_sync([1], params).token_ids for _ in range(2)]
    assert fixed[0] == fixed[1]


def test_bad_requests_are_refused_before_any_work() -> None:
    engine = make_engine(max_model_len=16)
    sink = BlockingStream()
    with pytest.raises(PromptTooLong, match="16 tokens") as caught:
        engine.add(list(range(16)), GREEDY, sink)
    assert (caught.value.prompt_tokens, caught.value.max_model_len) == (16, 16)
    with pytest.raises(InvalidPrompt, match="empty"):
        engine.add([], GREEDY, sink)
    with pytest.raises(InvalidPrompt, match=f"token id {VOCAB} at position 1"):
        engine.add([0, VOCAB, -1], GREEDY, sink)
    with pytest.raises(InvalidPrompt, match="token id -1 at position 0"):
        engine.add([-1], GREEDY, sink)
    with pytest.raises(InvalidPrompt, match="list of token ids"):
        engine.add(["a"], GREEDY, sink)  # type: ignore[list-item]
    with pytest.raises(InvalidPrompt, match="list of token ids"):
        engine.add([2**70], GREEDY, sink)
    with pytest.raises(InvalidSamplingParams, match="outside the vocabulary"):
        engine.add([1], SamplingParams(stop_token_ids=(VOCAB,)), sink)
    assert engine.stats()["waiting"] == 0
    assert sink.empty
    assert engine.generate_sync(np.array([1, 2]), GREEDY).finish_reason == "length"


def test_a_cache_too_small_for_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs 16 KV pages, but the cache has 3"):
        make_engine(max_model_len=64, pages=3)


@pytest.mark.parametrize("after", [0, 1, 2, 3, 5, 9])
def test_abort_gives_pages_back_and_leaves_others_alone(after: int) -> None:
    engine = make_engine(prefill_chunk=4, device_seed=after)
    streams = [BlockingStream() for _ in range(3)]
    prompts = [[1] * 3, [2] * 14, [3] * 5]
    sequences = [
        engine.add(prompt, GREEDY, stream) for prompt, stream in zip(prompts, streams, strict=True)
    ]
    for _ in range(after):
        engine.step()
    engine.abort(sequences[1])
    engine.step()
    assert sequences[1].done
    assert sequences[1].pages == ()
    late = BlockingStream()
    engine.add([4] * 20, GREEDY, late)
    run_all(engine)
    with pytest.raises(RequestAborted):
        drain(streams[1])
    for prompt, stream in ((prompts[0], streams[0]), (prompts[2], streams[2]), ([4] * 20, late)):
        assert ids(drain(stream)) == expected(prompt, 10)
    engine.abort(sequences[1])
    engine.abort(sequences[0])
    run_all(engine)
    assert_at_rest(engine)
    assert engine.stats()["requests_aborted"] == 1


@pytest.mark.parametrize("where", ["fail_decode", "fail_late"])
def test_a_failing_decode_ends_the_requests_in_it_only(where: str) -> None:
    engine = make_engine(prefill_chunk=4)
    model = model_of(engine)
    streams = [BlockingStream() for _ in range(3)]
    for at in range(2):
        engine.add([at + 1] * 3, GREEDY, streams[at])
    for _ in range(3):
        engine.step()
    engine.add([9] * 30, GREEDY, streams[2])
    engine.step()
    if where == "fail_decode":
        # The graph of the batch is recorded already: only a new one calls decode again.
        engine._loop.runner._lanes.clear()
    setattr(model, where, ValueError("bad kernel"))
    run_all(engine)
    for stream in streams[:2]:
        with pytest.raises(StepFailed, match="ValueError: bad kernel") as caught:
            drain(stream)
        assert isinstance(caught.value.__cause__, ValueError)
    if where == "fail_decode":
        assert model.moved is not None
    # The error is still held here, and must not hold what the failing call held.
    assert model.moved is None or model.moved() is None
    assert ids(drain(streams[2])) == expected([9] * 30, 10)
    assert ids([engine.generate_sync([8], GREEDY)]) == expected([8], 10)
    run_all(engine)
    assert_at_rest(engine)
    assert engine.stats()["requests_failed"] == 2


def test_a_failing_prefill_ends_that_request_only() -> None:
    engine = make_engine(prefill_chunk=4)
    streams = [BlockingStream() for _ in range(3)]
    engine.add([1] * 3, GREEDY, streams[0])
    engine.step()
    engine.step()
    model_of(engine).fail_prefill = MemoryError("no room")
    engine.add([2] * 9, GREEDY, streams[1])
    engine.add([3] * 9, GREEDY, streams[2])
    run_all(engine)
    with pytest.raises(StepFailed, match="MemoryError: no room"):
        drain(streams[1])
    assert ids(drain(streams[0])) == expected([1] * 3, 10)
    assert ids(drain(streams[2])) == expected([3] * 9, 10)
    assert_at_rest(engine)


def test_a_device_that_cannot_go_on_ends_everything_clearly() -> None:
    engine = make_engine(prefill_chunk=4)
    streams = [BlockingStream() for _ in range(3)]
    for stream in streams:
        engine.add([1] * 6, GREEDY, stream)
    engine.step()
    model = model_of(engine)
    model.device.broken = RuntimeError("illegal address")
    model.fail_prefill = RuntimeError("illegal address")
    engine.step()
    with pytest.raises(StepFailed, match="illegal address"):
        drain(streams[0])
    for stream in streams[1:]:
        with pytest.raises(EngineDead, match="restart the server: RuntimeError: illegal address"):
            drain(stream)
    with pytest.raises(EngineDead, match="illegal address"):
        engine.add([1], GREEDY, BlockingStream())
    assert engine.stats()["waiting"] == engine.stats()["running"] == 0
    engine.close()


def test_bytes_that_fail_to_decode_end_one_request() -> None:
    engine = make_engine()
    streams = [BlockingStream(), BlockingStream()]
    broken = engine.add([1, 1], GREEDY, streams[0])
    engine.add([2, 2], GREEDY, streams[1])

    def token_bytes(token: int) -> bytes:
        raise KeyError(token)

    broken.detokenizer._token_bytes = token_bytes
    run_all(engine)
    with pytest.raises(StepFailed, match="KeyError"):
        drain(streams[0])
    assert ids(drain(streams[1])) == expected([2, 2], 10)
    assert_at_rest(engine)


def test_close_ends_outstanding_requests_and_refuses_new_ones() -> None:
    engine = make_engine(max_num_seqs=1)
    streams = [BlockingStream() for _ in range(3)]
    for stream in streams[:2]:
        engine.add([1, 2], GREEDY, stream)
    engine.step()
    engine.step()
    engine.add([1, 2], GREEDY, streams[2])
    engine.close()
    engine.close()
    for stream in streams:
        with pytest.raises(EngineClosed):
            drain(stream)
    with pytest.raises(EngineClosed):
        engine.add([1], GREEDY, BlockingStream())
    with pytest.raises(EngineClosed):
        engine.start()
    assert engine.stats()["pages_free"] == engine.stats()["pages_total"]


def test_many_threads_share_one_engine() -> None:
    with make_engine(max_num_seqs=8, pages=60).start() as engine:
        replies: dict[int, list[int]] = {}

        def request(number: int) -> None:
            replies[number] = ids([engine.generate_sync([number, number + 1], GREEDY)])

        threads = [threading.Thread(target=request, args=(number,)) for number in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert replies == {number: expected([number, number + 1], 10) for number in range(32)}
        assert_at_rest(engine)
    assert engine._thread is not None
    assert not engine._thread.is_alive()


def test_stats_count() -> None:
    engine = make_engine()
    engine.generate_sync([1, 2, 3], GREEDY)
    run_all(engine)
    stats = engine.stats()
    assert stats["prompt_tokens"] == 3
    assert stats["generated_tokens"] == 10
    assert stats["requests_finished"] == 1
    assert stats["max_num_seqs"] == EngineConfig(max_num_seqs=4).max_num_seqs


def test_a_started_engine_runs_its_own_steps() -> None:
    with make_engine() as engine:
        assert engine.step() is False
        engine.start()
        with pytest.raises(RuntimeError, match="own thread"):
            engine.step()
