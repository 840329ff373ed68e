"""The HTTP layer of Grout: OpenAI-compatible routes over an engine, and the `grout` command.

`create_app` is loaded on first use, so that `grout --help` does not pay for FastAPI.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI

    from server.protocol import ServingEngine
    from server.settings import Settings

__all__ = ["create_app"]


def create_app(engine: "ServingEngine", settings: "Settings | None" = None) -> "FastAPI":
    """Return the ASGI application that serves `engine`; see `server.app.create_app`."""
    from server import app

    return app.create_app(engine, settings)
