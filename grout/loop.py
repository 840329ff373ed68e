"""The main loop: schedule, run, postprocess."""

import logging
import math
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from grout.errors import (
    BadLogits,
    GrammarError,
    GroutError,
    RequestAborted,
    RequestTimeout,
    StepFailed,
)
from grout.metrics import Counters, Histograms
from grout.readback import Readback
from grout.request import Delta
from grout.runner import Runner
from grout.scheduler import Chunk, Scheduler, Step
from grout.sequence import Sequence, SequenceState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step that was enqueued, and its ids, which have not been read."""

    step: Step
    decode: Readback | None
    prefill: Readback | None


class StepLoop:
    """Drives scheduler and runner. Not thread-safe: one thread calls everything here.

    On a device that works beside the host one step runs ahead: step n + 1 is enqueued before the
    ids of step n are read, so the host's work hides behind the device's. Sequences join and leave
    all the same, because the device itself takes the newest ids from where they are. A sequence
    that turns out to have ended in step n leaves a surplus token in step n + 1, which is dropped.
    Where a grammar says which tokens may come next, the ids of step n are read with the layers of
    step n + 1 enqueued, and its sampling after that. Before a sequence has to give way, they are
    read first: one may have ended, and those that come back bring all their tokens.

    timeout: seconds from arrival within which a request must be finished, or None.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        timeout: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.counters = Counters()
        self.histograms = Histograms()
        self.clock = clock
        self._timeout = timeout
        # No sequence arrived before this; earlier than that of the oldest once it has ended.
        self._oldest = math.inf
        self._pending: _Pending | None = None
        self._events: list[tuple[Sequence, Delta | GroutError]] = []
        self._failed = False

    @property
    def busy(self) -> bool:
        return self._pending is not None or self.scheduler.busy

    def step(self) -> None:
        """Enqueue the next step and take in the previous one's tokens.

        A failure ends the sequences it hit, with `StepFailed`. Raises only when the runner cannot
        recover from it.
        """
        self._expire()
        if self.scheduler.short:
            self._collect()
        step = None if self._failed else self._schedule()
        launched = None if step is None else self._launch(step)
        self._collect()
        self._pending = launched
        if not self.runner.asynchronous:
            self._collect()
        if self._failed:
            self._recover()

    def add(self, sequence: Sequence) -> None:
        self.scheduler.add(sequence)
        self._oldest = min(self._oldest, sequence.arrived)

    def abort(self, sequence: Sequence) -> None:
        """End a sequence now; does nothing if it is done."""
        if not sequence.done:
            self.counters.requests_aborted += 1
            self._emit(sequence, RequestAborted("the request was aborted"))
            self._retire(sequence)

    def abandon(self, error: Callable[[], GroutError]) -> None:
        """End every sequence with an error, without touching the device any more."""
        self._pending = None
        for sequence in self.scheduler.sequences:
            self.counters.requests_failed += 1
            self._emit(sequence, error())
            self.scheduler.retire(sequence)

    def take_events(self) -> list[tuple[Sequence, Delta | GroutError]]:
        """Deltas and errors since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _schedule(self) -> Step | None:
        step = self.scheduler.schedule()
        self._release_rows()
        for chunk in step.prefills if step is not None else ():
            sequence = chunk.sequence
            if sequence.admitted is None:
                sequence.admitted = self.clock()
                sequence.cached = chunk.start
                self.counters.prompt_tokens += len(sequence.prompt)
                self.counters.prefix_hits += sequence.cached
                self.histograms.queue_time.observe(sequence.admitted - sequence.arrived)
        return step

    def _launch(self, step: Step) -> _Pending:
        self.counters.steps += 1
        decode = prefill = None
        if step.decode:
            try:
                decode = self.runner.decode(step.decode, step.grown, self._collect)
            except Exception as failure:
                self._fail(step.decode, failure)
        if step.prefills:
            try:
                prefill = self.runner.prefill(step.prefills)
                for chunk in step.prefills:
                    if chunk.sequence.scoring:
                        self._score(chunk)
            except Exception as failure:
                self._fail([chunk.sequence for chunk in step.prefills], failure)
        return _Pending(step, decode, prefill)

    def _collect(self) -> None:
        """Wait for the pending step and take in its tokens."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.decode is not None:
            self._take_in(pending.decode)
        if pending.prefill is not None and self._take_in(pending.prefill):
            for chunk in pending.step.prefills:
                if not chunk.last and not chunk.sequence.done:
                    self.scheduler.completed(chunk.sequence, chunk.stop)

    def _take_in(self, read: Readback) -> bool:
        """The tokens of a decode or a prefill, once they are there; False if it failed."""
        try:
            tokens = read.wait()
            self.counters.device_seconds += read.seconds
        except Exception as failure:
            self._fail(read.affects, failure)
            return False
        now, gaps = self.clock(), dict[float, int]()
        for place, (sequence, token) in enumerate(zip(read.sequences, tokens.ids, strict=True)):
            if sequence.state is SequenceState.DONE:
                continue
            if tokens.bad and place in tokens.bad:
                self._spoilt(sequence)
                continue
            try:
                delta = sequence.accept(token, tokens.logprobs.get(place))
            except GrammarError as error:
                self._refuse(sequence, error)
                continue
            except Exception as failure:
                self._end(sequence, failure)
                continue
            self._events.append((sequence, delta))
            if sequence.token_at is None:
                self.histograms.time_to_first_token.observe(now - sequence.arrived)
            else:
                gap = now - sequence.token_at
                gaps[gap] = gaps.get(gap, 0) + 1
            sequence.token_at = now
            self.counters.generated_tokens += len(delta.token_ids)
            # The keys and values of all tokens but this one are in place.
            self.scheduler.completed(sequence, len(sequence.prompt) + len(sequence.produced) - 1)
            if delta.finish_reason is not None:
                self._finish(sequence, now)
        # Most have waited for the same step.
        for gap, times in gaps.items():
            self.histograms.inter_token_latency.observe(gap, times)
        return True

    def _score(self, chunk: Chunk) -> None:
        """Take in the log probabilities of the chunk that was enqueued last."""
        sequence = chunk.sequence
        scored = self.runner.score(chunk)
        if any(math.isnan(entry.logprob) for entry in scored):
            self._spoilt(sequence)
        else:
            sequence.scored += scored

    def _finish(self, sequence: Sequence, now: float) -> None:
        self.counters.requests_finished += 1
        self.histograms.request_time.observe(now - sequence.arrived)
        self._retire(sequence)

    def _spoilt(self, sequence: Sequence) -> None:
        """Its logits hold NaN, and so may the pages that it alone has written."""
        logger.error("request %d: the model's logits hold NaN", sequence.id)
        self.counters.requests_failed += 1
        self._emit(
            sequence,
            BadLogits(
                f"the model's logits hold NaN at position {sequence.length} of this request, or "
                "before it, so no token can be chosen"
            ),
        )
        pages = sequence.pages[sequence.frozen :]
        self._retire(sequence)
        self.runner.scrub(pages)

    def _fail(self, sequences: Iterable[Sequence], failure: Exception) -> None:
        logger.error("a step failed", exc_info=failure)
        self._failed = True
        _clear_frames(failure)
        # What the failed step should have written may be missing.
        self.scheduler.pool.forget_all()
        for sequence in sequences:
            if not sequence.done:
                self._end(sequence, failure)

    def _refuse(self, sequence: Sequence, error: GroutError) -> None:
        """End a sequence that cannot go on by what it asked for."""
        self.counters.requests_failed += 1
        self._emit(sequence, error)
        self._retire(sequence)

    def _end(self, sequence: Sequence, failure: Exception) -> None:
        error = StepFailed(
            f"the step running this request failed: {type(failure).__name__}: {failure}"
        )
        error.__cause__ = failure
        self._refuse(sequence, error)

    def _expire(self) -> None:
        """End the requests whose time is up."""
        if self._timeout is None or self._oldest > (late := self.clock() - self._timeout):
            return
        for sequence in self.scheduler.sequences:
            if sequence.arrived <= late:
                self.counters.requests_timed_out += 1
                self._emit(sequence, RequestTimeout(self._timeout))
                self._retire(sequence)
        self._oldest = min((s.arrived for s in self.scheduler.sequences), default=math.inf)

    def _recover(self) -> None:
        """Settle what is still in flight, then give the runner a fresh start."""
        self._collect()
        self.runner.recover()
        self._failed = False

    def _retire(self, sequence: Sequence) -> None:
        self.scheduler.retire(sequence)
        self._release_rows()

    def _release_rows(self) -> None:
        for row in self.scheduler.take_left_rows():
            self.runner.release(row)

    def _emit(self, sequence: Sequence, event: Delta | GroutError) -> None:
        self._events.append((sequence, event))


def _clear_frames(failure: BaseException | None) -> None:
    """Drop the locals of the calls that failed.

    The error lives on in the requests it ended, and its frames would keep ops alive that still
    hold the arrays moved into them (O5): every later step would find the KV cache taken.
    """
    while failure is not None:
        traceback.clear_frames(failure.__traceback__)
        failure = failure.__cause__ or failure.__context__


__all__ = ["StepLoop"]
