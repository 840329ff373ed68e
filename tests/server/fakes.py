"""An engine that answers from a script, and servers on real sockets for it."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Self, TypeVar

from grout.errors import EngineClosed, PromptTooLong
from grout.request import Delta, SamplingParams, TokenLogprob
from server.http_server import HttpServer
from server.protocol import ClosableEngine
from server.serve import bind
from server.settings import Settings

EngineT = TypeVar("EngineT", bound=ClosableEngine)

MODEL = "acme/tiny-1"
DRAIN_SECONDS = 1.0
REPLY = ["Hel", "lo", ", 世界", "! ", "🙂", "\n", "bye\u2028."]


class FakeTokenizer:
    """A token a byte; 256 begins a sequence."""

    vocab_size = 257
    special_ids = frozenset({256})

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [256] * add_special_tokens + list(text.encode())

    def min_tokens(self, text: str) -> int:
        return len(text.encode())

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        skipped = self.special_ids if skip_special_tokens else frozenset()
        raw = b"".join(self.token_bytes(token) for token in ids if token not in skipped)
        return raw.decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return b"<|begin|>" if token == 256 else bytes([token])

    def token_to_id(self, text: str) -> int | None:
        return 256 if text == "<|begin|>" else None


class FakeTemplate:
    """<role>content lines; keeps what it was given."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.kwargs: dict[str, Any] = {}
        self.tools: list[dict[str, Any]] | None = None
        self.failure: Exception | None = None
        self.ending = "<assistant>"
        self.source = "<think> tools"

    def mentions(self, text: str) -> bool:
        return text in self.source

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        if self.failure is not None:
            raise self.failure
        self.seen, self.kwargs = list(messages), kwargs
        self.tools = None if tools is None else list(tools)
        lines = [f"<{message['role']}>{message['content']}\n" for message in messages]
        return "".join(lines) + self.ending * add_generation_prompt


@dataclass
class FakeConfig:
    served_model_name: str | None = None


@dataclass
class FakeEngine:
    """Replies `reply`, a token a piece, `delay` seconds apart; records what happens to requests."""

    reply: list[str] = field(default_factory=lambda: list(REPLY))
    delay: float = 0.0
    endless: bool = False
    fail_after: int | None = None
    failure: Exception = field(default_factory=lambda: RuntimeError("secret detail"))
    refusal: Exception | None = None
    finish: Literal["stop", "length"] | None = "stop"
    config: FakeConfig = field(default_factory=FakeConfig)
    model_id: str = MODEL
    max_model_len: int = 512
    max_requests: int | None = None
    vocab_size: int = FakeTokenizer.vocab_size
    eos_token_ids: tuple[int, ...] = ()
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    chat_template: FakeTemplate | None = field(default_factory=FakeTemplate)
    default_sampling: dict[str, Any] = field(default_factory=dict)
    requests: list[tuple[list[int], SamplingParams]] = field(default_factory=list)
    running: int = 0
    aborted: int = 0
    finished: int = 0
    closed: bool = False
    alive: bool = True
    hung: bool = False
    cached_tokens: int = 0
    sleeping: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = field(default_factory=set)

    def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncIterator[Delta]:
        if self.refusal is not None:
            raise self.refusal
        if self.closed:
            raise EngineClosed("the engine was closed")
        if len(prompt_ids) > self.max_model_len - (params.max_tokens != 0):
            raise PromptTooLong(len(prompt_ids), self.max_model_len)
        self.requests.append((list(prompt_ids), params))
        return self._generate(prompt_ids, params)

    async def _generate(
        self, prompt_ids: Sequence[int], params: SamplingParams
    ) -> AsyncIterator[Delta]:
        last = False
        self.running += 1
        try:
            asked = params.prompt_logprobs is not None
            async for delta in self._deltas(params):
                if asked:
                    rest = [TokenLogprob(token, -token / 100) for token in prompt_ids[1:]]
                    delta.prompt_logprobs, asked = (None, *rest), False
                last = delta.finish_reason is not None
                self.finished += last
                yield delta
        except (GeneratorExit, asyncio.CancelledError):
            self.aborted += not last
            raise
        finally:
            self.running -= 1

    async def _deltas(self, params: SamplingParams) -> AsyncIterator[Delta]:
        limit = self.max_model_len if params.max_tokens is None else params.max_tokens
        sent = 0
        while self.endless or sent < len(self.reply):
            if sent == self.fail_after:
                raise self.failure
            if sent == limit:
                yield Delta("", (), "length")
                return
            await self._pause()
            text = self.reply[sent % len(self.reply)]
            cached = self.cached_tokens if sent == 0 else 0
            if params.logprobs is None:
                yield Delta(text, (sent,), None, cached_tokens=cached)
            else:
                yield byte_delta(text, params.logprobs, cached)
            sent += 1
        if sent == self.fail_after:
            raise self.failure
        if self.finish is not None:
            yield Delta("", (99,), self.finish)

    async def _pause(self) -> None:
        """Sleep for `delay`, or until the engine is closed."""
        alarm = asyncio.get_running_loop(), asyncio.Event()
        self.sleeping.add(alarm)
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(alarm[1].wait(), self.delay)
        finally:
            self.sleeping.discard(alarm)
        if self.closed:
            raise EngineClosed("the engine was closed")

    def settle(self, timeout: float = 60.0) -> bool:
        """There is nothing to wait for."""
        return True

    def close(self, timeout: float | None = None) -> bool:
        """End what runs with `EngineClosed`; for any thread."""
        self.closed = True
        for loop, woken in list(self.sleeping):
            loop.call_soon_threadsafe(woken.set)
        return True

    def stats(self) -> dict[str, int]:
        return {"running": self.running, "waiting": 0, "pages_free": 3, "pages_total": 4}

    @property
    def text(self) -> str:
        return "".join(self.reply)

    def prompt(self) -> str:
        """The text of the last prompt."""
        return bytes(token for token in self.requests[-1][0] if token < 256).decode()


def byte_delta(text: str, top: int, cached: int) -> Delta:
    """A delta of one token a byte, each with `top` alternatives."""
    logprobs = tuple(
        TokenLogprob(byte, -0.5, tuple(((byte + i) % 256, -0.5 - i) for i in range(top)))
        for byte in text.encode()
    )
    return Delta(text, tuple(text.encode()), None, logprobs, cached)


class Live(Generic[EngineT]):
    """A server for an engine on a loopback port, in a thread of this process."""

    def __init__(self, engine: EngineT, settings: Settings | None = None) -> None:
        self.engine = engine
        self._socket = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._server = HttpServer(engine, settings or Settings(), drain_seconds=DRAIN_SECONDS)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))

    def __enter__(self) -> Self:
        self._thread.start()
        wait_for(lambda: self._server.started)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._thread.join(60)
        self._socket.close()
        assert not self._thread.is_alive()

    def stop(self) -> None:
        """Tell the server to stop, as a signal does."""
        self._server.should_exit = True


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Return once `condition` holds; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError("waited in vain")
        time.sleep(0.005)


@contextlib.contextmanager
def live(settings: Settings | None = None, **engine: Any) -> Iterator[Live[FakeEngine]]:
    """A server for `FakeEngine(**engine)`."""
    with Live(FakeEngine(**engine), settings) as server:
        yield server
