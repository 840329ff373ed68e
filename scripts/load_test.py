"""Many unruly clients at once on a server, and then: was anything lost, leaked or swollen?

`--streams` clients send requests for `--seconds`: streamed and plain, chat and completion, some
left in the middle, some never sent to their end, some malformed. Every request must be answered in
full, refused as it should be, or dropped by this script on purpose. Afterwards the server must be
as before: nothing running or waiting, the KV cache's use back where it was, memory flat, and the
same greedy answer to the same question. The exit status is 1 if any of that fails; the last line
printed is JSON.

    python -m scripts.load_test --start "grout serve --port 8001" --url http://127.0.0.1:8001
"""

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.bench_serving import PROGRESS_SECONDS, first_model, say
from scripts.serving_client import Client, ClientError, Endpoint, ask
from scripts.serving_malformed import MALFORMED
from scripts.serving_process import StartError, resident_bytes, started
from scripts.serving_prompts import ROUTES

SETTLE_SECONDS = 15.0
"""How long after its last request a server may take to be idle again."""

SWELLING = 24
"""Longest prompts sent before memory is watched: more than a server has threads for them."""

GAUGES = {
    "running": re.compile(r"^\w+:num_requests_running(?:\{.*\})? (\S+)$", re.MULTILINE),
    "waiting": re.compile(r"^\w+:num_requests_waiting(?:\{.*\})? (\S+)$", re.MULTILINE),
    "kv_used": re.compile(r"^\w+:(?:kv|gpu)_cache_usage_perc(?:\{.*\})? (\S+)$", re.MULTILINE),
}

State = dict[str, float]
Probe = Callable[[], Awaitable[State | None]]
WORDS = ["red", "green", "seven", "nine", "river", "mountain", "cloud", "世界", "🙂", "when", "how"]
QUESTIONS = [" ".join([word] * count) for word in WORDS[:6] for count in (1, 5)] + [
    " ".join(WORDS * count) for count in (1, 2, 4)
]
"""Few, so that the same greedy question is answered often, in different company."""


@dataclass
class Tally:
    """What became of the requests: each is in exactly one of `outcomes`."""

    outcomes: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)
    replies: dict[str, set[str]] = field(default_factory=dict)
    tokens: int = 0
    rss: list[tuple[float, int]] = field(default_factory=list)

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


def metrics_probe(client: Client) -> Probe:
    """The server's state as its /metrics tells it; None where it has none."""

    async def probe() -> State | None:
        response = await client.request("GET", "/metrics")
        if response.status != 200:
            return None
        text = response.body.decode()
        found = {name: gauge.search(text) for name, gauge in GAUGES.items()}
        return {name: float(match[1]) for name, match in found.items() if match} or None

    return probe


async def settle(probe: Probe, before: State | None, seconds: float) -> dict[str, Any]:
    """Wait for the state of before; what differs after `seconds` is in "differs"."""
    if before is None:
        return {"before": None, "after": None, "differs": {}}
    until = time.monotonic() + seconds
    while True:
        after = await probe() or {}
        differs = {
            name: [value, after.get(name)]
            for name, value in before.items()
            if after.get(name) is None or abs(after[name] - value) > 1e-9
        }
        if not differs or time.monotonic() > until:
            return {"before": before, "after": after, "differs": differs}
        await asyncio.sleep(0.1)


async def run(
    url: str,
    *,
    seconds: float,
    streams: int,
    max_new: int = 32,
    seed: int = 0,
    timeout: float = 300.0,
    api_key: str | None = None,
    probe: Probe | None = None,
    rss: Callable[[], int] | None = None,
    settle_seconds: float = SETTLE_SECONDS,
) -> dict[str, Any]:
    """Drive the server at `url` and report.

    probe: the server's state, by default from its /metrics. rss: its resident bytes now.
    """
    client = Client(Endpoint("server", url, api_key), timeout)
    model = await first_model(client)
    probe = probe or metrics_probe(client)
    routes = await usable_routes(client, model)
    question = {"model": model, "prompt": "One, two, three,", "max_tokens": 12, "temperature": 0}
    first = (await client.request("POST", ROUTES["completions"], question)).json()["choices"]
    crowd = Crowd(client, model, routes, max_new, seed)
    tally = crowd.tally
    await asyncio.gather(*(swell(client, model) for _ in range(SWELLING)))
    before = await settle_first(probe)
    begin = time.monotonic()

    async def watch() -> None:
        said = begin
        while True:
            now = time.monotonic()
            if rss is not None:
                tally.rss.append((now - begin, rss()))
            if now - said >= PROGRESS_SECONDS:
                said = now
                size = f"{tally.rss[-1][1] / 1e6:.0f} MB, " if tally.rss else ""
                say(f"{now - begin:.0f} s: {size}{dict(tally.outcomes)}")
            await asyncio.sleep(max(seconds / 60, 0.2))

    watching = asyncio.create_task(watch())
    try:
        await asyncio.gather(*(crowd.member(i, begin + seconds) for i in range(streams)))
    finally:
        watching.cancel()
    took = time.monotonic() - begin
    state = await settle(probe, before, settle_seconds)
    last = (await client.request("POST", ROUTES["completions"], question)).json()["choices"]
    await client.close()
    return {
        "model": model,
        "seconds": round(took, 1),
        "streams": streams,
        "requests": tally.outcomes.total(),
        "outcomes": dict(tally.outcomes),
        "losses": dict(tally.losses),
        "output_throughput": round(tally.tokens / took, 2),
        "questions": len(tally.replies),
        "unequal_answers": sum(len(texts) > 1 for texts in tally.replies.values()),
        "same_after": first == last,
        "state": state,
        "rss_mb": memory(tally.rss),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
    }


async def swell(client: Client, model: str) -> None:
    """Have the longest prompt refused: what a server's threads take for it, they tend to keep."""
    (longest,) = (bad for bad in MALFORMED if bad.name == "prompt too long")
    path = ROUTES["completions"]
    await client.request("POST", path, longest.body(model, path))


async def settle_first(probe: Probe) -> State | None:
    """The state before, once the requests that made ready for the run have left."""
    state = await probe()
    until = time.monotonic() + SETTLE_SECONDS
    while state and state.get("running", 0) and time.monotonic() < until:
        await asyncio.sleep(0.1)
        state = await probe()
    return state


async def usable_routes(client: Client, model: str) -> tuple[str, ...]:
    """Completions, and chat where the model has a template."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    response = await client.request("POST", ROUTES["chat"], body)
    return tuple(ROUTES) if response.status == 200 else ("completions",)


def memory(samples: Sequence[tuple[float, int]]) -> dict[str, float] | None:
    """Resident memory over the run, MB: growth is from its second quarter to its last."""
    sizes = [size / 1e6 for _, size in samples]
    quarter = len(sizes) // 4
    if not quarter:
        return None
    early, late = sizes[quarter : 2 * quarter], sizes[-quarter:]
    return {
        "start": round(sizes[0], 1),
        "most": round(max(sizes), 1),
        "end": round(sizes[-1], 1),
        "growth": round(statistics.median(late) - statistics.median(early), 1),
    }


def faults(result: dict[str, Any], *, growth_mb: float, equal: bool) -> list[str]:
    """What is wrong with a result, for people; nothing if all is well."""
    out = [f"{count} lost: {what}" for what, count in result["losses"].items()]
    if not result["outcomes"].get("streamed"):
        out.append("no stream came to its end")
    for name, (before, after) in result["state"]["differs"].items():
        out.append(f"{name} was {before} before and is {after} after")
    if not result["same_after"]:
        out.append("the same greedy question has another answer after the run")
    memory_mb = result["rss_mb"]
    if memory_mb is not None and memory_mb["growth"] > growth_mb:
        out.append(f"memory grew by {memory_mb['growth']} MB, {growth_mb:g} are allowed")
    if equal and result["unequal_answers"]:
        out.append(f"{result['unequal_answers']} greedy questions had different answers")
    return out


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--start", metavar="COMMAND", help="start that server, and stop it after")
    parser.add_argument("--start-timeout", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("--pid", type=int, help="process whose memory is watched (that of --start)")
    parser.add_argument("--api-key")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--max-new", type=int, default=32, help="most tokens of an answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a request may take")
    parser.add_argument("--growth-mb", type=float, default=64.0, help="memory that may be gained")
    parser.add_argument(
        "--equal", action="store_true", help="greedy answers to one question must all be equal"
    )
    args = parser.parse_args(argv)
    if args.seconds <= 0 or args.streams < 1 or args.max_new < 1:
        parser.error("needs --seconds over 0, --streams and --max-new of at least 1")
    return args


def drive(args: argparse.Namespace, pid: int | None) -> dict[str, Any]:
    """`run` with the command line's settings."""
    return asyncio.run(
        run(
            args.url.rstrip("/").removesuffix("/v1"),
            seconds=args.seconds,
            streams=args.streams,
            max_new=args.max_new,
            seed=args.seed,
            timeout=args.timeout,
            api_key=args.api_key,
            rss=None if pid is None else lambda: resident_bytes(pid),
        )
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the test; 1 if anything was lost or is not as before, 2 where it could not be run."""
    args = parse(argv)
    try:
        if args.start is None:
            result = drive(args, args.pid)
        else:
            with started(args.start, args.url, args.start_timeout) as pid:
                result = drive(args, args.pid or pid)
    except (ClientError, StartError, LookupError) as error:
        say(f"load_test: error: {error}")
        return 2
    wrong = faults(result, growth_mb=args.growth_mb, equal=args.equal)
    for line in wrong:
        print(f"load_test: {line}")
    if result["state"]["before"] is None:
        print("load_test: the server has no /metrics, so its state was not checked")
    print(json.dumps(result | {"ok": not wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
