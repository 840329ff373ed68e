"""What holds the pieces of a fake engine's reply back until a test asks for them."""

import asyncio
import threading
from typing import Any

import pytest

from tests.server.fakes import FakeEngine


class Gate:
    """Holds an engine's pieces back until they are asked for."""

    def __init__(self, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._allowed = threading.Semaphore(0)
        deltas = engine._deltas

        async def held(params: Any) -> Any:
            async for delta in deltas(params):
                while not self._allowed.acquire(blocking=False):
                    await asyncio.sleep(0.01)
                yield delta

        monkeypatch.setattr(engine, "_deltas", held)

    def open(self, pieces: int) -> None:
        for _ in range(pieces):
            self._allowed.release()
