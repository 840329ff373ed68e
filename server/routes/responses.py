"""POST /v1/responses: text, reasoning and function calls; nothing is stored."""

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator
from itertools import count
from typing import Any

from fastapi import APIRouter, Request, Response

from server.body import read_json
from server.chat_job import begin_chat
from server.choices import ChatChoices
from server.errors import ApiError, invalid
from server.generation import unless_disconnected
from server.json_response import JsonResponse
from server.messages import flatten_messages
from server.parameters import RESPONSES_NEUTRAL
from server.request_log import note
from server.response_events import TEXT_DELTAS, OutputBuilder
from server.response_items import messages_of
from server.schemas import ChatRequest, Function, ResponsesRequest, Tool, validated
from server.served import Served
from server.sse import NUMBER, TEXT, EventStream, TextEvents, event

__all__ = ["routes"]

LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")


def routes(served: Served) -> APIRouter:
    """Return the routes, serving `served`."""
    router = APIRouter()
    settings = served.settings

    @router.post("/v1/responses")
    async def create_response(request: Request) -> Response:
        body, chat, messages = await read_json(request, settings, _request)
        name = served.check_name(body.model)
        choices = await begin_chat(served, chat, messages, "input", "text.format", "tools[{}]")
        note(request, choices.generations, stream=bool(body.stream))
        wire = _Wire(served, name, body, chat)
        if body.stream:
            return await EventStream.begun(
                wire.events(choices), choices.generations, request.receive
            )
        return await unless_disconnected(request.receive, wire.answer(choices))

    @router.get("/v1/responses/{response_id}")
    async def get_response(response_id: str) -> None:
        raise ApiError(404, "Responses are not stored here.", code="not_found", param="response_id")

    return router


def _request(
    raw: dict[str, Any],
) -> tuple[ResponsesRequest, ChatRequest, list[dict[str, Any]]]:
    body = validated(ResponsesRequest, raw, neutral=RESPONSES_NEUTRAL)
    return body, _chat_request(body), _renamed(body)


def _renamed(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The input as flat messages; what is wrong with them is wrong with 'input'."""
    messages = messages_of(body.input, body.instructions)
    try:
        return flatten_messages(messages)
    except ApiError as error:
        raise invalid(
            "input", error.message.replace("messages[", "input["), error.code or "invalid_value"
        ) from None


def _chat_request(body: ResponsesRequest) -> ChatRequest:
    for i, name in enumerate(body.include or ()):
        if name not in _INCLUDABLE:
            raise invalid(
                f"include[{i}]",
                f"'include' takes {' and '.join(_INCLUDABLE)} here.",
                "unsupported_value",
            )
    wants_logprobs = body.top_logprobs is not None or LOGPROBS in (body.include or ())
    return ChatRequest(
        messages=[],
        model=body.model,
        temperature=body.temperature,
        top_p=body.top_p,
        max_completion_tokens=body.max_output_tokens,
        logprobs=wants_logprobs,
        top_logprobs=body.top_logprobs if wants_logprobs else None,
        tools=[
            Tool(type="function", function=Function(**tool.model_dump(exclude={"type"})))
            for tool in body.tools or ()
        ],
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=body.text.format if body.text is not None else None,
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        chat_template_kwargs=body.chat_template_kwargs,
    )


class _Wire:
    """One request's response object, and the events that lead to it."""

    def __init__(
        self, served: Served, model: str, body: ResponsesRequest, chat: ChatRequest
    ) -> None:
        self._output = OutputBuilder(served.engine.tokenizer, chat.top_logprobs_wanted)
        defaults = served.engine.default_sampling
        self._response: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": chat.reasoning_effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": _first(body.temperature, defaults.get("temperature"), 1.0),
            "text": {"format": chat.response_format or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": _first(body.top_p, defaults.get("top_p"), 1.0),
            "truncation": "disabled",
            "usage": None,
        }

    async def answer(self, choices: ChatChoices) -> Response:
        """Return the response once it is complete."""
        async with contextlib.aclosing(choices.generations):
            async for _ in self._built(choices):
                pass
        return JsonResponse(self._response)

    async def events(self, choices: ChatChoices) -> AsyncGenerator[bytes, None]:
        """Yield the response's events, numbered."""
        numbers = count()
        quick: dict[str, TextEvents] = {}

        def numbered(data: dict[str, Any]) -> bytes:
            number, name = next(numbers), data["type"]
            if name not in TEXT_DELTAS or data.get("logprobs"):
                return event(data | {"sequence_number": number}, name)
            item = data["item_id"]
            if item not in quick:
                quick[item] = TextEvents(data | {"delta": TEXT, "sequence_number": NUMBER}, name)
            return quick[item](data["delta"], number)

        for name in ("response.created", "response.in_progress"):
            yield numbered({"type": name, "response": self._response})
        try:
            async for data in self._built(choices):
                yield numbered(data)
        except ApiError as error:
            self._response |= {
                "status": "failed",
                "error": {"code": "server_error", "message": error.message},
            }
            yield numbered({"type": "response.failed", "response": self._response})
            return
        name = f"response.{self._response['status']}"
        yield numbered({"type": name, "response": self._response})

    async def _built(self, choices: ChatChoices) -> AsyncGenerator[dict[str, Any], None]:
        reason = None
        async for step in choices:
            for data in self._output.add(step.pieces):
                yield data
            reason = step.finish_reason
        status = "incomplete" if reason == "length" else "completed"
        for data in self._output.end(status):
            yield data
        self._response |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if reason == "length" else None,
            "output": self._output.items,
            "usage": _usage(choices),
        }


def _usage(choices: ChatChoices) -> dict[str, Any]:
    counts = choices.usage()
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"],
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": counts["completion_tokens_details"],
        "total_tokens": counts["total_tokens"],
    }


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
