"""What a request says of tools: which the prompt shows, and whether a call is forced."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from server.errors import ApiError, invalid
from server.schemas.tools import Tool

__all__ = ["ToolUse", "tool_use"]

Mode = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools of one request.

    shown: what the prompt describes. callable: what a call that a grammar guides may name. mode:
    "none" neither shows nor looks for calls; "required" forces at least one. parallel: several
    calls are fine.
    """

    shown: tuple[Tool, ...] = ()
    callable: tuple[Tool, ...] = ()
    mode: Mode = "none"
    parallel: bool = True

    @property
    def guided(self) -> bool:
        """Whether a grammar gives calls their form: also where none need be made, for `strict`."""
        strict = any(tool.function.strict for tool in self.callable)
        return self.mode == "required" or (self.mode == "auto" and strict)

    def for_template(self) -> list[dict[str, Any]] | None:
        """The tools as a chat template takes them."""
        if not self.shown:
            return None
        return [
            tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})
            for tool in self.shown
        ]


def tool_use(tools: Sequence[Tool] | None, choice: Any, parallel: bool | None) -> ToolUse:
    """Return what `tools` and `tool_choice` ask for together; raises ApiError 400."""
    known = {tool.function.name: tool for tool in tools or ()}
    if len(known) < len(tools or ()):
        raise invalid("tools", "Two of the 'tools' have the same name.")
    if isinstance(choice, dict):
        name = _named(choice)
        if name not in known:
            raise invalid("tool_choice", f"'tool_choice' names '{name}', which 'tools' has not.")
        return ToolUse(tuple(known.values()), (known[name],), "required", parallel=False)
    if choice not in (None, "none", "auto", "required"):
        raise _unknown_choice()
    if not known and choice == "required":
        raise invalid("tool_choice", "'tool_choice' is 'required', but there are no 'tools'.")
    if not known or choice == "none":
        return ToolUse()
    every = tuple(known.values())
    mode: Mode = "required" if choice == "required" else "auto"
    return ToolUse(every, every, mode, parallel is not False)


def _named(choice: dict[str, Any]) -> str:
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise _unknown_choice()
    shown: str = name[:100]
    return shown


def _unknown_choice() -> ApiError:
    return invalid(
        "tool_choice",
        "'tool_choice' must be 'none', 'auto', 'required' or "
        '{"type": "function", "function": {"name": "..."}}.',
    )
