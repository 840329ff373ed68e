"""The prompts of a serving benchmark: the same for every endpoint, none of them sent twice."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from scripts.serving_client import Client, ClientError

LOWEST_ID = 1000
"""Below lie the special ids and single bytes of many vocabularies."""

ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


_FOUR_LETTERS = """
ball band bank bath bear bird boat body bone book bowl cake camp card case city club coal coat
cook corn crop date dawn desk dish door dust east face farm film fire fish flag food foot game
gate gift girl gold hair hall hand head hill home hope idea iron king lake lamp land leaf life
lion list luck mail meal meat milk mind moon neck news nose page park path pool race rain rice
ring road rock roof room root rope rose salt sand seat seed ship shoe shop silk skin snow song
soup star step tail team tent tide time tool town tree wall wave week west wife wind wine wing
wire wood word yard year
"""

WORDS = tuple(_FOUR_LETTERS.split())
"""Of a chat prompt: equally long, and a token each in the vocabularies of most models."""

CALIBRATION = 1 << 16
"""The phase of the prompts that measure how many tokens words are."""

CALIBRATION_WORDS = 8, 40


class PromptError(Exception):
    """Prompts cannot be made."""


@dataclass(frozen=True)
class Prompts:
    """Makes request bodies.

    length: tokens of a random prompt, on the chat route words. texts: instead of random prompts,
    taken in turn. vocab: random ids are below it. extra: fields added to every body.
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
        if self.route == "chat":
            return " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), self.length))
        return [int(token) for token in rng.integers(LOWEST_ID, self.vocab, self.length)]

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


async def chat_words(client: Client, prompts: Prompts) -> int:
    """How many words are a chat prompt of `prompts.length` tokens, the template's among them.

    Two requests for one token say so, by their usage. Raises `ClientError`.
    """
    few, many = CALIBRATION_WORDS
    less = await _prompt_tokens(client, replace(prompts, length=few))
    more = await _prompt_tokens(client, replace(prompts, length=many))
    each = max((more - less) / (many - few), 0.1)
    return max(round((prompts.length - less) / each) + few, 1)


async def _prompt_tokens(client: Client, prompts: Prompts) -> int:
    [body] = replace(prompts, new=1).bodies(1, phase=CALIBRATION)
    del body["stream_options"]
    response = await client.request("POST", prompts.path, body | {"stream": False})
    if response.status != 200:
        raise ClientError(f"HTTP {response.status}: {response.problem()}")
    try:
        return int(response.json()["usage"]["prompt_tokens"])
    except (LookupError, TypeError, ValueError):
        raise ClientError("an answer without usage.prompt_tokens came to a chat request") from None


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
