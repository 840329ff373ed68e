"""Many unruly clients at once on a server, and then: was anything lost, leaked or swollen?

`--streams` clients send requests for `--seconds`: streamed and plain, chat and completion, some
left in the middle, some never sent to their end, some malformed. Every request must be answered in
full, refused as it should be, or dropped by this script on purpose. Afterwards the server must be
as before: nothing running or waiting, all rows and pages free again, and the same greedy answer to
the same question; and its memory must not have grown with the requests. The exit status is 1 if
any of that fails; the last line printed is JSON.

    python -m scripts.load_test --start "grout serve --port 8001" --url http://127.0.0.1:8001
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts import load_plot
from scripts.bench_serving import PROGRESS_SECONDS, first_model, say
from scripts.load_crowd import Crowd, Tally
from scripts.load_fill import Fill
from scripts.load_heap import Heap, traced
from scripts.load_state import TOUCHED, Probe, State, metrics_probe
from scripts.load_trend import Sample, trend
from scripts.serving_client import Client, ClientError, Endpoint
from scripts.serving_process import StartError, private_bytes, started
from scripts.serving_prompts import ROUTES

SETTLE_SECONDS = 15.0
"""How long after its last request a server may take to be idle again."""


class Watch:
    """Takes samples of a run, and says how far it is."""

    def __init__(
        self, tally: Tally, probe: Probe, memory: Callable[[], int] | None, heap: Heap | None
    ) -> None:
        self.samples: list[Sample] = []
        self._tally = tally
        self._probe = probe
        self._memory = memory
        self._heap = heap

    async def run(self, period: float) -> None:
        """Until it is cancelled."""
        begin = said = time.monotonic()
        while True:
            now = time.monotonic()
            sample = await self._sample(now - begin)
            self.samples.append(sample)
            if now - said >= PROGRESS_SECONDS:
                said = now
                size = "" if sample.memory is None else f"{sample.memory / 1e6:.1f} MB, "
                counts = {name: sample.state.get(name) for name in ("running", "waiting")}
                outcomes = dict(self._tally.outcomes)
                say(f"{sample.seconds:.0f} s: {size}{counts}, {outcomes}")
            await asyncio.sleep(period)

    async def _sample(self, seconds: float) -> Sample:
        try:
            state = await self._probe()
        except ClientError:
            state = None
        heap = None if self._heap is None else await asyncio.to_thread(self._heap.size)
        memory = None if self._memory is None else self._memory()
        return Sample(seconds, self._tally.done, memory, heap, state or {})


async def run(
    url: str,
    *,
    seconds: float,
    streams: int,
    warm_up: float = 0.0,
    fill_seconds: float = 0.0,
    max_new: int = 32,
    seed: int = 0,
    timeout: float = 300.0,
    api_key: str | None = None,
    probe: Probe | None = None,
    memory: Callable[[], int] | None = None,
    heap: Heap | None = None,
    settle_seconds: float = SETTLE_SECONDS,
) -> tuple[dict[str, Any], list[Sample]]:
    """Drive the server at `url`; the report, and what was seen on the way.

    seconds: after the first `warm_up` ones, whose requests count but whose memory does not.
    fill_seconds: how long filling the KV cache may take before that. probe: the server's state, by
    default from its /metrics. memory: bytes it has for itself now.
    """
    client = Client(Endpoint("server", url, api_key), timeout)
    model = await first_model(client)
    probe = probe or metrics_probe(client)
    routes = await usable_routes(client, model)
    question = {"model": model, "prompt": "One, two, three,", "max_tokens": 12, "temperature": 0}
    first = (await client.request("POST", ROUTES["completions"], question)).json()["choices"]
    await (await Fill.begin(client, model, routes, fill_seconds, seed)).run(probe)
    crowd = Crowd(client, model, routes, max_new, seed)
    tally = crowd.tally
    before = await settle_first(probe)
    watch = Watch(tally, probe, memory, heap)
    begin = time.monotonic()
    watching = asyncio.create_task(watch.run(max((warm_up + seconds) / 300, 0.2)))
    beginning = asyncio.create_task(_begin_later(heap, warm_up))
    try:
        until = begin + warm_up + seconds
        await asyncio.gather(*(crowd.member(i, until) for i in range(streams)))
    finally:
        watching.cancel()
        await beginning
    took = time.monotonic() - begin
    state = await settle(probe, before, settle_seconds)
    last = (await client.request("POST", ROUTES["completions"], question)).json()["choices"]
    grown = [] if heap is None else await asyncio.to_thread(heap.grown)
    await client.close()
    return {
        "model": model,
        "seconds": round(took, 1),
        "warm_up": warm_up,
        "streams": streams,
        "requests": tally.sent.total(),
        "sent": dict(tally.sent),
        "outcomes": dict(tally.outcomes),
        "losses": dict(tally.losses),
        "output_throughput": round(tally.tokens / took, 2),
        "questions": len(tally.replies),
        "unequal_answers": sum(len(texts) > 1 for texts in tally.replies.values()),
        "same_after": first == last,
        "state": state,
        **growth(watch.samples, warm_up, warm_up + seconds),
        "heap_grown": grown,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
    }, watch.samples


async def _begin_later(heap: Heap | None, warm_up: float) -> None:
    if heap is not None:
        await asyncio.sleep(warm_up)
        await asyncio.to_thread(heap.begin)


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
            if name != TOUCHED and (after.get(name) is None or abs(after[name] - value) > 1e-9)
        }
        if not differs or time.monotonic() > until:
            return {"before": before, "after": after, "differs": differs}
        await asyncio.sleep(0.1)


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


def growth(samples: Sequence[Sample], begin: float, end: float) -> dict[str, Any]:
    """What a run shows of memory from one second of it to another: after its warm-up, and before
    its clients leave one by one. None for what was not watched, or too briefly.

    "memory" and "heap": KB a request, of the process and of its Python objects. "filling": how
    much of the KV cache was used for the first time, which is in "memory".
    """
    samples = [s for s in samples if begin <= s.seconds <= end]
    sizes = [s.memory for s in samples if s.memory is not None]
    memory = trend([(s.requests, s.memory) for s in samples if s.memory is not None])
    heap = trend([(s.requests, s.heap) for s in samples if s.heap is not None])
    touched = [s.state[TOUCHED] for s in samples if TOUCHED in s.state]
    return {
        "memory": memory and memory.report(),
        "memory_mb": [round(size / 1e6, 1) for size in (sizes[0], max(sizes), sizes[-1])]
        if sizes
        else None,
        "heap": heap and heap.report(),
        "filling": round(touched[-1] - touched[0], 4) if touched else 0.0,
    }


def faults(result: dict[str, Any], *, allowed: float, equal: bool, watched: str) -> list[str]:
    """What is wrong with a result, for people; nothing if all is well.

    allowed: KB a request that `watched`, "memory" or "heap", may grow by for all that can be told.
    """
    out = [f"{count} lost: {what}" for what, count in result["losses"].items()]
    missing = result["requests"] - sum(result["outcomes"].values())
    if missing:
        out.append(f"{missing} requests have no outcome")
    if not result["outcomes"].get("streamed"):
        out.append("no stream came to its end")
    for name, (before, after) in result["state"]["differs"].items():
        out.append(f"{name} was {before} before and is {after} after")
    if not result["same_after"]:
        out.append("the same greedy question has another answer after the run")
    if equal and result["unequal_answers"]:
        out.append(f"{result['unequal_answers']} greedy questions had different answers")
    slope = result[watched]
    if slope is None and result["memory_mb"] is not None:
        out.append(f"the run was too short to tell whether its {watched} grows")
    if slope is not None:
        most = slope["kb_per_request"] + slope["margin"]
        if most > allowed:
            out.append(
                f"{watched} grew by {slope['kb_per_request']} ± {slope['margin']} KB a request "
                f"over {slope['requests']}, so perhaps by more than the {allowed:g} allowed"
            )
            if result["filling"]:
                out.append(
                    f"of the KV cache {result['filling']:.1%} was used for the first time, which "
                    "takes memory: fill it before (--fill-seconds), or serve with a smaller one"
                )
    return out


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="(%(default)s)")
    parser.add_argument("--start", metavar="COMMAND", help="start that server, and stop it after")
    parser.add_argument(
        "--start-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="for it to be up (%(default)s)",
    )
    parser.add_argument("--pid", type=int, help="process whose memory is watched (that of --start)")
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--seconds", type=float, default=120.0, help="(%(default)s)")
    parser.add_argument(
        "--warm-up", type=float, metavar="SECONDS", help="before those (a quarter of them)"
    )
    parser.add_argument(
        "--fill-seconds",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="time for what takes memory once (sizes of steps, pages of the KV cache), before that"
        " (%(default)s)",
    )
    parser.add_argument("--streams", type=int, default=64, help="at a time (%(default)s)")
    parser.add_argument("--max-new", type=int, default=32, help="tokens of an answer (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds a request may take (%(default)s)"
    )
    parser.add_argument(
        "--kb-per-request",
        type=float,
        default=5.0,
        help="growth that must be ruled out (%(default)s)",
    )
    parser.add_argument(
        "--trace",
        action="store_true",
        help="watch the Python heap of --start instead of its memory, and say where it grew (slow)",
    )
    parser.add_argument(
        "--equal", action="store_true", help="greedy answers to one question must all be equal"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a plot there")
    args = parser.parse_args(argv)
    if args.seconds <= 0 or args.streams < 1 or args.max_new < 1:
        parser.error("needs --seconds over 0, --streams and --max-new of at least 1")
    if args.trace and args.start is None:
        parser.error("--trace needs --start: the server's Python is told to trace as it starts")
    if args.warm_up is None:
        args.warm_up = args.seconds / 4
    return args


def drive(args: argparse.Namespace, pid: int | None, heap: Heap | None) -> dict[str, Any]:
    """`run` with the command line's settings; writes the plot."""
    result, samples = asyncio.run(
        run(
            args.url.rstrip("/").removesuffix("/v1"),
            seconds=args.seconds,
            warm_up=args.warm_up,
            fill_seconds=args.fill_seconds,
            streams=args.streams,
            max_new=args.max_new,
            seed=args.seed,
            timeout=args.timeout,
            api_key=args.api_key,
            memory=None if pid is None else lambda: private_bytes(pid),
            heap=heap,
        )
    )
    if args.svg is not None:
        title = f"{args.streams} clients, {result['requests']} requests, {result['model']}"
        args.svg.write_text(load_plot.plot(samples, title, args.warm_up))
    return result


def started_and_driven(args: argparse.Namespace) -> dict[str, Any]:
    """The result, of a server that is there or that is started for it."""
    if args.start is None:
        return drive(args, args.pid, None)
    with traced(args.trace) as heap:
        variables = {} if heap is None else heap.environment
        with started(args.start, args.url, args.start_timeout, variables) as pid:
            if heap is not None:
                heap.pid = pid
                if heap.size() is None:
                    raise StartError(f"{args.start!r} runs no Python that can be traced")
            return drive(args, args.pid or pid, heap)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the test; 1 if anything was lost or is not as before, 2 where it could not be run."""
    args = parse(argv)
    try:
        result = started_and_driven(args)
    except (ClientError, StartError, LookupError) as error:
        say(f"load_test: error: {error}")
        return 2
    watched = "heap" if args.trace else "memory"
    wrong = faults(result, allowed=args.kb_per_request, equal=args.equal, watched=watched)
    for line in wrong:
        print(f"load_test: {line}")
    for line in result["heap_grown"]:
        print(f"load_test: heap: {line}")
    if result["state"]["before"] is None:
        print("load_test: the server has no /metrics, so its state was not checked")
    if result["memory_mb"] is None:
        print("load_test: without --start or --pid its memory was not watched")
    result["ok"] = not wrong
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
