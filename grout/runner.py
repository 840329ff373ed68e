"""Runs steps on the device: batches, step graphs, and which pages rows have."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import replace
from functools import partial

import numpy as np

import tilert
from grout.readback import Readback, Reader
from grout.request import TokenLogprob
from grout.scheduler import PREFILLS_PER_STEP, Chunk
from grout.scorer import Scorer
from grout.seats import Seats
from grout.sequence import Sequence
from models.batch import Batch
from models.kv_cache import KVCache
from models.prompt import PromptChunk
from models.slot import PADDING, PLAIN, Features, Slot
from models.transformer import Transformer

RECORDED = (
    Features(edits=True),
    Features(logprobs=True),
    Features(edits=True, logprobs=True),
)
"""What requests ask of the sampling, beside plain, that is worth recording before they do.

Penalties, biases, grammars and `min_tokens` are edits."""


def _nothing() -> None:
    return


class Lane:
    """A batch of one size, and its step's graphs: of the layers (None), and of its sampling.

    features: what the sampling of the next step is to be recorded for.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.features = PLAIN
        self.graphs: dict[Features | None, tilert.Graph] = {}

    def change(self, slots: Mapping[int, Slot], fresh: tilert.Array) -> None:
        """See `Batch.change`."""
        self.batch.change(slots, fresh)
        # A step with draws serves greedy slots too.
        self.features = replace(self.batch.features, draws=True)

    def close(self) -> None:
        for graph in self.graphs.values():
            graph.close()
        self.graphs.clear()


class Runner:
    """Owns the transformer, its KV cache and its batches; everything is enqueued on one stream.

    A decode batch has the smallest power-of-two size that holds the running sequences. A sequence
    keeps its slot for as long as the batch has that size, and the state of a slot, its newest id
    and position, goes from step to step on the device; the host tells it only of changes.
    """

    def __init__(
        self, transformer: Transformer, cache: KVCache, *, max_num_seqs: int, eager: bool = False
    ) -> None:
        self.transformer = transformer
        self.cache = cache
        self._device = transformer.device
        self._max_num_seqs = max_num_seqs
        self._eager = eager
        # By row: who has it, and how many pages, of them frozen, its table was last given.
        self._members: dict[int, Sequence] = {}
        self._mapped: dict[int, tuple[int, int]] = {}
        self._lanes: dict[int, Lane] = {}
        self._scorer: Scorer | None = None
        # What records prefills, the longest first.
        self._ahead: list[Callable[[], None]] = []
        self._make_batches()

    @property
    def asynchronous(self) -> bool:
        """Whether enqueued work runs beside the host's; on the cpu it is done when enqueued."""
        return self._device.kind != "cpu"

    def decode(
        self,
        sequences: tuple[Sequence, ...],
        grown: Ordered[Sequence] = (),
        read_ids: Callable[[], None] = _nothing,
    ) -> Readback:
        """Enqueue one token for each sequence; `grown` are those with more pages than before.

        Their newest ids need not have been read, if they are of the step before. Where what may
        come next depends on them, `read_ids` is called with the layers enqueued, so that the host
        follows grammars while the device runs.
        """
        self._reader.begin()
        if grown:
            self._extend(grown)
        seats = self._seats
        lane = self._lane(bucket(len(sequences)))
        changes = seats.arrange(sequences, lane.batch.size)
        if changes:
            lane.change(changes, self._prompts.ids)
        self._run(lane, None)
        if seats.constrained:
            read_ids()
        lane.batch.allow(seats.masks(self.transformer.config.vocab_size))
        self._run(lane, lane.features)
        return self._reader.read(sequences, seats.slots, sequences, lane.features.logprobs)

    def prefill(self, chunks: Ordered[Chunk]) -> Readback:
        """Enqueue chunks of prompts. The readback is of those whose last chunks they are."""
        self._prompt_reader.begin()
        for chunk in chunks:
            if self._members.get(chunk.sequence.row) is not chunk.sequence:
                self._enter(chunk.sequence)
        batch = self._prompts if len(chunks) > 1 else self._prompt
        slots = [_prompt_slot(chunk) for chunk in chunks]
        batch.set(slots + [PADDING] * (batch.size - len(slots)))
        last = {place: chunk.sequence for place, chunk in enumerate(chunks) if chunk.last}
        vocabulary = self.transformer.config.vocab_size
        batch.allow({at: s.allowed(vocabulary) for at, s in last.items() if s.masked})
        self.transformer.prefill(self.cache, batch, [_tokens(chunk) for chunk in chunks])
        self._seats.expect(last)
        return self._prompt_reader.read(
            tuple(last.values()),
            tuple(last),
            tuple(chunk.sequence for chunk in chunks),
            batch.features.logprobs,
        )

    def score(self, chunk: Chunk) -> list[TokenLogprob]:
        """Log probabilities of the prompt's tokens that follow those of the chunk enqueued last.

        Of those not scored yet, in order. Waits for the device.
        """
        if self._scorer is None:
            self._scorer = Scorer(self.transformer, self.cache)
        return self._scorer.score(chunk)

    def release(self, row: int) -> None:
        """Detach a row's pages, in order behind every step enqueued so far."""
        self._members.pop(row, None)
        self._mapped.pop(row, None)
        self.cache.clear(row)

    def scrub(self, pages: Ordered[int]) -> None:
        """Make pages that may hold NaN harmless for those who get them next."""
        self.cache.scrub(pages)

    def warm_up(
        self,
        prompt_lengths: Ordered[int],
        batch_sizes: Ordered[int] = (1,),
        features: Ordered[Features] = (),
    ) -> None:
        """Compile all that requests need, and record of it decodes of some batch sizes.

        The layers of prefills, but for the shortest, are left to `record_ahead`.

        prompt_lengths: tokens of a prefill, of one prompt and of several; those that never come
        together count as the most that do. features: what sampling is recorded for, beside plain.
        Before any request: uses the cache's first rows and pages.
        """
        parts = tuple(dict.fromkeys((PLAIN, *features)))
        # The longest first: the others are recorded in its memory.
        lengths = sorted(prompt_lengths, reverse=True)
        ahead: list[tuple[int, Callable[[], None]]] = []
        for batch in (self._prompt, self._prompts)[: self._max_num_seqs]:
            spreads = dict.fromkeys(self._spread(length, batch.size) for length in lengths)
            for number, counts in enumerate(spreads, 1):
                record = self.transformer.prepare_prefill(self.cache, batch, sum(counts))
                if record is None or number == len(spreads):
                    self._warm_prefill(batch, counts, PLAIN)
                else:
                    ahead.append((sum(counts), record))
            for part in parts[1:] if lengths else ():
                self._warm_prefill(batch, self._spread(lengths[-1], 1), part)
        self._ahead = [record for _, record in sorted(ahead, key=lambda one: -one[0])]
        for size in batch_sizes:
            lane = self._lane(size)
            lane.change(dict.fromkeys(range(size), PADDING), self._prompts.ids)
            self._run(lane, None)
            for part in parts:
                self._run(lane, part)
            self._reader.read((), (), (), False).wait()

    @property
    def left_to_record(self) -> int:
        """How many times there is something for `record_ahead` to do."""
        return len(self._ahead)

    def record_ahead(self) -> None:
        """Record one prefill that a request may need, the shortest that is left.

        One that is needed before its turn is recorded then, as are all after a failure.
        """
        if self._ahead:
            try:
                self._ahead[-1]()
            finally:
                self._ahead.pop()

    def recover(self) -> None:
        """After a failed step: wait for the device and start over with fresh batches and graphs.

        The pages of the cache stay as they are. Every id must have been read. Raises if the device
        cannot go on.
        """
        self.close()
        self._make_batches()

    def close(self) -> None:
        """Wait for what is enqueued, then close every graph."""
        self._ahead.clear()
        self._device.synchronize()
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()

    def _spread(self, tokens: int, slots: int) -> tuple[int, ...]:
        """Up to so many tokens of new prompts, as few as there are rows and pages for them."""
        cache, counts, pages = self.cache, list[int](), self.cache.num_pages
        while tokens and pages and len(counts) < min(slots, self._max_num_seqs):
            counts.append(min(tokens, cache.max_len, pages * cache.page_size))
            tokens -= counts[-1]
            pages -= -(-counts[-1] // cache.page_size)
        return tuple(counts)

    def _warm_prefill(self, batch: Batch, counts: Ordered[int], features: Features) -> None:
        """Run prompts of so many tokens."""
        cache, page = self.cache, 0
        for row, count in enumerate(counts):
            pages = -(-count // cache.page_size)
            cache.set_pages(row, range(page, page + pages))
            page += pages
        slot = replace(PADDING, masked=features.edits, logprobs=features.logprobs)
        slots = [replace(slot, row=row) for row in range(len(counts))]
        batch.set(slots + [PADDING] * (batch.size - len(counts)))
        chunks = [PromptChunk(np.zeros(count, np.int32), 0) for count in counts]
        self.transformer.prefill(cache, batch, chunks)
        self._prompt_reader.read((), (), (), False).wait()
        for row in range(len(counts)):
            cache.clear(row)

    def _make_batches(self) -> None:
        self._seats = Seats()
        self._largest = self.transformer.new_batch(self.cache, bucket(self._max_num_seqs))
        self._reader = Reader(self._largest, self._device)
        # One prompt runs in a batch of its own: on the cpu padding would cost it time.
        self._prompts = self.transformer.new_batch(self.cache, PREFILLS_PER_STEP)
        self._prompt = self._prompts.head(1)
        self._prompt_reader = Reader(self._prompts, self._device)
        self._scorer = None

    def _enter(self, sequence: Sequence) -> None:
        """A sequence takes its row. Whoever wrote the pages it shares must stop being able to."""
        shared = set(sequence.pages[: sequence.frozen])
        for member in self._members.values() if shared else ():
            if not shared.isdisjoint(member.pages):
                self._map(member)
        self._members[sequence.row] = sequence
        self._map(sequence)
        if sequence.params.penalises:
            self.cache.history.set(sequence.row, sequence.prompt.tolist(), sequence.produced)

    def _extend(self, grown: Ordered[Sequence]) -> None:
        """Give rows the pages that their sequences have got since."""
        further: dict[int, Ordered[int]] = {}
        for sequence in grown:
            count, frozen = self._mapped[sequence.row]
            further[sequence.row] = sequence.pages[count:]
            self._mapped[sequence.row] = len(sequence.pages), frozen
        self.cache.extend(further)

    def _map(self, sequence: Sequence) -> None:
        """Bring the row's table up to date.

        A page that is complete stays writable until then; nobody writes it, nor may share it.
        """
        now = len(sequence.pages), sequence.frozen
        if self._mapped.get(sequence.row) != now:
            self.cache.set_pages(sequence.row, sequence.pages, sequence.frozen)
            self._mapped[sequence.row] = now

    def _lane(self, size: int) -> Lane:
        if size not in self._lanes:
            self._lanes[size] = Lane(self._largest.head(size))
        return self._lanes[size]

    def _run(self, lane: Lane, features: Features | None) -> None:
        """Enqueue a decode step's layers, or its sampling, recorded the first time."""
        model, batch = self.transformer, lane.batch
        if features is None:
            work = partial(model.decode_layers, self.cache, batch)
        else:
            batch.need(features)
            work = partial(model.decode_sample, self.cache, batch, features)
        if self._eager:
            work()
            return
        if features not in lane.graphs:
            lane.graphs[features] = tilert.capture(self._device, work)
        lane.graphs[features].replay()


def bucket(count: int) -> int:
    """The smallest power of two >= count."""
    return 1 << (count - 1).bit_length()


def _prompt_slot(chunk: Chunk) -> Slot:
    """Sampling settings matter to the last chunk only."""
    sequence = chunk.sequence
    if not chunk.last:
        return replace(PADDING, row=sequence.row)
    return sequence.slot(token=0, position=chunk.start)


def _tokens(chunk: Chunk) -> PromptChunk:
    return PromptChunk(chunk.sequence.tokens(chunk.start, chunk.stop), chunk.start)


__all__ = ["RECORDED", "Lane", "Runner", "bucket"]
