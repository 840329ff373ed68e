"""POST /v1/embeddings, refused: the models served here generate."""

from fastapi import APIRouter

from server.errors import invalid

__all__ = ["routes"]


def routes() -> APIRouter:
    """Return the route."""
    router = APIRouter()

    @router.post("/v1/embeddings")
    async def create_embedding() -> None:
        raise invalid(
            "model",
            "This server has a generating model, which makes no embeddings; use "
            "/v1/chat/completions, /v1/completions or /v1/responses.",
            "unsupported_model",
        )

    return router
