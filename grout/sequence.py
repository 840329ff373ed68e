"""A request the engine works on: `Sequence`."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from grout.detokenizer import Detokenizer
from grout.errors import GroutError
from grout.request import Delta, FinishReason, SamplingParams


class SequenceState(Enum):
    WAITING = "waiting"
    """Queued; holds no row and no pages."""
    PREFILL = "prefill"
    """Holds a row and all its pages; its prompt is being run."""
    RUNNING = "running"
    """Its whole prompt has been run; a token comes with every step."""
    DONE = "done"
    """Finished, aborted or failed; holds nothing."""


class Sink(Protocol):
    """Where a sequence's deltas go, or the error that ended it. Called on the engine's thread."""

    def put(self, event: Delta | GroutError) -> None: ...


@dataclass(eq=False, slots=True)
class Sequence:
    """One request: what it asked for, what it has produced, and what it holds.

    prompt: int32[P]. stop_ids: ids that end it. limit: most tokens it may produce, so that prompt
    and reply fit the context. seed: of its sampler. prefilled: prompt tokens enqueued so far.
    in_flight: tokens enqueued on the device and not read yet. row: its row of the KV cache, -1
    for none.
    """

    id: int
    prompt: NDArray[np.int32]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    limit: int
    detokenizer: Detokenizer
    sink: Sink
    state: SequenceState = SequenceState.WAITING
    produced: list[int] = field(default_factory=list)
    prefilled: int = 0
    in_flight: int = 0
    row: int = -1
    pages: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None

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
        return len(self.prompt) + len(self.produced) - 1

    @property
    def done(self) -> bool:
        return self.state is SequenceState.DONE

    @property
    def wants_token(self) -> bool:
        """Whether another decode step could be of use, as far as is known before reading ids."""
        return len(self.produced) + self.in_flight < self.limit

    def accept(self, token: int) -> Delta:
        """Take the next token; sets `finish_reason` when it is the last one.

        An id that ends the reply counts as produced but has no text.
        """
        self.produced.append(token)
        if token in self.stop_ids:
            text = self.detokenizer.flush()
            self.finish_reason = "stop"
        else:
            text = self.detokenizer.push(token)
            if not self.detokenizer.stopped and len(self.produced) >= self.limit:
                text += self.detokenizer.flush()
                self.finish_reason = "length"
            if self.detokenizer.stopped:
                self.finish_reason = "stop"
        return Delta(text, (token,), self.finish_reason)


__all__ = ["Sequence", "SequenceState", "Sink"]
