"""What an answer consists of, as it streams."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal

from grout.request import TokenLogprob

__all__ = ["CallPiece", "Piece", "joined"]


@dataclass(slots=True)
class Piece:
    """A stretch of text of one kind.

    end: how much of all content there has been up to its end, what is dropped included. logprobs:
    of the tokens of content, each with the first piece that has text of it.
    """

    kind: Literal["reasoning", "content"]
    text: str
    end: int = field(default=0, compare=False)
    logprobs: Sequence[TokenLogprob] = field(default=(), compare=False)


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
            whole = replace(first, text=first.text + more)
            for piece in rest:
                if isinstance(piece, Piece):
                    whole.logprobs = [*whole.logprobs, *piece.logprobs]
            longer.append(whole)
    return longer


def _whole(piece: Piece | CallPiece) -> str | int:
    """Return what a piece is of: one kind of text, or one call."""
    return piece.index if isinstance(piece, CallPiece) else piece.kind
