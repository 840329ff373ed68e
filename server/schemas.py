"""The requests the routes take, as strict pydantic models, and OpenAI's errors for bad ones."""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from server.body import join_path
from server.errors import ApiError, invalid
from server.parameters import implemented

__all__ = [
    "MAX_STOPS",
    "ChatRequest",
    "CompletionRequest",
    "GenerationRequest",
    "StreamOptions",
    "parse_request",
]

MAX_STOPS = 16
"""Most stop strings a request may have (OpenAI's own limit is 4)."""

MAX_TOKEN_ID = 2**31 - 1


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Stop = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(max_length=MAX_STOPS),
    BeforeValidator(_as_list),
]
Limit = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]


class _Strict(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )


class StreamOptions(_Strict):
    """`include_usage` adds a last chunk with the token counts; obfuscation is never added."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(_Strict):
    """What both generating routes take; null means absent everywhere."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Seed | None = None
    max_tokens: Limit | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = None
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


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Limit | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def token_limit(self) -> int | None:
        """Most tokens to answer with; `max_completion_tokens` is the newer name."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(GenerationRequest):
    """POST /v1/completions; `prompt` is a string or a list of token ids."""

    prompt: Any


RequestT = TypeVar("RequestT", bound=GenerationRequest)


def parse_request(model: type[RequestT], body: dict[str, Any]) -> RequestT:
    """Return the request in `body`; raises ApiError 400 naming the first parameter at fault."""
    try:
        request = model.model_validate(implemented(body, model.model_fields))
    except ValidationError as error:
        raise _from_pydantic(error.errors(include_url=False, include_context=False)[0]) from None
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "'stream_options' needs 'stream': true.")
    if isinstance(request, ChatRequest):
        both = (request.max_tokens, request.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise invalid(
                "max_tokens", "'max_tokens' and 'max_completion_tokens' differ; send one of them."
            )
    return request


def _from_pydantic(detail: ErrorDetails) -> ApiError:
    param = join_path(detail["loc"])
    kind = detail["type"]
    if kind == "missing":
        return invalid(
            param, f"Missing required parameter: '{param}'.", "missing_required_parameter"
        )
    if kind == "extra_forbidden":
        return invalid(param, f"Unknown parameter: '{param}'.", "unknown_parameter")
    wrong_type = kind.endswith("_type") or kind == "int_from_float"
    rule = detail["msg"].removeprefix("Input ")
    return invalid(
        param,
        f"Invalid '{param}': {rule} (got {_shown(detail['input'])}).",
        "invalid_type" if wrong_type else "invalid_value",
    )


def _shown(value: Any) -> str:
    if isinstance(value, list | dict):
        return "an array" if isinstance(value, list) else "an object"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a very large integer"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
