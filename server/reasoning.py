"""Splitting an answer into reasoning (`<think>...</think>`) and content, as it streams."""

from typing import Literal

from server.pieces import Piece

__all__ = ["ReasoningSplitter"]

OPEN = "<think>"
CLOSE = "</think>"


class ReasoningSplitter:
    """Takes an answer's text piece by piece and returns what each adds to either kind.

    Reasoning is what stands between `<think>` at the very start of the answer (or in the prompt:
    `opened`; some models then write it once more) and the first `</think>`; without one it lasts to
    the end, so that a cut-off thought never becomes content. Newlines around both kinds belong to
    the markup and are dropped.
    """

    def __init__(self, *, opened: bool = False) -> None:
        self._opened = opened
        self._state: Literal["start", "thinking", "content"] = "start"
        self._held = ""
        self._at_edge = True

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        return self._state == "thinking" or (self._state == "start" and self._opened)

    @property
    def settled(self) -> bool:
        """Whether all text from now on is content as it stands."""
        return self._state == "content" and not self._at_edge

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces that `text` settles; the rest is held back."""
        self._held += text
        pieces: list[Piece] = []
        if self._state == "start":
            self._look_for_open()
        if self._state == "thinking":
            self._take_reasoning(pieces)
        if self._state == "content":
            self._take_content(pieces)
        return pieces

    def flush(self) -> list[Piece]:
        """Return what is still held at the end of the answer."""
        held, self._held = self._held, ""
        if self.thinking:
            held = held.lstrip("\n") if self._at_edge else held
            held = held.rstrip("\n")
            return [Piece("reasoning", held)] if held else []
        return [Piece("content", held)] if held else []

    def _look_for_open(self) -> None:
        begin = self._held.lstrip()
        if begin.startswith(OPEN):
            self._held = begin.removeprefix(OPEN)
            self._state = "thinking"
        elif not OPEN.startswith(begin):
            self._state = "thinking" if self._opened else "content"
            # Before content nothing was cut off: every newline is the answer's.
            self._at_edge = self._opened

    def _take_reasoning(self, pieces: list[Piece]) -> None:
        before, close, after = self._held.partition(CLOSE)
        if self._at_edge:
            before = before.lstrip("\n")
        if close:
            settled, self._held = before.rstrip("\n"), after
            self._state = "content"
            self._at_edge = True
        else:
            keep = _unsettled(before)
            settled, self._held = before[: len(before) - keep], before[len(before) - keep :]
            self._at_edge = self._at_edge and not settled
        if settled:
            pieces.append(Piece("reasoning", settled))

    def _take_content(self, pieces: list[Piece]) -> None:
        text, self._held = self._held, ""
        if self._at_edge:
            text = text.lstrip("\n")
        if text:
            self._at_edge = False
            pieces.append(Piece("content", text))


def _unsettled(text: str) -> int:
    """Return the length of the tail that may yet be newlines and `</think>`."""
    at = text.rfind(CLOSE[0], -len(CLOSE) + 1)
    tag = len(text) - at if at >= 0 and CLOSE.startswith(text[at:]) else 0
    body = text[: len(text) - tag]
    return tag + len(body) - len(body.rstrip("\n"))
