"""The requests the routes take, as strict pydantic models."""

from server.schemas.base import MAX_STOPS, validated
from server.schemas.generation import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    StreamOptions,
    parse_request,
)
from server.schemas.responses import ResponsesRequest
from server.schemas.tokens import DetokenizeRequest, TokenizeRequest
from server.schemas.tools import Function, Tool

__all__ = [
    "MAX_CHOICES",
    "MAX_LOGPROBS",
    "MAX_STOPS",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "Function",
    "GenerationRequest",
    "ResponsesRequest",
    "StreamOptions",
    "TokenizeRequest",
    "Tool",
    "parse_request",
    "validated",
]
