"""`grout serve`: a model over HTTP until it is told to stop."""

import argparse
import contextlib
import json
import logging
import shlex
import signal
import socket
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

import uvicorn

from server.app import create_app
from server.exceptions import CommandError
from server.opening import open_engine
from server.origin import check_origin
from server.protocol import ServingEngine
from server.served import Served

__all__ = ["bind", "serve"]

SHUTDOWN_SECONDS = 5
"""How long running answers may still take after the server was told to stop."""


def serve(options: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; the port is taken before the model is loaded."""
    check_origin()
    if options.api_key == "":
        raise CommandError("--api-key is empty; leave it out to serve without one")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    with _sigterm_interrupts(), bind(options.host, options.port) as listener:
        engine = open_engine(options)
        try:
            _run(engine, listener, options.host, options.api_key)
        except KeyboardInterrupt:
            print("grout: stopped", flush=True)
        finally:
            engine.close()
    return 0


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that holds `host`:`port`; raises CommandError where it is not to be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CommandError(f"cannot use the address {host}: {error.strerror or error}") from None
    try:
        # Connections of an earlier server may linger; a listening socket still refuses this.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise CommandError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; "
            "stop what uses it, or choose another --port"
        ) from None
    return listener


def _run(engine: ServingEngine, listener: socket.socket, host: str, key: str | None) -> None:
    config = uvicorn.Config(
        create_app(engine, api_key=key),
        log_level=logging.WARNING,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    port = listener.getsockname()[1]
    _Server(config, _ready_text(engine, host, port, key is not None)).run(sockets=[listener])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: str) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(self._ready, flush=True)


def _ready_text(engine: ServingEngine, host: str, port: int, needs_key: bool) -> str:
    name = Served(engine).name
    example: dict[str, Any] = {"model": name}
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    url = f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
    if engine.chat_template is None:
        path, example["prompt"] = "completions", "Once upon a time"
    else:
        path, example["messages"] = "chat/completions", [{"role": "user", "content": "Hello!"}]
    header = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    return (
        f"grout: ready, {name} at {url}/v1\n"
        f"grout: try  curl {url}/v1/{path} -H 'Content-Type: application/json'{header} "
        f"-d {shlex.quote(json.dumps({'model': name, **example}))}"
    )


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Make SIGTERM act as Ctrl-C: uvicorn raises it again at its end, before the engine closes."""

    def interrupt(_: int, __: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
