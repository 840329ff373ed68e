"""Runs steps on the device: batches, step graphs, and ids on their way back to the host."""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace

import numpy as np

import tilert
from grout.scheduler import Chunk
from grout.sequence import Sequence
from models.batch import Batch, Slot
from models.kv_cache import KVCache
from models.transformer import Transformer

PADDING = Slot(row=-1, token=0, position=0, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


@dataclass(frozen=True, slots=True)
class Readback:
    """Ids a step produces, one for each of `sequences`, not on the host before `wait`.

    affects: the sequences the step worked on, also where it gave them no token.
    """

    sequences: tuple[Sequence, ...]
    affects: tuple[Sequence, ...]
    _event: tilert.Event
    _host: tilert.Pinned

    def wait(self) -> list[int]:
        """The ids. Raises what made the step fail on the device."""
        self._event.wait()
        ids: list[int] = self._host.numpy[: len(self.sequences)].tolist()
        return ids


class Lane:
    """A batch of one size, its step graph, and the host memory its ids are copied to.

    Two host buffers take turns, because a step may be enqueued while the ids of the one before
    are still being read; hence at most two readbacks of a lane may be outstanding.
    """

    def __init__(self, batch: Batch, device: tilert.Device) -> None:
        self.batch = batch
        self.graph: tilert.Graph | None = None
        self._device = device
        self._hosts = [tilert.pinned((batch.size,), tilert.i32, device) for _ in range(2)]

    def read(self, sequences: tuple[Sequence, ...], affects: tuple[Sequence, ...] = ()) -> Readback:
        """Enqueue the copy of the newest ids to the host."""
        host = self._hosts[0]
        self._hosts.reverse()
        host.copy_from(self.batch.ids)
        return Readback(sequences, affects or sequences, self._device.record_event(), host)

    def close(self) -> None:
        if self.graph is not None:
            self.graph.close()
            self.graph = None


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
        self._loaded: tuple[Sequence, ...] = ()
        self._lanes: dict[int, Lane] = {}
        self._make_batches()

    @property
    def asynchronous(self) -> bool:
        """Whether enqueued work runs beside the host's; on the cpu it is done when enqueued."""
        return self._device.kind != "cpu"

    def decode(self, sequences: tuple[Sequence, ...]) -> Readback:
        """Enqueue one token for each sequence.

        If they are not the ones of the decode before, all their ids must have been read.
        """
        lane = self._lane(bucket(len(sequences)))
        if self._loaded != sequences:
            slots = [_slot(sequence, sequence.position) for sequence in sequences]
            lane.batch.set(slots + [PADDING] * (lane.batch.size - len(slots)))
            self._loaded = sequences
        self._replay(lane)
        return lane.read(sequences)

    def prefill(self, chunk: Chunk) -> Readback:
        """Enqueue a chunk of a prompt. Its readback names the sequence only for the last chunk."""
        sequence = chunk.sequence
        if chunk.first:
            self.cache.set_pages(sequence.row, sequence.pages)
        self._prefill_lane.batch.set([_slot(sequence, chunk.start)])
        self.transformer.prefill(
            self.cache,
            self._prefill_lane.batch,
            sequence.prompt[chunk.start : chunk.stop],
            chunk.start,
        )
        return self._prefill_lane.read((sequence,) if chunk.last else (), (sequence,))

    def release(self, row: int) -> None:
        """Detach a row's pages, in order behind every step enqueued so far."""
        self.cache.clear(row)

    def warm_up(self, prompt_lengths: Ordered[int]) -> None:
        """Compile and record what the first requests need: prefill and the batch of one.

        Before any request: uses the cache's first pages, which must hold each of the prompts.
        """
        batch = self._prefill_lane.batch
        for length in prompt_lengths:
            self.cache.set_pages(0, range(-(-length // self.cache.page_size)))
            batch.set([replace(PADDING, row=0)])
            self.transformer.prefill(self.cache, batch, np.zeros(length, np.int32), 0)
            self._prefill_lane.read(()).wait()
            self.cache.clear(0)
        lane = self._lane(1)
        lane.batch.set([PADDING])
        self._loaded = ()
        self._replay(lane)
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
        self._loaded = ()
        self._largest = self.transformer.new_batch(self.cache, bucket(self._max_num_seqs))
        self._prefill_lane = Lane(self.transformer.new_batch(self.cache, 1), self._device)

    def _lane(self, size: int) -> Lane:
        if size not in self._lanes:
            self._lanes[size] = Lane(self._largest.head(size), self._device)
        return self._lanes[size]

    def _replay(self, lane: Lane) -> None:
        if self._eager:
            self.transformer.decode(self.cache, lane.batch)
            return
        if lane.graph is None:
            lane.graph = tilert.capture(
                self._device, lambda: self.transformer.decode(self.cache, lane.batch)
            )
        lane.graph.replay()


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
    )


__all__ = ["Lane", "Readback", "Runner", "bucket"]
