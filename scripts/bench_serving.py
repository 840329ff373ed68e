"""Throughput and latency of OpenAI-compatible servers, measured from the client's side.

Drives one or several endpoints (Grout, vLLM, SGLang, ...) with the same prompts, streaming, at each
level of concurrency, and reports the figures of `vllm bench serve` under its names. A request that
fails in any way is counted, with the reason, and makes the exit status 1. The last line printed is
JSON. docs/peers.md has the other servers' flags, docs/benchmarks/serving.md what the figures mean.

    python -m scripts.bench_serving --endpoint grout=http://127.0.0.1:8000 --concurrency 1 8 32 64
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scripts import serving_plot, serving_report
from scripts.serving_client import Client, ClientError, Endpoint, Reply, ask
from scripts.serving_process import StartError, started
from scripts.serving_prompts import (
    LOWEST_ID,
    ROUTES,
    PromptError,
    Prompts,
    chat_words,
    read_texts,
)

DEFAULT_ENDPOINT = "http://127.0.0.1:8000"
PROGRESS_SECONDS = 5.0
UNLIMITED = 0
"""`--concurrency 0`: no limit but the request rate."""
DEVICE_SECONDS = re.compile(r"^grout:device_busy_seconds_total\{.*\} (\S+)$", re.MULTILINE)

Run = dict[str, Any]


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


async def drive(
    client: Client,
    path: str,
    bodies: Sequence[dict[str, Any]],
    *,
    concurrency: int,
    rate: float,
    seed: int,
    label: str,
) -> list[Reply]:
    """Send all `bodies`, at most `concurrency` at once, and return the answers in their order.

    rate: requests a second of a Poisson process; infinite sends them as soon as there is room.
    """
    rng = random.Random(seed)
    room = asyncio.Semaphore(concurrency or len(bodies))
    done = failed = tokens = 0

    async def one(body: dict[str, Any]) -> Reply:
        nonlocal done, failed, tokens
        try:
            reply = await ask(client, path, body)
        finally:
            room.release()
        done, failed = done + 1, failed + (reply.error is not None)
        tokens += reply.completion_tokens
        return reply

    async def report() -> None:
        start = time.perf_counter()
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            speed = tokens / (time.perf_counter() - start)
            say(f"{label}: {done}/{len(bodies)} done, {failed} failed, {speed:.0f} tok/s so far")

    reporting = asyncio.create_task(report())
    tasks: list[asyncio.Task[Reply]] = []
    due = time.perf_counter()
    try:
        for body in bodies:
            await asyncio.sleep(max(due - time.perf_counter(), 0))
            await room.acquire()
            tasks.append(asyncio.create_task(one(body)))
            due += rng.expovariate(rate) if rate < float("inf") else 0
        return list(await asyncio.gather(*tasks))
    finally:
        reporting.cancel()
        for task in tasks:
            task.cancel()


async def measure_level(
    client: Client, prompts: Prompts, args: argparse.Namespace, level: int
) -> Run:
    """Warm up, then measure one level of concurrency."""
    index = args.concurrency.index(level)
    label = f"{client.endpoint.name} at {level or 'no limit'}"

    async def send(count: int, phase: int, name: str, rate: float) -> list[Reply]:
        bodies = prompts.bodies(count, phase=phase)
        return await drive(
            client,
            prompts.path,
            bodies,
            concurrency=level,
            rate=rate,
            seed=args.seed,
            label=name,
        )

    warm = await send(amount(args.warmup, level), 2 * index, f"{label}, warm-up", float("inf"))
    broken = [reply.error for reply in warm if reply.error is not None]
    if broken and len(broken) == len(warm):
        raise ClientError(f"every request of the warm-up failed: {broken[0]}")
    load, busy = os.getloadavg()[0], await device_seconds(client)
    cpu, start = time.process_time(), time.perf_counter()
    replies = await send(amount(args.num_prompts, level), 2 * index + 1, label, args.request_rate)
    seconds = max(reply.end for reply in replies) - min(reply.start for reply in replies)
    wanted = args.new if args.ignore_eos else None
    run: Run = {
        "endpoint": client.endpoint.name,
        "model": prompts.model,
        "max_concurrency": level or None,
        "request_rate": args.request_rate if args.request_rate < float("inf") else "inf",
        "num_prompts": len(replies),
        **serving_report.summarise(replies, seconds, wanted),
        "wanted_input_tokens": None if args.texts else args.prompt,
        "client_cpu": round((time.process_time() - cpu) / (time.perf_counter() - start), 3),
        "device_idle": await idle_share(client, busy, seconds),
        "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2),
    }
    if args.details:
        run["requests"] = [_details(reply, wanted) for reply in replies]
    say(f"{label}: {outcome(run)}")
    return run


def outcome(run: Run) -> str:
    """The figures of a run, or why there are none, on one line."""
    if not run["completed"]:
        error, count = max(run["errors"].items(), key=lambda item: item[1])
        return f"all {run['failed']} requests failed, {count} of them: {error}"
    itl = run["median_itl_ms"]
    return (
        f"{run['output_throughput']:.1f} tok/s, TTFT {run['median_ttft_ms']} ms, "
        f"ITL {'-' if itl is None else f'{itl} ms'}, {run['failed']} failed"
    )


async def device_seconds(client: Client) -> float | None:
    """How long the endpoint's device has been at steps, by its metrics; None if they do not say."""
    try:
        response = await client.request("GET", "/metrics")
    except ClientError:
        return None
    found = DEVICE_SECONDS.search(response.body.decode(errors="replace"))
    return float(found[1]) if response.status == 200 and found else None


async def idle_share(client: Client, before: float | None, seconds: float) -> float | None:
    """Share of `seconds` that the device had nothing to do, since it had worked for `before`."""
    after = await device_seconds(client)
    if before is None or after is None:
        return None
    return round(1 - (after - before) / seconds, 4)


def _details(reply: Reply, wanted: int | None) -> dict[str, Any]:
    times = [round(1e3 * (at - reply.start), 3) for at in reply.arrivals]
    return {
        "error": reply.problem(wanted),
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "arrivals_ms": times,
        "text": reply.text,
    }


async def measure_endpoint(endpoint: Endpoint, args: argparse.Namespace) -> list[Run]:
    """All levels of one endpoint, which must be up. Raises `ClientError`."""
    client = Client(endpoint, args.timeout)
    try:
        model = args.model or await first_model(client)
        prompts = Prompts(
            route=args.route,
            model=model,
            new=args.new,
            length=args.prompt,
            vocab=args.vocab,
            seed=args.seed,
            texts=args.texts,
            temperature=args.temperature,
            ignore_eos=args.ignore_eos,
            extra=tuple(args.extra_body.items()),
        )
        if args.route == "chat" and not args.texts:
            # Found once: all endpoints get the same prompts.
            args.words = args.words or await chat_words(client, prompts)
            prompts = replace(prompts, length=args.words)
        return [await measure_level(client, prompts, args, level) for level in args.concurrency]
    finally:
        await client.close()


async def first_model(client: Client) -> str:
    """The first model that the server lists."""
    response = await client.request("GET", "/v1/models")
    if response.status != 200:
        raise ClientError(
            f"{client.endpoint.url}/v1/models: HTTP {response.status}: {response.problem()}"
        )
    try:
        return str(response.json()["data"][0]["id"])
    except (LookupError, TypeError):
        raise ClientError(f"{client.endpoint.url}/v1/models lists no model") from None


def amount(text: str, level: int) -> int:
    """A number of requests: `N`, or `Nx` for N times the level of concurrency."""
    number = int(text.removesuffix("x"))
    return number * (level or 1) if text.endswith("x") else number


@contextlib.contextmanager
def running(endpoint: Endpoint, args: argparse.Namespace) -> Iterator[None]:
    """The endpoint's server, started here where `--start` says how."""
    command = args.start.get(endpoint.name)
    if command is None:
        yield
        return
    say(f"{endpoint.name}: starting {command}, waiting for {endpoint.url}/health")
    begin = time.perf_counter()
    with started(command, endpoint.url, args.start_timeout):
        say(f"{endpoint.name}: up after {time.perf_counter() - begin:.1f} s")
        yield


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--endpoint",
        action="append",
        default=[],
        metavar="NAME=URL",
        help=f"server to measure, may be repeated; the first is the base ({DEFAULT_ENDPOINT})",
    )
    parser.add_argument(
        "--start",
        action="append",
        default=[],
        metavar="[NAME=]COMMAND",
        help="start that endpoint's server for its turn, on its port, and stop it after",
    )
    parser.add_argument(
        "--start-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="for a server to be up (%(default)s)",
    )
    parser.add_argument("--api-key", help="sent as a bearer token to every endpoint")
    parser.add_argument("--model", help="name to ask for (the first that /v1/models lists)")
    parser.add_argument(
        "--route", choices=tuple(ROUTES), default="completions", help="(%(default)s)"
    )
    parser.add_argument(
        "--prompt", type=int, default=128, help="tokens of a random prompt (%(default)s)"
    )
    parser.add_argument(
        "--prompts-file", type=Path, metavar="FILE", help="one prompt a line instead of random ones"
    )
    parser.add_argument(
        "--vocab", type=int, default=30_000, help="ids are below this (%(default)s)"
    )
    parser.add_argument("--new", type=int, default=256, help="tokens of every answer (%(default)s)")
    parser.add_argument(
        "--concurrency",
        type=int,
        nargs="+",
        default=[1, 8, 32, 64],
        help="requests at a time, 0 is no limit (%(default)s)",
    )
    parser.add_argument(
        "--num-prompts",
        default="4x",
        help="requests a level: N, or Nx for N times the level (%(default)s)",
    )
    parser.add_argument(
        "--warmup", default="1x", help="requests before each level, as above (%(default)s)"
    )
    parser.add_argument(
        "--request-rate",
        type=float,
        default=float("inf"),
        help="mean requests a second (%(default)s)",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="(%(default)s)")
    parser.add_argument(
        "--no-ignore-eos",
        dest="ignore_eos",
        action="store_false",
        help="answers may end before --new tokens",
    )
    parser.add_argument(
        "--extra-body", type=json.loads, default={}, metavar="JSON", help="added to every request"
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts, arrivals (%(default)s)")
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds a request may take (%(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--details", action="store_true", help="every request in that file")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a plot there")
    parser.add_argument(
        "--compare",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="results of earlier runs to show with these; alone, nothing is measured",
    )
    args = parser.parse_args(argv)
    try:
        _settle(args)
    except (ValueError, PromptError) as error:
        parser.error(str(error))
    return args


def _settle(args: argparse.Namespace) -> None:
    texts = args.endpoint or ([] if args.compare and not args.start else [DEFAULT_ENDPOINT])
    args.endpoints = [Endpoint.parse(text, args.api_key) for text in texts]
    names = [endpoint.name for endpoint in args.endpoints]
    if len(set(names)) != len(names):
        raise ValueError("endpoints need different names")
    if args.start and len(names) == 1 and not args.start[0].startswith(f"{names[0]}="):
        args.start = [f"{names[0]}={args.start[0]}", *args.start[1:]]
    args.start = dict(text.partition("=")[::2] for text in args.start)
    for name in args.start.keys() - set(names):
        raise ValueError(f"--start {name}=...: there is no such endpoint")
    if min(args.concurrency) < UNLIMITED or len(set(args.concurrency)) != len(args.concurrency):
        raise ValueError("--concurrency takes different levels of 0 or more")
    for option, least in (("num_prompts", 1), ("warmup", 0)):
        if not getattr(args, option).removesuffix("x").isdecimal():
            raise ValueError(f"--{option.replace('_', '-')} is a number such as 100 or 4x")
        if amount(getattr(args, option), 1) < least:
            raise ValueError(f"--{option.replace('_', '-')} is at least {least}")
    if args.prompt < 1 or args.new < 1 or args.vocab <= LOWEST_ID or args.request_rate <= 0:
        raise ValueError(
            f"needs --prompt and --new of at least 1, --vocab over {LOWEST_ID}, "
            "--request-rate over 0"
        )
    if not isinstance(args.extra_body, dict):
        raise ValueError("--extra-body is a JSON object")
    args.words = None
    args.texts = () if args.prompts_file is None else read_texts(args.prompts_file)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the figures were measured with; no URL, command or key."""
    names = ("route", "prompt", "words", "new", "vocab", "temperature", "ignore_eos", "seed")
    return {
        **{name: getattr(args, name) for name in names},
        "prompts_file": None if args.prompts_file is None else args.prompts_file.name,
        "extra_body": args.extra_body,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "client_cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def load(path: Path) -> tuple[dict[str, Any], list[Run]]:
    """Settings and runs of an earlier `--json` file. Raises ValueError."""
    try:
        result = json.loads(path.read_text())
        runs = [run for run in result["runs"] if run["endpoint"] and "output_throughput" in run]
        return dict(result["settings"]), runs
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} does not hold results of this script: {error}") from None


def write(result: dict[str, Any], args: argparse.Namespace) -> None:
    """The files that were asked for."""
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.svg is not None:
        title = serving_report.title(result["settings"])
        args.svg.write_text(serving_plot.plot(result["runs"], title))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 if a request failed, 2 where nothing could be measured."""
    args = parse(argv)
    runs: list[Run] = []
    measured: list[tuple[str, dict[str, Any]]] = []
    try:
        for endpoint in args.endpoints:
            with running(endpoint, args):
                runs += asyncio.run(measure_endpoint(endpoint, args))
        if runs:
            measured.append(("measured now", settings(args)))
        for path in args.compare:
            earlier, more = load(path)
            measured.append((path.name, earlier))
            runs += more
        result: dict[str, Any] = {"settings": measured[0][1], "runs": runs}
        if args.compare:
            result["compared"] = dict(measured)
        write(result, args)
    except (ClientError, StartError, ValueError, OSError) as error:
        say(f"bench_serving: error: {error}")
        return 2
    for name, what in measured:
        print(f"{name}: {serving_report.title(what)}, {what.get('date', 'without a date')}")
    print(serving_report.table(runs))
    notes = serving_report.warnings(runs) + serving_report.differences(measured)
    for line in notes:
        print(f"note: {line}")
    for run in runs:
        run.pop("requests", None)
    print(json.dumps(result))
    return 1 if any(run["failed"] for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
