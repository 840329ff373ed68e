"""What the engine's host work costs, and whether a GPU would wait for it, without a GPU.

The real engine, scheduler, runner and detokenizer run on a simulated device: work is taken in
order, each step takes the time given for its batch, and reading ids waits for their step. Time is
simulated as well: it passes with this thread's CPU time, with a charge for each driver call and for
each token (the HTTP server shares the interpreter), and jumps where the host waits; so other
processes on the machine do not matter, and a wait costs nothing. What stands for the device's
arithmetic is not counted. The last line printed is JSON.

    python -m scripts.bench_engine_host --sequences 1 8 32 64 128
"""

import argparse
import cProfile
import gc
import json
import pstats
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

import tilert
from grout.config import EngineConfig
from grout.engine import Engine
from grout.errors import GroutError
from grout.grammar import Grammar
from grout.pages import PagePool
from grout.request import Delta, SamplingParams
from grout.runner import Runner
from grout.scheduler import Scheduler
from models.batch import Batch
from models.kv_cache import KVCache
from models.presets import PRESETS
from models.prompt import PromptChunk
from models.slot import PLAIN, Features
from models.tokenizer import Tokenizer
from models.transformer import PAGE_SIZE, Transformer
from tilert.cpu_device import CpuDevice, host_view
from tilert.device import Call, Use
from tilert.event import Event
from tilert.rebind import Maker

STEP_MS = {1: 2.55, 8: 3.6, 32: 4.5, 64: 6.4, 128: 9.7}
"""A decode step of Qwen3-4B on an H200, by sequences; between them, and beyond, linear."""

PREFILL_MS = (3.0, 0.015)
"""A prefill: at least, and for each token."""

KERNEL_MS = 0.002
"""A copy or a kernel of its own."""

FEATURES = ("logprobs", "penalties", "grammar")

TEXT = (
    "The harbour was quiet when she came down to it, and the boats lay against the wall as if "
    "they had never been anywhere else. “Not today,” said the keeper — “nor tomorrow.” 天気。\n"
    "def area(r: float) -> float:\n    return 3.14159 * r**2\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
)


class Clock:
    """Simulated seconds: the host's, which are this thread's CPU time, and those added to them."""

    def __init__(self) -> None:
        self._added = 0.0
        self._left_out = 0.0
        self._stopped_at: float | None = None

    def now(self) -> float:
        """Seconds since some moment."""
        return self.host() + self._added

    def host(self) -> float:
        """Seconds of CPU time, but for those when the clock was stopped."""
        return (self._stopped_at or time.thread_time()) - self._left_out

    def skip(self, seconds: float) -> None:
        """Add seconds: a wait, or work that the host would do elsewhere."""
        self._added += seconds

    def outside(self, work: Callable[[], object]) -> None:
        """Do `work` without time passing."""
        if self._stopped_at is not None:
            work()
            return
        self._stopped_at = at = time.thread_time()
        try:
            work()
        finally:
            self._stopped_at = None
            self._left_out += time.thread_time() - at


class Moment(Event):
    """When the device will have done what was enqueued."""

    def __init__(self, device: "SimulatedDevice", at: float) -> None:
        self._device = device
        self._at = at

    def done(self) -> bool:
        """See `Event`."""
        return self._device.clock.now() >= self._at

    def wait(self) -> None:
        """See `Event`."""
        clock = self._device.clock
        clock.skip(max(0.0, self._at - clock.now()))

    def since(self, earlier: Event) -> float:
        """See `Event`."""
        return self._at - cast(Moment, earlier)._at


class SimulatedDevice(CpuDevice):
    """Host memory, and one queue that takes time.

    Attributes:
        idle: seconds that the queue was empty for. calls: driver calls, by kind.
    """

    kind = "cuda"

    def __init__(self, clock: Clock, call_seconds: float) -> None:
        super().__init__()
        self.clock = clock
        self.idle = 0.0
        self.calls: Counter[str] = Counter()
        self._call_seconds = call_seconds
        self._free_at = 0.0

    def busy(self, seconds: float) -> None:
        """Take time of the device, in order."""
        now = self.clock.now()
        self.idle += max(0.0, now - self._free_at)
        self._free_at = max(now, self._free_at) + seconds

    def submit(
        self,
        call: Call,
        uses: Sequence[Use],
        maker: Maker | None = None,
        stream: tilert.Stream | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """See `Device`."""
        if self.recorder is not None:
            super().submit(call, uses, maker, stream, check)
        else:
            if check is not None:
                check()
            replay = isinstance(getattr(call, "__self__", None), tilert.Graph)
            kind, least = ("replay", 0.0) if replay else ("submit", KERNEL_MS)
            self._called(kind, partial(call, None), least)

    def submit_alone(self, call: Call) -> bool:
        """See `Device`: all work is timed by `submit`."""
        return False

    def upload(self, target: tilert.Array, source: np.ndarray[Any, Any]) -> None:
        """See `Device`."""
        self._called("upload", partial(super().upload, target, source), KERNEL_MS)

    def record_event(self, timing: bool = False, stream: tilert.Stream | None = None) -> Event:
        """See `Device`."""
        self._called("event", int)
        return Moment(self, self._free_at)

    def _called(self, kind: str, call: Callable[[], Any], milliseconds: float = 0.0) -> None:
        def work() -> None:
            self.calls[kind] += 1
            self.busy(milliseconds / 1e3)
            call()

        self.clock.skip(self._call_seconds)
        self.clock.outside(work)


class SimulatedTransformer:
    """A model whose steps take time, and whose replies are one text, over and over."""

    page_size = PAGE_SIZE

    def __init__(self, device: SimulatedDevice, text: Sequence[int], vocab_size: int) -> None:
        self.device = device
        shape = PRESETS["tiny-qwen3"]
        self.config = replace(shape, vocab_size=vocab_size, num_layers=1)
        self._text = np.array(text, np.int32)

    def new_cache(self, num_pages: int, max_seqs: int, max_len: int) -> KVCache:
        """A cache of real pages with hardly anything in them."""
        return KVCache(
            self.config, self.device, tilert.bf16,
            num_pages=num_pages, page_size=PAGE_SIZE, max_seqs=max_seqs, max_len=max_len,
        )  # fmt: skip

    def new_batch(self, cache: KVCache, size: int) -> Batch:
        """See `Transformer`."""
        return Batch(self.config, self.device, tilert.bf16, cache, size)

    def prefill(self, cache: KVCache, batch: Batch, chunks: Sequence[PromptChunk]) -> None:
        """See `Transformer`."""
        least, each = PREFILL_MS
        count = sum(len(chunk.tokens) for chunk in chunks)

        def work(_: object) -> None:
            self.device.busy(max(least, each * count) / 1e3)
            stops = [chunk.stop for chunk in chunks]
            host_view(batch.positions)[: len(stops)] = stops
            self._choose(batch)

        # The uploads of its tokens, their places and its bounds.
        self.device.calls["upload"] += 3
        self.device.submit(work, ())

    def decode(self, cache: KVCache, batch: Batch, features: Features = PLAIN) -> None:
        """See `Transformer`."""
        self.decode_layers(cache, batch)
        self.decode_sample(cache, batch, features)

    def decode_layers(self, cache: KVCache, batch: Batch) -> None:
        """See `Transformer`."""
        sizes = sorted(STEP_MS)
        seconds = float(np.interp(batch.size, sizes, [STEP_MS[size] for size in sizes])) / 1e3
        self.device.submit(lambda _: self.device.busy(seconds), ())

    def decode_sample(self, cache: KVCache, batch: Batch, features: Features = PLAIN) -> None:
        """See `Transformer`."""

        def work(_: object) -> None:
            host_view(batch.positions)[host_view(batch.index.rows) >= 0] += 1
            self._choose(batch)

        self.device.submit(work, ())

    def _choose(self, batch: Batch) -> None:
        places = host_view(batch.positions) + 7 * host_view(batch.index.rows)
        host_view(batch.ids)[:] = self._text[places % len(self._text)]


class Tally:
    """A sink that counts. ended: requests that are over."""

    def __init__(self) -> None:
        self.tokens = 0
        self.characters = 0
        self.ended = 0

    def put(self, event: Delta | GroutError) -> None:
        """See `grout.sequence.Sink`."""
        if type(event) is not Delta:
            raise cast(GroutError, event)
        self.tokens += len(event.token_ids)
        self.characters += len(event.text)
        self.ended += event.finish_reason is not None


def make_engine(device: SimulatedDevice, tokenizer: Tokenizer, sequences: int) -> Engine:
    """An engine on the simulated device, not started."""
    text = tokenizer.encode(TEXT)
    model = SimulatedTransformer(device, text, max(tokenizer.vocab_size, 151936))
    transformer = cast(Transformer, model)
    pages, context = 16 * sequences + 16, 1024
    cache = model.new_cache(pages, sequences, context)
    runner = Runner(transformer, cache, max_num_seqs=sequences)
    scheduler = Scheduler(
        PagePool(pages), page_size=PAGE_SIZE, max_num_seqs=sequences, prefill_chunk=1024
    )
    return Engine(
        EngineConfig(max_num_seqs=sequences, seed=0),
        runner,
        scheduler,
        tokenizer,
        model_id="simulated",
        max_model_len=context,
        vocab_size=model.config.vocab_size,
    )


def parameters(args: argparse.Namespace, number: int) -> SamplingParams:
    """Lengths vary by a quarter, so that requests end at different times."""
    length = args.new * (3 + number % 5 / 2) / 4
    return SamplingParams(
        temperature=0.7,
        seed=number,
        max_tokens=max(1, int(length)),
        ignore_eos=True,
        stop=tuple(args.stop),
        logprobs=5 if "logprobs" in args.features else None,
        presence_penalty=0.5 if "penalties" in args.features else 0.0,
        grammar=Grammar.regex("(.|\n)*") if "grammar" in args.features else None,
    )


def measure(args: argparse.Namespace, tokenizer: Tokenizer, sequences: int) -> dict[str, Any]:
    """Keep as many requests running as there are rows, and take the figures of `--steps`."""
    clock = Clock()
    device = SimulatedDevice(clock, args.call_us / 1e6)
    engine = make_engine(device, tokenizer, sequences)
    engine._loop.clock = clock.now
    tally = Tally()
    chance = np.random.default_rng(0)
    added = 0
    longest: list[float] = []

    def add() -> None:
        nonlocal added
        prompt = chance.integers(0, engine.vocab_size, args.prompt)
        engine.add(prompt, parameters(args, added), tally).arrived = clock.now()
        added += 1

    def run(steps: int) -> None:
        for _ in range(steps):
            while added < tally.ended + sequences:
                clock.outside(add)
            before, host = tally.tokens, clock.host()
            engine.step()
            longest.append(clock.host() - host)
            clock.skip(args.http_us / 1e6 * (tally.tokens - before))

    sizes = [1 << power for power in range((sequences - 1).bit_length() + 1)]
    clock.outside(lambda: engine.runner.warm_up((), sizes))
    run(args.warm)
    # As `create_engine` does.
    clock.outside(gc.collect)
    gc.freeze()
    device.calls.clear()
    longest.clear()
    device.idle = 0.0
    now, host = clock.now(), clock.host()
    tokens, ended, steps = tally.tokens, tally.ended, engine.stats()["steps"]
    spin = spin_us()
    if args.profile:
        profile = cProfile.Profile(time.thread_time)
        profile.runcall(run, args.steps)
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    else:
        run(args.steps)
    seconds, host = clock.now() - now, clock.host() - host
    tokens, steps = tally.tokens - tokens, engine.stats()["steps"] - steps
    return {
        "sequences": sequences,
        "steps": steps,
        "tokens": tokens,
        "requests": tally.ended - ended,
        "host_us_per_step": round(1e6 * host / steps, 1),
        "host_us_per_token": round(1e6 * host / tokens, 2),
        "host_us_p99_step": round(1e6 * float(np.percentile(longest, 99)), 1),
        "host_us_longest_step": round(1e6 * max(longest), 1),
        "calls_per_step": {kind: round(n / steps, 2) for kind, n in sorted(device.calls.items())},
        "step_ms": round(1e3 * seconds / steps, 3),
        "device_idle": round(device.idle / seconds, 4),
        "spin_us": round((spin + spin_us()) / 2, 1),
        "tokens_per_second": round(tokens / seconds, 1),
    }


def spin_us() -> float:
    """CPU time of a fixed piece of Python, to compare figures of machines and of busy moments."""
    start, table = time.thread_time(), dict[int, int]()
    for number in range(10_000):
        table[number & 63] = table.get(number & 31, 0) + 1
    return 1e6 * (time.thread_time() - start)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--sequences",
        type=int,
        nargs="+",
        default=[1, 8, 32, 64, 128],
        help="at a time (%(default)s)",
    )
    parser.add_argument("--prompt", type=int, default=100, help="tokens of a prompt (%(default)s)")
    parser.add_argument("--new", type=int, default=200, help="of a reply, on average (%(default)s)")
    parser.add_argument("--stop", nargs="*", default=[], metavar="TEXT", help="stop texts")
    parser.add_argument("--features", nargs="*", default=[], choices=FEATURES)
    parser.add_argument(
        "--warm", type=int, default=400, help="steps before the figures (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=1000, help="that count (%(default)s)")
    parser.add_argument(
        "--call-us", type=float, default=10.0, help="of a driver call (%(default)s)"
    )
    parser.add_argument(
        "--http-us", type=float, default=0.0, help="charged for a token (%(default)s)"
    )
    parser.add_argument("--tokenizer", metavar="FOLDER", help="with a tokenizer.json; else bytes")
    parser.add_argument("--profile", action="store_true", help="print where the host's time goes")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each number of sequences."""
    args = parse(argv)
    folder = args.tokenizer
    tokenizer = Tokenizer.from_folder(Path(folder)) if folder else Tokenizer.byte_level(())
    results = []
    for sequences in args.sequences:
        result = measure(args, tokenizer, sequences)
        print(
            f"{sequences:4} sequences: {result['host_us_per_step']:7.0f} us of CPU a step, "
            f"{result['host_us_per_token']:6.1f} a token; driver calls a step "
            f"{sum(result['calls_per_step'].values()):5.1f}; {result['step_ms']:.2f} ms a step, "
            f"device idle {result['device_idle']:.1%} (spin {result['spin_us']:.0f})"
        )
        results.append(result)
    print(json.dumps({"settings": vars(args), "runs": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
