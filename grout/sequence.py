"""A request the engine works on: `Sequence`."""

from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from grout.constraint import Constraint
from grout.detokenizer import Detokenizer
from grout.errors import GrammarError, GroutError
from grout.request import Delta, FinishReason, SamplingParams, TokenLogprob
from models.slot import GIVEN, Slot

_SHOWN = 20
"""Tokens that a message shows of a reply."""

KEY_BYTES = 16
"""Length of a page's key: long enough that no two contents ever have the same."""


class SequenceState(Enum):
    WAITING = "waiting"
    """Queued; holds no row and no pages."""
    PREFILL = "prefill"
    """Holds a row and the pages of its tokens, which are being run."""
    RUNNING = "running"
    """All of its tokens have been run; another comes with every step."""
    DONE = "done"
    """Finished, aborted or failed; holds nothing."""


class Sink(Protocol):
    """Where a sequence's deltas go, or the error that ended it. Called on the engine's thread."""

    def put(self, event: Delta | GroutError) -> None: ...


@dataclass(eq=False, slots=True)
class Sequence:
    """One request: what it asked for, what it has produced, and what it holds.

    prompt: int32[P]. stop_ids: ids that end it. limit: most tokens it may produce, so that prompt
    and reply fit the context. seed: of its sampler. constraint: what its reply must match.
    prefilled: tokens that need not be run again: they are cached, or a chunk of them is enqueued.
    enqueued: tokens of the reply that the device has been asked for, read or not. row: its row of
    the KV cache, -1 for none. frozen: how many of its first pages are complete, and so may be
    shared. cached: how many of the prompt's tokens were found in cached pages. scored: log
    probabilities of the prompt's tokens, from the second on. arrived, admitted, token_at: when it
    came, was first given pages, and produced its newest token, by the engine's clock in seconds.
    """

    id: int
    prompt: NDArray[np.int32]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    limit: int
    detokenizer: Detokenizer
    sink: Sink
    constraint: Constraint | None = None
    arrived: float = 0.0
    state: SequenceState = SequenceState.WAITING
    produced: list[int] = field(default_factory=list)
    prefilled: int = 0
    enqueued: int = 0
    row: int = -1
    pages: tuple[int, ...] = ()
    frozen: int = 0
    cached: int = 0
    scored: list[TokenLogprob] = field(default_factory=list)
    admitted: float | None = None
    token_at: float | None = None
    finish_reason: FinishReason | None = None
    _keys: list[bytes] = field(default_factory=list)

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller goes first: by priority, then in order of arrival."""
        return self.params.priority, self.id

    @property
    def length(self) -> int:
        """Tokens of prompt and reply so far."""
        return len(self.prompt) + len(self.produced)

    @property
    def capacity(self) -> int:
        """Positions it can ever fill: P + limit - 1.

        The last token's keys and values are never written, and no step is enqueued past `limit`
        even when steps run ahead of reading (`wants_token`), so a surplus step stays within it.
        """
        return len(self.prompt) + self.limit - 1

    @property
    def position(self) -> int:
        """Where the newest token goes: 0-based, P + produced - 1."""
        return self.length - 1

    @property
    def done(self) -> bool:
        return self.state is SequenceState.DONE

    @property
    def in_flight(self) -> int:
        """Tokens enqueued on the device and not read yet."""
        return self.enqueued - len(self.produced)

    @property
    def wants_token(self) -> bool:
        """Whether another decode step could be of use, as far as is known before reading ids."""
        return self.enqueued < self.limit

    @property
    def scoring(self) -> bool:
        """Whether log probabilities of its prompt are still to be had: all of it is to be run."""
        wanted = self.params.prompt_logprobs is not None
        return wanted and len(self.scored) < len(self.prompt) - 1

    @property
    def holds_back(self) -> bool:
        """Whether the newest token enqueued may not be one that ends the reply."""
        return self.enqueued <= self.params.min_tokens

    def tokens(self, start: int, stop: int) -> NDArray[np.int32]:
        """Tokens [start, stop) of prompt and reply."""
        size = len(self.prompt)
        if stop <= size:
            return self.prompt[start:stop]
        reply = np.array(self.produced[max(0, start - size) : stop - size], np.int32)
        return np.concatenate([self.prompt[start:], reply])

    def page_keys(self, count: int, page_size: int) -> list[bytes]:
        """Keys of the first `count` pages: each stands for the tokens of its page and all before.

        The pages must be full of tokens that are known.
        """
        while len(self._keys) < count:
            at = len(self._keys) * page_size
            before = self._keys[-1] if self._keys else b""
            contents = before + self.tokens(at, at + page_size).tobytes()
            self._keys.append(blake2b(contents, digest_size=KEY_BYTES).digest())
        return self._keys[:count]

    def slot(self, token: int = 0, position: int = 0, source: int = GIVEN) -> Slot:
        """Its slot in a batch: how its next token is chosen, and which one it follows."""
        params = self.params
        return Slot(
            row=self.row,
            token=token,
            position=position,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=self.seed,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            logit_bias=params.logit_bias,
            masked=self.masked,
            logprobs=params.logprobs is not None,
            source=source,
        )

    @property
    def masked(self) -> bool:
        """Whether some tokens may not come next."""
        return self.constraint is not None or self.holds_back

    def allowed(self, vocab_size: int) -> NDArray[np.uint32]:
        """Which tokens may come next: token t is bit t % 32 of word t // 32."""
        if self.constraint is None:
            words = np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32)
        else:
            words = self.constraint.allowed.copy()
        if not self.holds_back:
            return words
        held = words.copy()
        for token in self.stop_ids:
            held[token // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token % 32))
        # A grammar that allows nothing but the end has the last word.
        return held if held.any() else words

    def accept(self, token: int, logprob: TokenLogprob | None = None) -> Delta:
        """Take the next token; sets `finish_reason` when it is the last one.

        An id that ends the reply counts as produced but has no text. A reply of no tokens takes
        none. Raises `GrammarError` where the constraint has no way on.
        """
        produced = self.produced
        first = not produced
        if not self.limit:
            self.finish_reason = "length"
            return Delta("", (), "length", (), self.cached, self._prompt_logprobs())
        produced.append(token)
        detokenizer = self.detokenizer
        if token in self.stop_ids:
            text = detokenizer.flush()
            self.finish_reason = "stop"
        else:
            complete = False
            if self.constraint is not None:
                self._constrain(self.constraint, token)
                complete = self.constraint.complete
            text = detokenizer.push(token, stops=len(produced) > self.params.min_tokens)
            if not detokenizer.stopped and (complete or len(produced) >= self.limit):
                text += detokenizer.flush()
                self.finish_reason = "stop" if complete else "length"
            if detokenizer.stopped:
                self.finish_reason = "stop"
        logprobs = () if logprob is None else (logprob,)
        if not first:
            return Delta(text, (token,), self.finish_reason, logprobs)
        of_prompt = self._prompt_logprobs()
        return Delta(text, (token,), self.finish_reason, logprobs, self.cached, of_prompt)

    def _prompt_logprobs(self) -> tuple[TokenLogprob | None, ...]:
        return () if self.params.prompt_logprobs is None else (None, *self.scored)

    def _constrain(self, constraint: Constraint, token: int) -> None:
        try:
            constraint.accept(token)
        except GrammarError as error:
            count, end = len(self.produced), self.detokenizer.shown(self.produced[-_SHOWN:])
            raise GrammarError(
                f"the grammar leads nowhere at token {count} of the reply, after {end!r}: {error}"
            ) from None


__all__ = ["Sequence", "SequenceState", "Sink"]
