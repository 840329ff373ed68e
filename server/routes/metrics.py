"""GET /metrics, for Prometheus."""

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from server.served import Served

__all__ = ["routes"]


def routes(served: Served) -> APIRouter:
    """Return the route."""
    router = APIRouter()

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(served.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return router
