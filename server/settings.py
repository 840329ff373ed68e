"""How the HTTP layer behaves, apart from the engine's own settings."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["DEFAULT_MAX_BODY_BYTES", "RequestLogging", "Settings"]

DEFAULT_MAX_BODY_BYTES = 32 * 1024 * 1024

RequestLogging = Literal["off", "summary", "text"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one application.

    api_keys: any of them opens every route but the page and /health; none: all routes are open.
    names: model names that requests may give, the first of them in answers; none: the engine's.
    cors_origins: web origins that browsers may call from; "*" is any.
    max_body_bytes: a longer body is 413. receive_seconds: a body that takes
    longer to come is 408, and a connection that takes longer to send the head of one is closed.
    log_requests: one JSON line a request; "text" adds the request's body, prompts included.
    """

    api_keys: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    receive_seconds: float = 60.0
    log_requests: RequestLogging = "off"
