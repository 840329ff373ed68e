"""GET /v1/models and /v1/models/{id}."""

from typing import Any

from fastapi import APIRouter

from server.served import Served

__all__ = ["routes"]


def routes(served: Served) -> APIRouter:
    """Return the routes, listing the one model under each of its names."""
    router = APIRouter()

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": served.created,
            "owned_by": "grout",
            "max_model_len": served.engine.max_model_len,
        }

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in served.names]}

    # A path: Hub ids hold a slash, and clients do not all escape it.
    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        return card(served.check_name(name))

    return router
