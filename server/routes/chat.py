"""POST /v1/chat/completions."""

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from grout.request import TokenLogprob
from server.body import read_json
from server.chat_job import begin_chat
from server.choices import ChatChoices
from server.errors import ApiError
from server.generation import unless_disconnected
from server.json_response import JsonResponse
from server.logprobs import chat_entries
from server.messages import flatten_messages
from server.pieces import CallPiece, Piece
from server.protocol import ServingTokenizer
from server.request_log import note
from server.schemas import ChatRequest, parse_request
from server.served import Served
from server.sse import DONE, TEXT, EventStream, TextEvents, event

__all__ = ["routes"]


def routes(served: Served) -> APIRouter:
    """Return the route, serving `served`."""
    router = APIRouter()
    settings = served.settings

    @router.post("/v1/chat/completions")
    async def create_chat_completion(request: Request) -> Response:
        body, messages = await read_json(request, settings, _request)
        name = served.check_name(body.model)
        choices = await begin_chat(served, body, messages)
        note(request, choices.generations, stream=bool(body.stream))
        wire = _Wire(served.engine.tokenizer, name, body.top_logprobs_wanted)
        if body.stream:
            events = wire.events(choices, include_usage=body.include_usage)
            return await EventStream.begun(events, choices.generations, request.receive)
        return await unless_disconnected(request.receive, wire.answer(choices))

    return router


def _request(raw: dict[str, Any]) -> tuple[ChatRequest, list[dict[str, Any]]]:
    body = parse_request(ChatRequest, raw)
    return body, flatten_messages(body.messages)


class _Wire:
    """One request's answers in OpenAI's format, whole or as chunks."""

    def __init__(self, tokenizer: ServingTokenizer, model: str, top: int | None) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
        }

    async def answer(self, choices: ChatChoices) -> Response:
        """Return the answers once all are complete."""
        parts = [_Parts() for _ in choices.answers]
        async with contextlib.aclosing(choices.generations):
            async for step in choices:
                parts[step.index].add(step.pieces, step.logprobs, step.finish_reason)
        listed = [
            {
                "index": i,
                "message": part.message(),
                "logprobs": self._logprobs(part.logprobs),
                "finish_reason": part.finish_reason,
            }
            for i, part in enumerate(parts)
        ]
        return JsonResponse(self._head | {"choices": listed, "usage": choices.usage()})

    async def events(
        self, choices: ChatChoices, *, include_usage: bool
    ) -> AsyncGenerator[bytes, None]:
        """Yield the answers as events, one finish chunk for each."""
        head = self._head | {"object": "chat.completion.chunk"}
        usage = {"usage": None} if include_usage else {}

        def data(
            index: int,
            delta: dict[str, Any],
            reason: str | None = None,
            logprobs: Sequence[TokenLogprob] = (),
        ) -> dict[str, Any]:
            choice = {
                "index": index,
                "delta": delta,
                "logprobs": self._logprobs(logprobs) if logprobs else None,
                "finish_reason": reason,
            }
            return head | {"choices": [choice]} | usage

        def chunk(*of: Any) -> bytes:
            return event(data(*of))

        # What is sent once a token: content without log probabilities.
        quick = [TextEvents(data(i, {"content": TEXT})) for i in range(len(choices.answers))]
        try:
            for i in range(len(choices.answers)):
                yield chunk(i, {"role": "assistant", "content": ""})
            async for step in choices:
                logprobs = step.logprobs
                for piece in step.pieces:
                    if isinstance(piece, Piece) and piece.kind == "content" and not logprobs:
                        yield quick[step.index](piece.text)
                    else:
                        yield chunk(step.index, _delta(piece), None, logprobs)
                    logprobs = ()
                if logprobs and step.finish_reason is None:
                    yield chunk(step.index, {}, None, logprobs)
                if step.finish_reason is not None:
                    yield chunk(step.index, {}, step.finish_reason, logprobs)
            if include_usage:
                yield event(head | {"choices": [], "usage": choices.usage()})
        except ApiError as error:
            yield event(error.body())
        yield DONE

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self._top is None:
            return None
        return {"content": chat_entries(self._tokenizer, entries, self._top), "refusal": None}


class _Parts:
    """One answer as it comes together."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {"reasoning": [], "content": []}
        self._calls: list[dict[str, Any]] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: str | None = None

    def add(
        self,
        pieces: Sequence[Piece | CallPiece],
        logprobs: Sequence[TokenLogprob],
        finish_reason: str | None,
    ) -> None:
        for piece in pieces:
            if isinstance(piece, Piece):
                self._texts[piece.kind].append(piece.text)
            elif piece.index == len(self._calls):
                self._calls.append(_call(piece))
            else:
                self._calls[piece.index]["function"]["arguments"] += piece.arguments
        self.logprobs += logprobs
        self.finish_reason = finish_reason

    def message(self) -> dict[str, Any]:
        content = "".join(self._texts["content"])
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not self._calls else None,
        }
        if self._texts["reasoning"]:
            message |= _reasoning("".join(self._texts["reasoning"]))
        if self._calls:
            message["tool_calls"] = self._calls
        return message


def _delta(piece: Piece | CallPiece) -> dict[str, Any]:
    if isinstance(piece, Piece):
        return {"content": piece.text} if piece.kind == "content" else _reasoning(piece.text)
    if piece.id is not None:
        return {"tool_calls": [{"index": piece.index, **_call(piece)}]}
    return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.arguments}}]}


def _call(piece: CallPiece) -> dict[str, Any]:
    return {
        "id": piece.id,
        "type": "function",
        "function": {"name": piece.name, "arguments": piece.arguments},
    }


def _reasoning(text: str) -> dict[str, str]:
    # Both names are in use: `reasoning_content` by most clients, `reasoning` by newer ones.
    return {"reasoning_content": text, "reasoning": text}
