"""Requests to prompts: token ids that fit the model's context, with room for the answer."""

import asyncio
from dataclasses import dataclass
from typing import Any

from server.errors import context_length_exceeded, invalid
from server.exceptions import is_for_people
from server.messages import flatten_messages
from server.protocol import ServingEngine, ServingTemplate
from server.schemas import ChatRequest, CompletionRequest

__all__ = ["Prompt", "chat_prompt", "completion_prompt", "token_budget"]

# Names that `render` or a template takes from the server and a client may not replace.
_RESERVED = frozenset({"add_generation_prompt", "messages", "self", "template_name", "tools"})


@dataclass(frozen=True)
class Prompt:
    """A prompt as the engine takes it.

    param: the request's parameter it came from. opens_thinking: the template already wrote
    `<think>`, so that the answer begins inside the reasoning.
    """

    token_ids: list[int]
    param: str
    opens_thinking: bool = False


async def chat_prompt(engine: ServingEngine, request: ChatRequest) -> Prompt:
    """Return the prompt of a chat; raises ApiError 400 where the messages cannot be rendered."""
    template = engine.chat_template
    if template is None:
        raise invalid(
            "messages",
            "This model has no chat template; use /v1/completions.",
            "no_chat_template",
        )
    messages = flatten_messages(request.messages)
    extra = request.chat_template_kwargs or {}
    for name in sorted(_RESERVED & extra.keys()):
        raise invalid(
            f"chat_template_kwargs.{name}",
            f"'{name}' cannot be set through chat_template_kwargs.",
            "unsupported_parameter",
        )

    def build() -> Prompt:
        text = _render(template, messages, extra)
        return Prompt(engine.tokenizer.encode(text), "messages", text.rstrip().endswith("<think>"))

    # In a thread: a prompt of a million characters would stop every stream while it is encoded.
    return await asyncio.to_thread(build)


async def completion_prompt(engine: ServingEngine, request: CompletionRequest) -> Prompt:
    """Return the prompt of a plain completion: text, or token ids as they are."""
    prompt = request.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        token_ids = await asyncio.to_thread(_encode, engine, prompt)
    elif isinstance(prompt, list):
        _check_token_ids(prompt, engine.tokenizer.vocab_size)
        token_ids = prompt
    else:
        raise invalid(
            "prompt", "'prompt' must be a string or an array of token ids.", "invalid_type"
        )
    if not token_ids:
        raise invalid("prompt", "'prompt' is empty; there is nothing to complete.")
    return Prompt(token_ids, "prompt")


def token_budget(
    prompt: Prompt, limit: int | None, max_model_len: int, default: int | None = None
) -> int:
    """Return the most tokens to answer with.

    limit: the request's own, which must fit the context together with the prompt; without one
    the answer may fill the context, up to `default`.
    Raises ApiError 400 context_length_exceeded.
    """
    size = len(prompt.token_ids)
    room = max_model_len - size
    if room < 1 or (limit is not None and limit > room):
        asked = limit if room >= 1 else None
        raise context_length_exceeded(prompt.param, size, max_model_len, asked)
    return limit or min(room, default or room)


def _render(
    template: ServingTemplate, messages: list[dict[str, Any]], extra: dict[str, Any]
) -> str:
    try:
        return template.render(messages, add_generation_prompt=True, **extra)
    except Exception as error:
        # Templates run on the client's values and fail in any way: all of them are about those.
        reason = str(error) if is_for_people(error) else "the chat template failed on them"
        raise invalid(
            "messages", f"These messages cannot be rendered: {reason}.", "chat_template_error"
        ) from error


def _encode(engine: ServingEngine, text: str) -> list[int]:
    # With the tokenizer's own beginning of sequence, which a chat template writes out itself.
    return engine.tokenizer.encode(text, add_special_tokens=True)


def _check_token_ids(prompt: list[Any], vocab_size: int) -> None:
    if any(isinstance(item, str | list) for item in prompt):
        raise invalid(
            "prompt",
            "Several prompts in a request are not supported; send one request for each.",
            "unsupported_value",
        )
    for i, item in enumerate(prompt):
        if not isinstance(item, int) or isinstance(item, bool):
            raise invalid(f"prompt[{i}]", f"'prompt[{i}]' is not a token id.", "invalid_type")
        if not 0 <= item < vocab_size:
            raise invalid(
                f"prompt[{i}]",
                f"'prompt[{i}]' is outside the vocabulary; token ids are 0..{vocab_size - 1}.",
            )
