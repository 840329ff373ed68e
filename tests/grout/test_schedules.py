"""Random schedules over the pseudo-model: each request gets what it would get alone."""

import random
import re
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grout.engine import Engine
from grout.errors import RequestAborted
from grout.grammar import Grammar
from grout.request import SamplingParams
from grout.sequence import Sequence
from grout.streams import BlockingStream
from tests.grout.fakes import EOS, PAGE_SIZE, VOCAB, FakeTokenizer, expected, make_engine, model_of

pytestmark = pytest.mark.usefixtures("fake_device")

# Prompts are pieces of few texts, so that many begin alike and end anywhere in a page.
TEXTS = [[(11 * n * n + 7 * text + 1) % VOCAB for n in range(40)] for text in range(3)]

requests = st.lists(
    st.tuples(
        st.sampled_from(TEXTS),
        st.integers(1, 24),  # tokens of the prompt
        st.integers(1, 16),  # of the reply
        st.sampled_from([0.0, 0.7]),
        st.integers(-1, 1),  # priority
        st.booleans(),  # aborted on the way
        st.integers(0, 5),  # min_tokens, if that is not more than there may be
        st.booleans(),  # constrained
    ),
    min_size=1,
    max_size=12,
)


def machines(pages: Ordered[int]) -> st.SearchStrategy[dict[str, Any]]:
    """What `make_engine` takes for engines of any size, with so many pages, on any device."""
    return st.fixed_dictionaries(
        {
            "max_num_seqs": st.integers(1, 6),
            "pages": st.sampled_from(pages),
            "prefill_chunk": st.integers(1, 30),
            "device_kind": st.sampled_from(["cpu", "cuda"]),
            "device_seed": st.integers(0, 2**32),
        }
    )


def run_out(step: Callable[[], bool]) -> None:
    """Step until there is nothing more to do."""
    for _ in range(3000):
        if not step():
            return
    raise AssertionError("the engine does not come to rest")


# What may come next changes with every token: one of the first letters, then one of the others.
LETTERS = Grammar.regex("([a-m][a-z][n-z][a-z])*")


def fits(number: int, token: int) -> bool:
    """Whether `LETTERS` allows a token as the one of that number."""
    if token == EOS:
        return number % 2 == 0
    first = "[n-z]" if number % 2 else "[a-m]"
    return bool(re.fullmatch(first + "[a-z]", FakeTokenizer().token_bytes(token).decode("latin-1")))


def replied(
    prompt: list[int],
    count: int,
    ends: Callable[[int], bool],
    held: int,
    constrained: bool,
    sampling: dict[str, Any],
) -> list[int]:
    """What the pseudo-model answers, by its definition."""
    context = list(prompt)
    for number in range(count):
        (token,) = expected(context, 1, **sampling)
        while (constrained and not fits(number, token)) or (number < held and ends(token)):
            token = (token + 1) % VOCAB
        context.append(token)
        # To a grammar the end of the sequence is the end, wanted or not.
        if ends(token) or (constrained and token == EOS):
            break
    return context[len(prompt) :]


def at_rest(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats["running"], stats["waiting"]) == (0, 0)
    assert stats["pages_free"] == stats["pages_total"]
    assert model_of(engine).cache.in_use == set()


def received(stream: BlockingStream) -> tuple[list[int], bool]:
    """The tokens so far, and whether the request was aborted."""
    tokens: list[int] = []
    while not stream.empty:
        try:
            tokens += stream.get().token_ids
        except RequestAborted:
            return tokens, True
    return tokens, False


@settings(deadline=None, max_examples=100)
@given(
    requests,
    machines([10, 11, 14, 25]),
    st.booleans(),
)
def test_company_changes_nothing(
    requests: list[tuple[list[int], int, int, float, int, bool, int, bool]],
    machine: dict[str, Any],
    prefix_caching: bool,
) -> None:
    chance = random.Random(machine["device_seed"])
    engine = make_engine(max_model_len=40, prefix_caching=prefix_caching, **machine)
    streams = [BlockingStream() for _ in requests]
    doomed: list[Sequence] = []
    for at, (text, size, count, temperature, priority, aborted, held, constrained) in enumerate(
        requests
    ):
        params = SamplingParams(
            min_tokens=min(held, count),
            grammar=LETTERS if constrained else None,
            temperature=temperature,
            max_tokens=count,
            ignore_eos=at % 2 == 0,
            seed=at,
            priority=priority,
        )
        sequence = engine.add(text[:size], params, streams[at])
        doomed += [sequence] if aborted else []
        for _ in range(chance.randrange(6)):
            engine.step()
            if doomed and chance.random() < 0.3:
                engine.abort(doomed.pop())
    run_out(engine.step)
    for at, (text, size, count, temperature, _, _, held, constrained) in enumerate(requests):
        want = replied(
            text[:size],
            count,
            lambda token, at=at: token == EOS and at % 2 == 1,  # type: ignore[misc]
            min(held, count),
            constrained,
            {"seed": at, "temperature": temperature},
        )
        tokens, aborted = received(streams[at])
        assert tokens == want[: len(tokens)] if aborted else tokens == want
    at_rest(engine)
    stats = engine.stats()
    assert stats["requests_finished"] + stats["requests_aborted"] == len(requests)
    assert prefix_caching or stats["prefix_hits"] == stats["pages_cached"] == 0


@pytest.mark.parametrize("size", [1, 3, 4, 5, 7, 8, 9, 16])
def test_the_same_prompt_twice(size: int) -> None:
    engine = make_engine()
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    first = engine.generate_sync(TEXTS[0][:size], params)
    second = engine.generate_sync(TEXTS[0][:size], params)
    assert first.token_ids == second.token_ids == tuple(expected(TEXTS[0][:size], 9))
    assert first.cached_tokens == 0
    assert second.cached_tokens == (size - 1) // PAGE_SIZE * PAGE_SIZE
    assert engine.stats()["prefix_hits"] == second.cached_tokens


def test_a_conversation_finds_its_replies_too() -> None:
    engine = make_engine()
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    prompt = TEXTS[1][:6]
    reply = list(engine.generate_sync(prompt, params).token_ids)
    again = engine.generate_sync([*prompt, *reply, 5, 6], params)
    assert list(again.token_ids) == expected([*prompt, *reply, 5, 6], 9)
    # Of 6 + 9 tokens all but the last were run: three full pages.
    assert again.cached_tokens == 12


def test_the_last_token_of_a_reply_is_not_in_its_page() -> None:
    engine = make_engine()
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    prompt = TEXTS[1][:6]
    reply = list(engine.generate_sync(prompt, params).token_ids)
    again = engine.generate_sync([*prompt, *reply, 5], params)
    assert list(again.token_ids) == expected([*prompt, *reply, 5], 10)
    assert again.cached_tokens == 12


def test_requests_that_come_together_share_their_prompt() -> None:
    engine = make_engine(prefill_chunk=64, max_num_seqs=4)
    params = SamplingParams(temperature=0.7, max_tokens=5, ignore_eos=True, seed=1)
    streams = [BlockingStream() for _ in range(3)]
    for stream in streams:
        engine.add(TEXTS[2][:17], params, stream)
    while engine.step():
        pass
    for stream in streams:
        assert received(stream) == (expected(TEXTS[2][:17], 5, seed=1, temperature=0.7), False)
    assert engine.stats()["prefix_hits"] == 32
    assert model_of(engine).chunks == [(0, 17), (16, 1), (16, 1)]


def test_a_tiny_pool_makes_requests_give_way_and_all_finish() -> None:
    engine = make_engine(max_num_seqs=6, pages=10, max_model_len=40, prefill_chunk=64)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    streams = [BlockingStream() for _ in range(6)]
    for at, stream in enumerate(streams):
        engine.add(TEXTS[at % 3][at : at + 3], params, stream)
    while engine.step():
        pass
    for at, stream in enumerate(streams):
        assert received(stream) == (expected(TEXTS[at % 3][at : at + 3], 30), False)
    assert engine.stats()["preemptions"] > 0
    at_rest(engine)


def test_cached_pages_make_room() -> None:
    engine = make_engine(max_num_seqs=1, pages=10, max_model_len=40)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for at in range(12):
        prompt = [at] * 20
        assert list(engine.generate_sync(prompt, params).token_ids) == expected(prompt, 4)
    stats = engine.stats()
    assert stats["pages_free"] == 10
    assert stats["pages_cached"] <= 10
    assert engine.generate_sync([11] * 20, params).cached_tokens == 16
    assert engine.generate_sync([0] * 20, params).cached_tokens == 0
