"""What a step leaves on the device for the host: ids, and what is said about them."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import tilert
from grout.request import TokenLogprob
from grout.sequence import Sequence
from models.batch import Batch, Features


@dataclass(frozen=True, slots=True)
class Tokens:
    """ids: one for each sequence. bad: places whose logits held NaN, so that the id is nothing.
    logprobs: by place, for the sequences that asked."""

    ids: list[int]
    bad: frozenset[int]
    logprobs: Mapping[int, TokenLogprob]


class _Host:
    """Pinned memory for the results of one step of one batch."""

    def __init__(self, batch: Batch, device: tilert.Device) -> None:
        self._device = device
        self._batch = batch
        self._ids = self._pinned(batch.ids)
        self._bad = self._pinned(batch.bad)
        self._logprobs: dict[str, tilert.Pinned] = {}

    def copy(self, logprobs: bool) -> None:
        """Enqueue copies of the batch's results."""
        self._ids.copy_from(self._batch.ids)
        self._bad.copy_from(self._batch.bad)
        if logprobs:
            arrays = self._batch.logprobs
            for name in ("chosen", "top_ids", "top_values"):
                if name not in self._logprobs:
                    self._logprobs[name] = self._pinned(arrays[name])
                self._logprobs[name].copy_from(arrays[name])

    def ids(self, count: int) -> list[int]:
        """Of the first `count` places, once the copies are done, as all below."""
        ids: list[int] = self._ids.numpy[:count].tolist()
        return ids

    def bad(self, count: int) -> frozenset[int]:
        """Which of the first `count` places are bad."""
        return frozenset(self._bad.numpy[:count].nonzero()[0].tolist())

    def logprob(self, place: int, count: int) -> TokenLogprob:
        """Of the token in one place, with the `count` likeliest."""
        chosen, ids, values = (
            self._logprobs[name].numpy[place] for name in ("chosen", "top_ids", "top_values")
        )
        top = zip(ids[:count].tolist(), values[:count].tolist(), strict=True)
        return TokenLogprob(int(self._ids.numpy[place]), float(chosen), tuple(top))

    def _pinned(self, array: tilert.Array) -> tilert.Pinned:
        return tilert.pinned(array.shape, array.dtype, self._device)


@dataclass(frozen=True, slots=True)
class Readback:
    """Ids a step produces, one for each of `sequences`, not on the host before `wait`.

    affects: the sequences the step worked on, also where it gave them no token.
    """

    sequences: tuple[Sequence, ...]
    affects: tuple[Sequence, ...]
    _event: tilert.Event
    _host: _Host

    def wait(self) -> Tokens:
        """The ids. Raises what made the step fail on the device."""
        self._event.wait()
        count = len(self.sequences)
        return Tokens(
            self._host.ids(count),
            self._host.bad(count),
            {
                place: self._host.logprob(place, sequence.params.logprobs)
                for place, sequence in enumerate(self.sequences)
                if sequence.params.logprobs is not None
            },
        )


class Lane:
    """A batch of one size, its step graphs, and the host memory its results are copied to.

    Host buffers take turns, because a step may be enqueued while the ids of the one before are
    still being read; at most `depth` readbacks of a lane may be outstanding.
    """

    def __init__(self, batch: Batch, device: tilert.Device, depth: int = 2) -> None:
        self.batch = batch
        self.graphs: dict[tuple[str, Features | None], tilert.Graph] = {}
        self._device = device
        self._depth = depth
        self._hosts: deque[_Host] = deque()

    def read(self, sequences: tuple[Sequence, ...], affects: tuple[Sequence, ...] = ()) -> Readback:
        """Enqueue the copy of the newest results to the host."""
        if len(self._hosts) < self._depth:
            self._hosts.appendleft(_Host(self.batch, self._device))
        host = self._hosts[0]
        self._hosts.rotate(-1)
        host.copy(any(sequence.params.logprobs is not None for sequence in sequences))
        return Readback(sequences, affects or sequences, self._device.record_event(), host)

    def close(self) -> None:
        for graph in self.graphs.values():
            graph.close()
        self.graphs.clear()


__all__ = ["Lane", "Readback", "Tokens"]
