"""From token ids to text, a token at a time, never showing what may still change."""

from codecs import utf_8_decode
from collections.abc import Callable, Collection, Sequence

_LONGEST_BEGUN = 3
"""Bytes of a character of four that are not whole yet."""


class StopScanner:
    """Cuts a text stream exactly before the first of several stop texts.

    The stop text that is complete first wins, and of those complete at the same character the
    longest; that choice does not depend on how the stream is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str, *, stops: bool = True) -> str:
        """Text that is certain to be part of the reply; "" once stopped.

        stops: whether a stop text that ends in `text` is one; otherwise it is passed on.
        """
        if self.stopped:
            return ""
        before = len(self._held)
        text = self._held + text
        if stops and (end := self._first(text, before)):
            self.stopped, self._held = True, ""
            return text[: end[1]]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _first(self, text: str, before: int) -> tuple[int, int] | tuple[()]:
        """End and start of the stop text that wins among those that end after `before`, or ()."""
        starts = [(stop, text.find(stop, max(0, before - len(stop) + 1))) for stop in self._stops]
        return min(((at + len(stop), at) for stop, at in starts if at >= 0), default=())

    def flush(self) -> str:
        """The text held back, when no more will come."""
        text, self._held = self._held, ""
        return text


class Detokenizer:
    """Text of a growing list of token ids.

    token_bytes(id) gives a token's raw bytes; ids in `hidden` (special tokens) have no text.
    Bytes are held back until they decode as UTF-8; invalid ones become U+FFFD exactly as
    `bytes.decode(errors="replace")` has it, so the pieces joined are the decoded whole. Only the
    beginning of a character that never becomes whole, where the tokens end, is left out.
    begun: the beginning of a character, which the first tokens may complete.
    stopped: a stop text was reached, so the reply is complete.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        hidden: Collection[int] = (),
        stops: Sequence[str] = (),
        begun: bytes = b"",
    ) -> None:
        self._token_bytes = token_bytes
        self._hidden = hidden
        self._begun = begun
        self._scanner = StopScanner(stops) if stops else None
        self.stopped = False

    def push(self, token: int, *, stops: bool = True) -> str:
        """The text that `token` makes certain, which may be "".

        stops: whether it may complete a stop text.
        """
        if token in self._hidden:
            return ""
        data = self._token_bytes(token)
        if self._begun:
            data = self._begun + data
        text, size = utf_8_decode(data, "replace", False)
        self._begun = data[size:]
        return text if self._scanner is None else self._scan(self._scanner, text, stops)

    def flush(self) -> str:
        """The rest of the text, when no more tokens will come."""
        return "" if self._scanner is None else self._scanner.flush()

    def whole(self, tokens: Sequence[int]) -> str:
        """The text of tokens when no more will come."""
        return "".join(map(self.push, tokens)) + self.flush()

    def shown(self, tokens: Sequence[int]) -> str:
        """Some tokens' text by itself, for messages."""
        raw = b"".join(map(self._token_bytes, tokens))
        return raw.decode(errors="backslashreplace")

    def _scan(self, scanner: StopScanner, text: str, stops: bool) -> str:
        text = scanner.push(text, stops=stops)
        self.stopped = scanner.stopped
        return text


def begun_character(
    token_bytes: Callable[[int], bytes], hidden: Collection[int], tokens: Sequence[int]
) -> bytes:
    """The beginning of a character that `tokens` end in, or none.

    One before a token of `hidden` does not count: what comes after that is another text.
    """
    data = b""
    for token in reversed(tokens):
        if len(data) >= _LONGEST_BEGUN or token in hidden:
            break
        data = token_bytes(token) + data
    for size in range(1, min(len(data), _LONGEST_BEGUN) + 1):
        if utf_8_decode(data[-size:], "replace", False)[1] == 0:
            return data[-size:]
    return b""


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, short of all of it."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return 0 if at < 0 else len(text) - at


__all__ = ["Detokenizer", "StopScanner", "begun_character"]
