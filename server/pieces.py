"""What an answer consists of, as it streams."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["CallPiece", "Piece"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of text of one kind."""

    kind: Literal["reasoning", "content"]
    text: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A stretch of a tool call: the first of a call has its id and name.

    index: the call's place in the answer. arguments: JSON text to append.
    """

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None
