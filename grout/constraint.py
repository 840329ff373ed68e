"""From a grammar to the tokens that keep to it: `GrammarTokens`, `Constraint`."""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import llguidance
import numpy as np
from numpy.typing import NDArray

from grout.errors import GrammarError
from grout.grammar import Grammar
from models.tokenizer import Tokenizer

COMPILED_GRAMMARS = 64
"""Compiled grammars kept for the next request with the same one."""


class Constraint:
    """How far into its grammar a reply has come.

    allowed: uint32[ceil(V / 32)], the tokens that may come next: token t is bit t % 32 of word
    t // 32. End-of-sequence ids are among them where the reply may end.
    """

    __slots__ = ("_matcher", "allowed")

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self.allowed: NDArray[np.uint32] = np.zeros(-(-vocab_size // 32), np.uint32)
        self._fill()

    @property
    def complete(self) -> bool:
        """Whether nothing may follow: the reply has ended, though no token says so."""
        return self._matcher.is_stopped()

    def accept(self, token: int) -> None:
        """Take the next token. Raises `GrammarError` if it is not allowed, or nothing after it."""
        if not self.allowed[token // 32] >> np.uint32(token % 32) & 1:
            raise GrammarError(f"it does not allow token {token}")
        if not self._matcher.consume_token(token):
            raise GrammarError(self._problem())
        if not self.complete:
            self._fill()

    def _fill(self) -> None:
        self._matcher.unsafe_compute_mask_ptr(self.allowed.ctypes.data, self.allowed.nbytes)
        if self._matcher.is_error():
            raise GrammarError(self._problem())

    def _problem(self) -> str:
        problem: str = self._matcher.get_error().strip().split("\n")[0]
        # llguidance's name for a mask that allows nothing.
        return "no text can follow" if problem.startswith("NoExtension") else problem


class GrammarTokens:
    """Compiles grammars over a tokenizer's vocabulary. May be used by any number of threads.

    vocab_size: of the model, whose last ids may have no token. Building the vocabulary takes a
    while, and waits for the first grammar or for `prepare`.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = sorted({token for token in eos_token_ids if token < vocab_size})
        self._lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, llguidance.LLMatcher] = OrderedDict()

    def prepare(self) -> llguidance.LLTokenizer:
        """Build the vocabulary, once."""
        with self._lock:
            if self._vocabulary is None:
                wrapper: Any = _Vocabulary(self._tokenizer, self._vocab_size, self._eos)
                self._vocabulary = llguidance.LLTokenizer(
                    llguidance.TokenizerWrapper(wrapper),
                    n_vocab=self._vocab_size,
                    eos_token=self._eos or None,
                )
            return self._vocabulary

    def constraint(self, grammar: Grammar) -> Constraint:
        """A constraint at the beginning of its grammar. Raises `GrammarError`."""
        vocabulary = self.prepare()
        with self._lock:
            matcher = self._compiled.get(grammar)
            if matcher is not None:
                self._compiled.move_to_end(grammar)
        if matcher is None:
            matcher = llguidance.LLMatcher(vocabulary, grammar.source, log_level=0)
            if matcher.is_error():
                raise GrammarError(f"the {grammar.kind} grammar: {matcher.get_error().strip()}")
            with self._lock:
                self._compiled[grammar] = matcher
                if len(self._compiled) > COMPILED_GRAMMARS:
                    self._compiled.popitem(last=False)
        try:
            return Constraint(matcher.deep_copy(), self._vocab_size)
        except GrammarError as error:
            raise GrammarError(f"the {grammar.kind} grammar cannot begin: {error}") from None


class _Vocabulary:
    """A tokenizer in the form llguidance asks for."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: list[int]) -> None:
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = sorted(t for t in tokenizer.special_ids if t < vocab_size)
        self.eos_token_id = eos[0] if eos else (self.special_token_ids or [vocab_size - 1])[0]
        self.bos_token_id = None
        self._encode = tokenizer.encode

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("texts only")
        return self._encode(text)


__all__ = ["Constraint", "GrammarTokens"]
