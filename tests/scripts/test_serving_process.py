"""Servers that scripts start: they end with whoever started them."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SERVER = """
import http.server, os, pathlib, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): pass
pathlib.Path(sys.argv[2]).write_text(str(os.getpid()))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
STARTS = """
import signal, sys, time
from scripts.serving_process import started
# Whoever runs these tests may ignore them.
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
with started(sys.argv[1], sys.argv[2], 30.0):
    print("up", flush=True)
    time.sleep(60)
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port: int = held.getsockname()[1]
        return port


def lives(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_server_ends_with_the_script_that_started_it(
    number: signal.Signals, tmp_path: Path
) -> None:
    port, server, written = free_port(), tmp_path / "server.py", tmp_path / "pid"
    server.write_text(SERVER)
    command = f"{sys.executable} {server} {port} {written}"
    script = [sys.executable, "-c", STARTS, command, f"http://127.0.0.1:{port}"]
    with subprocess.Popen(script, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        pid = int(written.read_text())
        assert lives(pid)
        process.send_signal(number)
        status = process.wait(30)
    # Who is interrupted says so by the signal itself.
    assert status == (-number if number == signal.SIGINT else 128 + number)
    until = time.monotonic() + 10
    while lives(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not lives(pid)
