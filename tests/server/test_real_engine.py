"""The server on the real engine, with a tiny model of made-up weights."""

import json
from collections.abc import Iterator

import httpx
import pytest

import grout
from tests.server.fakes import Live, wait_for

pytestmark = pytest.mark.slow

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "vocab_size": 320,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
ASK = {"messages": [{"role": "user", "content": "Hi 🙂"}], "max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live[grout.Engine]]:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    config = grout.EngineConfig(str(folder), device="cpu", load_format="dummy", seed=1)
    with grout.create_engine(config) as engine, Live(engine) as live:
        yield live


@pytest.fixture
def http(real: Live[grout.Engine]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=real.url, timeout=60, trust_env=False) as client:
        yield client


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": -5, "top_k": 10**12}])
def test_stream_equals_plain(http: httpx.Client, sampling: dict[str, int]) -> None:
    body = {**ASK, **sampling}
    plain = http.post("/v1/chat/completions", json=body).json()
    assert plain["model"] == "tiny"
    assert plain["usage"]["completion_tokens"] == 40
    assert plain["choices"][0]["finish_reason"] == "length"
    streamed = http.post("/v1/chat/completions", json={**body, "stream": True}).text
    *events, done, rest = streamed.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    deltas = [json.loads(event[6:])["choices"][0]["delta"] for event in events]
    text = "".join(delta.get("content", "") for delta in deltas)
    assert text == plain["choices"][0]["message"]["content"]
    assert text


def test_leaving_frees_the_engine(real: Live[grout.Engine], http: httpx.Client) -> None:
    body = {**ASK, "max_tokens": 400, "stream": True}
    before = real.engine.stats()["pages_free"]
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()  # kept: a dropped iterator closes the connection
        next(lines)
    wait_for(lambda: real.engine.stats()["requests_aborted"] == 1)
    assert real.engine.stats()["pages_free"] == before


def test_refusals_of_the_engine_itself(http: httpx.Client) -> None:
    body = {"prompt": "Hi", "stop_token_ids": [320], "stream": True}
    response = http.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stop_token_ids")


CHAT = "/v1/chat/completions"


def test_what_the_engine_does_for_the_api(http: httpx.Client) -> None:
    ask = {**ASK, "temperature": 0, "max_tokens": 4}
    entries = http.post(CHAT, json={**ask, "logprobs": True, "top_logprobs": 3}).json()
    [choice] = entries["choices"]
    content = choice["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 3 for entry in content)
    assert all(entry["logprob"] == entry["top_logprobs"][0]["logprob"] for entry in content)
    biased = http.post(CHAT, json={**ask, "logit_bias": {"65": 100}}).json()
    assert biased["choices"][0]["message"]["content"] == "AAAA"
    several = http.post(CHAT, json={**ask, "n": 3}).json()["choices"]
    assert len({choice["message"]["content"] for choice in several}) == 1
    picked = http.post("/v1/completions", json={"prompt": "Hi", "guided_choice": ["yes", "no"]})
    assert picked.json()["choices"][0]["text"] in ("yes", "no")
