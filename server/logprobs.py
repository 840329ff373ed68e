"""Log probabilities in both of OpenAI's formats, with the true bytes of each token."""

from collections import deque
from collections.abc import Iterable
from typing import Any

from grout.request import Delta, TokenLogprob
from server.protocol import ServingTokenizer

__all__ = ["LogprobStream", "chat_entries", "legacy_logprobs", "token_text"]


class LogprobStream:
    """Releases each token's entry once text of that token is part of the answer.

    Text may be held back (half a character, what may become a stop string), and what belongs to a
    stop string never comes: neither do its tokens. Tokens without text are left out.
    """

    def __init__(self, tokenizer: ServingTokenizer) -> None:
        self._tokenizer = tokenizer
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()
        self._produced = 0
        self._sent = 0

    def feed(self, delta: Delta) -> list[TokenLogprob]:
        """Return the entries that the text of `delta` settles."""
        for entry in delta.logprobs:
            if entry.token_id not in self._tokenizer.special_ids:
                self._waiting.append((self._produced, entry))
                self._produced += len(self._tokenizer.token_bytes(entry.token_id))
        self._sent += len(delta.text.encode())
        settled = []
        while self._waiting and self._waiting[0][0] < self._sent:
            settled.append(self._waiting.popleft()[1])
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
    tokenizer: ServingTokenizer, entries: Iterable[TokenLogprob], top: int, offset: int
) -> tuple[dict[str, Any], int]:
    """Return the entries as /v1/completions has them, and the offset of what follows.

    offset: characters of the answer before the first of them.
    """
    out: dict[str, Any] = {
        "text_offset": [],
        "token_logprobs": [],
        "tokens": [],
        "top_logprobs": [],
    }
    for entry in entries:
        out["text_offset"].append(offset)
        out["token_logprobs"].append(_finite(entry.logprob))
        out["tokens"].append(token_text(tokenizer, entry.token_id))
        out["top_logprobs"].append(
            {token_text(tokenizer, token): _finite(value) for token, value in entry.top[:top]}
        )
        offset += _characters(tokenizer.token_bytes(entry.token_id))
    return out, offset


def _characters(raw: bytes) -> int:
    """Return how many characters begin in `raw`: all bytes but UTF-8's continuations."""
    return sum(byte & 0xC0 != 0x80 for byte in raw)


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes this number for it."""
    return max(logprob, -9999.0)
