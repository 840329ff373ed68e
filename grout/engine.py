"""The engine: takes requests from any thread, runs steps on one."""

import asyncio
import gc
import logging
import math
import operator
import random
import threading
import time
from collections.abc import AsyncGenerator, Iterable
from dataclasses import asdict
from itertools import count
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from grout.config import EngineConfig
from grout.constraint import Constraint, GrammarTokens
from grout.detokenizer import Detokenizer, begun_character
from grout.errors import (
    ConfigError,
    EngineClosed,
    EngineDead,
    EngineHung,
    GroutError,
    InvalidPrompt,
    InvalidSamplingParams,
    PromptTooLong,
    QueueFull,
    RequestTimeout,
)
from grout.grammar import Grammar
from grout.loop import StepLoop
from grout.metrics import Histograms
from grout.request import Delta, SamplingParams
from grout.runner import Runner
from grout.scheduler import Scheduler
from grout.sequence import Sequence, Sink
from grout.streams import AsyncStream, BlockingStream, deliver
from models.chat_template import ChatTemplate
from models.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_QUIET_SECONDS = 0.05
"""Without requests, after which there is time for other things."""
_LATE_SECONDS = 5.0
"""After a request's time is up: longest wait for the engine's thread to say so."""


class Engine:
    """Serves many requests at once on one model.

    `start` runs steps on a thread of the engine's own; without it, call `step` by hand. `step`
    belongs to one thread; everything else may be called from any. max_model_len: prompt and reply
    together, in tokens. default_sampling: the model's own sampling settings, for callers to fall
    back on.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        *,
        model_id: str,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        chat_template: ChatTemplate | None = None,
        default_sampling: dict[str, Any] | None = None,
        grammars: GrammarTokens | None = None,
    ) -> None:
        if scheduler.pages_for(max_model_len) > scheduler.pool.total:
            raise ConfigError(
                f"a context of {max_model_len} tokens needs {scheduler.pages_for(max_model_len)} "
                f"KV pages, but the cache has {scheduler.pool.total}"
            )
        self.config = config
        self.model_id = model_id
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.default_sampling = dict(default_sampling or {})
        self._hidden = frozenset(tokenizer.special_ids)
        self._grammars = grammars or GrammarTokens(tokenizer, vocab_size, self.eos_token_ids)
        self._loop = StepLoop(scheduler, runner, config.request_timeout)
        self._ids = count(1)
        self._random = random.Random(config.seed)
        # When the step under way began.
        self._began = math.inf
        self._wake = threading.Condition()
        self._ended = threading.Event()
        # Guarded by _wake.
        self._added: list[Sequence] = []
        self._aborted: list[Sequence] = []
        self._closed = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._deserted = False

    def start(self) -> Self:
        """Run steps on a thread from now on."""
        with self._wake:
            if self._closed:
                raise EngineClosed("the engine is closed and cannot be started again")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="grout-engine", daemon=True)
                self._thread.start()
        return self

    def add(self, prompt_ids: Iterable[int], params: SamplingParams, sink: Sink) -> Sequence:
        """Queue a request; `sink` gets its deltas, the last one with a finish reason, or an error.

        Raises `InvalidPrompt`, `PromptTooLong`, `InvalidSamplingParams` or `GrammarError` before
        any work, `QueueFull` when too much is waiting, and `EngineClosed` or `EngineDead` when no
        work can be done.
        """
        return self._submit(self.check(prompt_ids, params), params, sink)

    def abort(self, sequence: Sequence) -> None:
        """End a request within a step; its pages come back then. Does nothing if it has ended."""
        if sequence.done:
            return
        with self._wake:
            self._aborted.append(sequence)
            self._wake.notify_all()

    def generate(self, prompt_ids: Iterable[int], params: SamplingParams) -> AsyncGenerator[Delta]:
        """Deltas of a reply; refuses a bad request at once, as `add` does. Starts the engine.

        The request is queued when the iteration begins, which may raise `QueueFull` once more.
        Leaving the iteration (`aclose`, cancellation, an exception) aborts the request.
        """
        prompt = self.check(prompt_ids, params)
        with self._wake:
            self._require_alive()
            self._require_room()
        self.start()
        return self._generate(prompt, params)

    def generate_sync(self, prompt_ids: Iterable[int], params: SamplingParams) -> Delta:
        """The whole reply as one delta; runs the steps itself unless `start` was called."""
        stream = BlockingStream()
        sequence = self.add(prompt_ids, params, stream)
        deltas: list[Delta] = []
        try:
            while not deltas or deltas[-1].finish_reason is None:
                while self._thread is None and stream.empty:
                    self.step()
                deltas.append(stream.get())
        except BaseException:
            self.abort(sequence)
            raise
        return Delta(
            "".join(delta.text for delta in deltas),
            tuple(token for delta in deltas for token in delta.token_ids),
            deltas[-1].finish_reason,
            tuple(logprob for delta in deltas for logprob in delta.logprobs),
            deltas[0].cached_tokens,
            deltas[0].prompt_logprobs,
        )

    def step(self) -> bool:
        """Run one step and hand its deltas over; returns whether there is more to do.

        Raises RuntimeError on a thread other than the engine's own, once that was started.
        """
        if self._thread not in (None, threading.current_thread()):
            raise RuntimeError("the engine runs its steps on its own thread since it was started")
        self._take_requests()
        self._began = time.monotonic()
        try:
            self._loop.step()
        except Exception as failure:
            logger.critical("the engine cannot go on", exc_info=failure)
            with self._wake:
                self._failure = failure
            self._take_requests()
            self._loop.abandon(self._death)
        finally:
            self._began = math.inf
        self._deliver()
        return self._loop.busy

    def check(self, prompt_ids: Iterable[int], params: SamplingParams) -> NDArray[np.int32]:
        """The prompt as int32[P], once it and `params` are known to be servable."""
        try:
            prompt = np.array([operator.index(token) for token in prompt_ids], np.int64)
        except (TypeError, OverflowError) as error:
            raise InvalidPrompt(f"a prompt is a list of token ids: {error}") from error
        if len(prompt) == 0:
            raise InvalidPrompt("the prompt is empty; give at least one token")
        if len(prompt) > self.max_model_len - (params.max_tokens != 0):
            raise PromptTooLong(len(prompt), self.max_model_len)
        strange = np.flatnonzero((prompt < 0) | (prompt >= self.vocab_size))
        if len(strange):
            at = int(strange[0])
            raise InvalidPrompt(
                f"token id {prompt[at]} at position {at} of the prompt is outside the "
                f"vocabulary of {self.vocab_size} ids"
            )
        self._check_params(params)
        return prompt.astype(np.int32)

    def constraint(self, grammar: Grammar) -> Constraint:
        """A grammar over this model's tokens, compiled once and kept for requests that follow.

        May take long for a large grammar: call it beforehand on a thread that may wait. Raises
        `GrammarError`.
        """
        return self._grammars.constraint(grammar)

    @property
    def max_requests(self) -> int | None:
        """Most requests at once, running or waiting: `QueueFull` for more; None for no limit."""
        limit = self.config.max_queue
        return None if limit is None else self.config.max_num_seqs + limit

    @property
    def alive(self) -> bool:
        """Whether requests are served: not closed, and no failure it cannot recover from."""
        return not self._closed and self._failure is None

    @property
    def hung(self) -> bool:
        """Whether the step under way takes longer than any should (`step_timeout`).

        Requests that come meanwhile are refused; if it does end after all, they are taken again.
        """
        return self._hung_seconds() is not None

    @property
    def runner(self) -> Runner:
        """What steps run on; for benchmarks and tests, while no request is under way."""
        return self._loop.runner

    @property
    def histograms(self) -> Histograms:
        """Times of requests and tokens so far; they go on counting."""
        return self._loop.histograms

    def stats(self) -> dict[str, float]:
        """Counts as of now: requests, tokens, KV pages, steps.

        rows_free: places of `max_num_seqs` that no request has. pages_free: held by no request;
        pages_cached: findable by later requests, held or not; pages_touched: ever used.
        prefix_queries, prefix_hits: tokens of prompts that were looked up in the cache, and found.
        """
        scheduler, counters = self._loop.scheduler, self._loop.counters
        return {
            "running": len(scheduler.running) + (scheduler.prefilling is not None),
            "waiting": len(scheduler.waiting) + len(self._added),
            "max_num_seqs": self.config.max_num_seqs,
            "rows_free": scheduler.free_rows,
            "pages_free": scheduler.pool.free_count,
            "pages_total": scheduler.pool.total,
            "pages_cached": scheduler.pool.cached_count,
            "pages_touched": scheduler.pool.touched_count,
            "preemptions": scheduler.preemptions,
            "prefix_queries": counters.prompt_tokens if self.config.prefix_caching else 0,
            **asdict(counters),
        }

    def settle(self, timeout: float = 60.0) -> bool:
        """Wait until what is recorded in quiet times is, so that no request waits for a recording.

        Returns whether that was so within `timeout` seconds; false as well where the engine ends.
        """
        deadline = time.monotonic() + timeout
        while self._loop.runner.left_to_record:
            if not self.alive or time.monotonic() > deadline:
                return False
            time.sleep(_QUIET_SECONDS)
        return self.alive

    def close(self, timeout: float | None = None) -> bool:
        """Stop after the step under way; requests not finished end with `EngineClosed`.

        Returns whether that step ended and the device is idle, for which it waits up to `timeout`
        seconds. If not, requests have ended all the same, but the engine's memory is the device's
        until the step ends; from then on no `timeout` means not to wait.
        """
        with self._wake:
            first, self._closed = not self._closed, True
            self._wake.notify_all()
        if self._thread is None:
            if first:
                self._finish()
            return True
        if self._thread is threading.current_thread():
            raise RuntimeError("the engine's own thread cannot wait for its end")
        # Not the thread itself: a `join` that Ctrl-C interrupts takes it for ended ever after.
        if not self._ended.wait(0 if self._deserted and timeout is None else timeout):
            self._desert()
            return False
        self._thread.join()
        return True

    async def aclose(self) -> None:
        """`close`, without blocking the asyncio loop."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def _generate(
        self, prompt: NDArray[np.int32], params: SamplingParams
    ) -> AsyncGenerator[Delta]:
        loop = asyncio.get_running_loop()
        stream, timeout = AsyncStream(loop), self.config.request_timeout
        sequence = self._submit(prompt, params, stream)
        late = None
        if timeout is not None:
            # The engine's own thread comes first, unless a step keeps it.
            late = loop.call_later(timeout + _LATE_SECONDS, stream.put, RequestTimeout(timeout))
        try:
            while True:
                delta = await stream.get()
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            if late is not None:
                late.cancel()
            self.abort(sequence)

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self.step()
        finally:
            try:
                self._finish()
            finally:
                self._ended.set()

    def _finish(self) -> None:
        """End every request; wait for the device."""
        self._take_requests()
        self._loop.abandon(self._closing)
        self._deliver()
        if self._failure is None:
            try:
                self._loop.runner.close()
            except Exception:
                logger.exception("the device failed while it was closed")
        # `create_engine` has frozen what may be garbage from now on.
        gc.unfreeze()

    def _desert(self) -> None:
        """End every request from outside while a step keeps the engine's thread.

        Only their sinks are told: the rest is that thread's, which may come back.
        """
        if self._deserted:
            return
        self._deserted = True
        with self._wake:
            left = [*self._added, *self._loop.scheduler.sequences]
        deliver((sequence, self._closing()) for sequence in left)

    def _wait_for_work(self) -> bool:
        """False once the engine is closed. In quiet times records what requests may need."""
        runner, quiet = self._loop.runner, False
        while True:
            with self._wake:
                if self._closed or self._added or self._aborted or self._loop.busy:
                    return not self._closed
                if not quiet or not runner.left_to_record:
                    # Requests that follow each other at once wait for no recording.
                    self._wake.wait(_QUIET_SECONDS if runner.left_to_record else None)
                    quiet = True
                    continue
            try:
                runner.record_ahead()
            except Exception:
                # A request that needs it meets the failure itself, and is told.
                logger.exception("a prefill cannot be recorded ahead of requests")

    def _take_requests(self) -> None:
        with self._wake:
            added, self._added = self._added, []
            aborted, self._aborted = self._aborted, []
        for sequence in added:
            self._loop.add(sequence)
        for sequence in aborted:
            self._loop.abort(sequence)

    def _deliver(self) -> None:
        for sequence in deliver(self._loop.take_events()):
            self.abort(sequence)

    def _submit(self, prompt: NDArray[np.int32], params: SamplingParams, sink: Sink) -> Sequence:
        sequence = self._sequence(prompt, params, sink)
        with self._wake:
            self._require_alive()
            self._require_room()
            self._added.append(sequence)
            self._wake.notify_all()
        return sequence

    def _sequence(self, prompt: NDArray[np.int32], params: SamplingParams, sink: Sink) -> Sequence:
        room = self.max_model_len - len(prompt)
        eos = () if params.ignore_eos else self.eos_token_ids
        token_bytes = self.tokenizer.token_bytes
        begun = begun_character(token_bytes, self._hidden, prompt.tolist())
        return Sequence(
            id=next(self._ids),
            prompt=prompt,
            params=params,
            seed=self._random.getrandbits(32) if params.seed is None else params.seed,
            stop_ids=frozenset(eos).union(params.stop_token_ids),
            limit=room if params.max_tokens is None else min(room, params.max_tokens),
            detokenizer=Detokenizer(token_bytes, self._hidden, params.stop, begun),
            sink=sink,
            constraint=None if params.grammar is None else self.constraint(params.grammar),
            arrived=time.monotonic(),
        )

    def _check_params(self, params: SamplingParams) -> None:
        for name, tokens in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", [token for token, _ in params.logit_bias]),
        ):
            for token in tokens:
                if token >= self.vocab_size:
                    raise InvalidSamplingParams(
                        name,
                        f"{name} holds {token}, outside the vocabulary of {self.vocab_size} ids",
                    )
        if params.grammar is not None:
            self.constraint(params.grammar)

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise self._death()
        if self._closed:
            raise self._closing()
        if (seconds := self._hung_seconds()) is not None:
            raise EngineHung(seconds)

    def _hung_seconds(self) -> float | None:
        """How long the step under way has taken, if too long."""
        seconds, limit = time.monotonic() - self._began, self.config.step_timeout
        return None if limit is None or seconds <= limit else seconds

    def _require_room(self) -> None:
        limit = self.config.max_queue
        if limit is None:
            return
        held = len(self._added) + len(self._loop.scheduler.sequences)
        waiting = held - self.config.max_num_seqs
        if waiting >= limit:
            raise QueueFull(waiting, limit)

    def _death(self) -> GroutError:
        error = EngineDead(
            "the engine has stopped after a failure it cannot recover from, restart the server: "
            f"{type(self._failure).__name__}: {self._failure}"
        )
        error.__cause__ = self._failure
        return error

    def _closing(self) -> GroutError:
        return EngineClosed("the engine was closed")


__all__ = ["Engine"]
