"""What a request can ask for beyond tokens, and how it can end, over the pseudo-model."""

import re
import time

import pytest

from grout.config import EngineConfig
from grout.engine import Engine
from grout.errors import (
    BadLogits,
    GrammarError,
    GroutError,
    InvalidSamplingParams,
    QueueFull,
    RequestTimeout,
    StepFailed,
)
from grout.grammar import Grammar
from grout.metrics import Histogram
from grout.request import Delta, SamplingParams, TokenLogprob
from grout.streams import BlockingStream
from tests.grout.fakes import BAD_SEED, VOCAB, FakeTokenizer, expected, make_engine, model_of

pytestmark = pytest.mark.usefixtures("fake_device")

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def run_all(engine: Engine) -> None:
    for _ in range(5000):
        if not engine.step():
            break
    else:
        raise AssertionError("the engine does not come to rest")
    stats = engine.stats()
    assert stats["pages_free"] == stats["pages_total"]
    assert model_of(engine).cache.in_use == set()


def tokens(stream: BlockingStream) -> list[int]:
    found: list[int] = []
    while not stream.empty:
        found += stream.get().token_ids
    return found


def masked(prompt: list[int], count: int, held: int, ends: set[int]) -> list[int]:
    """The model's tokens when the first `held` may not be in `ends`; up to the first that is."""
    context = list(prompt)
    for number in range(count):
        token = expected(context, 1)[0]
        while number < held and token in ends:
            token = (token + 1) % VOCAB
        context.append(token)
        if token in ends:
            break
    return context[len(prompt) :]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("held", [0, 1, 2, 5, 9])
def test_min_tokens_holds_the_end_back(held: int, kind: str) -> None:
    prompt = [5, 6]
    plain = expected(prompt, 10)
    ends = {plain[0], plain[1], plain[4]}
    engine = make_engine(device_kind=kind)
    params = SamplingParams(
        temperature=0, max_tokens=10, stop_token_ids=tuple(ends), min_tokens=held, ignore_eos=True
    )
    streams = [BlockingStream() for _ in range(3)]
    engine.add(prompt, params, streams[0])
    engine.add([7], GREEDY, streams[1])
    engine.add([8] * 9, SamplingParams(temperature=0, max_tokens=4, min_tokens=2), streams[2])
    run_all(engine)
    want = masked(prompt, 10, held, ends)
    assert tokens(streams[0]) == want
    assert len(want) > held or want[-1] not in ends
    assert tokens(streams[1]) == expected([7], 10)
    # No mask is left behind for those who come next.
    assert list(engine.generate_sync(prompt, GREEDY).token_ids) == plain


@pytest.mark.parametrize("held", [0, 1, 2, 3, 5])
def test_min_tokens_holds_stop_texts_back(held: int) -> None:
    prompt = [65, 66]
    engine = make_engine()
    ids = expected(prompt, 10)
    texts = [engine.tokenizer.token_bytes(token).decode(errors="replace") for token in ids]
    first, second = texts[1] + texts[2], texts[6] + texts[7]
    # The first stop text ends with the third token, the other with the eighth.
    assert "".join(texts[:3]).find(first) == len(texts[0])
    assert "".join(texts).find(second) == len("".join(texts[:6]))
    params = SamplingParams(
        temperature=0, max_tokens=10, ignore_eos=True, min_tokens=held, stop=(first, second)
    )
    reply = engine.generate_sync(prompt, params)
    assert reply.text == "".join(texts[: 1 if held < 3 else 6])
    assert list(reply.token_ids) == ids[: 3 if held < 3 else 8]
    assert reply.finish_reason == "stop"


def test_logprobs_come_with_their_tokens() -> None:
    engine = make_engine()
    streams = [BlockingStream(), BlockingStream()]
    engine.add([1, 2], GREEDY, streams[0])
    asked = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
    engine.add([3], asked, streams[1])
    for _ in range(2):
        engine.step()
    reply = engine.generate_sync([3], SamplingParams(temperature=0, max_tokens=3, logprobs=0))
    assert reply.logprobs == tuple(TokenLogprob(token, -float(token)) for token in expected([3], 3))
    run_all(engine)
    assert streams[0].get().logprobs == ()
    for token in expected([3], 6):
        delta = streams[1].get()
        top = ((token, -float(token)), ((token + 1) % VOCAB, -float(token) - 1))
        assert delta.logprobs == (TokenLogprob(token, -float(token), top),)
        assert delta.token_ids == (token,)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_bad_logits_end_one_request_and_its_pages_are_scrubbed(kind: str) -> None:
    engine = make_engine(device_kind=kind)
    streams = [BlockingStream() for _ in range(3)]
    engine.add([1, 2], GREEDY, streams[0])
    engine.step()
    engine.add([4] * 10, SamplingParams(seed=BAD_SEED), streams[1])
    engine.add([3], GREEDY, streams[2])
    run_all(engine)
    with pytest.raises(BadLogits, match="NaN at position 10"):
        streams[1].get()
    assert streams[1].empty
    assert tokens(streams[0]) == expected([1, 2], 10)
    assert tokens(streams[2]) == expected([3], 10)
    # Ten tokens in pages of four: the first page and the second came from a chunk that went well.
    assert len(model_of(engine).cache.scrubbed) == 1
    assert engine.stats()["requests_failed"] == 1
    assert list(engine.generate_sync([4] * 10, GREEDY).token_ids) == expected([4] * 10, 10)


def test_a_request_that_takes_too_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(request_timeout=5.0, max_num_seqs=1, max_model_len=400)
    streams = [BlockingStream() for _ in range(3)]
    endless = SamplingParams(temperature=0, ignore_eos=True)
    engine.add([1], endless, streams[0])
    engine.add([2], endless, streams[1])
    for _ in range(4):
        engine.step()
    start = time.monotonic()
    engine._loop.clock = lambda: start + 4.9
    engine.add([3], GREEDY, streams[2])
    engine._added[0].arrived = start + 3
    for _ in range(4):
        engine.step()
    assert engine.stats()["requests_timed_out"] == 0
    engine._loop.clock = lambda: start + 5.1
    run_all(engine)
    for stream in streams[:2]:
        with pytest.raises(RequestTimeout, match=r"within 5 s \(request_timeout\)"):
            tokens(stream)
    assert tokens(streams[2]) == expected([3], 10)
    assert engine.stats()["requests_timed_out"] == 2


def test_a_full_queue_refuses() -> None:
    assert make_engine().max_requests is None
    engine = make_engine(max_num_seqs=2, max_queue=1)
    assert engine.max_requests == 3
    streams = [BlockingStream() for _ in range(3)]
    for stream in streams:
        engine.add([1], GREEDY, stream)
    with pytest.raises(QueueFull, match="1 requests are waiting and the queue holds 1") as caught:
        engine.add([2], GREEDY, BlockingStream())
    assert (caught.value.waiting, caught.value.limit) == (1, 1)
    engine.step()
    with pytest.raises(QueueFull):
        engine.generate([2], GREEDY)
    run_all(engine)
    assert engine.generate_sync([2], GREEDY).finish_reason == "length"
    assert all(tokens(stream) == expected([1], 10) for stream in streams)


def test_an_engine_says_whether_it_is_alive() -> None:
    engine = make_engine()
    assert engine.alive
    model_of(engine).device.broken = RuntimeError("gone")
    model_of(engine).fail_prefill = RuntimeError("gone")
    stream = BlockingStream()
    engine.add([1], GREEDY, stream)
    engine.step()
    assert not engine.alive
    with pytest.raises(StepFailed):
        stream.get()
    closed = make_engine()
    closed.close()
    assert not closed.alive


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidSamplingParams, match="logit_bias holds 97, outside") as caught:
        make_engine().check([1], SamplingParams(logit_bias=((VOCAB, 1.0),)))
    assert caught.value.param == "logit_bias"


def test_what_penalties_go_by_is_told_again_after_giving_way() -> None:
    engine = make_engine(max_num_seqs=2, pages=16)
    streams = [BlockingStream(), BlockingStream()]
    params = SamplingParams(
        temperature=0, max_tokens=50, ignore_eos=True, presence_penalty=1.0, logit_bias=((3, 1.0),)
    )
    plain = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    engine.add([1, 2], plain, streams[0])
    engine.step()
    engine.add([4, 5], params, streams[1])
    engine.step()
    histories = model_of(engine).cache.histories
    assert histories == {1: ([4, 5], [])}
    while not engine.stats()["preemptions"]:
        engine.step()
    run_all(engine)
    assert list(histories) == [1, 0]  # its row is another
    prompt, produced = histories[0]
    assert prompt == [4, 5]
    assert len(produced) > 10
    want = expected([4, 5], 50)
    assert tokens(streams[1]) == want
    assert produced == want[: len(produced)]


def text(reply: list[int]) -> str:
    return b"".join(map(FakeTokenizer().token_bytes, reply)).decode()


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("preempting", [False, True])
def test_replies_match_their_grammar(kind: str, preempting: bool) -> None:
    pages = {"pages": 16} if preempting else {}
    engine = make_engine(device_kind=kind, max_num_seqs=4, **pages)
    streams = [BlockingStream() for _ in range(4)]
    grammars = [Grammar.choice(["baca", "fa"]), Grammar.regex("(ca|gb){6}"), None]
    for stream, grammar in zip(streams, grammars, strict=False):
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, grammar=grammar)
        engine.add([9, 9], params, stream)
    engine.add([1], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True), streams[3])
    run_all(engine)
    assert text(tokens(streams[0])) in ("baca", "fa")
    second = iter_deltas(streams[1])
    assert re.fullmatch("(ca|gb){6}", "".join(delta.text for delta in second))
    assert len(second) == 6
    assert second[-1].finish_reason == "stop"
    assert tokens(streams[2]) == expected([9, 9], 60)
    assert tokens(streams[3]) == expected([1], 60)
    assert (engine.stats()["preemptions"] > 0) == preempting


def test_a_grammar_is_followed_while_the_device_runs() -> None:
    engine = make_engine()
    stream, plain = BlockingStream(), BlockingStream()
    grammar = Grammar.regex("([a-z]{2})*")
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, grammar=grammar)
    engine.add([9], params, stream)
    engine.add([7], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), plain)
    for _ in range(8):
        engine.step()
    pending = engine._loop._pending
    # A step is under way with the grammar's request in it, and nothing was uploaded for it anew.
    assert pending is not None and len(pending.step.decode) == 2
    assert model_of(engine).device.uploads == 2
    run_all(engine)
    assert len(text(tokens(stream))) == 40
    assert tokens(plain) == expected([7], 20)


def iter_deltas(stream: BlockingStream) -> list[Delta]:
    found: list[Delta] = []
    while not stream.empty:
        found.append(stream.get())
    return found


def test_a_grammar_without_a_way_on_ends_its_request_only() -> None:
    engine = make_engine()
    streams = [BlockingStream(), BlockingStream()]
    params = SamplingParams(
        temperature=0, max_tokens=9, ignore_eos=True, grammar=Grammar.regex("ba")
    )
    sequence = engine.add([9], params, streams[0])
    engine.add([8], GREEDY, streams[1])
    assert sequence.constraint is not None
    sequence.constraint.allowed[:] = 0
    sequence.constraint.allowed[0] = 1  # token 0 only, which the grammar will not take
    run_all(engine)
    with pytest.raises(GrammarError, match="leads nowhere at token 1 of the reply"):
        streams[0].get()
    assert tokens(streams[1]) == expected([8], 10)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("source", "why"),
    [
        ('start: "ea" x\nx: x "fa"', "no text can follow"),
        ('start: ("ea" | "fa") ("ga" | "ha") x\nx: x "fa"', "no text can follow"),
    ],
)
def test_a_grammar_that_leads_nowhere_is_said_to(source: str, why: str, kind: str) -> None:
    engine = make_engine(device_kind=kind)
    streams = [BlockingStream(), BlockingStream()]
    params = SamplingParams(temperature=0, max_tokens=9, grammar=Grammar.lark(source))
    engine.add([9], params, streams[0])
    engine.add([8], GREEDY, streams[1])
    run_all(engine)
    with pytest.raises(GrammarError) as caught:
        tokens(streams[0])
    assert re.search(r"leads nowhere at token [12] of the reply, after '\w+': ", str(caught.value))
    assert why in str(caught.value)
    assert engine.stats()["requests_failed"] == 1
    assert tokens(streams[1]) == expected([8], 10)
    assert list(engine.generate_sync([9], GREEDY).token_ids) == expected([9], 10)


def test_a_grammar_that_allows_nothing_is_refused() -> None:
    engine = make_engine()
    grammar = Grammar.lark('start: x\nx: x "ba"')
    with pytest.raises(GrammarError, match="the lark grammar cannot begin: no text can follow"):
        engine.check([1], SamplingParams(grammar=grammar))
    assert grammar.named("guided_grammar") == grammar


def test_a_grammar_of_unknown_tokens_is_refused() -> None:
    engine = make_engine()
    with pytest.raises(GrammarError, match="unknown special token"):
        engine.generate([1], SamplingParams(grammar=Grammar.lark("start: <|nothing|>")))
    assert issubclass(GrammarError, GroutError)


def test_times_are_counted() -> None:
    engine = make_engine()
    engine.generate_sync([1, 2, 3], GREEDY)
    times = engine.histograms
    assert times.queue_time.count == times.time_to_first_token.count == 1
    assert times.request_time.count == 1
    assert times.inter_token_latency.count == 9
    assert times.request_time.total >= times.time_to_first_token.total >= times.queue_time.total


def test_a_histogram_counts_up_to_its_bounds() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 2, 3):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert (histogram.count, histogram.total) == (5, 8.0)


def test_settings_of_the_second_stage_are_checked() -> None:
    for field, value in (
        ("kv_cache_memory", 0),
        ("max_queue", -1),
        ("request_timeout", 0),
    ):
        with pytest.raises(GroutError, match=field):
            EngineConfig(**{field: value})  # type: ignore[arg-type]
