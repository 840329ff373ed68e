"""A device call that never returns: requests are told, and the process still ends."""

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from server.http_server import REPEAT_SECONDS, HttpServer
from server.opening import HUNG, close_engine
from server.settings import Settings
from tests.server.fakes import FakeEngine, wait_for
from tests.server.test_stopping import CHAT, COMPLETIONS, RESPONSES, Served, events, serving

# The command on a tiny model, one of whose steps waits for a pipe that nobody writes: one after all
# three of `LONG` have come.
HUNG_COMMAND = """
import json, os, signal, sys, grout
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
from server.cli import main
from tests.server.tiny import open_tiny
original = grout.create_engine
def create_engine(config, progress=None):
    grout.create_engine = original
    folder = Path(json.loads(os.environ["FAKE"])["folder"])
    engine = open_tiny(
        folder, step_timeout=config.step_timeout, request_timeout=config.request_timeout
    )
    engine.eos_token_ids = ()
    decode, (silent, _) = engine.runner.decode, os.pipe()
    def hang(*arguments):
        stats = engine.stats()
        if stats["running"] == 3 and stats["generated_tokens"] > 8:
            print("it hangs", file=sys.stderr, flush=True)
            os.read(silent, 1)
        return decode(*arguments)
    engine.runner.decode = hang
    return engine
grout.create_engine = create_engine
sys.exit(main(sys.argv[1:]))
"""
LONG: dict[str, dict[str, Any]] = {
    CHAT: {"max_tokens": 40_000},
    COMPLETIONS: {"max_tokens": 40_000},
    RESPONSES: {"max_output_tokens": 40_000},
}


@pytest.fixture
def hung(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server told that a step should take two seconds, far more than it does, and more flags."""
    flags = ["--step-timeout", "2", *request.param]
    with serving(*flags, fake={"folder": str(tmp_path)}, code=HUNG_COMMAND) as server:
        yield server


def health(server: Served) -> tuple[int, str]:
    connection = server.connect()
    connection.request("GET", "/health")
    response = connection.getresponse()
    return response.status, json.loads(response.read())["status"]


def streams_until_it_hangs(server: Served) -> list[HTTPConnection]:
    """Streams of every kind that have begun; none brings more."""
    connections = [server.send(path, stream=True, **more) for path, more in LONG.items()]
    server.told("it hangs")
    wait_for(lambda: health(server) == (503, "a step of the engine does not end"))
    return connections


def end_of(process: "subprocess.Popen[str]") -> str:
    """Wait for the end; returns what was said on stderr."""
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Traceback" not in err
    assert "the engine's step under way does not end; leaving without it" in err
    return err


def error_code(connection: HTTPConnection) -> tuple[int, str]:
    """Status, and code of the error that a stream ends in or a refusal is."""
    response = connection.getresponse()
    if response.status != 200:
        return response.status, json.loads(response.read())["error"]["code"]
    last = events(response)[-1]
    error = last["error"] if "error" in last else last["response"]["error"]
    return 200, error["code"]


@pytest.mark.parametrize("hung", [["--shutdown-timeout", "0.2"]], indirect=True)
def test_sigterm_ends_a_server_that_hangs(hung: Served) -> None:
    streams = streams_until_it_hangs(hung)
    for path, more in LONG.items():
        assert error_code(hung.send(path, **more)) == (503, "engine_down")
    assert hung.metric("num_requests_running") == 3
    hung.process.send_signal(signal.SIGTERM)
    codes = [error_code(connection) for connection in streams]
    # Those whose first token had not come are refused as a whole.
    assert {code for _, code in codes} <= {"engine_down", "server_error"}
    assert "ending 3 requests that still run" in end_of(hung.process)


@pytest.mark.parametrize("hung", [["--shutdown-timeout", "600"]], indirect=True)
@pytest.mark.parametrize("again", [signal.SIGTERM, signal.SIGINT])
def test_another_signal_ends_the_wait_for_it(hung: Served, again: signal.Signals) -> None:
    streams = streams_until_it_hangs(hung)
    hung.process.send_signal(signal.SIGTERM)
    hung.told("stopping; up to 600 s")

    def ended() -> bool:
        hung.process.send_signal(again)
        try:
            return hung.process.wait(0.3) is not None
        except subprocess.TimeoutExpired:
            return False

    wait_for(ended)
    end_of(hung.process)
    for connection in streams:
        assert error_code(connection)[1] in ("engine_down", "server_error")


@pytest.mark.parametrize("hung", [["--request-timeout", "4"]], indirect=True)
def test_requests_in_it_time_out(hung: Served) -> None:
    for connection in streams_until_it_hangs(hung):
        assert error_code(connection)[1] in ("timeout", "server_error")


def test_a_sigterm_that_launchers_pass_on_is_the_same_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("server.http_server.time.monotonic", lambda: now[0])

    def server() -> Callable[[signal.Signals], tuple[bool, bool]]:
        made = HttpServer(FakeEngine(), Settings(), drain_seconds=1)

        def told(sent: signal.Signals) -> tuple[bool, bool]:
            made.handle_exit(sent, None)
            return made.should_exit, made.force_exit

        return told

    told = server()
    assert told(signal.SIGTERM) == (True, False)
    now[0] += REPEAT_SECONDS / 2
    assert told(signal.SIGTERM) == (True, False)
    now[0] += REPEAT_SECONDS
    assert told(signal.SIGTERM) == (True, True)
    # Who presses Ctrl-C twice means it.
    told = server()
    assert told(signal.SIGINT) == (True, False)
    assert told(signal.SIGINT) == (True, True)


@pytest.mark.parametrize(("hung", "code"), [(True, HUNG), (False, 0)])
def test_a_slow_step_is_no_failure_and_ctrl_c_ends_the_wait(
    hung: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Slow(FakeEngine):
        def close(self, timeout: float | None = None) -> bool:
            if timeout:
                raise KeyboardInterrupt
            return False

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr("server.opening.os._exit", leave)
    with pytest.raises(SystemExit) as caught:
        close_engine(Slow(hung=hung))
    assert caught.value.code == code
    assert ("does not end" in capsys.readouterr().err) == hung
