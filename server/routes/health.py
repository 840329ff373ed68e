"""GET /health."""

from fastapi import APIRouter

__all__ = ["routes"]


def routes() -> APIRouter:
    """Return the route; it answers as long as the process takes requests."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return router
