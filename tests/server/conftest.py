from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

import grout
from tests.server.fakes import FakeEngine, Live, wait_for
from tests.server.scripted import write_model
from tests.server.scripts import SCRIPTS


def client_of(server: Live[Any], timeout: float = 10) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key="unused",
        max_retries=0,
        timeout=timeout,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    )


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Live[FakeEngine]]:
    """One server for all tests: each also shows that none before it did harm."""
    with Live(FakeEngine()) as live:
        yield live


@pytest.fixture
def server(shared_server: Live[FakeEngine]) -> Live[FakeEngine]:
    """The server, its engine as new."""
    # Requests of an earlier test would count themselves out of what this one sees.
    wait_for(lambda: shared_server.engine.running == 0)
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
    with client_of(shared_server) as client:
        yield client


@pytest.fixture
def client(server: Live[FakeEngine], shared_client: openai.OpenAI) -> openai.OpenAI:
    return shared_client


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live[grout.Engine]]:
    """The real engine on a model whose replies are `SCRIPTS`."""
    folder = tmp_path_factory.mktemp("models") / "scripted"
    folder.mkdir()
    write_model(folder, SCRIPTS)
    with (
        grout.create_engine(grout.EngineConfig(str(folder), device="cpu", seed=1)) as engine,
        Live(engine) as live,
    ):
        yield live


@pytest.fixture(scope="session")
def scripted_client(scripted: Live[grout.Engine]) -> Iterator[openai.OpenAI]:
    with client_of(scripted, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def scripted_http(scripted: Live[grout.Engine]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=scripted.url, timeout=60, trust_env=False) as http:
        yield http
