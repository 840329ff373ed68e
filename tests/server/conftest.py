from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.server.fakes import FakeEngine, Live


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Live[FakeEngine]]:
    """One server for all tests: each also shows that none before it did harm."""
    with Live(FakeEngine()) as live:
        yield live


@pytest.fixture
def server(shared_server: Live[FakeEngine]) -> Live[FakeEngine]:
    """The server, its engine as new."""
    vars(shared_server.engine).update(vars(FakeEngine()))
    return shared_server


@pytest.fixture
def engine(server: Live[FakeEngine]) -> FakeEngine:
    return server.engine


@pytest.fixture(scope="session")
def shared_http(shared_server: Live[FakeEngine]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=shared_server.url, timeout=10, trust_env=False) as http:
        yield http


@pytest.fixture
def http(server: Live[FakeEngine], shared_http: httpx.Client) -> httpx.Client:
    return shared_http


@pytest.fixture(scope="session")
def shared_client(shared_server: Live[FakeEngine]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{shared_server.url}/v1",
        api_key="unused",
        max_retries=0,
        timeout=10,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    ) as client:
        yield client


@pytest.fixture
def client(server: Live[FakeEngine], shared_client: openai.OpenAI) -> openai.OpenAI:
    return shared_client
