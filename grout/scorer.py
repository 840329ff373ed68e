"""How likely the tokens of a prompt were: `Scorer`."""

from grout.readback import Reader
from grout.request import TokenLogprob
from grout.scheduler import Chunk
from models.kv_cache import KVCache
from models.transformer import Transformer

SCORED_TOGETHER = 16
"""Tokens whose logits are computed at once, in memory of their own."""


class Scorer:
    """Log probabilities of prompts, read while the host waits. Takes memory when made."""

    def __init__(self, transformer: Transformer, cache: KVCache) -> None:
        self._transformer = transformer
        # Not one of the batches of steps, whose slots have ids that are still to be read.
        self._batch = transformer.new_batch(cache, SCORED_TOGETHER)
        self._reader = Reader(self._batch, transformer.device)

    def score(self, chunk: Chunk) -> list[TokenLogprob]:
        """Of the tokens after those of `chunk`, which the last prefill ran, by itself.

        Up to the end of the prompt, and without those that `Sequence.scored` has.
        """
        sequence = chunk.sequence
        prompt, top = sequence.prompt, sequence.params.prompt_logprobs or 0
        end = min(chunk.stop, len(prompt) - 1)
        found: list[TokenLogprob] = []
        for first in range(max(chunk.start, len(sequence.scored)), end, SCORED_TOGETHER):
            targets = prompt[first + 1 : min(first + SCORED_TOGETHER, end) + 1].tolist()
            self._transformer.score(self._batch, first - chunk.start, targets)
            found += self._reader.read((), (), (), True).logprobs(len(targets), top)
        return found


__all__ = ["Scorer"]
