"""Function tools as a request defines them."""

from typing import Annotated, Any, Literal

from pydantic import Field

from server.schemas.base import Strict

__all__ = ["MAX_TOOLS", "Function", "Name", "Tool", "Tools"]

MAX_TOOLS = 512

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.\-]{1,64}$")]


class Function(Strict):
    """A function the model may call; parameters: a JSON schema of an object."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool of a chat; functions are the only kind."""

    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
