"""POST /v1/completions: prompts continued as they are, without a chat template."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from grout.request import Delta, SamplingParams
from server.body import read_json
from server.choices import usage
from server.constraint import constraint
from server.errors import ApiError, invalid
from server.generation import Generation, Generations, unless_disconnected
from server.json_response import JsonResponse
from server.logprobs import LogprobStream, legacy_logprobs, legacy_prompt
from server.prompts import Prompt, completion_prompts, token_budget
from server.protocol import ServingTokenizer
from server.request_log import note
from server.sampling import of_choice, sampling_params
from server.schemas import MAX_CHOICES, CompletionRequest, parse_request
from server.served import Served
from server.sse import DONE, TEXT, EventStream, TextEvents, event
from server.structured import structure
from server.tool_choice import ToolUse

__all__ = ["routes"]

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default on this route, where a prompt has no natural end."""


def routes(served: Served) -> APIRouter:
    """Return the route, serving `served`."""
    router = APIRouter()
    settings = served.settings

    @router.post("/v1/completions")
    async def create_completion(request: Request) -> Response:
        body = await read_json(request, settings, partial(parse_request, CompletionRequest))
        name = served.check_name(body.model)
        wanted = await _wanted(served, body)
        generations = Generations.begin(served.engine, wanted, served.metrics)
        note(request, generations, stream=bool(body.stream))
        wire = _Wire(served.engine.tokenizer, name, body)
        if body.stream:
            events = wire.events(generations, include_usage=body.include_usage)
            return await EventStream.begun(events, generations, request.receive)
        return await unless_disconnected(request.receive, wire.answer(generations))

    return router


async def _wanted(served: Served, body: CompletionRequest) -> list[tuple[Prompt, SamplingParams]]:
    """Return each prompt as often as it is to be answered, in the order of the choices."""
    engine = served.engine
    prompts = await completion_prompts(engine, body.prompt)
    count = body.n or 1
    if len(prompts) * count > 2 * MAX_CHOICES:
        raise invalid("n", f"{len(prompts)} prompts with 'n' {count} are too many answers.")
    shape = await asyncio.to_thread(structure, body)
    grammar = constraint(shape, ToolUse(), "off", engine.tokenizer)
    wanted = []
    for prompt in prompts:
        budget = token_budget(prompt, body.token_limit, engine.max_model_len, DEFAULT_MAX_TOKENS)
        params = sampling_params(body, engine, budget, grammar)
        wanted += [(prompt, of_choice(params, i)) for i in range(count)]
    return wanted


class _Wire:
    """One request's answers in OpenAI's format, whole or as chunks."""

    def __init__(self, tokenizer: ServingTokenizer, model: str, body: CompletionRequest) -> None:
        self._tokenizer = tokenizer
        self._body = body
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    async def answer(self, generations: Generations) -> Response:
        """Return the answers once all are complete."""
        texts = [_Text(self._tokenizer, one, self._body) for one in generations.each]
        async with contextlib.aclosing(generations):
            async for index, delta in generations:
                generations.each[index].count(delta)
                texts[index].add(delta)
        choices = [
            _choice(i, text.text, text.logprobs, generations.each[i].finish_reason)
            for i, text in enumerate(texts)
        ]
        return JsonResponse(self._head | {"choices": choices, "usage": usage(generations)})

    async def events(
        self, generations: Generations, *, include_usage: bool
    ) -> AsyncGenerator[bytes, None]:
        """Yield the answers as events."""
        no_usage = {"usage": None} if include_usage else {}
        texts = [_Text(self._tokenizer, one, self._body) for one in generations.each]

        def data(choice: dict[str, Any]) -> dict[str, Any]:
            return self._head | {"choices": [choice]} | no_usage

        # What is sent once a token: text without log probabilities.
        quick = [TextEvents(data(_choice(i, TEXT))) for i in range(len(texts))]
        try:
            # With log probabilities a prompt waits for its own.
            if self._body.echo and self._body.logprobs is None:
                for i, one in enumerate(texts):
                    yield quick[i](one.take_prompt())
            async for index, delta in generations:
                generations.each[index].count(delta)
                (text, logprobs), reason = texts[index].add(delta), delta.finish_reason
                if logprobs or reason:
                    yield event(data(_choice(index, text, logprobs, reason)))
                elif text:
                    yield quick[index](text)
            if include_usage:
                yield event(self._head | {"choices": [], "usage": usage(generations)})
        except ApiError as error:
            yield event(error.body())
        yield DONE


class _Text:
    """One answer as it comes together, the prompt in front where it is to be echoed."""

    def __init__(
        self, tokenizer: ServingTokenizer, generation: Generation, body: CompletionRequest
    ) -> None:
        self._tokenizer = tokenizer
        self._top = body.logprobs
        self._prompt = prompt = generation.prompt
        self._stream = LogprobStream(tokenizer, prompt.begun) if body.logprobs is not None else None
        self._offset = len(prompt.text) if body.echo else 0
        self._untold = prompt.text if body.echo else ""
        self._parts: list[str] = []
        self.logprobs: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def take_prompt(self) -> str:
        """Return the prompt where it is to be echoed and has not been."""
        prompt, self._untold = self._untold, ""
        self._parts.append(prompt)
        return prompt

    def add(self, delta: Delta) -> tuple[str, dict[str, Any] | None]:
        """Take a delta; return what the answer gains: text, and log probabilities if any."""
        text = self.take_prompt() + delta.text
        self._parts.append(delta.text)
        if self._stream is None or self._top is None:
            return text, None
        tokenizer, prompt, top = self._tokenizer, self._prompt, self._top
        new = legacy_logprobs(tokenizer, self._stream.placed(delta), top, self._offset)
        if delta.prompt_logprobs:
            shown = legacy_prompt(
                tokenizer, prompt.token_ids, prompt.text, delta.prompt_logprobs, top
            )
            new = {key: shown[key] + values for key, values in new.items()}
        if self.logprobs is None:
            self.logprobs = {key: [] for key in new}
        for key, values in new.items():
            self.logprobs[key] += values
        return text, new if new["tokens"] else None


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None = None, reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
