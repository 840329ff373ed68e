"""The main loop: schedule, run, postprocess."""

import logging
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from grout.errors import GroutError, RequestAborted, StepFailed
from grout.request import Delta
from grout.runner import Readback, Runner
from grout.scheduler import Scheduler, Step
from grout.sequence import Sequence

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Counters:
    """What has happened since the start."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0
    requests_failed: int = 0


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step that was enqueued and whose ids have not been read."""

    step: Step
    reads: list[Readback] = field(default_factory=list)


class StepLoop:
    """Drives scheduler and runner. Not thread-safe: one thread calls everything here.

    On a device that works beside the host one step runs ahead: while the batch keeps its members,
    step n + 1 is enqueued before the ids of step n are read, so the host's work hides behind the
    device's. A sequence that turns out to have ended in step n leaves a surplus token in step
    n + 1, which is dropped.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.counters = Counters()
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
        if self._pending is not None and not self.scheduler.follows(self._pending.step):
            self._collect()
        step = None if self._failed else self.scheduler.schedule()
        launched = None if step is None else self._launch(step)
        self._collect()
        self._pending = launched
        if not self.runner.asynchronous:
            self._collect()
        if self._failed:
            self._recover()

    def add(self, sequence: Sequence) -> None:
        self.counters.prompt_tokens += len(sequence.prompt)
        self.scheduler.add(sequence)

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

    def _launch(self, step: Step) -> _Pending:
        self.counters.steps += 1
        pending = _Pending(step)
        if step.decode:
            try:
                pending.reads.append(self.runner.decode(step.decode))
            except Exception as failure:
                self._fail(step.decode, failure)
        if step.prefill is not None:
            try:
                pending.reads.append(self.runner.prefill(step.prefill))
            except Exception as failure:
                self._fail([step.prefill.sequence], failure)
        return pending

    def _collect(self) -> None:
        """Wait for the pending step and take in its tokens."""
        pending, self._pending = self._pending, None
        for read in pending.reads if pending is not None else ():
            try:
                ids = read.wait()
            except Exception as failure:
                self._fail(read.affects, failure)
                continue
            for sequence, token in zip(read.sequences, ids, strict=True):
                sequence.in_flight -= 1
                if not sequence.done:
                    self._accept(sequence, token)

    def _accept(self, sequence: Sequence, token: int) -> None:
        try:
            delta = sequence.accept(token)
        except Exception as failure:
            self._end(sequence, failure)
            return
        self.counters.generated_tokens += 1
        self._emit(sequence, delta)
        if sequence.finish_reason is not None:
            self.counters.requests_finished += 1
            self._retire(sequence)

    def _fail(self, sequences: Iterable[Sequence], failure: Exception) -> None:
        logger.error("a step failed", exc_info=failure)
        self._failed = True
        _clear_frames(failure)
        for sequence in sequences:
            if not sequence.done:
                self._end(sequence, failure)

    def _end(self, sequence: Sequence, failure: Exception) -> None:
        error = StepFailed(
            f"the step running this request failed: {type(failure).__name__}: {failure}"
        )
        error.__cause__ = failure
        self.counters.requests_failed += 1
        self._emit(sequence, error)
        self._retire(sequence)

    def _recover(self) -> None:
        """Settle what is still in flight, then give the runner a fresh start."""
        self._collect()
        self.runner.recover()
        self._failed = False

    def _retire(self, sequence: Sequence) -> None:
        row = sequence.row
        self.scheduler.retire(sequence)
        if row >= 0:
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


__all__ = ["Counters", "StepLoop"]
