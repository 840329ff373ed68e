"""The ASGI application: routes, errors, and what stands in front of them, over one engine."""

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from server import errors, openapi
from server.auth import RequireKey
from server.metrics import Metrics
from server.protocol import ServingEngine
from server.request_log import RequestLog
from server.routes import (
    chat,
    completions,
    embeddings,
    health,
    metrics,
    models,
    page,
    responses,
    tokens,
)
from server.served import Served, served_name
from server.settings import Settings
from server.sse import DirectSend
from server.stopping import RefuseWhenStopping, Stopping

__all__ = ["create_app"]


class _App(FastAPI):
    def build_middleware_stack(self) -> ASGIApp:
        return DirectSend(super().build_middleware_stack())


def create_app(
    engine: ServingEngine, settings: Settings | None = None, stopping: Stopping | None = None
) -> FastAPI:
    """Return the application that serves `engine`, which the caller opens and closes.

    stopping: by which the caller makes it refuse requests.
    """
    settings = settings or Settings()
    # Bodies are read by the routes themselves (server/body.py), so the schema is our own too.
    app = _App(title="Grout", openapi_url=None, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False
    served = Served(engine, settings, Metrics(engine, served_name(engine)))
    for router in (
        chat.routes(served),
        completions.routes(served),
        responses.routes(served),
        models.routes(served),
        tokens.routes(served),
        embeddings.routes(),
        health.routes(served),
        metrics.routes(served),
        openapi.routes(),
        page.routes(),
    ):
        app.include_router(router)
    # The last one added stands first: a refusal, too, has a request id, a log line and CORS.
    errors.install(app)
    if settings.api_keys:
        app.add_middleware(RequireKey, keys=settings.api_keys)
    app.add_middleware(RefuseWhenStopping, state=stopping or Stopping())
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    app.add_middleware(RequestLog, level=settings.log_requests)
    return app
