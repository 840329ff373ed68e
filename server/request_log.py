"""One JSON line a request, without prompts unless asked for, and a request id in every answer."""

import json
import logging
import re
import time
import uuid
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.generation import Generations
from server.settings import RequestLogging

__all__ = ["RequestLog", "note", "note_body"]

logger = logging.getLogger("grout.requests")

_KEY = "grout.request"
_QUIET = frozenset({"/health", "/metrics"})
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


@dataclass(slots=True)
class _Record:
    id: str
    status: int | None = None
    stream: bool = False
    generations: Generations | None = None
    body: str | None = None


def note(request: Request, generations: Generations, *, stream: bool) -> None:
    """Keep what the log line is to say of the answers."""
    record = request.scope.get(_KEY)
    if isinstance(record, _Record):
        record.generations, record.stream = generations, stream


def note_body(request: Request, body: str) -> None:
    """Keep a request's body for the log line, where bodies are logged."""
    record = request.scope.get(_KEY)
    if isinstance(record, _Record):
        record.body = body


class RequestLog:
    """ASGI middleware: `x-request-id` in answers, the client's own where it sent one, and lines."""

    def __init__(self, app: ASGIApp, level: RequestLogging) -> None:
        self._app = app
        self._level = level

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        record = _Record(given if _ID.fullmatch(given) else f"req_{uuid.uuid4().hex}")
        scope[_KEY] = record

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.id
            await send(message)

        started = time.monotonic()
        try:
            await self._app(scope, receive, watch)
        finally:
            if self._level != "off" and scope["path"] not in _QUIET:
                seconds = time.monotonic() - started
                logger.info(json.dumps(self._line(scope, record, seconds), ensure_ascii=False))

    def _line(self, scope: Scope, record: _Record, seconds: float) -> dict[str, Any]:
        line: dict[str, Any] = {
            "time": round(time.time(), 3),
            "id": record.id,
            "client": (scope.get("client") or ("",))[0],
            "method": scope["method"],
            "path": scope["path"],
            "status": record.status,
            "seconds": round(seconds, 4),
        }
        if record.generations is not None:
            each = record.generations.each
            line |= {
                "stream": record.stream,
                "prompt_tokens": len(each[0].prompt.token_ids),
                "completion_tokens": sum(one.completion_tokens for one in each),
                "finish_reasons": [one.finish_reason or "abort" for one in each],
            }
            # A stream that fails has had its status: 200.
            if errors := [one.error for one in each if one.error is not None]:
                line["error"] = errors[0]
        if self._level == "text" and record.body is not None:
            line["body"] = record.body
        return line
