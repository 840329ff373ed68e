"""GET /health and GET /version."""

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from server.served import Served
from server.versions import version

__all__ = ["routes"]


def routes(served: Served) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    @router.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        if not served.engine.alive:
            return JSONResponse({"status": "the engine has stopped; restart the server"}, 503)
        if served.engine.hung:
            return JSONResponse({"status": "a step of the engine does not end"}, 503)
        return JSONResponse({"status": "ok"})

    @router.get("/version")
    async def get_version() -> dict[str, str]:
        return {"version": version()}

    return router
