"""API keys, for every route but those that tell nothing."""

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import ApiError, error_response

__all__ = ["OPEN_PATHS", "RequireKey"]

OPEN_PATHS = frozenset({"/", "/health", "/static/chat.css", "/static/chat.js"})
"""The page has to load before its user can give it a key."""


class RequireKey:
    """ASGI middleware: 401 unless the request has `Authorization: Bearer <key>`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
            # Headers are latin-1 on the wire; each comparison takes the same time for any key,
            # and every key is compared.
            sent = given.strip(" \t").encode("latin-1")
            right = sum(hmac.compare_digest(sent, key) for key in self._keys)
            if scheme.lower() != "bearer" or not right:
                error = ApiError(
                    401,
                    "The API key is missing or wrong; send 'Authorization: Bearer <key>'.",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
