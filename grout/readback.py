"""What a step leaves on the device for the host: ids, and what is said about them."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import tilert
from grout.request import TokenLogprob
from grout.sequence import Sequence
from models.batch import Batch

NONE: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Tokens:
    """ids: one for each sequence. bad: places whose logits held NaN, so that the id is nothing.
    logprobs: by place, for the sequences that asked."""

    ids: list[int]
    bad: frozenset[int]
    logprobs: Mapping[int, TokenLogprob]


class _Host:
    """Pinned memory for the results of one step."""

    def __init__(self, batch: Batch, device: tilert.Device) -> None:
        self._device = device
        self._batch = batch
        self._results = self._pinned(batch.results)
        self._logprobs: dict[str, tilert.Pinned] = {}

    def copy(self, logprobs: bool) -> None:
        """Enqueue copies of the batch's results."""
        self._results.copy_from(self._batch.results)
        if logprobs:
            arrays = self._batch.logprobs
            for name in ("chosen", "top_ids", "top_values"):
                if name not in self._logprobs:
                    self._logprobs[name] = self._pinned(arrays[name])
                self._logprobs[name].copy_from(arrays[name])

    def ids(self) -> list[int]:
        """Of every slot, once the copies are done, as all below."""
        ids: list[int] = self._results.numpy[0].tolist()
        return ids

    def bad(self) -> list[int]:
        """The slots that are bad, and perhaps others that nobody has."""
        bad: list[int] = self._results.numpy[1].nonzero()[0].tolist()
        return bad

    def logprob(self, slot: int, count: int) -> TokenLogprob:
        """Of the token in one slot, with the `count` likeliest."""
        chosen, ids, values = (
            self._logprobs[name].numpy[slot] for name in ("chosen", "top_ids", "top_values")
        )
        top = zip(ids[:count].tolist(), values[:count].tolist(), strict=True)
        return TokenLogprob(int(self._results.numpy[0, slot]), float(chosen), tuple(top))

    def _pinned(self, array: tilert.Array) -> tilert.Pinned:
        return tilert.pinned(array.shape, array.dtype, self._device)


@dataclass(frozen=True, slots=True)
class Readback:
    """Ids a step produces, one for each of `sequences`, not on the host before `wait`.

    slots: of the batch, where each sequence's id is. affects: the sequences the step worked on,
    also where it gave them no token.
    """

    sequences: tuple[Sequence, ...]
    slots: tuple[int, ...]
    affects: tuple[Sequence, ...]
    _begun: tilert.Event
    _event: tilert.Event
    _host: _Host
    _logprobs: bool

    def wait(self) -> Tokens:
        """The ids. Raises what made the step fail on the device."""
        self._event.wait()
        host, slots = self._host, self.slots
        ids, bad = host.ids(), host.bad()
        return Tokens(
            [ids[slot] for slot in slots],
            frozenset(place for place, slot in enumerate(slots) if slot in bad) if bad else NONE,
            self._read_logprobs() if self._logprobs else {},
        )

    @property
    def seconds(self) -> float:
        """How long the device was at the step, once `wait` has returned."""
        return self._event.since(self._begun)

    def logprobs(self, count: int, top: int) -> list[TokenLogprob]:
        """Of the ids in the first `count` slots, each with the `top` likeliest. Waits for them."""
        self._event.wait()
        return [self._host.logprob(slot, top) for slot in range(count)]

    def _read_logprobs(self) -> dict[int, TokenLogprob]:
        return {
            place: self._host.logprob(slot, sequence.params.logprobs)
            for place, (slot, sequence) in enumerate(zip(self.slots, self.sequences, strict=True))
            if sequence.params.logprobs is not None
        }


class Reader:
    """Takes the results of a batch to the host, and those of its heads, which are in its arrays.

    Host buffers take turns, because a step may be enqueued while the ids of the one before are
    still being read; at most `depth` readbacks may be outstanding.
    """

    def __init__(self, batch: Batch, device: tilert.Device, depth: int = 2) -> None:
        self._batch = batch
        self._device = device
        self._hosts = deque(_Host(batch, device) for _ in range(depth))
        self.begin()

    def begin(self) -> None:
        """A step's work is enqueued from now on."""
        self._begun = self._device.record_event(timing=True)

    def read(
        self,
        sequences: tuple[Sequence, ...],
        slots: tuple[int, ...],
        affects: tuple[Sequence, ...],
        logprobs: bool,
    ) -> Readback:
        """Enqueue the copy of the newest results to the host.

        logprobs: whether the step has left log probabilities.
        """
        host = self._hosts[0]
        self._hosts.rotate(-1)
        host.copy(logprobs)
        event = self._device.record_event(timing=True)
        return Readback(sequences, slots, affects, self._begun, event, host, logprobs)


__all__ = ["Readback", "Reader", "Tokens"]
