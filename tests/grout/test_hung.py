"""A step that does not end: what the engine says meanwhile, and how it is closed."""

import asyncio
import signal
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from grout.config import STEP_TIMEOUT, EngineConfig
from grout.engine import Engine
from grout.errors import ConfigError, EngineClosed, EngineHung, RequestTimeout
from grout.request import SamplingParams
from grout.streams import BlockingStream
from tests.grout.fakes import expected, make_engine

pytestmark = pytest.mark.usefixtures("fake_device")

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
WAIT = 60.0


class Hanging:
    """An engine whose decodes wait until `end` is set."""

    def __init__(self, **config: Any) -> None:
        self.engine: Engine = make_engine(step_timeout=0.05, **config)
        self.begun, self.end = threading.Event(), threading.Event()
        self._decode = self.engine.runner.decode
        vars(self.engine.runner)["decode"] = self._hang

    def _hang(self, *arguments: Any) -> Any:
        self.begun.set()
        assert self.end.wait(WAIT)
        return self._decode(*arguments)

    def hang(self, *prompts: list[int]) -> list[BlockingStream]:
        """Start requests; returns once a step of theirs hangs."""
        streams = [BlockingStream() for _ in prompts]
        for prompt, stream in zip(prompts, streams, strict=True):
            self.engine.add(prompt, GREEDY, stream)
        self.engine.start()
        assert self.begun.wait(WAIT)
        while not self.engine.hung:
            assert not self.end.wait(0.01)
        return streams


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    made = Hanging(max_num_seqs=1)
    yield made
    made.end.set()
    assert made.engine._thread is not None
    made.engine._thread.join(WAIT)


def finish(stream: BlockingStream) -> list[int]:
    ids: list[int] = []
    while True:
        delta = stream.get()
        ids += delta.token_ids
        if delta.finish_reason is not None:
            return ids


def test_requests_are_refused_until_it_ends(hanging: Hanging) -> None:
    engine = hanging.engine
    assert not engine.hung
    [stream] = hanging.hang([1, 2])
    assert engine.alive
    for refused in (
        lambda: engine.add([3], GREEDY, BlockingStream()),
        lambda: engine.generate([3], GREEDY),
    ):
        with pytest.raises(EngineHung, match=r"has not ended for \d+ s \(step_timeout\)") as caught:
            refused()
        assert caught.value.seconds > 0.05
    hanging.end.set()
    assert finish(stream) == expected([1, 2], 12)
    assert engine.generate_sync([3], GREEDY).token_ids == tuple(expected([3], 12))
    assert engine.close()
    assert not engine.hung


def test_closing_gives_up_on_it(hanging: Hanging) -> None:
    """Running, waiting and just added requests are told; the step may end later all the same."""
    engine = hanging.engine
    streams = hanging.hang([1, 2], [3])
    engine.config = EngineConfig()  # which lets one more in
    streams.append(BlockingStream())
    engine.add([4], GREEDY, streams[-1])
    assert not engine.close(0.01)
    for stream in streams:
        with pytest.raises(EngineClosed):
            finish(stream)
    assert not engine.alive
    with pytest.raises(EngineClosed):
        engine.add([5], GREEDY, BlockingStream())
    assert not engine.close()  # does not wait again
    hanging.end.set()
    assert engine.close(WAIT)  # unless told how long
    assert engine.close()
    stats = engine.stats()
    assert (stats["running"], stats["waiting"]) == (0, 0)
    assert stats["pages_free"] == stats["pages_total"]


def test_ctrl_c_while_it_is_closed(hanging: Hanging) -> None:
    """A thread whose `join` is interrupted passes for ended."""
    hanging.hang([1, 2])

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            hanging.engine.close(WAIT)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert not hanging.engine.close(0.01)
    hanging.end.set()
    assert hanging.engine.close(WAIT)


def test_a_request_in_it_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grout.engine._LATE_SECONDS", 0.05)
    hanging = Hanging(request_timeout=0.5)

    async def main() -> None:
        with pytest.raises(RequestTimeout):
            async for _ in hanging.engine.generate([1, 2], GREEDY):
                pass

    asyncio.run(asyncio.wait_for(main(), WAIT))
    hanging.end.set()
    assert hanging.engine.close()


def test_the_default_is_the_devices() -> None:
    assert EngineConfig().resolve("cuda").step_timeout == STEP_TIMEOUT["cuda"]
    assert EngineConfig(step_timeout=7).resolve("cpu").step_timeout == 7
    with pytest.raises(ConfigError, match="step_timeout must be a number of seconds above 0"):
        EngineConfig(step_timeout=0)
