"""A server that is told to stop: each request still gets an end that its client understands."""

import contextlib
import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from server.http_server import REPEAT_SECONDS
from tests.server.command import FAKE_COMMAND, start
from tests.server.fakes import Live, wait_for
from tests.server.tiny import open_tiny

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "a secret word"}]},
    COMPLETIONS: {"prompt": "a secret word", "max_tokens": 10**8},
    RESPONSES: {"input": "a secret word"},
}
ENDLESS: dict[str, object] = {"endless": True, "delay": 0.01, "max_model_len": 10**9}


class Served:
    """A server in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        self.process = process
        self.connections: list[HTTPConnection] = []
        self.address = urlsplit(process.stdout.readline().split()[-1]).netloc
        process.stdout.readline()

    def connect(self) -> HTTPConnection:
        connection = HTTPConnection(self.address, timeout=60)
        self.connections.append(connection)
        return connection

    def send(self, path: str, **more: Any) -> HTTPConnection:
        """Send a request, its answer unread."""
        connection = self.connect()
        body = json.dumps({**BODIES[path], **more})
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        return connection

    def metric(self, name: str) -> float:
        connection = self.connect()
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        found = [line for line in text.splitlines() if line.startswith(f"grout:{name}{{")]
        return float(found[0].split()[-1]) if found else 0.0

    def wait_running(self, requests: int) -> None:
        wait_for(lambda: self.metric("num_requests_running") == requests)

    def told(self, text: str) -> str:
        """The next line on stderr that holds `text`."""
        assert self.process.stderr is not None
        return next(line for line in self.process.stderr if text in line)

    def ended(self) -> list[dict[str, Any]]:
        """Wait for the end; returns the request log."""
        out, err = self.process.communicate(timeout=60)
        assert (self.process.returncode, out) == (0, "grout: stopped\n")
        assert "Traceback" not in err
        assert "never retrieved" not in err
        return [json.loads(line) for line in err.splitlines() if line.startswith("{")]


def served(*flags: str, **fake: object) -> contextlib.AbstractContextManager[Served]:
    """A server of `FakeEngine(**fake)`, whose replies have no end."""
    return serving(*flags, fake={**ENDLESS, **fake})


@contextlib.contextmanager
def serving(*flags: str, fake: dict[str, object], code: str = FAKE_COMMAND) -> Iterator[Served]:
    with start("serve", "--port", "0", *flags, fake=fake, code=code) as process:
        server = Served(process)
        try:
            yield server
        finally:
            process.kill()
            for connection in server.connections:
                connection.close()


def events(response: HTTPResponse) -> list[dict[str, Any]]:
    """The rest of a stream, which must be complete, without [DONE]."""
    lines = [line for line in response.read().decode().splitlines() if line.startswith("data: ")]
    if lines[-1] == "data: [DONE]":
        del lines[-1]
    return [json.loads(line[6:]) for line in lines]


def is_refusal(connection: HTTPConnection) -> None:
    response = connection.getresponse()
    error = json.loads(response.read())["error"]
    assert (response.status, error["type"], error["code"]) == (503, "server_error", "engine_down")
    assert int(response.headers["retry-after"]) >= 1
    assert response.headers["x-request-id"]
    assert response.will_close


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_what_runs_too_long_is_told(stop: signal.Signals) -> None:
    with served("--shutdown-timeout", "0.3") as server:
        streamed = [
            server.send(path, stream=True, **more)
            for path, more in (
                (CHAT, {}),
                (CHAT, {}),
                (CHAT, {"n": 3}),
                (COMPLETIONS, {}),
                (COMPLETIONS, {"n": 2}),
                (RESPONSES, {}),
            )
        ]
        plain = [
            server.send(path, **more)
            for path, more in ((CHAT, {}), (CHAT, {"n": 3}), (COMPLETIONS, {}), (RESPONSES, {}))
        ]
        idle = server.connect()
        idle.connect()
        reading = server.connect()
        reading.putrequest("POST", CHAT)
        reading.putheader("Content-Type", "application/json")
        reading.putheader("Content-Length", "1000")
        reading.endheaders(b"{")
        responses = [connection.getresponse() for connection in streamed]
        for response in responses:
            response.readline()
        server.wait_running(9 + 6)
        server.process.send_signal(stop)
        for connection in [*plain, reading]:
            is_refusal(connection)
        *unnamed, named = [events(response) for response in responses]
        log = server.ended()
    for stream in unnamed:
        assert [event for event in stream if "error" in event] == stream[-1:]
        assert stream[-1]["error"]["code"] == "engine_down"
        assert stream[-1]["error"]["type"] == "server_error"
    assert named[-1]["type"] == "response.failed"
    assert "stopping" in named[-1]["response"]["error"]["message"]
    lines = [line for line in log if line["path"] != "/metrics"]
    assert sorted(line["status"] for line in lines) == [200] * 6 + [503] * 5
    for line in lines:
        if line["status"] == 200:
            assert line["error"] == "engine_down"
        if "finish_reasons" in line:
            assert set(line["finish_reasons"]) == {"abort"}


def test_requests_that_come_while_stopping() -> None:
    with served("--shutdown-timeout", "600") as server:
        kept = [server.connect() for _ in BODIES]
        for connection in kept:
            connection.request("GET", "/health")
            assert connection.getresponse().read() == b'{"status":"ok"}'
        idle = server.connect()
        idle.request("GET", "/health")
        idle.getresponse().read()
        running = server.send(CHAT, stream=True)
        response = running.getresponse()
        response.readline()
        server.process.send_signal(signal.SIGTERM)
        server.told("stopping; up to 600 s for 1 running requests")
        idle.request("GET", "/health")
        is_refusal(idle)
        for connection, (path, body) in zip(kept, BODIES.items(), strict=True):
            raw = json.dumps(body).encode() + b" " * 300_000
            connection.request("POST", path, raw, {"Content-Type": "application/json"})
            is_refusal(connection)
        with pytest.raises(ConnectionRefusedError):
            server.connect().connect()
        # What runs is not touched, until someone presses Ctrl-C again.
        for _ in range(20):
            assert response.readline()
        server.process.send_signal(signal.SIGINT)
        assert events(response)[-1]["error"]["code"] == "engine_down"
        server.ended()


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_signals_again_and_again_while_nothing_runs(stop: signal.Signals) -> None:
    """Until the process is gone, as an impatient person or several launchers send them."""
    with served() as server:
        while server.process.poll() is None:
            server.process.send_signal(stop)
            time.sleep(0.001)
        assert server.ended() == []


def test_a_second_sigterm_ends_the_wait() -> None:
    with served("--shutdown-timeout", "600") as server:
        response = server.send(CHAT, stream=True).getresponse()
        response.readline()
        server.process.send_signal(signal.SIGTERM)
        server.told("stopping")
        time.sleep(REPEAT_SECONDS)  # sooner it is the same one
        server.process.send_signal(signal.SIGTERM)
        assert events(response)[-1]["error"]["code"] == "engine_down"
        [line] = server.ended()
    assert (line["status"], line["finish_reasons"]) == (200, ["abort"])
    assert line["error"] == "engine_down"


def test_clients_that_have_stopped_reading_do_not_keep_the_server() -> None:
    with served("--shutdown-timeout", "0", reply=["x" * 2048], delay=0) as server:
        for path in BODIES:
            server.send(path, stream=True)
        server.wait_running(len(BODIES))
        counts = [-1.0]
        while counts[-3:] != [counts[-1]] * 3 or counts[-1] == 0:
            time.sleep(0.1)
            counts.append(server.metric("generation_tokens_total"))
        assert server.metric("num_requests_running") == len(BODIES)
        server.process.send_signal(signal.SIGTERM)
        log = server.ended()
    lines = [line for line in log if line["path"] in BODIES]
    assert [line["finish_reasons"] for line in lines] == [["abort"]] * len(BODIES)


def test_half_a_request_line_does_not_keep_the_server() -> None:
    with served("--shutdown-timeout", "0") as server:
        host, port = server.address.split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"POST /v1/chat")
            server.metric("num_requests_running")
            server.process.send_signal(signal.SIGTERM)
            assert connection.recv(1) == b""
        assert server.ended() == []


def test_the_engine_is_empty_at_the_end(tmp_path: Path) -> None:
    """With running and waiting requests, streams and others."""
    with open_tiny(tmp_path, max_num_seqs=3) as engine:
        with Live(engine) as server:
            host = urlsplit(server.url).netloc
            bodies = [BODIES[CHAT] | {"stream": i % 2 == 0, "n": 1 + i % 3} for i in range(8)]
            connections = [HTTPConnection(host, timeout=60) for _ in bodies]
            for connection, body in zip(connections, bodies, strict=True):
                raw = json.dumps(body | {"ignore_eos": True, "max_tokens": 40_000})
                connection.request("POST", CHAT, raw, {"Content-Type": "application/json"})
            wait_for(lambda: engine.stats()["running"] + engine.stats()["waiting"] == 15)
            server.stop()
            for connection in connections:
                response = connection.getresponse()
                if response.status == 200:
                    assert events(response)[-1]["error"]["code"] == "engine_down"
                else:
                    assert json.loads(response.read())["error"]["code"] == "engine_down"
                connection.close()
        stats = engine.stats()
    assert (stats["running"], stats["waiting"], stats["requests_finished"]) == (0, 0, 0)
    assert stats["pages_free"] == stats["pages_total"]
