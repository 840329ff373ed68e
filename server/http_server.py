"""The HTTP server: uvicorn, with an end that leaves no request without an answer."""

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import uvicorn

from server.app import create_app
from server.console import say
from server.head_limit import with_head_limit
from server.no_upgrade import without_upgrades
from server.opening import CLOSE_SECONDS
from server.protocol import ClosableEngine
from server.settings import Settings
from server.stopping import Stopping

__all__ = ["HttpServer"]

FLUSH_SECONDS = 5.0
"""Longest wait for clients to take the end of their answers."""

REPEAT_SECONDS = 1.0
"""A SIGTERM that soon after the first is the same one: launchers pass on what the whole group has
had already."""

AT_ONCE_SECONDS = 0.5
"""Longest wait for the step under way where the end cannot wait."""

_POLL_SECONDS = 0.05


class HttpServer(uvicorn.Server):
    """Serves an engine until it is told to stop, by a signal or `should_exit`.

    drain_seconds: for what runs then. After that, or on another signal, the engine is closed, which
    ends streams with an error of their own form, and other requests are answered with 503. started:
    is called once requests are taken.
    """

    def __init__(
        self,
        engine: ClosableEngine,
        settings: Settings,
        *,
        drain_seconds: float,
        started: Callable[[], None] = lambda: None,
        **tls: Any,
    ) -> None:
        self._engine = engine
        self._stopping = Stopping()
        self._drain_seconds = drain_seconds
        self._on_started = started
        self._head_seconds = settings.receive_seconds
        self._idle: dict[Any, tuple[object, float]] = {}
        self._told = 0.0
        config = uvicorn.Config(
            create_app(engine, settings, self._stopping),
            log_config=None,
            log_level=logging.WARNING,
            access_log=False,
            lifespan="off",
            # uvloop holds the interpreter's lock while it writes, and the engine's thread waits.
            loop="asyncio",
            server_header=False,
            # Nothing here speaks it, and what checks requests looks at HTTP alone.
            ws="none",
            **tls,
        )
        config.load()
        protocol = without_upgrades(config.http_protocol_class)
        config.http_protocol_class = with_head_limit(protocol)
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Not uvicorn's own, which raises each of them again at the end: that has been reached then.
        # They stay with `handle_exit`, so that none that comes later interrupts what follows.
        if threading.current_thread() is threading.main_thread():
            for one in (signal.SIGINT, signal.SIGTERM):
                signal.signal(one, self.handle_exit)
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        now, again = time.monotonic(), self.should_exit
        super().handle_exit(sig, frame)
        if not again:
            self._told = now
        elif sig != signal.SIGTERM or now - self._told > REPEAT_SECONDS:
            self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # of ten in a second
            self._close_slow()
        return await super().on_tick(counter)

    def _close_slow(self) -> None:
        """Close the connections that have begun no request for too long.

        uvicorn's own timeout ends with the first byte of a request.
        """
        now = time.monotonic()
        idle: dict[Any, tuple[object, float]] = {}
        for connection in self.server_state.connections:
            last = getattr(connection, "cycle", None)
            if last is None or last.response_complete:
                known, since = self._idle.get(connection, (last, now))
                idle[connection] = last, since if known is last else now
        self._idle = idle
        for connection, (_, since) in idle.items():
            if now - since > self._head_seconds:
                connection.shutdown()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Not uvicorn's own, which cancels what is left and cuts its connections. Idle ones stay
        # open meanwhile, so that a request already on its way finds an answer and not a reset.
        for listening in [*self.servers, *(sockets or ())]:
            listening.close()
        self._stopping.begin()
        state = self.server_state
        if running := len(state.tasks):
            say(f"stopping; up to {self._drain_seconds:g} s for {running} running requests")
        await _until(lambda: self.force_exit or not state.tasks, self._drain_seconds)
        if state.tasks:
            say(f"ending {len(state.tasks)} requests that still run")
            self._stopping.end()
            # A thread of its own: those of the loop may be busy with long prompts.
            patience = AT_ONCE_SECONDS if self.force_exit else CLOSE_SECONDS
            with ThreadPoolExecutor(1) as thread:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(thread, self._engine.close, patience)
        for connection in list(state.connections):
            connection.shutdown()
        await _until(lambda: not state.tasks and not state.connections, FLUSH_SECONDS)
        for connection in list(state.connections):
            connection.transport.abort()
        await _until(lambda: not state.tasks, FLUSH_SECONDS)


async def _until(done: Callable[[], object], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        await asyncio.sleep(_POLL_SECONDS)
