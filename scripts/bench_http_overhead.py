"""What the HTTP layer costs: streams of a made-up engine through the real application on loopback.

The engine is a thread that hands every running request a token a step, `--rates` tokens a second in
total, as the real one does (one wake-up of the asyncio loop a step), and computes nothing. Server
and client are two processes; each token carries the time it was made, so that the delay to the
client is measured too. A rate that the server cannot hold shows as a lower achieved rate: far too
high a rate gives the capacity. The last line printed is JSON.

    python -m scripts.bench_http_overhead --rates 10000 100000
"""

import argparse
import asyncio
import contextlib
import cProfile
import json
import os
import pstats
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import uvicorn

from grout.request import Delta, SamplingParams
from grout.streams import AsyncStream
from scripts.serving_client import Client, ClientError, Endpoint, events
from scripts.serving_process import StartError, cpu_seconds, started
from scripts.serving_prompts import ROUTES
from server.app import create_app

MODEL = "made-up"
START_SECONDS = 60.0


class BytesTokenizer:
    """A token a byte."""

    vocab_size = 256
    special_ids: tuple[int, ...] = ()

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode())

    def min_tokens(self, text: str) -> int:
        return len(text.encode())

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])

    def token_to_id(self, text: str) -> int | None:
        return None


class PlainTemplate:
    """The messages' texts, one a line."""

    def mentions(self, text: str) -> bool:
        return False

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        return "\n".join(str(message["content"]) for message in messages)


@dataclass
class MadeUpConfig:
    """The options that the HTTP layer reads."""

    served_model_name: str | None = None


@dataclass
class _Request:
    stream: AsyncStream
    left: int


@dataclass
class MadeUpEngine:
    """Every token's text is the time it was made, `time.perf_counter()`, and a space.

    rate: tokens a second over all requests; steps that are late are caught up with. streams:
    requests that must be there before the first token, so that all run from the start.
    """

    rate: float
    streams: int
    config: MadeUpConfig = field(default_factory=MadeUpConfig)
    model_id: str = MODEL
    alive: bool = True
    hung: bool = False
    max_requests: int | None = None
    max_model_len: int = 1 << 20
    vocab_size: int = 256
    eos_token_ids: tuple[int, ...] = ()
    tokenizer: BytesTokenizer = field(default_factory=BytesTokenizer)
    chat_template: PlainTemplate | None = field(default_factory=PlainTemplate)
    default_sampling: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._running: list[_Request] = []
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Delta]:
        """Deltas at the engine's pace until `params.max_tokens`."""
        return self._generate(params.max_tokens or 16)

    def stats(self) -> dict[str, int]:
        """Counts as of now."""
        return {"running": len(self._running), "waiting": 0, "pages_free": 1, "pages_total": 1}

    def settle(self, timeout: float = 60.0) -> bool:
        """Nothing to wait for."""
        return True

    def close(self, timeout: float | None = None) -> bool:
        """Nothing to close: the thread ends with the process."""
        return True

    async def _generate(self, tokens: int) -> AsyncGenerator[Delta]:
        request = _Request(AsyncStream(asyncio.get_running_loop()), tokens)
        with self._changed:
            self._running.append(request)
            self._changed.notify()
        try:
            while True:
                delta = await request.stream.get()
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            request.left = 0

    def _run(self) -> None:
        interval = self.streams / self.rate
        while True:
            with self._changed:
                while len(self._running) < self.streams:
                    self._changed.wait()
            due = time.perf_counter()
            while self._running:
                self._step()
                due += interval
                time.sleep(max(due - time.perf_counter(), 0))

    def _step(self) -> None:
        with self._changed:
            self._running = [request for request in self._running if request.left]
            running = list(self._running)
        if not running:
            return
        batch = []
        for request in running:
            request.left -= 1
            finish = None if request.left else "length"
            delta = Delta(f"{time.perf_counter():.6f} ", (1,), finish)  # type: ignore[arg-type]
            batch.append((request.stream, delta))
        running[0].stream.loop.call_soon_threadsafe(_put_all, batch)


def _put_all(batch: list[tuple[AsyncStream, Delta]]) -> None:
    for stream, delta in batch:
        stream.put(delta)


def serve(args: argparse.Namespace) -> None:
    """Serve the made-up engine until a signal."""
    engine = MadeUpEngine(args.rates[0], args.streams)
    # As server/http_server.py has it.
    config = uvicorn.Config(
        create_app(engine),
        port=args.port,
        log_level="warning",
        access_log=False,
        lifespan="off",
        loop="asyncio",
    )
    server = uvicorn.Server(config)
    if args.profile is None:
        server.run()
        return
    # uvicorn raises the signal again at its end, before the profile would be written.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    profile = cProfile.Profile()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            profile.runcall(server.run)
    finally:
        with open(args.profile, "w") as out:
            pstats.Stats(profile, stream=out).sort_stats("tottime").print_stats(45)


@dataclass
class Received:
    """One stream: when its first token was made, when its last one came, seconds between both."""

    made: float = float("inf")
    end: float = 0.0
    chunks: int = 0
    delays: list[float] = field(default_factory=list)

    def take(self, text: str, now: float) -> None:
        """Count the tokens of a chunk that came at `now`."""
        self.chunks += bool(text)
        for stamp in map(float, text.split()):
            self.made = min(self.made, stamp)
            self.delays.append(now - stamp)
            self.end = now


async def consume(client: Client, route: str, tokens: int) -> Received:
    """Read one stream. Raises `ClientError` unless exactly `tokens` came."""
    body = {
        "model": MODEL,
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body |= {"prompt": "Hi"} if route == "completions" else {"messages": [message("Hi")]}
    received, said = Received(), 0
    async with client.open("POST", ROUTES[route], body) as (response, connection):
        if response.status != 200:
            blocks = [block async for block in connection.blocks(response)]
            raise ClientError(f"HTTP {response.status}: {b''.join(blocks)[:300]!r}")
        async for data, now in events(connection, response):
            event = {"choices": []} if data == b"[DONE]" else json.loads(data)
            for choice in event["choices"]:
                text = choice["text"] if "text" in choice else choice["delta"].get("content")
                received.take(text or "", now)
            said = (event.get("usage") or {}).get("completion_tokens", said)
    came = len(received.delays)
    if came != tokens or said != tokens:
        raise ClientError(f"{came} tokens came, usage says {said}, {tokens} were asked for")
    return received


def message(text: str) -> dict[str, str]:
    """A user's chat message."""
    return {"role": "user", "content": text}


async def measure(url: str, pid: int, rate: float, args: argparse.Namespace) -> dict[str, Any]:
    """One rate: `--streams` streams that would take `--seconds` each at that rate."""
    client = Client(Endpoint("server", url), timeout=600)
    tokens = max(int(min(rate, args.most) * args.seconds / args.streams), 2)
    warm = min(tokens, 50)
    await asyncio.gather(*(consume(client, args.route, warm) for _ in range(args.streams)))
    server, own, load = cpu_seconds(pid), time.process_time(), os.getloadavg()[0]
    replies = await asyncio.gather(
        *(consume(client, args.route, tokens) for _ in range(args.streams))
    )
    server_cpu, own_cpu = cpu_seconds(pid) - server, time.process_time() - own
    await client.close()
    delays = np.concatenate([np.array(reply.delays) for reply in replies])
    seconds = max(reply.end for reply in replies) - min(reply.made for reply in replies)
    total = args.streams * tokens
    return {
        "route": args.route,
        "streams": args.streams,
        "rate": rate,
        "tokens": total,
        "seconds": round(seconds, 3),
        "achieved": round(total / seconds, 1),
        "tokens_per_chunk": round(total / sum(reply.chunks for reply in replies), 3),
        "delay_ms": {
            "mean": round(1e3 * delays.mean(), 2),
            "median": round(1e3 * float(np.median(delays)), 2),
            "p99": round(1e3 * float(np.percentile(delays, 99)), 2),
        },
        "server_cores": round(server_cpu / seconds, 3),
        "server_us_per_token": round(1e6 * server_cpu / total, 1),
        "client_us_per_token": round(1e6 * own_cpu / total, 1),
        "load_before": round(load, 2),
        "cores": os.cpu_count(),
    }


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[10_000.0], help="tokens/s (%(default)s)"
    )
    parser.add_argument("--streams", type=int, default=64, help="at a time (%(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="of each rate, were it held (%(default)s)"
    )
    parser.add_argument(
        "--most",
        type=float,
        default=20_000.0,
        help="rate that bounds the tokens of a run (%(default)s)",
    )
    parser.add_argument("--route", choices=tuple(ROUTES), default="chat", help="(%(default)s)")
    parser.add_argument("--profile", metavar="FILE", help="write a profile of the server there")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if min(args.rates) <= 0 or args.streams < 1 or args.seconds <= 0:
        parser.error("--rates, --streams and --seconds are over 0")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every rate; 1 if a stream was wrong, 2 if the server did not start."""
    args = parse(argv)
    if args.serve:
        serve(args)
        return 0
    results = []
    for rate in args.rates:
        port = free_port()
        command = [sys.executable, "-m", "scripts.bench_http_overhead", "--serve"]
        command += ["--rates", str(rate), "--streams", str(args.streams), "--port", str(port)]
        command += ["--profile", args.profile] if args.profile else []
        url = f"http://127.0.0.1:{port}"
        try:
            with started(shlex.join(command), url, START_SECONDS) as pid:
                result = asyncio.run(measure(url, pid, rate, args))
        except StartError as error:
            print(f"bench_http_overhead: error: {error}", file=sys.stderr)
            return 2
        except ClientError as error:
            print(f"bench_http_overhead: error: {error}", file=sys.stderr)
            return 1
        delay = result["delay_ms"]
        print(
            f"{rate:.0f} tok/s offered over {args.streams} streams: {result['achieved']:.0f} "
            f"arrived, {result['tokens_per_chunk']} a chunk; "
            f"delay {delay['median']} ms, p99 {delay['p99']} ms; server "
            f"{result['server_cores']:.2f} cores, {result['server_us_per_token']} us a token; "
            f"client {result['client_us_per_token']} us a token"
        )
        results.append(result)
    print(json.dumps({"runs": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
