"""The prompts of a serving benchmark: the same for every endpoint, none of them sent twice."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LOWEST_ID = 1000
"""Below lie the special ids and single bytes of many vocabularies."""

ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class PromptError(Exception):
    """Prompts cannot be made."""


@dataclass(frozen=True)
class Prompts:
    """Makes request bodies.

    length: tokens of a random prompt; on the chat route words, each a few tokens. texts: instead
    of random prompts, taken in turn. vocab: random ids are below it. extra: fields added to every
    body.
    """

    route: str
    model: str
    new: int
    length: int
    vocab: int
    seed: int
    texts: tuple[str, ...] = ()
    temperature: float = 0.0
    ignore_eos: bool = True
    extra: tuple[tuple[str, Any], ...] = ()

    @property
    def path(self) -> str:
        return ROUTES[self.route]

    def bodies(self, count: int, *, phase: int) -> list[dict[str, Any]]:
        """`count` request bodies; each phase (a warm-up, a level) has prompts of its own."""
        rng = np.random.default_rng([self.seed, phase])
        return [self._body(self._prompt(rng, i)) for i in range(count)]

    def _prompt(self, rng: np.random.Generator, i: int) -> str | list[int]:
        if self.texts:
            return self.texts[i % len(self.texts)]
        ids = [int(token) for token in rng.integers(LOWEST_ID, self.vocab, self.length)]
        return " ".join(map(str, ids)) if self.route == "chat" else ids

    def _body(self, prompt: str | list[int]) -> dict[str, Any]:
        content: dict[str, Any] = {"prompt": prompt}
        if self.route == "chat":
            content = {"messages": [{"role": "user", "content": prompt}]}
        body = content | {
            "model": self.model,
            "max_tokens": self.new,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body | dict(self.extra)


def read_texts(path: Path) -> tuple[str, ...]:
    """The lines of a text file that are not blank. Raises `PromptError`."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"cannot read prompts from {path}: {error}") from None
    texts = tuple(line.strip() for line in lines if line.strip())
    if not texts:
        raise PromptError(f"{path} has no prompt; it must have one a line")
    return texts
