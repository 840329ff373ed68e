"""A device, model and tokenizer that follow the real ones' contracts, in plain Python.

The cache refuses, on the host and on the device, a write to a page that several rows have.

The device runs nothing until it is waited for (or, by chance, earlier), so a step loop that reads
ids too early, reloads a batch in flight, or hands out a page still in use gets wrong tokens. The
model's next token is a hash of every token it finds in the KV pages of its row, so one wrong
page, position or order changes every token after it.
"""

import functools
import operator
import random
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from grout.config import EngineConfig
from grout.engine import Engine
from grout.pages import PagePool
from grout.runner import Runner
from grout.scheduler import Scheduler
from models.prompt import PromptChunk
from models.slot import FROM_SLOT, GIVEN, KEPT, PADDING, PLAIN, Features, Slot

VOCAB = 97
EOS = 96
PAGE_SIZE = 4
BAD_TOKEN = 95
"""Its log probability in a prompt is NaN."""
BAD_SEED = 666
"""Requests with this seed get bad logits."""


class FakeDevice:
    """One stream: a queue of work run in order, or at once if its kind is "cpu"."""

    def __init__(self, seed: int = 0, kind: str = "cuda") -> None:
        self.kind = kind
        self.queue: deque[Callable[[], None]] = deque()
        self.capturing: list[Callable[[], None]] | None = None
        self.broken: Exception | None = None
        self.uploads = 0
        self._random = random.Random(seed)

    def enqueue(self, work: Callable[[], None]) -> None:
        if self.capturing is not None:
            self.capturing.append(work)
            return
        self.queue.append(work)
        while self.queue and (self.kind == "cpu" or self._random.random() < 0.4):
            self.queue.popleft()()

    def record_event(self, timing: bool = False) -> "FakeEvent":
        event = FakeEvent(self)
        self.enqueue(event.complete)
        return event

    def synchronize(self) -> None:
        if self.broken is not None:
            raise self.broken
        while self.queue:
            self.queue.popleft()()


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._complete = False

    def complete(self) -> None:
        self._complete = True

    def done(self) -> bool:
        return self._complete

    def since(self, earlier: "FakeEvent") -> float:
        assert self._complete and earlier._complete
        return 0.25

    def wait(self) -> None:
        while not self._complete:
            self._device.queue.popleft()()


class FakePinned:
    def __init__(self, shape: tuple[int, ...], dtype: Any, device: FakeDevice) -> None:
        self.numpy = np.zeros(shape, dtype)
        self._device = device

    def copy_from(self, array: "FakeArray") -> None:
        self._device.enqueue(lambda: np.copyto(self.numpy, array.data))


class FakeArray:
    """Device memory: written in order with everything else."""

    def __init__(self, data: np.ndarray, device: FakeDevice) -> None:
        self.data = data
        self._device = device

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def dtype(self) -> np.dtype:
        return self.data.dtype

    def __getitem__(self, at: Any) -> "FakeArray":
        return FakeArray(self.data[at], self._device)

    def copy_from(self, array: np.ndarray) -> None:
        given = np.array(array)
        self._device.enqueue(lambda: np.copyto(self.data, given))


class FakeGraph:
    def __init__(self, device: FakeDevice, work: list[Callable[[], None]]) -> None:
        self._device = device
        self._work = work
        self.closed = False

    def replay(self) -> None:
        if self.closed:
            raise RuntimeError("replay of a closed graph")
        for work in self._work:
            self._device.enqueue(work)

    def close(self) -> None:
        self.closed = True


def capture(device: FakeDevice, fn: Callable[[], None]) -> FakeGraph:
    device.capturing = []
    try:
        fn()
        return FakeGraph(device, device.capturing)
    finally:
        device.capturing = None


fake_tilert = SimpleNamespace(capture=capture, pinned=FakePinned)


class FakeCache:
    """`owner`: the row that may write a page. `readers`: the rows that have it to read only."""

    def __init__(self, device: FakeDevice, num_pages: int, max_seqs: int, max_len: int) -> None:
        self.num_pages = num_pages
        self.page_size = PAGE_SIZE
        self.max_seqs = max_seqs
        self.max_len = max_len
        self.owner: dict[int, int] = {}
        self.readers: dict[int, set[int]] = {}
        # What rows have been given, and what of it has reached the device.
        self.given: dict[int, tuple[list[int], int]] = {}
        self.tables: dict[int, tuple[list[int], int]] = {}
        self.tokens = np.full((num_pages, PAGE_SIZE), -1, np.int64)
        self.scrubbed: list[int] = []
        self.histories: dict[int, tuple[list[int], list[int]]] = {}
        self.history = SimpleNamespace(set=self._set_history)
        self._device = device

    def set_pages(self, row: int, pages: Sequence[int], shared: int = 0) -> None:
        others = {page for page, rows in self.readers.items() if rows - {row}}
        for at, page in enumerate(pages):
            if self.owner.get(page, row) != row:
                raise ValueError(f"page {page} belongs to row {self.owner[page]}")
            if at >= shared and page in others:
                raise ValueError(f"page {page} is shared and cannot be written by row {row}")
        self.owner = {page: r for page, r in self.owner.items() if r != row}
        self.owner.update(dict.fromkeys(pages[shared:], row))
        for rows in self.readers.values():
            rows.discard(row)
        for page in pages[:shared]:
            self.readers.setdefault(page, set()).add(row)
        table = self.given[row] = list(pages), shared
        self._device.enqueue(lambda: self.tables.__setitem__(row, table))

    def extend(self, further: Mapping[int, Sequence[int]]) -> None:
        given = [page for pages in further.values() for page in pages]
        if len(set(given)) < len(given) or self.in_use & set(given):
            raise ValueError(f"pages {given} are in use, or given twice")
        for row, pages in further.items():
            held, shared = self.given[row]
            self.set_pages(row, [*held, *pages], shared)

    def clear(self, row: int) -> None:
        self.set_pages(row, [])

    def scrub(self, pages: Sequence[int]) -> None:
        self.scrubbed += pages
        self._device.enqueue(lambda: self.tokens.__setitem__(list(pages), -1))

    def _set_history(self, row: int, prompt: Sequence[int], produced: Sequence[int]) -> None:
        self.histories[row] = [int(token) for token in prompt], list(produced)

    @property
    def in_use(self) -> set[int]:
        return set(self.owner) | {page for page, rows in self.readers.items() if rows}

    def write(self, row: int, position: int, token: int) -> None:
        pages, shared = self.tables[row]
        at = position // PAGE_SIZE
        if at < len(pages):
            holders = [r for r, (table, _) in self.tables.items() if pages[at] in table]
            if at < shared or holders != [row]:
                raise AssertionError(f"row {row} writes page {pages[at]}, held by {holders}")
            self.tokens[pages[at], position % PAGE_SIZE] = token

    def read(self, row: int, length: int) -> list[int]:
        table, _ = self.tables[row]
        if length > len(table) * PAGE_SIZE:
            return []
        return [int(self.tokens[table[p // PAGE_SIZE], p % PAGE_SIZE]) for p in range(length)]


@dataclass(eq=False)
class FakeBatch:
    """`slots` are those on the device; what is changed on the host reaches them in order."""

    device: FakeDevice
    size: int
    slots: list[Slot]
    given: list[Slot]
    arrays: dict[str, FakeArray]
    results: FakeArray
    features: Features = PLAIN

    def __getattr__(self, name: str) -> FakeArray:
        try:
            return self.arrays[name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def logprobs(self) -> dict[str, FakeArray]:
        return {name: self.arrays[name] for name in ("chosen", "top_ids", "top_values")}

    def need(self, features: Features) -> None:
        pass

    def allow(self, masks: Mapping[int, np.ndarray]) -> None:
        for slot, words in masks.items():
            self.allowed[slot].copy_from(words)

    def head(self, n: int) -> "FakeBatch":
        arrays = {name: array[:n] for name, array in self.arrays.items()}
        return replace(self, size=n, arrays=arrays)

    def set(self, slots: Sequence[Slot]) -> None:
        if len(slots) != self.size:
            raise ValueError(f"{len(slots)} slots for a batch of {self.size}")
        self.change(dict(enumerate(slots)))

    def change(self, slots: Mapping[int, Slot], fresh: FakeArray | None = None) -> None:
        for at, slot in slots.items():
            self.given[at] = slot
        given = self.given[: self.size]
        rows = [slot.row for slot in given if slot.row >= 0]
        if len(set(rows)) != len(rows):
            raise ValueError(f"rows repeat: {rows}")
        self.features = Features.of(functools.reduce(operator.or_, (s.needs for s in given)))
        self.device.uploads += 1
        self.given[: self.size] = [replace(slot, source=KEPT) for slot in given]

        def take() -> None:
            before = self.results.data[0].copy()
            self.slots[: self.size] = given
            for at, slot in enumerate(given):
                if slot.source == KEPT:
                    continue
                self.positions.data[at] = slot.position
                self.bad.data[at] = 0
                if slot.source == GIVEN:
                    self.ids.data[at] = slot.token
                elif slot.source < 0:
                    assert fresh is not None
                    self.ids.data[at] = fresh.data[-1 - slot.source]
                else:
                    self.ids.data[at] = before[slot.source - FROM_SLOT]

        self.device.enqueue(take)

    def sample(self, at: int, context: Sequence[int]) -> None:
        """Choose slot `at`'s next token: the model's, or the next one allowed after it."""
        arrays = {name: array.data for name, array in self.arrays.items()}
        token = next_token(context, self.slots[at])
        bits = np.unpackbits(arrays["allowed"][at].view(np.uint8), bitorder="little")[:VOCAB]
        while self.slots[at].masked and bits.any() and not bits[token]:
            token = (token + 1) % VOCAB
        arrays["ids"][at] = token
        arrays["bad"][at] |= self.slots[at].seed == BAD_SEED
        arrays["chosen"][at] = -float(token)
        arrays["top_ids"][at] = (token + np.arange(20)) % VOCAB
        arrays["top_values"][at] = -token - np.arange(20)


def next_token(context: Sequence[int], slot: Slot) -> int:
    """The pseudo-model: depends on the whole context and, when sampled, on the seed."""
    value = 0
    for token in context:
        value = (value * 31 + token + 1) % 1_000_003
    if slot.temperature > 0:
        value = (value + (slot.seed % 1_000_003) * (len(context) + 1)) % 1_000_003
    return value % VOCAB


class Moved:
    """Stands for an array that a failing call holds."""


class FakeTransformer:
    """`fail_prefill` and `fail_decode` are raised once, at the call; `fail_late` on the device."""

    page_size = PAGE_SIZE
    config = SimpleNamespace(vocab_size=VOCAB)

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.cache: Any = None
        self.decodes = 0
        self.chunks: list[tuple[int, int]] = []
        self.launches: list[list[PromptChunk]] = []
        self.prepare: Callable[[int], Callable[[], None] | None] = lambda count: None
        self.fail_prefill: Exception | None = None
        self.fail_decode: Exception | None = None
        self.fail_late: Exception | None = None
        self.moved: weakref.ref[Moved] | None = None

    def new_batch(self, cache: FakeCache, size: int) -> FakeBatch:
        self.cache = cache

        def array(dtype: Any, *shape: int, fill: int = 0) -> FakeArray:
            return FakeArray(np.full((size, *shape), fill, dtype), self.device)

        results = FakeArray(np.zeros((2, size), np.int32), self.device)
        arrays = {
            "ids": results[0],
            "positions": array(np.int32),
            "bad": results[1],
            "allowed": array(np.uint32, -(-VOCAB // 32)),
            "chosen": array(np.float32),
            "top_ids": array(np.int32, 20),
            "top_values": array(np.float32, 20),
        }
        return FakeBatch(self.device, size, [PADDING] * size, [PADDING] * size, arrays, results)

    def prefill(self, cache: FakeCache, batch: FakeBatch, chunks: Sequence[PromptChunk]) -> None:
        failure, self.fail_prefill = self.fail_prefill, None
        if failure is not None:
            raise failure
        self.chunks += [(chunk.start, len(chunk.tokens)) for chunk in chunks]
        self.launches.append(list(chunks))

        def work() -> None:
            for at, chunk in enumerate(chunks):
                row = batch.slots[at].row
                for position, token in enumerate(chunk.tokens, chunk.start):
                    cache.write(row, position, int(token))
                batch.sample(at, cache.read(row, chunk.stop))
                batch.positions.data[at] = chunk.stop

        self.device.enqueue(work)

    def prepare_prefill(self, cache: FakeCache, batch: FakeBatch, count: int) -> Any:
        """Its prefills are not recorded, unless a test says what recording them does."""
        return self.prepare(count)

    def score(self, batch: FakeBatch, first: int, targets: Sequence[int]) -> None:
        """Token t after token s of the prompt has the log probability -(s + t / 100)."""
        [chunk] = self.launches[-1]
        assert 0 < len(targets) <= batch.size
        before = [int(token) for token in chunk.tokens[first : first + len(targets)]]
        assert len(before) == len(targets)
        batch.set([Slot(row=-1, token=t, position=0, logprobs=True) for t in targets]
                  + [PADDING] * (batch.size - len(targets)))  # fmt: skip

        def work() -> None:
            arrays = {name: array.data for name, array in batch.logprobs.items()}
            for at, (token, target) in enumerate(zip(before, targets, strict=True)):
                arrays["chosen"][at] = -(token + target / 100)
                arrays["top_ids"][at] = np.arange(20) + token
                arrays["top_values"][at] = -np.arange(20)
                if target == BAD_TOKEN:
                    arrays["chosen"][at] = np.nan

        self.device.enqueue(work)

    def decode_layers(self, cache: FakeCache, batch: FakeBatch) -> None:
        failure, self.fail_decode = self.fail_decode, None
        if failure is not None:
            moved = Moved()
            self.moved = weakref.ref(moved)
            raise failure

        def work() -> None:
            self.decodes += 1
            late, self.fail_late = self.fail_late, None
            if late is not None:
                raise late
            for at in range(batch.size):
                slot = batch.slots[at]
                if slot.row >= 0:
                    cache.write(slot.row, int(batch.positions.data[at]), int(batch.ids.data[at]))

        self.device.enqueue(work)

    def decode_sample(self, cache: FakeCache, batch: FakeBatch, features: Features) -> None:
        assert features.cover(batch.features)

        def work() -> None:
            for at in range(batch.size):
                slot = batch.slots[at]
                if slot.row >= 0:
                    length = int(batch.positions.data[at]) + 1
                    batch.sample(at, cache.read(slot.row, length))
                    batch.positions.data[at] += 1

        self.device.enqueue(work)


class FakeTokenizer:
    """Each id is two letters of text; `EOS` is special; some ids split a character in two."""

    vocab_size = VOCAB
    special_ids = frozenset({EOS})

    def encode(self, text: str) -> list[int]:
        """Of an even number of letters."""
        letters = text.encode()
        return [low - 97 + 26 * (high - 97) for low, high in zip(*[iter(letters)] * 2, strict=True)]

    def token_bytes(self, token: int) -> bytes:
        if token == EOS:
            return b"<eos>"
        split = {0: b"\xf0\x9f", 1: b"\x99\x82", 2: b"\xe4\xbd", 3: b"\xa0"}
        return split.get(token, bytes([97 + token % 26, 97 + token // 26]))


def make_engine(
    *,
    max_num_seqs: int = 4,
    max_model_len: int = 64,
    pages: int | None = None,
    prefill_chunk: int = 8,
    device_seed: int = 0,
    eos: Sequence[int] = (EOS,),
    device_kind: str = "cuda",
    **config: Any,
) -> Engine:
    """An engine over the pseudo-model, not started."""
    device = FakeDevice(device_seed, device_kind)
    transformer = FakeTransformer(device)
    pages = pages or max_num_seqs * -(-max_model_len // PAGE_SIZE)
    cache = FakeCache(device, pages, max_num_seqs, max_model_len)
    settings = EngineConfig(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        prefill_chunk=prefill_chunk,
        device="cpu",
        **config,
    )
    fake: Any = (transformer, cache, FakeTokenizer())
    runner = Runner(fake[0], fake[1], max_num_seqs=max_num_seqs, eager=settings.enforce_eager)
    scheduler = Scheduler(
        PagePool(pages),
        page_size=PAGE_SIZE,
        max_num_seqs=max_num_seqs,
        prefill_chunk=prefill_chunk,
        prefix_caching=settings.prefix_caching,
    )
    return Engine(
        settings,
        runner,
        scheduler,
        fake[2],
        model_id="fake",
        max_model_len=max_model_len,
        vocab_size=VOCAB,
        eos_token_ids=eos,
    )


def model_of(engine: Engine) -> Any:
    """The engine's `FakeTransformer`."""
    return engine._loop.runner.transformer


def expected(prompt: Sequence[int], count: int, seed: int = 0, temperature: float = 0) -> list[int]:
    """The tokens the pseudo-model gives, computed without any engine."""
    context = list(prompt)
    slot = Slot(0, 0, 0, temperature, 0, 1.0, 0.0, seed)
    for _ in range(count):
        context.append(next_token(context, slot))
    return context[len(prompt) :]
