"""Who has which slot of the decode batch: `Seats`."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from grout.sequence import Sequence
from models.slot import KEPT, PADDING, Slot


class Seats:
    """The slots of the decode batch, and the changes that bring the device up to date.

    A sequence keeps its slot from when it joins until it leaves, unless the batch gets smaller.
    Neither it nor the others need to have been read then: a slot's token may be one that the
    device alone knows.

    slots: of the sequences last arranged, in their order. constrained: whether what one of them
    may choose next is known only once its newest token is.
    """

    def __init__(self) -> None:
        self.slots: tuple[int, ...] = ()
        self.constrained = False
        self._sequences: tuple[Sequence, ...] = ()
        self._slot_of: dict[Sequence, int] = {}
        # Which entry of the last prefill's ids is whose.
        self._fresh: dict[Sequence, int] = {}
        # Those that may not end yet, and of them those whose masks have not been handed out.
        self._held_back: list[Sequence] = []
        self._unmasked: list[Sequence] = []

    def expect(self, last: Mapping[int, Sequence]) -> None:
        """The prefill just enqueued leaves the ids of these sequences, by entry."""
        self._fresh = {sequence: entry for entry, sequence in last.items()}
        if not self._fresh.keys().isdisjoint(self._slot_of):
            # One that gave way has come back, with nobody decoded in between.
            self._sequences = ()

    def arrange(self, sequences: tuple[Sequence, ...], size: int) -> dict[int, Slot]:
        """Seat exactly these, whose next tokens count as enqueued, in the first `size` slots.

        Returns what changes, by slot. A slot may be past `size`, where it becomes padding.
        """
        free = [sequence for sequence in self._held_back if not sequence.holds_back]
        changes = {} if sequences == self._sequences else self._reseat(sequences, size)
        for sequence in free:
            slot = self._slot_of.get(sequence)
            if slot is not None and slot not in changes:
                changes[slot] = sequence.slot(source=KEPT)
        if free:
            self._held_back = [s for s in self._held_back if s.holds_back]
        return changes

    def masks(self, vocab_size: int) -> dict[int, NDArray[np.uint32]]:
        """What masked slots may choose next, by slot, where that is new since the last call."""
        if not (self.constrained or self._unmasked):
            return {}
        new = [s for s in self._sequences if s.constraint is not None and not s.done]
        new += [s for s in self._unmasked if s.constraint is None]
        self._unmasked = []
        return {self._slot_of[sequence]: sequence.allowed(vocab_size) for sequence in new}

    def _reseat(self, sequences: tuple[Sequence, ...], size: int) -> dict[int, Slot]:
        before = self._slot_of
        now: dict[Sequence, int] = {}
        homeless: list[Sequence] = []
        for sequence in sequences:
            slot = before.get(sequence, size)
            if slot < size and sequence not in self._fresh:
                now[sequence] = slot
            else:
                homeless.append(sequence)
        taken = set(now.values())
        changes = dict.fromkeys((slot for slot in before.values() if slot not in taken), PADDING)
        free = (slot for slot in range(size) if slot not in taken)
        for sequence, slot in zip(homeless, free, strict=False):
            now[sequence] = slot
            changes[slot] = self._join(sequence)
        self._sequences, self._slot_of, self._fresh = sequences, now, {}
        self.slots = tuple([now[sequence] for sequence in sequences])
        self.constrained = any(sequence.constraint is not None for sequence in sequences)
        self._held_back = [sequence for sequence in sequences if sequence.holds_back]
        self._unmasked = [sequence for sequence in homeless if sequence.holds_back]
        return changes

    def _join(self, sequence: Sequence) -> Slot:
        """A slot for a sequence that had another, or none."""
        # Of the tokens enqueued, the newest is the one that this step is to give.
        position = len(sequence.prompt) + sequence.enqueued - 2
        if sequence.in_flight == 1:
            return sequence.slot(token=sequence.produced[-1], position=position)
        if sequence in self._fresh:
            source = Slot.from_fresh(self._fresh[sequence])
        else:
            source = Slot.from_slot(self._slot_of[sequence])
        return sequence.slot(position=position, source=source)


__all__ = ["Seats"]
