"""Requests that an OpenAI-compatible server must refuse with a 4xx and an error that is of use."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LONG_PROMPT = 50_000
"""Words: more tokens than the context of what this is used on."""


@dataclass(frozen=True)
class Malformed:
    """A body to refuse: made from a good one, as JSON or as bytes."""

    name: str
    change: Callable[[dict[str, Any]], Any]

    def body(self, model: str, path: str) -> Any:
        """The body for that route: an object to encode, or bytes to send as they are."""
        chat = path.endswith("/chat/completions")
        good: dict[str, Any] = {"model": model, "max_tokens": 2}
        if chat:
            good["messages"] = [{"role": "user", "content": "Hi"}]
        else:
            good["prompt"] = "Hi"
        return self.change(good)


def _with(**fields: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda good: good | fields


def _without_prompt(good: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in good.items() if name not in ("prompt", "messages")}


def _prompt(text: str, good: dict[str, Any]) -> dict[str, Any]:
    if "messages" in good:
        return good | {"messages": [{"role": "user", "content": text}]}
    return good | {"prompt": text}


def _empty_prompt(good: dict[str, Any]) -> dict[str, Any]:
    return good | ({"messages": []} if "messages" in good else {"prompt": []})


MALFORMED = (
    Malformed("cut JSON", lambda good: json.dumps(good).encode()[:-9]),
    Malformed("no JSON", lambda good: b"hello"),
    Malformed("empty body", lambda good: b""),
    Malformed("array", lambda good: [good]),
    Malformed("not UTF-8", lambda good: b'{"prompt": "\xff\xfe"}'),
    Malformed("NaN", lambda good: json.dumps(good | {"temperature": float("nan")}).encode()),
    Malformed("deep", lambda good: b'{"prompt":' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
    Malformed("lone surrogate", lambda good: _prompt("\ud800", good)),
    Malformed("other model", _with(model="no/such-model")),
    Malformed("temperature", _with(temperature=-1)),
    Malformed("max_tokens -1", _with(max_tokens=-1)),
    Malformed("max_tokens text", _with(max_tokens="many")),
    Malformed("max_tokens too many", _with(max_tokens=10**9)),
    Malformed("stop", _with(stop=[1, 2])),
    Malformed("unknown parameter", _with(surprise=True)),
    Malformed("no prompt", _without_prompt),
    Malformed("empty prompt", _empty_prompt),
    Malformed("prompt too long", lambda good: _prompt("word " * LONG_PROMPT, good)),
)
"""Each is refused whatever the model, and before anything runs."""
