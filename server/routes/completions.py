"""POST /v1/completions: a prompt continued as it is, without a chat template."""

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from server.body import read_json
from server.errors import ApiError
from server.generation import Generation, unless_disconnected
from server.prompts import completion_prompt, token_budget
from server.sampling import sampling_params
from server.schemas import CompletionRequest, parse_request
from server.served import Served
from server.sse import DONE, EventStream, event

__all__ = ["routes"]

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default on this route, where a prompt has no natural end."""


def routes(served: Served) -> APIRouter:
    """Return the route, serving `served`."""
    router = APIRouter()
    engine = served.engine

    @router.post("/v1/completions")
    async def create_completion(request: Request) -> Response:
        body = parse_request(CompletionRequest, await read_json(request))
        served.check_name(body.model)
        prompt = await completion_prompt(engine, body)
        budget = token_budget(prompt, body.token_limit, engine.max_model_len, DEFAULT_MAX_TOKENS)
        params = sampling_params(body, engine.default_sampling, budget)
        generation = Generation(engine, prompt, params)
        fields = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": served.name,
        }
        if body.stream:
            events = _events(generation, fields, include_usage=body.include_usage)
            return await EventStream.begun(events, generation, request.receive)
        return await unless_disconnected(request.receive, _answer(generation, fields))

    return router


async def _answer(generation: Generation, fields: dict[str, Any]) -> Response:
    async with contextlib.aclosing(generation):
        text = "".join([delta.text async for delta in generation])
    choices = [_choice(text, generation.finish_reason)]
    return JSONResponse(fields | {"choices": choices, "usage": generation.usage()})


async def _events(
    generation: Generation, fields: dict[str, Any], *, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    no_usage = {"usage": None} if include_usage else {}
    try:
        async for delta in generation:
            if delta.text or delta.finish_reason:
                choices = [_choice(delta.text, delta.finish_reason)]
                yield event(fields | {"choices": choices} | no_usage)
        if include_usage:
            yield event(fields | {"choices": [], "usage": generation.usage()})
    except ApiError as error:
        yield event(error.body())
    yield DONE


def _choice(text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
