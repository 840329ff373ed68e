"""Who runs in the next step: first come, first served, continuous batching."""

from collections import deque
from dataclasses import dataclass

from grout.pages import PagePool
from grout.sequence import Sequence, SequenceState


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens [start, stop) of one sequence, run in one go."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def first(self) -> bool:
        return self.start == 0

    @property
    def last(self) -> bool:
        """Whether the sequence's first token comes out of this chunk."""
        return self.stop == len(self.sequence.prompt)


@dataclass(frozen=True, slots=True)
class Step:
    """Work enqueued together: one token for each of `decode`, then a prefill chunk."""

    decode: tuple[Sequence, ...]
    prefill: Chunk | None


class Scheduler:
    """Admits waiting sequences in order and batches every running one in each step.

    A sequence is admitted when a row is free and the pool holds all the pages it could ever need
    (`Sequence.capacity`), so a running sequence never runs out of pages. The head of the
    queue is never overtaken, so a large request cannot starve. One prompt is prefilled at a time,
    `prefill_chunk` tokens a step, and every step also decodes what is running.
    """

    def __init__(
        self, pool: PagePool, *, page_size: int, max_num_seqs: int, prefill_chunk: int
    ) -> None:
        self.pool = pool
        self.waiting: deque[Sequence] = deque()
        self.prefilling: Sequence | None = None
        self.running: list[Sequence] = []
        self._page_size = page_size
        self._prefill_chunk = prefill_chunk
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self._page_size)

    @property
    def busy(self) -> bool:
        """Whether any sequence is waiting or held."""
        return bool(self.waiting or self.prefilling or self.running)

    @property
    def sequences(self) -> list[Sequence]:
        """Every sequence not done, oldest first."""
        held = [self.prefilling] if self.prefilling else []
        return [*self.running, *held, *self.waiting]

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Its capacity must fit the whole pool, or it would wait for ever."""
        self.waiting.append(sequence)

    def retire(self, sequence: Sequence) -> None:
        """Forget a sequence, in whatever state, and take back its row and pages at once.

        A step already enqueued may still write to its pages. Everything enqueued later, for
        whoever gets them next, is ordered behind that write on the device.
        """
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        elif sequence is self.prefilling:
            self.prefilling = None
        elif sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
        if sequence.row >= 0:
            self._free_rows.append(sequence.row)
            self.pool.free(sequence.pages)
            sequence.row, sequence.pages = -1, ()
        sequence.state = SequenceState.DONE

    def follows(self, previous: Step) -> bool:
        """Whether the next step can be enqueued before the ids of `previous` are read.

        Not if a sequence's first token is in it (that sequence joins the batch next), nor if the
        batch changes (a new batch is uploaded with the ids of all its members).
        """
        if previous.prefill is not None and previous.prefill.last:
            return False
        return not previous.decode or previous.decode == self._decodable()

    def schedule(self) -> Step | None:
        """The next step, or None when there is nothing to do. Marks its tokens as in flight."""
        decode = self._decodable()
        prefill = self._next_chunk()
        if not decode and prefill is None:
            return None
        for sequence in decode:
            sequence.in_flight += 1
        return Step(decode, prefill)

    def _decodable(self) -> tuple[Sequence, ...]:
        return tuple(sequence for sequence in self.running if sequence.wants_token)

    def _next_chunk(self) -> Chunk | None:
        sequence = self.prefilling or self._admit()
        if sequence is None:
            return None
        start = sequence.prefilled
        chunk = Chunk(sequence, start, min(start + self._prefill_chunk, len(sequence.prompt)))
        sequence.prefilled = chunk.stop
        self.prefilling = sequence
        if chunk.last:
            sequence.in_flight += 1
            sequence.state = SequenceState.RUNNING
            self.running.append(sequence)
            self.prefilling = None
        return chunk

    def _admit(self) -> Sequence | None:
        if not self.waiting or not self._free_rows:
            return None
        needed = self.pages_for(self.waiting[0].capacity)
        if needed > self.pool.free_count:
            return None
        sequence = self.waiting.popleft()
        sequence.pages = self.pool.allocate(needed)
        sequence.row = self._free_rows.pop()
        sequence.state = SequenceState.PREFILL
        return sequence


__all__ = ["Chunk", "Scheduler", "Step"]
