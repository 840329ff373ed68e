"""Runs steps on the device: batches, step graphs, and which pages rows have."""

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np

import tilert
from grout.readback import Lane, Readback
from grout.scheduler import PREFILLS_PER_STEP, Chunk
from grout.sequence import Sequence
from models.batch import Batch, Slot
from models.kv_cache import KVCache
from models.prompt import PromptChunk
from models.transformer import Transformer

PADDING = Slot(row=-1, token=0, position=0)

Part = Literal["whole", "layers", "sample"]


def _nothing() -> None:
    return


class Runner:
    """Owns the transformer, its KV cache and its batches; everything is enqueued on one stream.

    A decode batch has the smallest power-of-two size that holds the running sequences. Its state
    is uploaded only when its members change; otherwise ids and positions advance on the device.
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
        # Whom the decode batch was last set for, and which of them it holds back from ending.
        self._loaded: tuple[tuple[Sequence, ...], tuple[Sequence, ...]] = ((), ())
        self._make_batches()

    @property
    def asynchronous(self) -> bool:
        """Whether enqueued work runs beside the host's; on the cpu it is done when enqueued."""
        return self._device.kind != "cpu"

    def decode(
        self, sequences: tuple[Sequence, ...], read_ids: Callable[[], None] = _nothing
    ) -> Readback:
        """Enqueue one token for each sequence.

        If they are not the ones of the decode before, all their ids must have been read. Otherwise
        `read_ids` is called, where what may come next depends on them, as late as it can be: with
        the layers enqueued, so that the host follows grammars while the device runs.
        """
        for sequence in sequences:
            self._map(sequence)
        lane = self._lane(bucket(len(sequences)))
        held_back = tuple(sequence for sequence in sequences if sequence.holds_back)
        known: tuple[Sequence, ...] = held_back
        if self._loaded != (sequences, held_back):
            slots = [_slot(sequence, sequence.position) for sequence in sequences]
            lane.batch.set(slots + [PADDING] * (lane.batch.size - len(slots)))
            self._loaded = (sequences, held_back)
            known = ()
        if any(sequence.constraint is not None for sequence in sequences):
            self._run(lane, "layers")
            read_ids()
            self._allow(lane.batch, sequences, known)
            self._run(lane, "sample")
        else:
            self._allow(lane.batch, sequences, known)
            self._run(lane, "whole")
        return lane.read(sequences)

    def prefill(self, chunk: Chunk) -> Readback:
        """Enqueue a chunk of a prompt. Its readback names the sequence only for the last chunk."""
        sequence, lane = chunk.sequence, self._prefill_lane
        if self._members.get(sequence.row) is not sequence:
            self._enter(sequence)
        if chunk.last:
            lane.batch.set([_slot(sequence, chunk.start)])
            self._allow(lane.batch, (sequence,))
        else:
            lane.batch.set([replace(PADDING, row=sequence.row)])
        tokens = sequence.tokens(chunk.start, chunk.stop)
        self.transformer.prefill(self.cache, lane.batch, [PromptChunk(tokens, chunk.start)])
        return lane.read((sequence,) if chunk.last else (), (sequence,))

    def release(self, row: int) -> None:
        """Detach a row's pages, in order behind every step enqueued so far."""
        self._members.pop(row, None)
        self._mapped.pop(row, None)
        self.cache.clear(row)

    def scrub(self, pages: Ordered[int]) -> None:
        """Make pages that may hold NaN harmless for those who get them next."""
        self.cache.scrub(pages)

    def warm_up(self, prompt_lengths: Ordered[int], batch_sizes: Ordered[int] = (1,)) -> None:
        """Compile and record what requests need: prefills, and decodes of some batch sizes.

        Before any request: uses the cache's first pages, which must hold each of the prompts.
        """
        batch = self._prefill_lane.batch
        for length in prompt_lengths:
            self.cache.set_pages(0, range(-(-length // self.cache.page_size)))
            batch.set([replace(PADDING, row=0)])
            chunk = PromptChunk(np.zeros(length, np.int32), 0)
            self.transformer.prefill(self.cache, batch, [chunk])
            self._prefill_lane.read(()).wait()
            self.cache.clear(0)
        self._loaded = ((), ())
        for size in batch_sizes:
            lane = self._lane(size)
            lane.batch.set([PADDING] * size)
            self._run(lane, "whole")
            lane.read(()).wait()

    def recover(self) -> None:
        """After a failed step: wait for the device and start over with fresh batches and graphs.

        The pages of the cache stay as they are. Raises if the device cannot go on.
        """
        self.close()
        self._make_batches()

    def close(self) -> None:
        """Wait for what is enqueued, then close every graph."""
        self._device.synchronize()
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()

    def _make_batches(self) -> None:
        self._loaded = ((), ())
        self._largest = self.transformer.new_batch(self.cache, bucket(self._max_num_seqs))
        batch = self.transformer.new_batch(self.cache, 1)
        self._prefill_lane = Lane(batch, self._device, 2 * PREFILLS_PER_STEP)

    def _enter(self, sequence: Sequence) -> None:
        """A sequence takes its row. Whoever wrote the pages it shares must stop being able to."""
        if sequence.frozen:
            for member in self._members.values():
                self._map(member, freeze=True)
        self._members[sequence.row] = sequence
        self._map(sequence)
        if sequence.params.penalises:
            self.cache.history.set(sequence.row, sequence.prompt.tolist(), sequence.produced)

    def _map(self, sequence: Sequence, freeze: bool = False) -> None:
        """Bring the row's table up to date: with new pages, or, to `freeze`, with frozen ones.

        A page that nobody else reads may stay writable until the next change.
        """
        pages, frozen = self._mapped.get(sequence.row, (-1, 0))
        if len(sequence.pages) != pages or (freeze and sequence.frozen != frozen):
            self.cache.set_pages(sequence.row, sequence.pages, sequence.frozen)
            self._mapped[sequence.row] = len(sequence.pages), sequence.frozen

    def _allow(
        self, batch: Batch, sequences: Ordered[Sequence], known: Ordered[Sequence] = ()
    ) -> None:
        """Upload the tokens that each masked slot may choose, but for those already `known`.

        What a grammar allows is new with every token.
        """
        for place, sequence in enumerate(sequences):
            if sequence.constraint is not None or (sequence.holds_back and sequence not in known):
                batch.allow(place, sequence.allowed(self.transformer.config.vocab_size))

    def _lane(self, size: int) -> Lane:
        if size not in self._lanes:
            self._lanes[size] = Lane(self._largest.head(size), self._device)
        return self._lanes[size]

    def _run(self, lane: Lane, part: Part) -> None:
        """Enqueue a decode step or a part of one, recorded the first time."""
        model, batch = self.transformer, lane.batch
        # A step with draws serves greedy slots too.
        features = replace(batch.features, draws=True)
        if part == "whole":
            work = partial(model.decode, self.cache, batch, features)
        elif part == "layers":
            work = partial(model.decode_layers, self.cache, batch)
        else:
            work = partial(model.decode_sample, self.cache, batch, features)
        if self._eager:
            work()
            return
        key = part, None if part == "layers" else features
        if key not in lane.graphs:
            lane.graphs[key] = tilert.capture(self._device, work)
        lane.graphs[key].replay()


def bucket(count: int) -> int:
    """The smallest power of two >= count."""
    return 1 << (count - 1).bit_length()


def _slot(sequence: Sequence, position: int) -> Slot:
    params = sequence.params
    return Slot(
        row=sequence.row,
        token=sequence.produced[-1] if sequence.produced else 0,
        position=position,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=sequence.seed,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias,
        masked=sequence.masked,
        logprobs=params.logprobs is not None,
    )


__all__ = ["Lane", "Readback", "Runner", "bucket"]
