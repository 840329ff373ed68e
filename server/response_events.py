"""The output of /v1/responses, as items and as the events that build them up."""

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from grout.request import TokenLogprob
from server.logprobs import chat_entries
from server.pieces import CallPiece, Piece
from server.protocol import ServingTokenizer

__all__ = ["TEXT_DELTAS", "OutputBuilder"]

Event = dict[str, Any]

_PARTS = {"reasoning": "reasoning_text", "content": "output_text"}

TEXT_DELTAS = frozenset(f"response.{name}.delta" for name in _PARTS.values())
"""Types of the events that an answer has most of: those with a piece of its text."""


class OutputBuilder:
    """Takes an answer's pieces; keeps the output items and yields OpenAI's events for them.

    Items come one after another: reasoning, message, and a function call for each call.
    """

    def __init__(self, tokenizer: ServingTokenizer, top_logprobs: int | None) -> None:
        self.items: list[dict[str, Any]] = []
        self._tokenizer = tokenizer
        self._top = top_logprobs
        self._open: str | None = None  # "reasoning", "content" or "call"
        self._texts: list[str] = []  # of the part that is open

    def add(self, pieces: Sequence[Piece | CallPiece]) -> Iterator[Event]:
        """Yield the events of what one delta settled."""
        for piece in pieces:
            if isinstance(piece, CallPiece):
                yield from self._call(piece)
            else:
                yield from self._text(piece)

    def end(self, status: str) -> Iterator[Event]:
        """Yield the events that close the last item; status: "completed" or "incomplete"."""
        yield from self._close(status)

    def _text(self, piece: Piece) -> Iterator[Event]:
        if self._open != piece.kind:
            yield from self._close("completed")
            yield from self._begin_text(piece.kind)
        part = self.items[-1]["content"][0]
        self._texts.append(piece.text)
        name = _PARTS[piece.kind]
        delta = self._at(f"response.{name}.delta") | {"content_index": 0, "delta": piece.text}
        if piece.kind == "content":
            entries = self._entries(piece.logprobs)
            part["logprobs"] += entries
            delta["logprobs"] = entries
        yield delta

    def _begin_text(self, kind: str) -> Iterator[Event]:
        if kind == "content":
            item = {"id": _id("msg"), "type": "message", "role": "assistant", "content": []}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"id": _id("rs"), "type": "reasoning", "summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
        yield self._begin(kind, item)
        yield self._at("response.content_part.added") | {"content_index": 0, "part": dict(part)}
        self.items[-1]["content"].append(part)

    def _call(self, piece: CallPiece) -> Iterator[Event]:
        if piece.id is not None:
            yield from self._close("completed")
            item = {
                "id": _id("fc"),
                "type": "function_call",
                "call_id": piece.id,
                "name": piece.name,
                "arguments": "",
            }
            yield self._begin("call", item)
        if piece.arguments:
            self.items[-1]["arguments"] += piece.arguments
            yield self._at("response.function_call_arguments.delta") | {"delta": piece.arguments}

    def _begin(self, kind: str, item: dict[str, Any]) -> Event:
        self._open = kind
        self.items.append(item | {"status": "in_progress"})
        shown = dict(self.items[-1])
        if "content" in shown:
            shown["content"] = []
        return {
            "type": "response.output_item.added",
            "output_index": len(self.items) - 1,
            "item": shown,
        }

    def _close(self, status: str) -> Iterator[Event]:
        if self._open is None:
            return
        kind, self._open = self._open, None
        item = self.items[-1]
        item["status"] = status
        if kind == "call":
            yield self._at("response.function_call_arguments.done") | {
                "name": item["name"],
                "arguments": item["arguments"],
            }
        else:
            part = item["content"][0]
            part["text"], self._texts = "".join(self._texts), []
            done = {"content_index": 0, "text": part["text"]}
            if kind == "content":
                done["logprobs"] = part["logprobs"]
            yield self._at(f"response.{_PARTS[kind]}.done") | done
            yield self._at("response.content_part.done") | {"content_index": 0, "part": part}
        yield {
            "type": "response.output_item.done",
            "output_index": len(self.items) - 1,
            "item": item,
        }

    def _at(self, name: str) -> Event:
        return {
            "type": name,
            "item_id": self.items[-1]["id"],
            "output_index": len(self.items) - 1,
        }

    def _entries(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        if self._top is None:
            return []
        return chat_entries(self._tokenizer, logprobs, self._top)


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
