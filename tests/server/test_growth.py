"""No request leaves objects behind: they are counted before and after many of one kind."""

import asyncio
import gc
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from typing import Any

import pytest

import grout
from scripts.bench_serving import first_model
from scripts.serving_client import Client, Endpoint
from scripts.serving_malformed import MALFORMED
from tests.server.fakes import Live, wait_for
from tests.server.tiny import open_tiny

WARM_UP = 70
"""More than the compiled grammars that are kept, so that these have their most."""

REQUESTS = 60
AT_ONCE = 4
PATH = "/v1/completions"

Act = Callable[[Client, str, int], Awaitable[object]]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live[grout.Engine]]:
    folder = tmp_path_factory.mktemp("tiny")
    sizes = {"max_model_len": 256, "max_num_seqs": 4, "kv_cache_memory": 2**20}
    with open_tiny(folder, **sizes) as engine, Live(engine) as live:
        yield live


def asking(make: Callable[[int], dict[str, Any]], status: int = 200) -> Act:
    """Requests whose body depends on their number, answered with a status."""

    async def act(client: Client, model: str, number: int) -> None:
        body = {"model": model, "prompt": "Hi", "max_tokens": 2, "temperature": 0} | make(number)
        response = await client.request("POST", PATH, body)
        assert response.status == status, response.body

    return act


async def leaving(client: Client, model: str, number: int) -> None:
    """A stream left after some of it."""
    body = {"model": model, "prompt": "Hi", "max_tokens": 200, "stream": True, "ignore_eos": True}
    async with client.open("POST", PATH, body) as (response, connection):
        async for _ in connection.blocks(response):
            connection.reusable = False
            return


async def hanging_up(client: Client, model: str, number: int) -> None:
    """A connection closed on a request, sent to its end or not."""
    connection = await client.connect()
    message = client.message("POST", PATH, {"model": model, "prompt": "Hi", "max_tokens": 50})
    connection.writer.write(message if number % 2 else message[:-5])
    await connection.writer.drain()
    connection.drop()


async def malformed(client: Client, model: str, number: int) -> None:
    """What is refused before it reaches the engine."""
    bad = MALFORMED[number % len(MALFORMED)]
    response = await client.request("POST", PATH, bad.body(model, PATH))
    assert 400 <= response.status < 500


async def nowhere(client: Client, model: str, number: int) -> None:
    """A path, a method and a header that were never seen before."""
    assert (await client.request("POST", f"/v1/{number}", {})).status == 404


async def metrics(client: Client, model: str, number: int) -> None:
    assert (await client.request("GET", "/metrics")).status == 200


ACTS: dict[str, Act] = {
    "plain": asking(lambda _: {}),
    "lengths": asking(lambda n: {"prompt": "x" * (1 + n * 7 % 150)}),
    "several": asking(lambda _: {"n": 3}),
    "stop": asking(lambda n: {"stop": [f"{n} ends", f"{n}"]}),
    "bias": asking(lambda n: {"logit_bias": {str(n % 256): 5, "7": -5}}),
    "penalties": asking(lambda n: {"presence_penalty": 0.5, "temperature": 1, "seed": n}),
    "logprobs": asking(lambda _: {"logprobs": 3}),
    "grammar": asking(lambda n: {"guided_regex": f"[a-z]{{1,4}}{n}"}),
    "bad grammar": asking(lambda n: {"guided_regex": f"({n}"}, 400),
    "too long": asking(lambda n: {"prompt": "x" * (300 + n)}, 400),
    "stop token": asking(lambda n: {"stop_token_ids": [1000 + n]}, 400),
    "leaving": leaving,
    "hanging up": hanging_up,
    "malformed": malformed,
    "nowhere": nowhere,
    "metrics": metrics,
}


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("name", ACTS)
def test_nothing_is_left_of_requests(real: Live[grout.Engine], name: str) -> None:
    act, numbers = ACTS[name], count()

    def counted(requests: int) -> Counter[str]:
        """Objects by type, once that many requests have come and gone."""
        asyncio.run(crowd(real.url, act, numbers, requests))
        wait_for(lambda: not any(real.engine.stats()[key] for key in ("running", "waiting")))
        gc.collect()
        return Counter(type(one).__qualname__ for one in gc.get_objects())

    # Lengths have kernels of their own: in all, a few hundred objects each.
    counted(WARM_UP if name != "lengths" else 2 * 150)
    grown: Counter[str] = Counter()
    # A connection that is closing, or a timer that has been cancelled, goes a little later: what is
    # left of every request is there in each round.
    # A cancelled timer stays in its loop until a hundred have been: rounds of one size might each
    # time end just before those go.
    for turn in range(10):
        before = counted(REQUESTS + 5 * AT_ONCE * turn)
        grown = counted(REQUESTS) - before
        if grown.total() < REQUESTS:
            return
    raise AssertionError(
        f"{REQUESTS} requests left {grown.total()} objects: {grown.most_common(9)}"
    )


async def crowd(url: str, act: Act, numbers: Iterator[int], requests: int) -> None:
    """So many requests, some at once."""
    client = Client(Endpoint("server", url, None), 60)
    model = await first_model(client)

    async def member() -> None:
        for _ in range(requests // AT_ONCE):
            await act(client, model, next(numbers))

    await asyncio.gather(*(member() for _ in range(AT_ONCE)))
    await client.close()
