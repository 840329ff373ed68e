"""The engine's asyncio side: streams, cancellation, closing."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

import pytest

from grout.engine import Engine
from grout.errors import EngineClosed, PromptTooLong, StepFailed
from grout.request import Delta, SamplingParams
from tests.grout.fakes import expected, make_engine, model_of

pytestmark = pytest.mark.usefixtures("fake_device")

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)

T = TypeVar("T")


def run(main: Callable[[], Awaitable[T]]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(main(), 60)

    return asyncio.run(bounded())


async def collect(stream: AsyncGenerator[Delta]) -> list[int]:
    return [token async for delta in stream for token in delta.token_ids]


async def settle(engine: Engine) -> None:
    """Wait until every request is gone."""
    while engine.stats()["running"] or engine.stats()["waiting"]:
        await asyncio.sleep(0.002)
    assert engine.stats()["pages_free"] == engine.stats()["pages_total"]


def test_thirty_two_requests_at_once() -> None:
    async def main() -> None:
        engine = make_engine(max_num_seqs=8, pages=70).start()
        streams = [engine.generate([n, n, n], GREEDY) for n in range(32)]
        replies = await asyncio.gather(*map(collect, streams))
        assert replies == [expected([n, n, n], 12) for n in range(32)]
        await settle(engine)
        await engine.aclose()

    run(main)


def test_leaving_early_aborts() -> None:
    async def main() -> None:
        engine = make_engine(max_model_len=4096).start()
        stream = engine.generate([1, 2], ENDLESS)
        first = await anext(stream)
        assert first.token_ids  # several, if the loop was slow to come
        assert list(first.token_ids) == expected([1, 2], len(first.token_ids))
        await stream.aclose()
        await settle(engine)
        assert engine.stats()["requests_aborted"] == 1
        assert await collect(engine.generate([3], GREEDY)) == expected([3], 12)
        await engine.aclose()

    run(main)


@pytest.mark.parametrize("delay", [0, 0.005])
def test_cancelling_the_task_aborts(delay: float) -> None:
    async def main() -> None:
        engine = make_engine(max_model_len=4096).start()
        task = asyncio.create_task(collect(engine.generate([1, 2], ENDLESS)))
        await asyncio.sleep(delay)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settle(engine)
        await engine.aclose()

    run(main)


def test_a_bad_prompt_is_refused_before_iterating() -> None:
    async def main() -> None:
        engine = make_engine(max_model_len=16)
        with pytest.raises(PromptTooLong):
            engine.generate([1] * 16, GREEDY)
        await engine.aclose()
        with pytest.raises(EngineClosed):
            engine.generate([1], GREEDY)

    run(main)


def test_a_failing_step_raises_in_the_stream_and_the_engine_lives_on() -> None:
    async def main() -> None:
        engine = make_engine()
        model_of(engine).fail_prefill = ValueError("bad kernel")
        with pytest.raises(StepFailed, match="bad kernel"):
            await collect(engine.generate([1, 2], GREEDY))
        assert await collect(engine.generate([1, 2], GREEDY)) == expected([1, 2], 12)
        await engine.aclose()

    run(main)


def test_closing_ends_streams_with_an_error() -> None:
    async def main() -> None:
        engine = make_engine(max_model_len=4096).start()
        task = asyncio.create_task(collect(engine.generate([1, 2], ENDLESS)))
        await asyncio.sleep(0.005)
        await engine.aclose()
        with pytest.raises(EngineClosed):
            await task

    run(main)


def test_a_loop_that_is_gone_loses_its_requests() -> None:
    engine = make_engine(max_model_len=4096).start()
    loop = asyncio.new_event_loop()
    stream = engine.generate([1, 2], ENDLESS)
    loop.run_until_complete(anext(stream))
    loop.close()

    async def main() -> None:
        await settle(engine)
        assert await collect(engine.generate([3], GREEDY)) == expected([3], 12)
        await engine.aclose()

    run(main)
    assert engine.stats()["requests_aborted"] == 1
