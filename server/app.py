"""The ASGI application: routes, errors, and the optional API key over one engine."""

from fastapi import FastAPI

from server import errors
from server.auth import RequireKey
from server.protocol import ServingEngine
from server.routes import chat, completions, health, models
from server.served import Served

__all__ = ["create_app"]


def create_app(engine: ServingEngine, *, api_key: str | None = None) -> FastAPI:
    """Return the application that serves `engine`, which the caller opens and closes.

    api_key: when given, every route but /health asks for it as a bearer token.
    """
    # Bodies are read by the routes themselves (server/body.py), so FastAPI knows no schema
    # that its documentation pages could show.
    app = FastAPI(title="Grout", openapi_url=None, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False
    served = Served(engine)
    for router in (
        chat.routes(served),
        completions.routes(served),
        models.routes(served),
        health.routes(),
    ):
        app.include_router(router)
    errors.install(app)
    if api_key is not None:
        app.add_middleware(RequireKey, key=api_key)
    return app
