"""Who answers in `grout chat`: an engine in this process, or a server."""

import asyncio
import contextlib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from server.exceptions import CommandError, ServerError
from server.generation import Generation
from server.messages import flatten_messages
from server.opening import close_engine
from server.pieces import Piece
from server.prompts import chat_prompt, token_budget
from server.protocol import ClosableEngine
from server.reasoning import ReasoningSplitter
from server.sampling import sampling_params
from server.schemas import ChatRequest, parse_request
from server.served import served_name

__all__ = ["Answering", "LocalAnswering", "RemoteAnswering"]

CONNECT_SECONDS = 600.0
"""Longest silence of a server before its answer counts as lost."""

Show = Callable[[Piece], None]


class Answering(Protocol):
    """Continues a conversation."""

    @property
    def name(self) -> str: ...

    def answer(self, messages: list[dict[str, Any]], show: Show) -> int:
        """Pass each piece to `show` as it comes and return the number of tokens.

        KeyboardInterrupt stops the answer and leaves from here; ServerError says why there is
        none.
        """

    def close(self) -> None: ...


class LocalAnswering:
    """An engine in this process, which it closes."""

    def __init__(self, engine: ClosableEngine, settings: dict[str, Any]) -> None:
        self._engine = engine
        self._settings = settings
        self._runner = asyncio.Runner()
        self.name = served_name(engine)
        if engine.chat_template is None:
            self.close()
            raise CommandError(f"{self.name} has no chat template, so it cannot chat")

    def answer(self, messages: list[dict[str, Any]], show: Show) -> int:
        return self._runner.run(self._answer(messages, show))

    def close(self) -> None:
        self._runner.close()
        close_engine(self._engine)

    async def _answer(self, messages: list[dict[str, Any]], show: Show) -> int:
        request = parse_request(ChatRequest, {"messages": messages, **self._settings})
        prompt = await chat_prompt(
            self._engine,
            flatten_messages(request.messages),
            variables=request.chat_template_kwargs,
        )
        budget = token_budget(prompt, request.token_limit, self._engine.max_model_len)
        params = sampling_params(request, self._engine, budget)
        splitter = ReasoningSplitter(opened=prompt.thinking == "open")
        async with contextlib.aclosing(Generation(self._engine, prompt, params)) as generation:
            async for delta in generation:
                for piece in splitter.feed(delta.text):
                    show(piece)
            for piece in splitter.flush():
                show(piece)
            return generation.completion_tokens


class RemoteAnswering:
    """A server that speaks OpenAI's API."""

    def __init__(
        self, url: str, model: str | None, api_key: str | None, settings: dict[str, Any]
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise CommandError(f"--url must begin with http:// or https://, not {url!r}")
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._settings = settings
        self.name = model or self._first_model()

    def answer(self, messages: list[dict[str, Any]], show: Show) -> int:
        body = {
            "model": self.name,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._settings,
        }
        tokens = 0
        with self._open("/chat/completions", body) as response:
            for chunk in _events(response):
                if (error := chunk.get("error")) is not None:
                    message = error.get("message", error) if isinstance(error, dict) else error
                    raise ServerError(str(message))
                for choice in chunk.get("choices") or ():
                    delta = choice.get("delta") or {}
                    if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
                        show(Piece("reasoning", reasoning))
                    if delta.get("content"):
                        show(Piece("content", delta["content"]))
                if chunk.get("usage"):
                    tokens = chunk["usage"]["completion_tokens"]
        return tokens

    def close(self) -> None:
        """Do nothing: each answer has a connection of its own."""

    def _first_model(self) -> str:
        with self._open("/models") as response:
            listing = _parse(response.read())
        try:
            return str(listing["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise CommandError(f"{self._base}/models lists no model") from None

    def _open(self, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, self._headers)
        try:
            response = urllib.request.urlopen(request, timeout=CONNECT_SECONDS)
        except urllib.error.HTTPError as error:
            with error:
                raise CommandError(_message(error.read()) or f"{self._base}: {error}") from None
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise CommandError(f"cannot reach {self._base}: {reason}") from None
        return response  # type: ignore[no-any-return]  # urlopen is typed for every scheme


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        if line.startswith(b"data:"):
            yield _parse(data)
    raise ServerError("the server closed the connection before the answer was complete")


def _parse(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        raise CommandError("the server's answer is not JSON; is it OpenAI-compatible?") from None
    return value if isinstance(value, dict) else {}


def _message(data: bytes) -> str | None:
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return None
