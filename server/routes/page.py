"""GET /: a small chat page, and the two files it needs."""

from pathlib import Path

from fastapi import APIRouter, Response

__all__ = ["routes"]

FOLDER = Path(__file__).resolve().parents[1] / "static"

_TYPES = {
    "chat.css": "text/css; charset=utf-8",
    "chat.js": "text/javascript; charset=utf-8",
    "index.html": "text/html; charset=utf-8",
}
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def routes() -> APIRouter:
    """Return the routes; the files are read once."""
    router = APIRouter()
    files = {name: (FOLDER / name).read_bytes() for name in _TYPES}

    def file(name: str) -> Response:
        return Response(files[name], headers=_HEADERS, media_type=_TYPES[name])

    @router.get("/")
    async def page() -> Response:
        return file("index.html")

    @router.get("/static/chat.js")
    async def script() -> Response:
        return file("chat.js")

    @router.get("/static/chat.css")
    async def style() -> Response:
        return file("chat.css")

    return router
