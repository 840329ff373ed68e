"""Opt-outs: where a program vouches itself for what the rules cannot check (rule O9)."""

import sys
from dataclasses import dataclass

from tilert.errors import OwnershipError
from tilert.ownership import Place

__all__ = ["IndexProof", "OptOut", "audit", "opt_out"]


@dataclass(frozen=True, slots=True, order=True)
class OptOut:
    """One place where a person vouches for a program.

    Attributes:
        filename, line: where it is defined.
        kind: "unsafe kernel", or "index proof" for an index map that the host does not check.
        name: what is vouched for.
        reason: why it is right.
    """

    filename: str
    line: int
    kind: str
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.reason} ({self.filename}:{self.line})"


_known: dict[OptOut, None] = {}


def opt_out(kind: str, name: str, reason: str, place: Place) -> OptOut:
    """Note an opt-out that is defined at `place`.

    Raises:
        OwnershipError: if it gives no reason.
    """
    if not isinstance(reason, str) or not reason.strip():
        raise OwnershipError(
            f"O9 opt-out: {kind} '{name}' gives no reason; say in reason= why it is right, for"
            " those who read the audit"
        )
    made = OptOut(place.filename, place.line, kind, name, " ".join(reason.split()))
    _known[made] = None
    return made


def audit() -> tuple[OptOut, ...]:
    """Every opt-out of the modules imported so far, by file and line."""
    return tuple(sorted(_known))


class IndexProof:
    """Why the rows of an index map are distinct, where that is not checked row by row (rule O7).

    It is listed by `tilert.audit()`.

    Args:
        name: of the type or method that has the proof.
        reason: the proof, for people.

    Raises:
        OwnershipError: if it gives no reason.
    """

    def __init__(self, name: str, reason: str) -> None:
        frame = sys._getframe(1)
        place = Place(frame.f_code, frame.f_lasti)
        self.opt_out = opt_out("index proof", name, reason, place)
