"""Completions, models, health, the API key, and errors of HTTP itself."""

import httpx
import openai
import pytest

from server.settings import Settings
from tests.server.fakes import MODEL, FakeConfig, FakeEngine, live


@pytest.mark.parametrize("prompt", ["Once", ["Once"]])
def test_completion_of_text(client: openai.OpenAI, engine: FakeEngine, prompt: str) -> None:
    answer = client.completions.create(model=MODEL, prompt=prompt)
    assert (answer.object, answer.choices[0].text) == ("text_completion", engine.text)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id.startswith("cmpl-")
    # With the tokenizer's own beginning of sequence, and OpenAI's limit of 16.
    assert engine.requests[-1][0] == [256, *b"Once"]
    assert engine.requests[-1][1].max_tokens == 16
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 8)


@pytest.mark.parametrize("prompt", [[1, 2, 256], [[1, 2, 256]]])
def test_completion_of_token_ids(
    client: openai.OpenAI, engine: FakeEngine, prompt: list[int]
) -> None:
    client.completions.create(model=MODEL, prompt=prompt, max_tokens=300)
    assert engine.requests[-1][0] == [1, 2, 256]
    assert engine.requests[-1][1].max_tokens == 300


def test_completion_stream_equals_plain(client: openai.OpenAI, engine: FakeEngine) -> None:
    with client.completions.create(
        model=MODEL, prompt="x", stream=True, stream_options={"include_usage": True}
    ) as stream:
        *chunks, last = list(stream)
    plain = client.completions.create(model=MODEL, prompt="x")
    assert "".join(chunk.choices[0].text for chunk in chunks) == plain.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert last.choices == []
    assert last.usage == plain.usage


def test_without_a_chat_template_completions_still_work(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    engine.chat_template = None
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
    assert caught.value.code == "no_chat_template"
    assert client.completions.create(model=MODEL, prompt="x").choices[0].text == engine.text


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    model = client.models.retrieve(MODEL)
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "grout")
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other/one")
    assert caught.value.code == "model_not_found"


def test_served_model_name_replaces_the_id() -> None:
    with (
        live(config=FakeConfig("mine")) as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        assert http.get("/v1/models/mine").json()["id"] == "mine"
        assert http.get(f"/v1/models/{MODEL}").status_code == 404


def test_health(http: httpx.Client, engine: FakeEngine) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    engine.alive = False
    response = http.get("/health")
    assert response.status_code == 503
    assert "restart" in response.json()["status"]
    engine.alive, engine.hung = True, True
    response = http.get("/health")
    assert (response.status_code, response.json()) == (
        503,
        {"status": "a step of the engine does not end"},
    )


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("POST", "/v1/embeddings", 400, "unsupported_model"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
    ],
)
def test_errors_of_routing(
    http: httpx.Client, method: str, path: str, status: int, code: str
) -> None:
    response = http.request(method, path)
    assert response.status_code == status
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert set(error) == {"message", "type", "param", "code"}
    if status == 405:
        assert response.headers["allow"] in error["message"]


def test_api_key() -> None:
    with (
        live(Settings(api_keys=("other", "sésame"))) as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        wrong: list[dict[str, str | bytes]] = [
            {},
            {"Authorization": "Bearer no"},
            {"Authorization": "Basic sesame"},
            {"Authorization": b"Bearer \xff"},
        ]
        for headers in wrong:
            response = http.get("/v1/models", headers=headers)  # type: ignore[arg-type]
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        right = {b"Authorization": "Bearer sésame".encode()}
        assert http.get("/v1/models", headers=right).status_code == 200
        assert http.get("/health").status_code == 200
        assert http.get("/nowhere").status_code == 401
