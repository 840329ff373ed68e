"""What the HTTP layer needs of an engine; `grout.Engine` has it, and so does a test's double."""

from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from grout.request import Delta, SamplingParams

__all__ = [
    "ClosableEngine",
    "ServingConfig",
    "ServingEngine",
    "ServingTemplate",
    "ServingTokenizer",
]


class ServingTokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_ids(self) -> Collection[int]: ...

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]: ...

    def min_tokens(self, text: str) -> int: ...

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token: int) -> bytes: ...

    def token_to_id(self, text: str) -> int | None: ...


class ServingTemplate(Protocol):
    """Chat messages to the text of a prompt."""

    def mentions(self, text: str) -> bool: ...

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str: ...


class ServingConfig(Protocol):
    """The engine's options that the HTTP layer shows."""

    @property
    def served_model_name(self) -> str | None: ...


class ServingEngine(Protocol):
    """An engine that continues prompts; closing an iterator of `generate` aborts that request."""

    @property
    def config(self) -> ServingConfig: ...

    @property
    def max_requests(self) -> int | None:
        """Most requests it takes at once, running or waiting; None for no limit."""
        ...

    @property
    def model_id(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int:
        """Token ids of the model; its tokenizer may have no text for the last ones."""
        ...

    @property
    def tokenizer(self) -> ServingTokenizer: ...

    @property
    def chat_template(self) -> ServingTemplate | None: ...

    @property
    def default_sampling(self) -> Mapping[str, Any]: ...

    @property
    def alive(self) -> bool: ...

    @property
    def hung(self) -> bool: ...

    def stats(self) -> Mapping[str, Any]: ...

    def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams
    ) -> AsyncIterator[Delta]: ...


class ClosableEngine(ServingEngine, Protocol):
    """An engine whose owner waits for what it does when it starts (`settle`), and closes it: False
    if that, or the step under way, has not ended in `timeout` seconds."""

    def settle(self, timeout: float = 60.0) -> bool: ...

    def close(self, timeout: float | None = None) -> bool: ...
