"""The clients of a load test: what each does next is drawn, and what became of it is counted."""

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from scripts.serving_client import Client, ClientError, ask
from scripts.serving_malformed import MALFORMED
from scripts.serving_prompts import ROUTES

__all__ = ["Crowd", "Tally"]

WORDS = ["red", "green", "seven", "nine", "river", "mountain", "cloud", "世界", "🙂", "when", "how"]
QUESTIONS = [" ".join([word] * count) for word in WORDS[:6] for count in (1, 5)] + [
    " ".join(WORDS * count) for count in (1, 2, 4)
]
"""Few, so that the same greedy question is answered often, in different company."""


@dataclass
class Tally:
    """What became of the requests: each that was `sent`, by what it was, is in one of `outcomes`.

    outcomes: "streamed" and "plain" answers came to their end; "refused" were to be refused and
    were; "dropped" were left by the client on purpose; "busy" got a 429 or 503; "lost" is the rest.
    """

    sent: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)
    replies: dict[str, set[str]] = field(default_factory=dict)
    tokens: int = 0

    @property
    def done(self) -> int:
        """Requests whose outcome is known."""
        return self.outcomes.total()

    def lose(self, what: str) -> None:
        self.outcomes["lost"] += 1
        self.losses[what] += 1


@dataclass
class Crowd:
    """The clients; each draws what it does next from its own seeded generator."""

    client: Client
    model: str
    routes: tuple[str, ...]
    max_new: int
    seed: int
    tally: Tally = field(default_factory=Tally)

    async def member(self, number: int, until: float) -> None:
        """One client until the deadline."""
        rng = random.Random(f"{self.seed}/{number}")
        acts = (self.stream, self.plain, self.leave, self.leave_early, self.half, self.malformed)
        while time.monotonic() < until:
            (act,) = rng.choices(acts, weights=(50, 12, 16, 6, 4, 12))
            self.tally.sent[act.__name__] += 1
            try:
                await act(rng)
            except (ClientError, OSError, ValueError, LookupError, TypeError) as error:
                self.tally.lose(f"{act.__name__}: {type(error).__name__}: {error}")

    def body(self, rng: random.Random, text: str) -> tuple[str, dict[str, Any]]:
        """(path, body) of a greedy request about `text`."""
        route = rng.choice(self.routes)
        content: dict[str, Any] = {"prompt": text}
        if route == "chat":
            content = {"messages": [{"role": "user", "content": text}]}
        tokens = rng.choice((1, self.max_new // 2, self.max_new))
        limits = {"model": self.model, "max_tokens": max(tokens, 1), "temperature": 0}
        return ROUTES[route], limits | content

    def streamed(self, rng: random.Random) -> tuple[str, dict[str, Any]]:
        """(path, body) of a stream that nobody asked for before."""
        path, body = self.body(rng, " ".join(rng.choices(WORDS, k=rng.choice((1, 8, 40)))))
        return path, body | {"stream": True}

    async def stream(self, rng: random.Random) -> None:
        """A stream read to its end."""
        path, body = self.body(rng, rng.choice(QUESTIONS))
        key = json.dumps([path, body], sort_keys=True)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        reply = await ask(self.client, path, body)
        if reply.status in (429, 503):
            self.tally.outcomes["busy"] += 1
            return
        problem = reply.problem(None)
        if problem is None and reply.completion_tokens > body["max_tokens"]:
            problem = f"{reply.completion_tokens} tokens, {body['max_tokens']} were the most"
        if problem is not None:
            self.tally.lose(f"stream: {problem}")
            return
        self.tally.outcomes["streamed"] += 1
        self.tally.tokens += reply.completion_tokens
        self.tally.replies.setdefault(key, set()).add(reply.text)

    async def plain(self, rng: random.Random) -> None:
        """An answer in one piece, which must equal the streamed one."""
        path, body = self.body(rng, rng.choice(QUESTIONS))
        response = await self.client.request("POST", path, body)
        if response.status in (429, 503):
            self.tally.outcomes["busy"] += 1
            return
        answer = response.json()
        if response.status != 200:
            self.tally.lose(f"plain: HTTP {response.status}: {answer}")
            return
        (choice,) = answer["choices"]
        message = choice.get("message") or {}
        text = choice.get("text") or "".join(
            message.get(kind) or "" for kind in ("reasoning_content", "content")
        )
        if choice["finish_reason"] not in ("stop", "length"):
            self.tally.lose(f"plain: finish_reason {choice['finish_reason']}")
            return
        self.tally.outcomes["plain"] += 1
        self.tally.tokens += answer["usage"]["completion_tokens"]
        self.tally.replies.setdefault(json.dumps([path, body], sort_keys=True), set()).add(text)

    async def leave(self, rng: random.Random) -> None:
        """A stream left after some of it."""
        path, body = self.streamed(rng)
        blocks = rng.randrange(1, 6)
        async with asyncio.timeout(self.client.timeout):
            async with self.client.open("POST", path, body) as (response, connection):
                async for _ in connection.blocks(response):
                    blocks -= 1
                    if not blocks:
                        break
                connection.reusable = False
        self._dropped(response.status)

    async def leave_early(self, rng: random.Random) -> None:
        """A request, streamed or not, whose client is gone before the answer's first byte."""
        path, body = self.streamed(rng)
        body["stream"] = rng.random() < 0.5
        await self._drop_after(self.client.message("POST", path, body), rng.uniform(0, 0.3))

    async def half(self, rng: random.Random) -> None:
        """A request that is never sent to its end."""
        message = self.client.message("POST", *self.streamed(rng))
        await self._drop_after(message[: rng.randrange(1, len(message))], rng.uniform(0, 0.3))

    async def malformed(self, rng: random.Random) -> None:
        """What must be refused: 4xx with an error that says something."""
        bad = rng.choice(MALFORMED)
        path = ROUTES[rng.choice(self.routes)]
        response = await self.client.request("POST", path, bad.body(self.model, path))
        if not 400 <= response.status < 500:
            self.tally.lose(f"malformed {bad.name}: HTTP {response.status}")
        elif response.status == 429:
            self.tally.outcomes["busy"] += 1
        elif not response.json()["error"]["message"]:
            self.tally.lose(f"malformed {bad.name}: no message")
        else:
            self.tally.outcomes["refused"] += 1

    async def _drop_after(self, message: bytes, seconds: float) -> None:
        connection = await self.client.connect()
        connection.writer.write(message)
        await connection.writer.drain()
        await asyncio.sleep(seconds)
        connection.drop()
        self.tally.outcomes["dropped"] += 1

    def _dropped(self, status: int) -> None:
        if status in (200, 429, 503):
            self.tally.outcomes["dropped" if status == 200 else "busy"] += 1
        else:
            self.tally.lose(f"leave: HTTP {status}")
