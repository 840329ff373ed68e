"""The OpenAPI document, and requests made from it: none may be answered by a 5xx."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

import grout
from server.app import create_app
from server.openapi import document
from tests.server.fakes import FakeEngine, Live
from tests.server.scripted import END, write_model

PATHS = document()["paths"]
OPERATIONS = [(path, method.upper()) for path, item in PATHS.items() for method in item]
# Without a body or a parameter there is nothing to vary.
VARIED = [
    (path, method) for path, method in OPERATIONS if method == "POST" or "{" in path
]  # fmt: skip
REFUSED = {"/v1/embeddings", "/v1/responses/{name}"}


def test_the_document_is_served(http: httpx.Client) -> None:
    served = http.get("/openapi.json").json()
    assert served == document()
    for path, method in OPERATIONS:
        if method == "GET" and path not in REFUSED:
            assert http.get(path.format(name="acme/tiny-1")).status_code == 200


@pytest.mark.filterwarnings("ignore:Duplicate Operation ID")
def test_every_route_is_in_the_document() -> None:
    # What FastAPI itself makes of the routes knows their paths, if not their bodies.
    made = create_app(FakeEngine()).openapi()["paths"]
    found = {re.sub("{.*}", "{name}", path) for path in made}
    assert {path for path in found if not path.startswith("/static/")} == set(PATHS)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live[grout.Engine]]:
    """A real engine whose replies end soon, whatever a request says of their length."""
    folder = tmp_path_factory.mktemp("models") / "scripted"
    folder.mkdir()
    write_model(folder, {"hi": [b"Hi ", "三".encode(), END]})
    config = grout.EngineConfig(str(folder), device="cpu", max_model_len=1000)
    with grout.create_engine(config) as engine, Live(engine) as live:
        yield live


TOKEN = {"enum": [65, 0, 255, 10]}
SCHEMAS = [
    {"type": "object", "properties": {"a": {"enum": ["é", 1, None]}}, "required": ["a"]},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
]
# What a client who knows this server adds to what the document says: parameters that go together,
# tokens that there are, text that is JSON. None: the parameter is left out.
KNOWN: dict[str, Any] = {
    "model": {"enum": ["scripted", None]},
    "logit_bias": {"enum": [{"65": 3, "66": -100.0}, {}, None]},
    "stop_token_ids": {"type": "array", "items": TOKEN, "maxItems": 3},
    "min_tokens": {"enum": [0, None]},
    "n": {"enum": [1, 2, None]},
    "tokens": {"type": "array", "items": TOKEN, "maxItems": 9},
    "include": {"enum": [["message.output_text.logprobs"], [], None]},
    "text": {"enum": [{"format": {"type": "text"}}, None]},
    "prompt": {
        "anyOf": [
            {"type": "string", "minLength": 1},
            {"type": "array", "items": TOKEN, "minItems": 1, "maxItems": 9},
            {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        ]
    },
    "response_format": {
        "enum": [
            None,
            {"type": "text"},
            {"type": "json_object"},
            *({"type": "json_schema", "json_schema": {"schema": schema}} for schema in SCHEMAS),
        ]
    },
    "guided_json": None,
    "guided_regex": None,
    "guided_choice": None,
    "guided_grammar": None,
    "grammar": None,
    "structured_outputs": None,
    "stream_options": None,
    "max_tokens": None,
    "messages": {
        "type": "array",
        "minItems": 1,
        "maxItems": 3,
        "items": {"$ref": "#/components/schemas/Message"},
    },
    "tool_choice": {"enum": ["none", "auto", None]},
    "chat_template_kwargs": {"enum": [{"enable_thinking": False}, {}, None]},
    "add_special_tokens": {"enum": [False, None]},
}
# Of two that exclude or need each other, which is kept.
OF_ROUTE: dict[str, dict[str, Any]] = {
    "ChatRequest": {"top_logprobs": None, "logprobs": {"type": "boolean"}},
    "TokenizeRequest": {"prompt": None, "add_special_tokens": None},
    "ResponsesRequest": {
        # Bytes are tokens here.
        "input": {"type": "string", "maxLength": 8},
        "max_output_tokens": {"enum": [1, 8, None]},
        "top_logprobs": {"enum": [0, 5, None]},
    },
}
TEXT_OF_CALL = {"type": "string", "enum": ["{}", '{"é": [1.50, null]}']}


def known() -> dict[str, Any]:
    """The document with what a client knows besides."""
    out = document()
    schemas = out["components"]["schemas"]
    for name, schema in schemas.items():
        if not name.endswith("Request"):
            continue
        schema["additionalProperties"] = False
        for field, value in (KNOWN | OF_ROUTE.get(name, {})).items():
            if field in schema["properties"]:
                if value is None:
                    del schema["properties"][field]
                else:
                    schema["properties"][field] = value
    schemas["ToolCall"]["properties"]["function"]["properties"]["arguments"] = TEXT_OF_CALL
    schemas["TokenizeRequest"]["required"] = ["messages"]
    return out


def fuzz(
    server: Live[grout.Engine],
    schema: dict[str, Any],
    path: str,
    method: str,
    mode: GenerationMode,
    examples: int,
) -> Counter[int]:
    """How often there was which status, after checking every answer."""
    operation = schemathesis.openapi.from_dict(schema)[path][method]
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=examples,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        response = case.call(base_url=server.url, session=session)
        assert response.status_code < 500, response.text
        statuses[response.status_code] += 1
        if response.status_code >= 400:
            error = response.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"}
            assert error["message"] and error["type"] == "invalid_request_error"

    with requests.Session() as session:
        session.trust_env = False
        run()
    return statuses


@pytest.mark.slow
@pytest.mark.parametrize(("path", "method"), VARIED)
def test_what_the_document_allows(small: Live[grout.Engine], path: str, method: str) -> None:
    mode = GenerationMode.POSITIVE
    statuses = fuzz(small, document(), path, method, mode, 10)
    assert statuses.keys() <= {200, 400, 404}
    if path in REFUSED:
        assert 200 not in statuses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "method"), [one for one in VARIED if one[0] not in REFUSED and one[1] == "POST"]
)
def test_what_a_client_would_send(small: Live[grout.Engine], path: str, method: str) -> None:
    statuses = fuzz(small, known(), path, method, GenerationMode.POSITIVE, 25)
    # Not all: `1.0` is an integer to JSON Schema.
    assert statuses[200] >= statuses.total() / 2, statuses


@pytest.mark.slow
@pytest.mark.parametrize(("path", "method"), [one for one in VARIED if one[1] == "POST"])
def test_what_the_document_forbids(small: Live[grout.Engine], path: str, method: str) -> None:
    statuses = fuzz(small, document(), path, method, GenerationMode.NEGATIVE, 20)
    assert statuses.keys() <= {400, 404, 413, 415}, statuses
    running = small.engine.stats()
    assert (running["running"], running["waiting"]) == (0, 0)


def test_the_document_allows_what_is_let_be(small: Live[grout.Engine]) -> None:
    """Drawn bodies without these were answered where the document forbade them."""
    call = {"function": {"name": "now"}}
    message = {"role": "assistant", "tool_calls": [call], "unknown": None}
    with requests.Session() as session:
        session.trust_env = False
        for body in ({"messages": [message]}, {"messages": [message], "unknown": None}):
            response = session.post(f"{small.url}/tokenize", json=body)
            assert response.status_code == 200, response.text
    schemas = document()["components"]["schemas"]
    assert schemas["ToolCall"]["required"] == ["function"]
    assert schemas["ToolCall"]["properties"]["function"]["required"] == ["name"]
    assert schemas["TokenizeRequest"]["additionalProperties"] == {"type": "null"}
