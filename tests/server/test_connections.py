"""What clients do with connections, byte by byte; and clients that die."""

import json
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import grout
from server.settings import Settings
from tests.server.fakes import FakeEngine, Live, live, wait_for
from tests.server.tiny import open_tiny

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Hi"}]}


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def post(body: object, *headers: str, path: str = CHAT) -> bytes:
    raw = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(raw)}", "", ""]).encode() + raw


def everything(connection: socket.socket) -> bytes:
    """What comes until the server closes."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def test_head_health(http: httpx.Client, engine: FakeEngine) -> None:
    response = http.head("/health")
    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["content-length"] == str(len(http.get("/health").content))
    engine.alive = False
    assert http.head("/health").status_code == 503


@pytest.mark.parametrize("stream", [False, True])
def test_a_half_closed_client_has_left(
    server: Live[FakeEngine], http: httpx.Client, engine: FakeEngine, stream: bool
) -> None:
    engine.endless, engine.delay, engine.max_model_len = True, 0.01, 10**9
    with connect(server.url) as connection:
        connection.sendall(post({**ASK, "stream": stream}))
        wait_for(lambda: engine.running == 1)
        if stream:
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        connection.shutdown(socket.SHUT_WR)
        received = everything(connection)
    assert b"[DONE]" not in received and (stream or received == b"")
    wait_for(lambda: engine.running == 0)
    assert engine.aborted == 1
    assert http.get("/health").status_code == 200


def test_pipelined_requests_are_answered_in_order(
    server: Live[FakeEngine], engine: FakeEngine
) -> None:
    engine.delay = 0.002
    requests = [
        post({**ASK, "stream": True}, "X-Request-Id: first"),
        post({**ASK, "n": 2}, "X-Request-Id: second"),
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: third\r\n\r\n",
        post({"prompt": "x"}, "X-Request-Id: last", "Connection: close", path="/v1/completions"),
    ]
    with connect(server.url) as connection:
        connection.sendall(b"".join(requests))
        received = everything(connection)
    heads = [part for part in received.split(b"\r\n") if part.startswith(b"x-request-id: ")]
    assert [head.removeprefix(b"x-request-id: ") for head in heads] == [
        b"first",
        b"second",
        b"third",
        b"last",
    ]
    assert received.count(b"HTTP/1.1 200 OK") == 4
    stream = received[: received.index(b"x-request-id: second")]
    assert stream.index(b"data: [DONE]") < len(stream)
    assert json.loads(received.rpartition(b"\r\n\r\n")[2])["choices"][0]["text"] == engine.text


UPGRADES = [
    ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAoAAA"),
    ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"),
]
SMUGGLED = b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.mark.parametrize("headers", UPGRADES)
def test_upgrades_are_ignored(
    server: Live[FakeEngine], engine: FakeEngine, headers: tuple[str, ...]
) -> None:
    upgrading = post({"prompt": "x"}, *headers, path="/v1/completions")
    head, _, body = upgrading.partition(b"\r\n\r\n")
    chunked = head.replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked")
    chunked += b"\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    without_body = "\r\n".join(["GET /health HTTP/1.1", "Host: x", *headers, "", ""]).encode()
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with connect(server.url) as connection:
        connection.sendall(b"".join([upgrading, without_body, chunked, upgrading, last]))
        received = everything(connection)
    assert received.count(b"HTTP/1.1 ") == received.count(b"HTTP/1.1 200 OK") == 5
    assert received.count(b'"text":') == len(engine.requests) == 3


@pytest.mark.parametrize("headers", UPGRADES)
def test_the_body_of_a_request_with_an_upgrade_is_no_request(
    server: Live[FakeEngine], headers: tuple[str, ...]
) -> None:
    head = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    head += ["Expect: 100-continue", f"Content-Length: {len(SMUGGLED)}", "", ""]
    with connect(server.url) as connection:
        connection.sendall("\r\n".join(head).encode())
        assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(SMUGGLED)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        received = everything(connection)
    answers = [part[:3] for part in received.split(b"HTTP/1.1 ")[1:]]
    assert answers == [b"400", b"200"]
    assert b"invalid_json" in received and b'"version"' not in received


@pytest.mark.parametrize("target", [b"a:443", b"/health"])
def test_nothing_after_a_connect_is_a_request(server: Live[FakeEngine], target: bytes) -> None:
    with connect(server.url) as connection:
        connection.sendall(b"CONNECT %s HTTP/1.1\r\nHost: a\r\n\r\n%s" % (target, SMUGGLED))
        received = everything(connection)
    assert received.startswith(b"HTTP/1.1 400 ") and received.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    "head",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 1_000_000,
        b"GET /" + b"x" * 1_000_000,
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-Many: x\r\n" * 100_000,
        b"nonsense\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_heads_that_are_none(server: Live[FakeEngine], http: httpx.Client, head: bytes) -> None:
    with connect(server.url) as connection:
        received = b""
        try:
            connection.sendall(head)
            received = everything(connection)
        except ConnectionError:
            pass  # closed on what was still being sent
    assert received[:12] in (b"", b"HTTP/1.1 400", b"HTTP/1.1 415")
    assert http.get("/health").status_code == 200


def test_the_size_of_a_body_is_refused_before_it_is_sent() -> None:
    expect = "Expect: 100-continue"
    with live(Settings(max_body_bytes=1000)) as server:
        with connect(server.url) as connection:
            head = post({"prompt": "x" * 1000}, expect).partition(b"\r\n\r\n")[0]
            connection.sendall(head + b"\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")
        with connect(server.url) as connection:
            head, _, body = post(ASK, expect, "Connection: close").partition(b"\r\n\r\n")
            connection.sendall(head + b"\r\n\r\n")
            assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
            connection.sendall(body)
            assert everything(connection).startswith(b"HTTP/1.1 200 ")


def test_heads_that_never_end_are_closed() -> None:
    with live(Settings(receive_seconds=0.3), endless=True, delay=0.01, max_model_len=10**9) as it:
        with connect(it.url) as silent, connect(it.url) as slow, connect(it.url) as again:
            slow.sendall(b"GET /health HTT")
            again.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTT")
            # A connection whose answer takes longer than that is not idle.
            with connect(it.url) as busy:
                busy.sendall(post({**ASK, "stream": True}))
                assert busy.recv(65536).startswith(b"HTTP/1.1 200 ")
                assert everything(silent) == b""
                assert everything(slow) == b""
                assert everything(again).startswith(b"HTTP/1.1 200 ")
                assert it.engine.running == 1
        wait_for(lambda: it.engine.running == 0)


def test_a_body_that_trickles() -> None:
    """The time is for all of a body, however often a byte of it comes."""
    with live(Settings(receive_seconds=0.5)) as server, connect(server.url) as connection:
        head = post({}).partition(b"Content-Length")[0]
        connection.sendall(head + b"Content-Length: 9999\r\n\r\n{")
        while not select.select([connection], [], [], 0.05)[0]:
            connection.sendall(b" ")
        assert connection.recv(65536).startswith(b"HTTP/1.1 408 ")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live[grout.Engine]]:
    folder = tmp_path_factory.mktemp("models")
    with open_tiny(folder, max_num_seqs=4) as engine, Live(engine) as server:
        yield server


# Says when the request is sent, or a first piece of the answer is there; then waits for the rest.
CLIENT = """
import http.client, sys
host, body, stream = sys.argv[1:]
connection = http.client.HTTPConnection(host)
connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
if stream:
    connection.getresponse().readline()
print("under way", flush=True)
connection.getresponse().read() if not stream else sys.stdin.read()
"""


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_killed_client_is_aborted(real: Live[grout.Engine], stream: bool, n: int) -> None:
    before = real.engine.stats()
    body = json.dumps({**ASK, "ignore_eos": True, "stream": stream, "n": n})
    arguments = [real.url.removeprefix("http://"), body, "1" * stream]
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent,
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"under way\n"
        wait_for(lambda: real.engine.stats()["running"] == n)
        client.kill()
    wait_for(lambda: real.engine.stats()["running"] == 0)
    after = real.engine.stats()
    assert after["requests_aborted"] == before["requests_aborted"] + n
    assert after["requests_finished"] == before["requests_finished"]
    assert after["pages_free"] == after["pages_total"]
