"""Errors of the HTTP layer, always with OpenAI's body: {"error": {message, type, param, code}}."""

import json
import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from grout.errors import (
    EngineClosed,
    EngineDead,
    EngineHung,
    GrammarError,
    InvalidPrompt,
    InvalidSamplingParams,
    PromptTooLong,
    QueueFull,
    RequestTimeout,
)
from grout.grammar import Grammar
from server.exceptions import ServerError
from server.paths import join_path

__all__ = [
    "ApiError",
    "context_length_exceeded",
    "error_response",
    "from_engine",
    "install",
    "invalid",
    "not_unicode",
    "stopping",
]

logger = logging.getLogger("grout.server")

RETRY_SECONDS = 1
"""What a client is told to wait where the queue is full or the server is stopping."""

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"


class ApiError(ServerError):
    """A refused or failed request: HTTP status and the four fields of OpenAI's error body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None,
        param: str | None = None,
        kind: str = INVALID_REQUEST,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.kind = kind
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error body."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """Return a 400 about one parameter of the request."""
    return ApiError(400, message, code=code, param=param)


def not_unicode(path: tuple[str | int, ...]) -> ApiError:
    """Return the 400 for text with a lone surrogate, which no UTF-8 can carry."""
    where = join_path(path).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    shown = where if len(where) <= 200 else where[:197] + "..."
    return invalid(
        shown,
        f"The text at {shown!r} has a lone surrogate (half of a \\uD83D\\uDE42 style "
        "pair), which is not valid Unicode.",
        "invalid_unicode",
    )


def context_length_exceeded(
    param: str,
    prompt_tokens: int,
    max_model_len: int,
    max_tokens: int | None = None,
    at_least: bool = False,
) -> ApiError:
    """Return the 400 for a prompt, or a prompt and its requested answer, over the context."""
    asked = "" if max_tokens is None else f" plus {max_tokens} requested for the answer"
    room = " and one more is needed for the answer" if prompt_tokens == max_model_len else ""
    return invalid(
        param,
        f"This model's context is {max_model_len} tokens, but the request has "
        f"{'at least ' if at_least else ''}{prompt_tokens} in the {param}{asked or room}. "
        f"Shorten the {param}" + (" or lower max_tokens." if asked else "."),
        "context_length_exceeded",
    )


def from_engine(error: Exception, param: str, grammar: Grammar | None = None) -> ApiError:
    """Map what `Engine.generate` raised to an error of the API; the rest goes to the log.

    param: where the prompt came from. grammar: of the request, whose name is where that came from.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptTooLong):
        return context_length_exceeded(param, error.prompt_tokens, error.max_model_len)
    if isinstance(error, InvalidSamplingParams):
        return invalid(error.param, f"{error}.")
    if isinstance(error, InvalidPrompt):
        return invalid(param, f"{error}.")
    if isinstance(error, QueueFull):
        return ApiError(
            429,
            f"The server has all the requests it takes: {error}. Try again shortly.",
            code="queue_full",
            kind="rate_limit_error",
            headers={"Retry-After": str(RETRY_SECONDS)},
        )
    if isinstance(error, GrammarError):
        name = grammar.name if grammar is not None and grammar.name else "response_format"
        return invalid(name, f"Invalid '{name}': {error}.")
    if isinstance(error, RequestTimeout):
        return ApiError(
            504,
            f"The answer took longer than this server allows ({error.seconds:g} s).",
            code="timeout",
            kind=SERVER_ERROR,
        )
    if isinstance(error, EngineClosed):
        return stopping()
    if isinstance(error, EngineHung):
        return ApiError(
            503,
            "A step of the engine does not end. Try again later, or elsewhere.",
            code="engine_down",
            kind=SERVER_ERROR,
        )
    logger.error("generation failed", exc_info=error)
    if isinstance(error, EngineDead):
        return ApiError(
            503,
            "The engine has stopped after a failure; restart the server, whose log has the cause.",
            code="engine_down",
            kind=SERVER_ERROR,
        )
    return ApiError(
        500,
        "Generation failed inside the server; its log has the details.",
        code="internal_error",
        kind=SERVER_ERROR,
    )


def stopping() -> ApiError:
    """Return the error for what a server that is stopping cannot answer any more."""
    return ApiError(
        503,
        "The server is stopping. Try again shortly, or elsewhere.",
        code="engine_down",
        kind=SERVER_ERROR,
        headers={"Retry-After": str(RETRY_SECONDS), "Connection": "close"},
    )


def error_response(error: ApiError) -> Response:
    """Return the HTTP response of an error."""
    # ASCII only: a message may quote text which UTF-8 cannot carry.
    content = json.dumps(error.body()).encode("ascii")
    return Response(content, error.status, error.headers, "application/json")


def _from_http(request: Request, error: HTTPException) -> ApiError:
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return ApiError(404, f"There is no route {where}.", code="not_found")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return ApiError(
            405,
            f"{where} is not supported; this route takes {allowed}.",
            code="method_not_allowed",
            headers=error.headers,
        )
    phrase = HTTPStatus(error.status_code).phrase
    return ApiError(error.status_code, f"{phrase}: {where}.", code=None, headers=error.headers)


class _LastResort:
    """ASGI middleware: a bug in a route becomes a logged 500.

    Starlette's own handler raises the exception again, and the server then drops the connection.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watch(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception:
            if started:
                raise  # half a response: only dropping the connection tells the client
            logger.exception("a request failed")
            error = ApiError(
                500,
                "The server failed on this request; its log has the details.",
                code="internal_error",
                kind=SERVER_ERROR,
            )
            await error_response(error)(scope, receive, send)


def install(app: FastAPI) -> None:
    """Make every error of `app` leave with OpenAI's body."""

    async def on_api_error(_: Request, error: Exception) -> Response:
        if not isinstance(error, ApiError):
            raise error
        return error_response(error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            raise error
        return error_response(_from_http(request, error))

    async def on_disconnect(_: Request, __: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientDisconnect, on_disconnect)
    app.add_middleware(_LastResort)
