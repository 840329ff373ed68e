"""Where deltas wait to be picked up: nothing lost, nothing out of order, several as one."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grout.errors import EngineClosed
from grout.request import Delta, TokenLogprob
from grout.streams import AsyncStream, MergedDelta, merged, parts


def run(main: Callable[[AsyncStream], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(main(AsyncStream(asyncio.get_running_loop())), 20)

    asyncio.run(bounded())


def deltas(count: int) -> list[Delta]:
    """As an engine makes them: the first knows of the cache, the last how it ended."""
    return [
        Delta(
            f"{i} ",
            (i,),
            "length" if i == count - 1 else None,
            (TokenLogprob(i, -float(i)),),
            7 if i == 0 else 0,
        )
        for i in range(count)
    ]


def test_one_that_keeps_up_gets_each() -> None:
    async def main(stream: AsyncStream) -> None:
        given = deltas(20)
        taken = asyncio.create_task(take_all(stream))
        for delta in given:
            await asyncio.sleep(0)
            stream.put(delta)
        assert await taken == given
        assert not any(isinstance(delta, MergedDelta) for delta in await taken)

    run(main)


async def take_all(stream: AsyncStream) -> list[Delta]:
    taken = [await stream.get()]
    while taken[-1].finish_reason is None:
        taken.append(await stream.get())
    return taken


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8))
def test_what_has_queued_up_comes_as_one(sizes: list[int]) -> None:
    async def main(stream: AsyncStream) -> None:
        given = deltas(sum(sizes))
        left = iter(given)
        taken = []
        for size in sizes:
            for _ in range(size):
                stream.put(next(left))
            taken.append(await stream.get())
        assert [len(delta.token_ids) for delta in taken] == sizes
        assert [part for delta in taken for part in parts(delta)] == given
        whole = merged(taken)
        assert whole.text == "".join(delta.text for delta in given)
        assert whole.token_ids == tuple(range(len(given)))
        assert [entry.token_id for entry in whole.logprobs] == list(range(len(given)))
        assert (whole.finish_reason, whole.cached_tokens) == ("length", 7)
        # What is merged again still knows each.
        assert list(parts(whole)) == given

    run(main)


def test_one_alone_stays_as_it_is() -> None:
    (only,) = deltas(1)
    assert merged([only]) is only
    assert parts(only) == (only,)


def test_an_error_comes_after_what_was_there() -> None:
    async def main(stream: AsyncStream) -> None:
        first, second, _ = deltas(3)
        stream.put(first)
        stream.put(second)
        stream.put(EngineClosed("closed"))
        assert parts(await stream.get()) == (first, second)
        with pytest.raises(EngineClosed):
            await stream.get()

    run(main)


def test_an_error_wakes() -> None:
    async def main(stream: AsyncStream) -> None:
        waiting = asyncio.create_task(stream.get())
        await asyncio.sleep(0)
        stream.put(EngineClosed("closed"))
        with pytest.raises(EngineClosed):
            await waiting

    run(main)


def test_a_cancelled_wait_loses_nothing() -> None:
    async def main(stream: AsyncStream) -> None:
        waiting = asyncio.create_task(stream.get())
        await asyncio.sleep(0)
        waiting.cancel()
        first, second = deltas(2)
        stream.put(first)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        stream.put(second)
        assert parts(await stream.get()) == (first, second)

    run(main)
