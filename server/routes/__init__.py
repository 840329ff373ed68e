"""The routes, one noun a module; each has `routes(served) -> APIRouter`."""

from server.routes import chat, completions, health, models

__all__ = ["chat", "completions", "health", "models"]
