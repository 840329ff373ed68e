"""Who runs in the next step: by rank, continuous batching, pages as they are needed."""

from bisect import insort
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from operator import attrgetter

from grout.pages import PagePool
from grout.sequence import Sequence, SequenceState

PREFILLS_PER_STEP = 8
"""Most prompts that a step runs whole or in part: running requests wait for all of them."""

_RANK = attrgetter("rank")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, stop) of one sequence, run in one go.

    last: whether these are all of its tokens, so that the next one comes out of the chunk.
    """

    sequence: Sequence
    start: int
    stop: int
    last: bool


@dataclass(frozen=True, slots=True)
class Step:
    """Work enqueued together: one token for each of `decode`, then chunks of prompts.

    grown: those of `decode` that were given a page for it.
    """

    decode: tuple[Sequence, ...]
    prefills: tuple[Chunk, ...]
    grown: tuple[Sequence, ...] = ()


class Scheduler:
    """Admits waiting sequences by rank and batches every running one in each step.

    A sequence is admitted when a row is free and the pool has the pages of its tokens so far, less
    those found in the prefix cache, and a page to spare for every sequence that may still grow.
    The head of the queue is never overtaken, so a large request cannot starve.

    A running sequence takes a page whenever its tokens fill the last. If there is none, the
    sequence of the last rank gives up its row and pages and waits in the place of its rank, with
    the tokens it has produced; once admitted again, all its tokens are run like a prompt. The
    first in rank never gives way, and the whole pool holds any one sequence, so it finishes: there
    is always progress.

    A step runs at most `prefill_chunk` tokens of prompts. Prompts are run in order of admission,
    and one is cut only if it is the first of its step. One whose log probabilities are asked for
    is run by itself.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        page_size: int,
        max_num_seqs: int,
        prefill_chunk: int,
        prefix_caching: bool = True,
    ) -> None:
        self.pool = pool
        self.waiting: list[Sequence] = []
        self.prefilling: Sequence | None = None
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._page_size = page_size
        self._prefill_chunk = prefill_chunk
        self._prefix_caching = prefix_caching
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._left_rows: list[int] = []

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self._page_size)

    @property
    def free_rows(self) -> int:
        """Rows that no sequence has."""
        return len(self._free_rows)

    @property
    def busy(self) -> bool:
        """Whether any sequence is waiting or held."""
        return bool(self.waiting or self.prefilling or self.running)

    @property
    def sequences(self) -> list[Sequence]:
        """Every sequence not done, held ones first."""
        return [*self._held, *self.waiting]

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Its capacity must fit the whole pool, or it would wait for ever."""
        insort(self.waiting, sequence, key=_RANK)

    def retire(self, sequence: Sequence) -> None:
        """Forget a sequence, in whatever state, and take back its row and pages at once.

        A step already enqueued may still write to its pages. Everything enqueued later, for
        whoever gets them next, is ordered behind that write on the device.
        """
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        else:
            self._let_go(sequence)
        sequence.state = SequenceState.DONE

    def take_left_rows(self) -> list[int]:
        """Rows that sequences have left since the last call, whose pages must be detached."""
        rows, self._left_rows = self._left_rows, []
        return rows

    @property
    def short(self) -> bool:
        """Whether a sequence will have to give way in the next step; its ids must be read first."""
        free = self.pool.free_count
        # Nobody takes more than one page.
        return free < len(self.running) and free < len(self._growing())

    def schedule(self) -> Step | None:
        """The next step, or None when there is nothing to do. Counts its tokens as enqueued."""
        grown = self._grow()
        # Those that join now are decoded from the next step on.
        decode = tuple([s for s in self.running if s.enqueued < s.limit])
        prefills = self._next_chunks()
        if not decode and not prefills:
            return None
        for sequence in decode:
            sequence.enqueued += 1
        return Step(decode, prefills, grown)

    def completed(self, sequence: Sequence, tokens: int) -> None:
        """The keys and values of its first `tokens` tokens are known to be in place.

        Full pages of them may be shared from now on.
        """
        full = tokens // self._page_size
        if full <= sequence.frozen or not self._prefix_caching or full > len(sequence.pages):
            return
        keys = sequence.page_keys(full, self._page_size)
        for at in range(sequence.frozen, full):
            self.pool.publish(sequence.pages[at], keys[at])
        sequence.frozen = full

    @property
    def _held(self) -> list[Sequence]:
        # Read once: another thread may ask, see `Engine.close`.
        prefilling = self.prefilling
        return [*self.running, *([prefilling] if prefilling else [])]

    def _growing(self) -> list[Sequence]:
        """Those whose next token needs another page, first in rank first."""
        size = self._page_size
        return [
            s
            for s in self.running
            if s.enqueued < s.limit and len(s.prompt) + s.enqueued > len(s.pages) * size
        ]

    def _grow(self) -> tuple[Sequence, ...]:
        """Give each sequence a page for its next token; returns those that needed one."""
        growing = self._growing()
        for sequence in growing:
            while sequence.row >= 0 and not self.pool.free_count:
                self._preempt(max(self._held, key=_RANK))
            if sequence.row >= 0:
                sequence.pages += self.pool.allocate(1)
        return tuple([sequence for sequence in growing if sequence.row >= 0])

    def _preempt(self, sequence: Sequence) -> None:
        """Its ids must all have been read."""
        self._let_go(sequence)
        self.preemptions += 1
        sequence.state = SequenceState.WAITING
        self.add(sequence)

    def _let_go(self, sequence: Sequence) -> None:
        """Take a held sequence's row and pages."""
        if sequence is self.prefilling:
            self.prefilling = None
        elif sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
        if sequence.row >= 0:
            self._free_rows.append(sequence.row)
            self._left_rows.append(sequence.row)
            self.pool.free(sequence.pages)
        sequence.row, sequence.pages = -1, ()
        sequence.prefilled = sequence.frozen = 0

    def _next_chunks(self) -> tuple[Chunk, ...]:
        chunks: list[Chunk] = []
        budget = self._prefill_chunk
        while budget > 0 and len(chunks) < PREFILLS_PER_STEP:
            sequence = self.prefilling or self._admit(chunks, budget)
            if sequence is None:
                break
            chunks.append(self._chunk(sequence, budget))
            if sequence.scoring:
                break
            budget -= chunks[-1].stop - chunks[-1].start
        return tuple(chunks)

    def _chunk(self, sequence: Sequence, budget: int) -> Chunk:
        start, goal = sequence.prefilled, sequence.length
        stop = min(start + budget, goal)
        sequence.prefilled = stop
        if stop == goal:
            sequence.enqueued += 1
            sequence.state = SequenceState.RUNNING
            insort(self.running, sequence, key=_RANK)
            self.prefilling = None
        else:
            self.prefilling = sequence
        return Chunk(sequence, start, stop, stop == goal)

    def _admit(self, chunks: Ordered[Chunk], room: int) -> Sequence | None:
        """Give the head of the queue a row and pages, if there are.

        After other `chunks` of the step only if it has no more than `room` tokens to run. Not while
        the next of its pages is being computed for another: it finds that in the cache soon.
        """
        if not self.waiting or not self._free_rows:
            return None
        sequence = self.waiting[0]
        keys = self._prefix_keys(sequence)
        found = self.pool.find(keys)
        start = len(found) * self._page_size
        if chunks and (sequence.scoring or sequence.length - start > room):
            return None
        if len(found) < len(keys) and self._computing(len(found), keys[len(found)]):
            return None
        fresh = self.pages_for(sequence.length) - len(found)
        if fresh + self.pool.idle_count(found) + self._headroom(sequence) > self.pool.free_count:
            return None
        del self.waiting[0]
        self.pool.share(found)
        sequence.pages = found + self.pool.allocate(fresh)
        sequence.frozen = len(found)
        sequence.prefilled = start
        sequence.row = self._free_rows.pop()
        sequence.state = SequenceState.PREFILL
        return sequence

    def _prefix_keys(self, sequence: Sequence) -> list[bytes]:
        """Of the pages it could begin with: not the last token's, from which the next one comes.

        None where every token is to be run, for its log probability.
        """
        if not self._prefix_caching or sequence.scoring:
            return []
        full = (sequence.length - 1) // self._page_size
        return sequence.page_keys(full, self._page_size)

    def _computing(self, page: int, key: bytes) -> bool:
        """Whether a chunk that is enqueued, or about to be, fills a page with that key."""
        stop = (page + 1) * self._page_size
        return any(
            member.frozen <= page
            and stop <= member.prefilled
            and member.page_keys(page + 1, self._page_size)[page] == key
            for member in self._held
        )

    def _headroom(self, sequence: Sequence) -> int:
        """Pages to leave free: one for each that may grow, so that none has to give way soon."""
        held = self._held
        if not held:
            return 0
        size = self._page_size
        growing = sum([len(s.pages) * size < len(s.prompt) + s.limit - 1 for s in held])
        return growing + (self.pages_for(sequence.length) < self.pages_for(sequence.capacity))


__all__ = ["PREFILLS_PER_STEP", "Chunk", "Scheduler", "Step"]
