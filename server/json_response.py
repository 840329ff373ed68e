"""Answers in JSON."""

import json
from typing import Any

from fastapi import Response

__all__ = ["JsonResponse", "utf8"]


def utf8(text: str) -> bytes:
    """A JSON text as it is sent; a lone surrogate, which UTF-8 has not, as JSON's escape."""
    return text.encode("utf-8", "backslashreplace")


class JsonResponse(Response):
    """A value as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return utf8(json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")))
