"""What an answer consists of, as it streams."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

__all__ = ["CallPiece", "Piece", "joined"]


@dataclass(slots=True)
class Piece:
    """A stretch of text of one kind."""

    kind: Literal["reasoning", "content"]
    text: str


@dataclass(slots=True)
class CallPiece:
    """A stretch of a tool call: the first of a call has its id and name.

    index: the call's place in the answer. arguments: JSON text to append.
    """

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


def joined(pieces: Sequence[Piece | CallPiece]) -> Sequence[Piece | CallPiece]:
    """Return the same with those that continue one another as one."""
    if len(pieces) < 2:
        return pieces
    longer: list[Piece | CallPiece] = []
    for _, group in groupby(pieces, _whole):
        first, *rest = group
        more = "".join(
            [piece.arguments if isinstance(piece, CallPiece) else piece.text for piece in rest]
        )
        if isinstance(first, CallPiece):
            longer.append(replace(first, arguments=first.arguments + more))
        else:
            longer.append(replace(first, text=first.text + more))
    return longer


def _whole(piece: Piece | CallPiece) -> str | int:
    """Return what a piece is of: one kind of text, or one call."""
    return piece.index if isinstance(piece, CallPiece) else piece.kind
