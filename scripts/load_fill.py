"""Before a load test: what makes a server take the memory that it takes once, whatever comes later.

A server may compile for sizes that it meets, record its steps, and keep that; and on the cpu a page
of the KV cache takes memory when it is first used. Under load some of it comes late and looks like
growth.
"""

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from scripts.bench_serving import PROGRESS_SECONDS, say
from scripts.load_state import ROWS, TOUCHED, Probe
from scripts.serving_client import Client
from scripts.serving_malformed import MALFORMED, Malformed
from scripts.serving_prompts import ROUTES

__all__ = ["Fill"]

FILL_TOKENS = 512
"""Most tokens of a prompt that fills the KV cache."""

PAGE = 64
"""Such prompts are multiples of this, and so of most sizes of page: pages are used as a whole."""

LADDER = (256, 1.06)
"""The longest of the prompts whose lengths are tried before, and from one to the next."""

AT_ONCE = 4
"""Such prompts, and bodies to refuse, that are sent at once."""


@dataclass
class Fill:
    """The requests of one run, all in the time until `until` on the monotonic clock.

    room: tokens that a prompt may have.
    """

    client: Client
    model: str
    routes: tuple[str, ...]
    room: int
    until: float
    rng: random.Random
    _said: float = field(default_factory=time.monotonic)

    @classmethod
    async def begin(
        cls, client: Client, model: str, routes: tuple[str, ...], seconds: float, seed: int
    ) -> "Fill":
        """For `seconds` from now, with the model's own context."""
        listed = (await client.request("GET", "/v1/models")).json()["data"][0]
        room = int(listed.get("max_model_len") or FILL_TOKENS + 1) - 1
        until = time.monotonic() + seconds
        return cls(client, model, routes, room, until, random.Random(seed))

    async def run(self, probe: Probe) -> None:
        """All of it, as far as the time goes."""
        for size in self._ladder():
            self._say(f"prompts of {size} tokens")
            await self.answer([size])
            # A step that has more than one prompt may run what a lone one does not.
            if size > 1:
                await self.answer([size // 2, size - size // 2])
        await self._decodes(int((await probe() or {}).get(ROWS, 1)))
        await self._refusals()
        await self._pages(probe)

    async def answer(self, sizes: list[int], max_tokens: int = 1) -> None:
        """One request with random prompts of these lengths."""
        prompts = [self.rng.choices(range(256), k=size) for size in sizes]
        body = {"model": self.model, "prompt": prompts, "max_tokens": max_tokens}
        await self.client.request("POST", ROUTES["completions"], body)

    def _ladder(self) -> Iterator[int]:
        size, (longest, ratio) = 1, LADDER
        while size <= min(longest, self.room) and self._in_time:
            yield size
            size = max(size + 1, int(size * ratio))

    async def _decodes(self, rows: int) -> None:
        """Decode batches of every size up to `rows`, where they go by powers of two."""
        count = 1
        while count <= rows and self._in_time:
            self._say(f"{count} prompts at once")
            # The first must still be running when the last begins.
            await self.answer([1] * count, max_tokens=min(count + 2, self.room))
            count *= 2

    async def _refusals(self) -> None:
        """Bodies to refuse, the largest of which take memory for a moment."""
        for bad in MALFORMED:
            for route in self.routes:
                if self._in_time:
                    await asyncio.gather(*(self._refusal(bad, route) for _ in range(AT_ONCE)))

    async def _refusal(self, bad: Malformed, route: str) -> None:
        path = ROUTES[route]
        await self.client.request("POST", path, bad.body(self.model, path))

    async def _pages(self, probe: Probe) -> None:
        """Prompts until every page of the KV cache has been used, if the server tells."""
        length = max(min(FILL_TOKENS, self.room) // PAGE * PAGE, 1)
        while self._in_time:
            touched = (await probe() or {}).get(TOUCHED, 1.0)
            if touched >= 1:
                return
            self._say(f"{touched:.0%} of the KV cache")
            await asyncio.gather(*(self.answer([length]) for _ in range(AT_ONCE)))

    @property
    def _in_time(self) -> bool:
        return time.monotonic() < self.until

    def _say(self, what: str) -> None:
        if time.monotonic() - self._said >= PROGRESS_SECONDS:
            self._said = time.monotonic()
            say(f"filling: {what}")
