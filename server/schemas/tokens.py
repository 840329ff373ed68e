"""Requests of /tokenize and /detokenize, as vLLM has them."""

from typing import Annotated, Any

from pydantic import Field

from server.schemas.base import Strict, TokenId
from server.schemas.tools import Tools

__all__ = ["DetokenizeRequest", "TokenizeRequest"]


class TokenizeRequest(Strict):
    """POST /tokenize: a text, or messages as a chat would render them."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
