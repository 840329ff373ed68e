"""POST /v1/chat/completions."""

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from server.body import read_json
from server.errors import ApiError
from server.generation import Generation, unless_disconnected
from server.prompts import chat_prompt, token_budget
from server.reasoning import Piece, ReasoningSplitter
from server.sampling import sampling_params
from server.schemas import ChatRequest, parse_request
from server.served import Served
from server.sse import DONE, EventStream, event

__all__ = ["routes"]


@dataclass(frozen=True)
class _Head:
    """What an answer and all chunks of it begin with."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def fields(self, object_name: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
        }


def routes(served: Served) -> APIRouter:
    """Return the route, serving `served`."""
    router = APIRouter()
    engine = served.engine

    @router.post("/v1/chat/completions")
    async def create_chat_completion(request: Request) -> Response:
        body = parse_request(ChatRequest, await read_json(request))
        served.check_name(body.model)
        prompt = await chat_prompt(engine, body)
        budget = token_budget(prompt, body.token_limit, engine.max_model_len)
        params = sampling_params(body, engine.default_sampling, budget)
        generation = Generation(engine, prompt, params)
        head = _Head(served.name)
        if body.stream:
            events = _events(generation, head, include_usage=body.include_usage)
            return await EventStream.begun(events, generation, request.receive)
        return await unless_disconnected(request.receive, _answer(generation, head))

    return router


async def _answer(generation: Generation, head: _Head) -> Response:
    texts: dict[str, list[str]] = {"reasoning": [], "content": []}
    async with contextlib.aclosing(generation):
        async for piece in _pieces(generation):
            texts[piece.kind].append(piece.text)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts["content"])}
    if texts["reasoning"]:
        message |= _reasoning("".join(texts["reasoning"]))
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": generation.finish_reason,
    }
    body = head.fields("chat.completion")
    return JSONResponse(body | {"choices": [choice], "usage": generation.usage()})


async def _events(
    generation: Generation, head: _Head, *, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    fields = head.fields("chat.completion.chunk")

    def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        usage = {"usage": None} if include_usage else {}
        return event(fields | {"choices": [choice]} | usage)

    try:
        yield chunk({"role": "assistant", "content": ""})
        async for piece in _pieces(generation):
            content = piece.kind == "content"
            yield chunk({"content": piece.text} if content else _reasoning(piece.text))
        yield chunk({}, generation.finish_reason)
        if include_usage:
            yield event(fields | {"choices": [], "usage": generation.usage()})
    except ApiError as error:
        yield event(error.body())
    yield DONE


async def _pieces(generation: Generation) -> AsyncGenerator[Piece, None]:
    splitter = ReasoningSplitter(opened=generation.prompt.opens_thinking)
    async for delta in generation:
        for piece in splitter.feed(delta.text):
            yield piece
    for piece in splitter.flush():
        yield piece


def _reasoning(text: str) -> dict[str, str]:
    # Both names are in use: `reasoning_content` by most clients, `reasoning` by newer ones.
    return {"reasoning_content": text, "reasoning": text}
