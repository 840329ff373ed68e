"""Log probabilities in both of OpenAI's formats, with the true bytes of each token."""

from codecs import utf_8_decode
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from grout.request import Delta, TokenLogprob
from server.protocol import ServingTokenizer

__all__ = [
    "LogprobStream",
    "Placed",
    "chat_entries",
    "legacy_logprobs",
    "legacy_prompt",
    "token_text",
]


class Placed(NamedTuple):
    """A token's entry, the character of the answer that it begins in, and the one after its end."""

    place: int
    end: int
    entry: TokenLogprob


class _Places:
    """Characters of a text that comes in tokens, cut anywhere, as `grout.detokenizer` has them.

    whole: how many are complete. begun: the beginning of the next, there before the first token.
    """

    def __init__(self, begun: bytes = b"") -> None:
        self.whole = 0
        self._begun = begun

    @property
    def end(self) -> int:
        """How many characters there are, with one that has only begun."""
        return self.whole + bool(self._begun)

    def add(self, raw: bytes) -> int:
        """Take a token; return the number of the character that it begins with, or goes on."""
        begun = self._begun
        place = self.whole + (bool(begun and raw) and not _continues(begun, raw))
        data = begun + raw
        text, size = utf_8_decode(data, "replace", False)
        self.whole += len(text)
        self._begun = data[size:]
        return place


def _continues(begun: bytes, raw: bytes) -> bool:
    """Return whether the first byte of `raw` belongs to the character that has begun."""
    text, size = utf_8_decode(begun + raw[:1], "replace", False)
    return size == 0 or (size > len(begun) and len(text) == 1)


class LogprobStream:
    """Releases each token's entry once text of that token is part of the answer.

    Text may be held back (half a character, what may become a stop string), and what belongs to a
    stop string never comes: neither do its tokens. Those of half a character that the answer ends
    in come with its end. Special tokens are left out. begun: the beginning of a character that the
    prompt ends in.
    """

    def __init__(self, tokenizer: ServingTokenizer, begun: bytes = b"") -> None:
        self._tokenizer = tokenizer
        self._waiting: deque[Placed] = deque()
        self._places = _Places(begun)
        self._sent = 0

    def feed(self, delta: Delta) -> list[TokenLogprob]:
        """Return the entries that the text of `delta` settles."""
        return [placed.entry for placed in self.placed(delta)]

    def placed(self, delta: Delta) -> list[Placed]:
        """The same, with their places."""
        for entry in delta.logprobs:
            if entry.token_id not in self._tokenizer.special_ids:
                raw = self._tokenizer.token_bytes(entry.token_id)
                place = self._places.add(raw)
                self._waiting.append(Placed(place, self._places.end, entry))
        self._sent += len(delta.text)
        # Where the answer ends with characters missing, they belong to a stop string.
        whole = delta.finish_reason is not None and self._sent == self._places.whole
        settled = []
        while self._waiting and (whole or self._waiting[0].place < self._sent):
            settled.append(self._waiting.popleft())
        return settled


def token_text(tokenizer: ServingTokenizer, token: int) -> str:
    """Return a token's text, never empty and never mangled.

    Bytes that are no whole character are written as `\\xf0`, as OpenAI does.
    """
    raw = tokenizer.token_bytes(token)
    return raw.decode("utf-8", errors="backslashreplace") if raw else f"token_id:{token}"


def chat_entries(
    tokenizer: ServingTokenizer, entries: Iterable[TokenLogprob], top: int
) -> list[dict[str, Any]]:
    """Return the entries as `logprobs.content` of a chat has them."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_text(tokenizer, token),
            "logprob": _finite(logprob),
            "bytes": list(tokenizer.token_bytes(token)),
        }

    return [
        one(entry.token_id, entry.logprob)
        | {"top_logprobs": [one(*alternative) for alternative in entry.top[:top]]}
        for entry in entries
    ]


def legacy_logprobs(
    tokenizer: ServingTokenizer, entries: Iterable[Placed], top: int, offset: int
) -> dict[str, Any]:
    """Return the entries of an answer as /v1/completions has them.

    offset: characters in front of the answer.
    """
    out = _no_tokens()
    for place, _, entry in entries:
        _append(out, tokenizer, offset + place, entry.token_id, entry, top)
    return out


def legacy_prompt(
    tokenizer: ServingTokenizer,
    token_ids: Sequence[int],
    text: str,
    entries: Iterable[TokenLogprob | None],
    top: int,
) -> dict[str, Any]:
    """Return the same for the tokens of a prompt, the first of which has no log probability.

    text: of the prompt, which has special tokens only where they were written out.
    """
    out, places, written = _no_tokens(), _Places(), 0
    for token, entry in zip(token_ids, entries, strict=True):
        raw = tokenizer.token_bytes(token)
        if token in tokenizer.special_ids:
            place = places.whole + written
            shown = raw.decode(errors="replace")
            written += len(shown) if text.startswith(shown, place) else 0
        else:
            place = written + places.add(raw)
        _append(out, tokenizer, place, token, entry, top)
    return out


def _no_tokens() -> dict[str, Any]:
    return {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}


def _append(
    out: dict[str, Any],
    tokenizer: ServingTokenizer,
    offset: int,
    token: int,
    entry: TokenLogprob | None,
    top: int,
) -> None:
    out["text_offset"].append(offset)
    out["tokens"].append(token_text(tokenizer, token))
    out["token_logprobs"].append(None if entry is None else _finite(entry.logprob))
    out["top_logprobs"].append(None if entry is None else _with_top(tokenizer, entry, top))


def _with_top(tokenizer: ServingTokenizer, entry: TokenLogprob, top: int) -> dict[str, float]:
    """The likeliest tokens, and the one that stands there where it is none of them."""
    shown = {token_text(tokenizer, token): _finite(value) for token, value in entry.top[:top]}
    shown.setdefault(token_text(tokenizer, entry.token_id), _finite(entry.logprob))
    return shown


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes this number for it."""
    return max(logprob, -9999.0)
