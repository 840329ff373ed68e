"""The answers of a chat, each taken apart into reasoning, content and tool calls as it streams."""

from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from grout.request import Delta, TokenLogprob
from grout.streams import parts
from server.generation import Generation, Generations
from server.logprobs import LogprobStream, Placed
from server.pieces import CallPiece, Piece, joined
from server.protocol import ServingTokenizer
from server.reasoning import ReasoningSplitter
from server.tool_choice import ToolUse
from server.tool_parser import ToolParser

__all__ = ["ChatAnswer", "ChatChoices", "Step", "usage"]


@dataclass(slots=True)
class Step:
    """What one delta adds to one answer; finish_reason: on the last of an answer alone."""

    index: int
    pieces: Sequence[Piece | CallPiece]
    logprobs: Sequence[TokenLogprob]
    finish_reason: str | None = None


class ChatAnswer:
    """Takes one answer's deltas and gives its pieces."""

    def __init__(self, *, opened: bool, tools: ToolUse, logprobs: LogprobStream | None) -> None:
        self._splitter = ReasoningSplitter(opened=opened)
        self._parser = None if tools.mode == "none" else ToolParser(guided=tools.guided)
        self._one_call = not tools.parallel
        self._logprobs = logprobs
        # Of tokens with text that has not come as content yet; how much text there was in all, and
        # before the content, which goes on to the end.
        self._waiting: deque[Placed] = deque()
        self._fed = 0
        self._before: int | None = None
        self.reasoning_tokens = 0
        self.plain = False
        """All text from now on is content as it stands."""
        self.complete = False
        """The one call that was asked for is there: nothing more is wanted."""

    def feed(self, delta: Delta) -> tuple[Sequence[Piece | CallPiece], list[TokenLogprob]]:
        """Return what the delta settles, everything on the last one."""
        placed = [] if self._logprobs is None else self._logprobs.placed(delta)
        self._waiting += placed
        self._fed += len(delta.text)
        pieces = self._pieces(delta)
        if self._logprobs is not None:
            self._give_logprobs(pieces)
        return pieces, [each.entry for each in placed]

    def _pieces(self, delta: Delta) -> Sequence[Piece | CallPiece]:
        if self.plain:
            return [Piece("content", delta.text, self._content_end)] if delta.text else []
        before = self._splitter.thinking
        split = self._splitter.feed(delta.text)
        if before or self._splitter.thinking:
            self.reasoning_tokens += len(delta.token_ids)
        pieces = self._parsed(split)
        if delta.finish_reason is not None:
            pieces += self._parsed(self._splitter.flush())
            if self._parser is not None:
                pieces += self._parser.flush()
        if self._one_call and self._parser is not None and self._parser.calls:
            pieces = self._up_to_one_call(pieces)
            self.complete = not self._parser.streaming
        self.plain = self._parser is None and self._splitter.settled
        return pieces

    def finish_reason(self, of_engine: str | None) -> str | None:
        """Return OpenAI's reason: an answer that ends after whole calls has "tool_calls"."""
        calls = self._parser is not None and self._parser.whole_calls
        return "tool_calls" if calls and (of_engine == "stop" or self.complete) else of_engine

    def _parsed(self, split: list[Piece]) -> list[Piece | CallPiece]:
        pieces: list[Piece | CallPiece] = []
        for piece in split:
            if piece.kind == "reasoning":
                pieces.append(piece)
                continue
            if self._before is None:
                self._before = self._fed - len(piece.text)
            piece.end = self._content_end
            pieces += [piece] if self._parser is None else self._parser.feed(piece.text)
        return pieces

    @property
    def _content_end(self) -> int:
        return self._fed - (self._before or 0)

    def _give_logprobs(self, pieces: Sequence[Piece | CallPiece]) -> None:
        """Give content its tokens: those with any of its text that no piece has had."""
        waiting = self._waiting
        for piece in pieces:
            if isinstance(piece, CallPiece) or piece.kind == "reasoning":
                continue
            end = (self._before or 0) + piece.end
            start = end - len(piece.text)
            while waiting and waiting[0].end <= start:
                waiting.popleft()
            own = []
            while waiting and waiting[0].place < end:
                own.append(waiting.popleft().entry)
            piece.logprobs = own

    def _up_to_one_call(self, pieces: list[Piece | CallPiece]) -> list[Piece | CallPiece]:
        wanted = [isinstance(piece, CallPiece) and piece.index == 0 for piece in pieces]
        return pieces[: len(wanted) - wanted[::-1].index(True)] if any(wanted) else []


class ChatChoices:
    """All answers of a chat request; iterate for steps."""

    def __init__(
        self,
        generations: Generations,
        tools: ToolUse,
        tokenizer: ServingTokenizer,
        *,
        logprobs: bool,
    ) -> None:
        self.generations = generations
        self.answers = [
            ChatAnswer(
                opened=generation.prompt.thinking == "open",
                tools=tools,
                logprobs=LogprobStream(tokenizer) if logprobs else None,
            )
            for generation in generations.each
        ]

    async def __aiter__(self) -> AsyncGenerator[Step, None]:
        async for index, delta in self.generations:
            answer, generation = self.answers[index], self.generations.each[index]
            if answer.plain:
                generation.count(delta)
                pieces, logprobs = answer.feed(delta)
            else:
                pieces, logprobs = self._one_by_one(answer, generation, delta)
                if answer.complete and generation.finish_reason is None:
                    await self.generations.end(index)
            reason: str | None = generation.finish_reason
            if reason is not None:
                reason = answer.finish_reason(reason)
            if pieces or logprobs or reason:
                yield Step(index, pieces, logprobs, reason)

    @staticmethod
    def _one_by_one(
        answer: ChatAnswer, generation: Generation, delta: Delta
    ) -> tuple[Sequence[Piece | CallPiece], list[TokenLogprob]]:
        """Feed each part of a delta: where tokens stand says how they count, and where to end."""
        pieces: list[Piece | CallPiece] = []
        logprobs: list[TokenLogprob] = []
        for part in parts(delta):
            generation.count(part)
            more, entries = answer.feed(part)
            pieces += more
            logprobs += entries
            if answer.complete:
                break
        return joined(pieces), logprobs

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's token counts, reasoning apart."""
        reasoning = sum(answer.reasoning_tokens for answer in self.answers)
        return usage(self.generations) | {
            "completion_tokens_details": {"reasoning_tokens": reasoning}
        }


def usage(generations: Generations) -> dict[str, Any]:
    """Return OpenAI's token counts; a prompt with several answers counts once."""
    prompts = {id(generation.prompt): generation for generation in reversed(generations.each)}
    prompt_tokens = sum(len(generation.prompt.token_ids) for generation in prompts.values())
    completion_tokens = sum(generation.completion_tokens for generation in generations.each)
    cached = sum(generation.cached_tokens for generation in prompts.values())
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
