"""What stands around the routes: CORS, queue, timeouts, logs, metrics, names, options."""

import argparse
import contextlib
import json
import logging
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from grout.errors import QueueFull, RequestTimeout
from server.cli import _key, _serve_parser, main
from server.configuration import doubts, resolve
from server.exceptions import CommandError
from server.serve import _check_tls, _LogHandler
from server.settings import Settings
from tests.server.fakes import MODEL, FakeEngine, Live, live, wait_for

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "a secret word"}]}


def client_of(server: Live[Any]) -> httpx.Client:
    return httpx.Client(base_url=server.url, trust_env=False, timeout=60)


def test_cors() -> None:
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    settings = Settings(cors_origins=("https://a.example",), api_keys=("k",))
    with live(settings) as server, client_of(server) as http:
        allowed = http.options(CHAT, headers=headers)
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        # A refusal is readable, too.
        refused = http.post(CHAT, json=ASK, headers={"Origin": "https://a.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"
        other = http.options(CHAT, headers={**headers, "Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


def test_no_cors_unless_asked_for(http: httpx.Client) -> None:
    response = http.post(CHAT, json=ASK, headers={"Origin": "https://a.example"})
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_a_full_queue_is_429(
    http: httpx.Client, engine: FakeEngine, stream: bool, late: bool
) -> None:
    if late:
        engine.fail_after, engine.failure = 0, QueueFull(9, 8)
    else:
        engine.refusal = QueueFull(9, 8)
    response = http.post(CHAT, json={**ASK, "stream": stream})
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (429, "rate_limit_error")
    assert int(response.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {**ASK, "n": 4}, "n"),
        ("/v1/completions", {"prompt": "x", "n": 4}, "n"),
        ("/v1/completions", {"prompt": ["x"] * 4}, "prompt"),
        ("/v1/completions", {"prompt": ["x"] * 2, "n": 2}, "n"),
    ],
)
def test_more_answers_than_are_ever_taken(
    http: httpx.Client, engine: FakeEngine, path: str, body: dict[str, Any], param: str
) -> None:
    """Not 429: trying again would not help."""
    engine.max_requests = 3
    response = http.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert "takes 3 at once" in error["message"] and "retry-after" not in response.headers
    assert engine.requests == []
    engine.max_requests = 4
    assert http.post(path, json=body).status_code == 200


@pytest.mark.parametrize("key", ["k", "two words", "à"])
def test_keys_are_taken_without_the_space_around_them(key: str) -> None:
    assert _key(f" {key}\t") == key
    with live(Settings(api_keys=(key,))) as server, client_of(server) as http:
        for sent, status in ((key, 200), (f"{key}x", 401), ("x", 401)):
            headers = {b"Authorization": b"Bearer  " + sent.encode()}
            assert http.post(CHAT, json=ASK, headers=headers).status_code == status


def test_the_engines_timeout_is_504(http: httpx.Client, engine: FakeEngine) -> None:
    engine.fail_after, engine.failure = 0, RequestTimeout(3)
    response = http.post(CHAT, json=ASK)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (504, "server_error", "timeout")
    assert "(3 s)" in error["message"]


def test_bodies_that_never_end() -> None:
    with live(Settings(receive_seconds=0.2)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(
                f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                "Content-Length: 100\r\n\r\n{".encode()
            )
            assert b" 408 " in connection.recv(4096).splitlines()[0]


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(r.message) for r in caplog.records if r.name == "grout.requests"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_line_a_request(caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    caplog.set_level(logging.INFO, "grout.requests")
    with live(Settings(log_requests="summary")) as server, client_of(server) as http:
        response = http.post(
            CHAT, json={**ASK, "stream": stream}, headers={"X-Request-Id": "mine-1"}
        )
        assert response.headers["x-request-id"] == "mine-1"
        http.get("/health")
        http.post(CHAT, content=b"{", headers={"X-Request-Id": "not mine\u00e9".encode()})
        wait_for(lambda: len(lines(caplog)) == 2)
    first, second = lines(caplog)
    assert (first["id"], first["path"], first["status"]) == ("mine-1", CHAT, 200)
    assert (first["stream"], first["completion_tokens"]) == (stream, 8)
    assert first["finish_reasons"] == ["stop"]
    assert second["status"] == 415
    assert second["id"].startswith("req_")
    assert "secret" not in caplog.text


def test_text_only_where_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "grout.requests")
    with live(Settings(log_requests="text")) as server, client_of(server) as http:
        http.post(CHAT, json=ASK)
        wait_for(lambda: len(lines(caplog)) == 1)
    assert "a secret word" in lines(caplog)[0]["body"]


def test_a_full_disk_for_logs() -> None:
    logger = logging.getLogger("grout.test")
    with open("/dev/full", "w") as full:
        handler = _LogHandler(full)
        logger.addHandler(handler)
        logger.error("x" * 100_000)
        logger.removeHandler(handler)
        handler.stream = None
        with contextlib.suppress(OSError):
            full.close()


def test_metrics(http: httpx.Client, server: Live[FakeEngine]) -> None:
    def value(name: str) -> float:
        text = http.get("/metrics").text
        found = [line for line in text.splitlines() if line.startswith(name)]
        return float(found[0].split()[-1]) if found else 0.0

    label = f'{{model_name="{MODEL}"}}'
    before = value(f"grout:generation_tokens_total{label}")
    reason = f'grout:request_success_total{{finished_reason="stop",model_name="{MODEL}"}}'
    stopped = value(reason)
    http.post(CHAT, json=ASK)
    assert value(f"grout:generation_tokens_total{label}") == before + 8
    assert value(reason) == stopped + 1
    assert value(f"grout:num_requests_running{label}") == 0
    assert value(f"grout:kv_cache_usage_perc{label}") == 0.25
    assert value(f"grout:time_to_first_token_seconds_count{label}") >= 1
    assert value(f"grout:inter_token_latency_seconds_count{label}") >= 7
    assert value(f"grout:e2e_request_latency_seconds_count{label}") >= 1


def test_several_names() -> None:
    with live(Settings(names=("one", "two"))) as server, client_of(server) as http:
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["one", "two"]
        for name, shown in (("two", "two"), ("one", "one"), (None, "one")):
            assert http.post(CHAT, json={**ASK, "model": name}).json()["model"] == shown
        error = http.post(CHAT, json={**ASK, "model": MODEL}).json()["error"]
        assert "'one', 'two'" in error["message"]


def test_version(http: httpx.Client) -> None:
    assert set(http.get("/version").json()) == {"version"}


def options(*arguments: str, environ: dict[str, str] | None = None) -> dict[str, Any]:
    parser = _serve_parser()
    return vars(resolve(parser.parse_args(arguments), parser, environ or {}))


def test_options_come_from_three_places(tmp_path: Path) -> None:
    file = tmp_path / "grout.toml"
    file.write_text(
        'model = "file/model"\nport = 1\nhost = "::"\nmax-num-seqs = 3\nenforce_eager = true\n'
        'api-key = ["f1", "f2"]\nserved-model-name = ["a", "b"]\nprefill-chunk = 64\n'
    )
    environ = {"GROUT_PORT": "2", "GROUT_MAX_NUM_SEQS": "4", "GROUT_API_KEY": "e1,e2",
               "GROUT_CACHE": "elsewhere", "GROUT_CONFIG": str(file)}  # fmt: skip
    found = options("--port", "3", environ=environ)
    assert (found["port"], found["max_num_seqs"], found["host"]) == (3, 4, "::")
    assert (found["model"], found["enforce_eager"], found["prefill_chunk"]) == (
        "file/model",
        True,
        64,
    )
    assert (found["api_key"], found["served_model_name"]) == (["e1", "e2"], ["a", "b"])
    assert options("given", "--config", str(file))["model"] == "given"
    defaults = options()
    assert (defaults["port"], defaults["log_requests"]) == (8000, "summary")
    assert "max_num_seqs" not in defaults  # the engine's own


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot = 1", "grout.toml: prot: there is no such option"),
        ("config = 'x'", "there is no such option"),
        ("port = 'x'", "grout.toml: port: argument --port: 'x' is not a port"),
        ("port = true", "True is not a value"),
        ("[server]\nport = 1", "there is no such option"),
        ("enforce-eager = 1", "must be true or false"),
        ("port = ", "is not TOML"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "grout.toml"
    file.write_text(text)
    with pytest.raises(CommandError, match=r"grout\.toml") as caught:
        options("--config", str(file))
    assert says in str(caught.value)


def test_variables_that_are_no_options_are_named() -> None:
    environ = {"GROUT_MAX_NUM_SEQ": "3", "GROUT_SERVICE_HOST": "10.0.0.1", "GROUT_CACHE": "/x",
               "GROUT_PORT": "1", "GROUT_CONFIG": "f", "PATH": "", "grout_maxx": "1"}  # fmt: skip
    ignored = "is no option of serve, and is ignored"
    assert doubts(_serve_parser(), environ) == [
        f"warning: the variable GROUT_MAX_NUM_SEQ {ignored}; did you mean GROUT_MAX_NUM_SEQS?",
        f"warning: the variable GROUT_SERVICE_HOST {ignored}",
    ]


def test_wrong_variables_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="GROUT_PORT: argument --port"):
        options(environ={"GROUT_PORT": "many"})
    with pytest.raises(CommandError, match="neither true nor false"):
        options(environ={"GROUT_ENFORCE_EAGER": "perhaps"})
    with pytest.raises(CommandError, match="No such file"):
        options("--config", str(tmp_path / "none.toml"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ssl-keyfile", "k"], "needs --ssl-certfile"),
        (["--ssl-certfile", "/nowhere"], "cannot serve TLS with /nowhere"),
        (["--request-timeout", "soon"], "'soon' is not a number of seconds"),
        (["--request-timeout", "0", "--port", "0"], "request_timeout must be"),
        (["--max-body-bytes", "0"], "'0' is not a whole number above 0"),
        (["--log-requests", "all"], "invalid choice"),
        (["--prefill-chunk", "0", "--port", "0"], "prefill_chunk must be"),
    ],
)
def test_wrong_options(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    assert main(["serve", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_file_that_is_no_certificate(tmp_path: Path) -> None:
    file = tmp_path / "x.pem"
    file.write_text("x")
    with pytest.raises(CommandError, match="cannot serve TLS"):
        _check_tls(argparse.Namespace(ssl_certfile=str(file), ssl_keyfile=None))
