"""An optional API key for every route but /health."""

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import ApiError, error_response

__all__ = ["RequireKey"]


class RequireKey:
    """ASGI middleware: 401 unless the request has `Authorization: Bearer <key>`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
            # Headers are latin-1 on the wire; the comparison takes the same time for any key.
            right = hmac.compare_digest(given.strip().encode("latin-1"), self._key)
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
