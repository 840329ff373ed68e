"""Requests of /v1/responses."""

from typing import Annotated, Any, Literal

from pydantic import Field

from server.schemas.base import Limit, Strict
from server.schemas.generation import MAX_LOGPROBS, ReasoningEffort
from server.schemas.tools import MAX_TOOLS, Name

__all__ = ["FunctionTool", "Reasoning", "ResponsesRequest", "TextOptions"]


class FunctionTool(Strict):
    """A function, flat as this route has it."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Reasoning(Strict):
    """effort: "none" turns thinking off; summaries are never made."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextOptions(Strict):
    """format: as `response_format` of a chat, but flat."""

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(Strict):
    """POST /v1/responses."""

    input: str | list[Any]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Limit | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: Annotated[list[str], Field(fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    stream: bool | None = None
