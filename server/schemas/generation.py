"""Requests of the two generating routes that share vLLM's sampling parameters."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field

from server.errors import invalid
from server.schemas.base import MAX_STOPS, Limit, Seed, Stop, Strict, TokenId, validated
from server.schemas.tools import Tools

__all__ = [
    "MAX_CHOICES",
    "MAX_LOGPROBS",
    "ChatRequest",
    "CompletionRequest",
    "GenerationRequest",
    "ReasoningEffort",
    "StreamOptions",
    "parse_request",
]

MAX_CHOICES = 128
"""Most answers in one response (OpenAI's limit of `n`)."""

MAX_LOGPROBS = 20
"""Most alternatives with a log probability for each token (OpenAI's limit of `top_logprobs`)."""

MAX_BIASES = 300

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _few(value: Any) -> Any:
    """Refuse what is too long before each of its entries is looked at."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"at most {MAX_BIASES} token ids may have a bias")
    return value


class StreamOptions(Strict):
    """`include_usage` adds a last chunk with the token counts; obfuscation is never added."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: Literal[False] | None = None


class GenerationRequest(Strict):
    """What both generating routes take; null means absent everywhere."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Seed | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Limit | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOPS, fail_fast=True)] | None = (
        None
    )
    ignore_eos: bool | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100)]],
            BeforeValidator(_few, json_schema_input_type=dict[str, float]),
        ]
        | None
    ) = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None
    grammar: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def token_limit(self) -> int | None:
        """Most tokens to answer with, where the request says so."""
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends in a chunk with the token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def top_logprobs_wanted(self) -> int | None:
        """Alternatives for each token, or None for no log probabilities at all."""
        raise NotImplementedError

    @property
    def prompt_logprobs_wanted(self) -> int | None:
        """The same for the tokens of the prompt."""
        return None


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True)]
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Tools | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: ReasoningEffort | None = None

    @property
    def token_limit(self) -> int | None:
        """Most tokens to answer with; `max_completion_tokens` is the newer name."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def top_logprobs_wanted(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None


class CompletionRequest(GenerationRequest):
    """POST /v1/completions; `prompt` is text or token ids, or a list of either.

    With `max_tokens` 0 nothing is generated: that leaves the prompt, where it is to be echoed.
    """

    prompt: Any
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def top_logprobs_wanted(self) -> int | None:
        return self.logprobs

    @property
    def prompt_logprobs_wanted(self) -> int | None:
        return self.logprobs if self.echo else None


RequestT = TypeVar("RequestT", bound=GenerationRequest)


def parse_request(model: type[RequestT], body: dict[str, Any]) -> RequestT:
    """Return the request in `body`; raises ApiError 400 naming the first parameter at fault."""
    if model is CompletionRequest and body.get("logprobs") is False:
        body = body | {"logprobs": None}
    request = validated(model, body)
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "'stream_options' needs 'stream': true.")
    if isinstance(request, ChatRequest):
        _check_chat(request)
    limit = request.token_limit
    if request.min_tokens and limit is not None and request.min_tokens > limit:
        raise invalid("min_tokens", "'min_tokens' is more than the answer's token limit.")
    return request


def _check_chat(request: ChatRequest) -> None:
    both = (request.max_tokens, request.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise invalid(
            "max_tokens", "'max_tokens' and 'max_completion_tokens' differ; send one of them."
        )
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs", "'top_logprobs' needs 'logprobs': true.")
