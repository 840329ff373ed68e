"""Tool calls in an answer: Qwen3's `<tool_call>` form, found as the text streams.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

A call becomes one only when it is complete and parses; whatever does not is content, character by
character as it was generated. Arguments are the generated JSON as it stands, never written anew.
"""

import re
import uuid
from dataclasses import dataclass

from server.pieces import CallPiece, Piece
from server.strict_json import DECODER, lone_surrogate, parse_strict

__all__ = ["CLOSE", "OPEN", "ToolParser", "parse_call"]

OPEN = "<tool_call>"
CLOSE = "</tool_call>"

_SPACE = " \t\r\n"
# What a guided call begins with (see `server.constraint`), and so what may be streamed at once.
_GUIDED = re.compile(r'\s*\{"name": "([a-zA-Z0-9_.\-]+)", "arguments": (?=\{)')


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call's name, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolParser:
    """Takes content piece by piece and returns content and calls.

    guided: a grammar guarantees the form of calls, so that their arguments are passed on before
    the call is complete. Space around calls is markup and dropped.
    """

    def __init__(self, *, guided: bool = False) -> None:
        self._guided = guided
        self._held = ""
        self._fed = 0
        self._before = ""  # space in front of the tag
        self._inside = False
        self._has_content = False
        self._streaming: _Scanner | None = None
        self.calls = 0
        """Calls found, the one being streamed included."""

    @property
    def streaming(self) -> bool:
        """Whether the last call's end is still to come."""
        return self._streaming is not None

    @property
    def whole_calls(self) -> bool:
        """Whether there are calls, and the arguments of each are all there."""
        return self.calls > 0 and (self._streaming is None or self._streaming.done)

    def feed(self, text: str) -> list[Piece | CallPiece]:
        """Return the pieces that `text` settles; the rest is held back."""
        self._held += text
        self._fed += len(text)
        pieces: list[Piece | CallPiece] = []
        while self._step(pieces):
            pass
        return pieces

    def flush(self) -> list[Piece | CallPiece]:
        """Return what is still held at the end of the answer, as content."""
        held, self._held = self._held, ""
        if self._streaming is not None:
            return []  # all that belongs to the call has been passed on
        pieces: list[Piece | CallPiece] = []
        if self._inside:
            self._add(pieces, self._before + OPEN + held, 0)
        elif held.strip(_SPACE) or (held and not self.calls):
            self._add(pieces, held, 0)
        return pieces

    def _step(self, pieces: list[Piece | CallPiece]) -> bool:
        """Settle what can be; returns whether there may be more."""
        if self._streaming is not None:
            return self._stream(self._streaming, pieces)
        return self._take_call(pieces) if self._inside else self._take_content(pieces)

    def _take_content(self, pieces: list[Piece | CallPiece]) -> bool:
        before, opened, after = self._held.partition(OPEN)
        if not opened:
            keep = _unsettled(before)
            self._add(pieces, before[: len(before) - keep], keep)
            self._held = before[len(before) - keep :]
            return False
        text = before.rstrip(_SPACE)
        self._add(pieces, text, len(self._held) - len(text))
        self._before = before[len(text) :]
        self._held, self._inside = after, True
        return True

    def _take_call(self, pieces: list[Piece | CallPiece]) -> bool:
        if self._guided and (match := _GUIDED.match(self._held)):
            self._held = self._held[match.end() :]
            self._inside, self._streaming = False, _Scanner()
            pieces.append(self._begin(match[1], ""))
            return True
        end = _closing(self._held)
        if end < 0:
            return False
        body, self._held = self._held[:end], self._held[end + len(CLOSE) :]
        self._inside = False
        call = parse_call(body)
        if call is None:
            self._add(pieces, self._before + OPEN + body + CLOSE, len(self._held))
        else:
            pieces.append(self._begin(call.name, call.arguments))
        return True

    def _stream(self, scanner: "_Scanner", pieces: list[Piece | CallPiece]) -> bool:
        if not scanner.done:
            end = scanner.feed(self._held)
            text, self._held = self._held[:end], self._held[end:]
            if text:
                pieces.append(CallPiece(self.calls - 1, text))
        end = self._held.find(CLOSE)
        if not scanner.done or end < 0:
            return False
        self._held = self._held[end + len(CLOSE) :]
        self._streaming = None
        return True

    def _begin(self, name: str, arguments: str) -> CallPiece:
        self.calls += 1
        return CallPiece(self.calls - 1, arguments, f"call_{uuid.uuid4().hex}", name)

    def _add(self, pieces: list[Piece | CallPiece], text: str, left: int) -> None:
        """Add content. left: how much of what was fed comes after it."""
        if self.calls and not self._has_content:
            text = text.lstrip(_SPACE)  # between calls and the text after them
        if text:
            self._has_content = True
            pieces.append(Piece("content", text, self._fed - left))


class _Scanner:
    """Finds the end of one JSON object in text that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False
        self.done = False

    def feed(self, text: str) -> int:
        """Return how much of `text` belongs to the object."""
        for at, char in enumerate(text):
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._quoted = False
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.done = True
                    return at + 1
        return len(text)


def parse_call(text: str) -> ParsedCall | None:
    """Return the call in the text between the tags, or None where it is not one.

    What a client could not send back as a part of the conversation is none.
    """
    spans: dict[str, tuple[object, str]] = {}
    try:
        at = _expect(text, 0, "{")
        while True:
            key, end = DECODER.raw_decode(text, _skip(text, at))
            at = _skip(text, _expect(text, end, ":"))
            value, end = DECODER.raw_decode(text, at)
            if not isinstance(key, str) or key in spans:
                return None
            spans[key] = (value, text[at:end])
            at = _skip(text, end)
            if text[at : at + 1] != ",":
                break
            at += 1
        if _skip(text, _expect(text, at, "}")) != len(text):
            return None
    except (ValueError, RecursionError):
        return None
    name = spans.get("name", (None, ""))[0]
    arguments = _arguments(*spans.get("arguments", (None, "")))
    if not isinstance(name, str) or not name or arguments is None:
        return None
    if lone_surrogate([name, spans["arguments"][0]], text) is not None:
        return None
    return ParsedCall(name, arguments)


def _arguments(value: object, source: str) -> str | None:
    if isinstance(value, dict):
        return source
    if isinstance(value, str):  # some models quote them
        try:
            quoted = parse_strict(value)
        except (ValueError, RecursionError):
            return None
        if isinstance(quoted, dict) and lone_surrogate(quoted, value) is None:
            return value
    return None


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def _expect(text: str, at: int, char: str) -> int:
    at = _skip(text, at)
    if text[at : at + 1] != char:
        raise ValueError(f"no {char}")
    return at + 1


def _closing(text: str) -> int:
    """Return where the closing tag stands, or -1; one inside a JSON string is only text."""
    at = -1
    while (at := text.find(CLOSE, at + 1)) >= 0:
        if not _quoted(text[:at]):
            return at
    return -1


_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')


def _quoted(text: str) -> bool:
    """Return whether `text` ends inside a string that may yet be valid JSON."""
    start = _STRING.sub("", text).find('"')
    if start < 0:
        return False
    return not any(char < " " for char in _STRING.sub("", text)[start:])


def _unsettled(text: str) -> int:
    """Return the length of the tail that may yet be space and `<tool_call>`."""
    at = text.rfind(OPEN[0], -len(OPEN) + 1)
    tag = len(text) - at if at >= 0 and OPEN.startswith(text[at:]) else 0
    body = text[: len(text) - tag]
    return tag + len(body) - len(body.rstrip(_SPACE))
