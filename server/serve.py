"""`grout serve`: a model over HTTP until it is told to stop."""

import argparse
import contextlib
import json
import logging
import os
import shlex
import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from server.console import drop_unwritten, say
from server.exceptions import CommandError
from server.http_server import HttpServer
from server.opening import close_engine, open_engine
from server.origin import check_origin
from server.protocol import ServingEngine
from server.served import served_name
from server.settings import Settings

__all__ = ["bind", "listen", "serve"]


def serve(options: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; the port is taken before the model is loaded."""
    check_origin()
    settings = _settings(options)
    _check_tls(options)
    _configure_logging()
    with _signals_interrupt(), bind(options.host, options.port) as listener:
        engine = open_engine(options)
        try:
            # What a script need not wait for, a request of somebody else's should not meet.
            engine.settle()
            listen(listener)
            ready = _ready_text(engine, settings, options, listener.getsockname()[1])
            HttpServer(
                engine,
                settings,
                drain_seconds=options.shutdown_timeout,
                started=lambda: say(ready, sys.stdout),
                ssl_certfile=options.ssl_certfile,
                ssl_keyfile=options.ssl_keyfile,
            ).run(sockets=[listener])
            # The process is about to end by itself, and Python's own end would not catch them.
            for one in (signal.SIGINT, signal.SIGTERM):
                signal.signal(one, signal.SIG_IGN)
            say("stopped", sys.stdout)
        except KeyboardInterrupt:
            say("stopped", sys.stdout)
        finally:
            close_engine(engine)
            drop_unwritten()
    return 0


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that holds `host`:`port`, which connects nobody before `listen`.

    Raises CommandError where another socket has it, listening or not.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CommandError(f"cannot use the address {host}: {error.strerror or error}") from None
    try:
        _share(listener, True)
        listener.bind(address)
        # Sockets that share all get a port that none of them listens on yet, and a model that is
        # loaded meanwhile would have none in the end.
        _share(listener, False)
    except OSError as error:
        listener.close()
        raise _taken(host, port, error) from None
    return listener


def listen(listener: socket.socket) -> None:
    """Let clients connect to what `bind` has returned.

    Raises CommandError where the system has let another socket listen there first.
    """
    # The connections inherit it, and those that linger must not keep the next server away.
    _share(listener, True)
    try:
        listener.listen()
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _taken(host, port, error) from None


def _share(listener: socket.socket, allowed: bool) -> None:
    """Let it have, or no longer, an address where connections of an earlier server linger."""
    # Windows lets them linger by itself, and would let other servers take the address.
    if os.name == "posix":
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, allowed)


def _taken(host: str, port: int, error: OSError) -> CommandError:
    return CommandError(
        f"cannot listen on {host}:{port}: {error.strerror or error}; "
        "stop what uses it, or choose another --port"
    )


def _settings(options: argparse.Namespace) -> Settings:
    if "" in options.api_key:
        raise CommandError("--api-key is empty; leave it out to serve without one")
    if "" in options.served_model_name:
        raise CommandError("--served-model-name is empty")
    if options.model is None:
        for name in options.served_model_name:
            if Path(name).exists():
                raise CommandError(
                    f"'{name}' is taken for one of the --served-model-name, and no model is named; "
                    "put the model before the options"
                )
    return Settings(
        api_keys=tuple(options.api_key),
        names=tuple(dict.fromkeys(options.served_model_name)),
        cors_origins=tuple(options.cors_origin),
        max_body_bytes=options.max_body_bytes,
        log_requests=options.log_requests,
    )


def _check_tls(options: argparse.Namespace) -> None:
    """Raise CommandError for files that no TLS server can use, before the model is loaded."""
    if options.ssl_certfile is None:
        if options.ssl_keyfile is not None:
            raise CommandError("--ssl-keyfile needs --ssl-certfile")
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # The password function keeps OpenSSL from asking on the terminal.
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, lambda: "")
    except (OSError, ValueError) as error:
        files = " and ".join(filter(None, (options.ssl_certfile, options.ssl_keyfile)))
        reason = getattr(error, "strerror", None) or error
        raise CommandError(f"cannot serve TLS with {files}: {reason}") from None


def _ready_text(
    engine: ServingEngine, settings: Settings, options: argparse.Namespace, port: int
) -> str:
    name = settings.names[0] if settings.names else served_name(engine)
    example: dict[str, Any] = {"model": name}
    host = options.host
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    scheme = "http" if options.ssl_certfile is None else "https"
    where = f"[{reachable}]:{port}" if ":" in reachable else f"{reachable}:{port}"
    url = f"{scheme}://{where}"
    if engine.chat_template is None:
        path, example["prompt"] = "completions", "Once upon a time"
    else:
        # A question that the smallest models answer well, too.
        question = "What is the capital of France?"
        path, example["messages"] = "chat/completions", [{"role": "user", "content": question}]
    header = " -H 'Authorization: Bearer KEY'" if settings.api_keys else ""
    return (
        f"ready, {name} at {url}/v1\n"
        f"try  curl {url}/v1/{path} -H 'Content-Type: application/json'{header} "
        f"-d {shlex.quote(json.dumps({'model': name, **example}))}"
    )


class _LogHandler(logging.StreamHandler[Any]):
    def handleError(self, record: logging.LogRecord) -> None:
        """Do nothing: a log that cannot be written, on a full disk, must not end a request."""


def _configure_logging() -> None:
    handler = _LogHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    lines = _LogHandler()
    lines.setFormatter(logging.Formatter("%(message)s"))
    requests = logging.getLogger("grout.requests")
    requests.handlers = [lines]
    requests.setLevel(logging.INFO)
    requests.propagate = False


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Make SIGTERM act as Ctrl-C, once, until the server takes both."""

    def interrupt(_: int, __: FrameType | None) -> NoReturn:
        # Who sends it again must not interrupt the end; a second Ctrl-C may.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    previous = {one: signal.signal(one, interrupt) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is interrupt:
            for one, handler in previous.items():
                signal.signal(one, handler)
