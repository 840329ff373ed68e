"""Requests to prompts: token ids that fit the model's context, with room for the answer."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grout.detokenizer import Detokenizer, begun_character
from server.constraint import Thinking
from server.errors import context_length_exceeded, invalid
from server.exceptions import is_for_people
from server.protocol import ServingEngine, ServingTemplate
from server.shown_tools import shown_in_messages

__all__ = [
    "Prompt",
    "chat_prompt",
    "completion_prompts",
    "template_variables",
    "token_budget",
]

# Names that `render` or a template takes from the server and a client may not replace.
_RESERVED = frozenset({"add_generation_prompt", "messages", "self", "template_name", "tools"})


_LONG = 4
"""Characters a token from which on a text probably does not fit, so that counting pays."""

MAX_PROMPTS = 256
"""Most prompts in one request."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as the engine takes it.

    param: the request's parameter it came from. thinking: where the answer begins; "open" is
    where the template already wrote `<think>`. text: what the prompt says, for `echo`. begun: the
    beginning of a character it ends in, which is no part of that: the answer begins with the whole.
    """

    token_ids: list[int]
    param: str
    thinking: Thinking = "off"
    text: str = ""
    begun: bytes = b""


async def chat_prompt(
    engine: ServingEngine,
    messages: Sequence[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    variables: dict[str, Any] | None = None,
    *,
    param: str = "messages",
    add_generation_prompt: bool = True,
) -> Prompt:
    """Return the prompt of a chat; raises ApiError 400 where the messages cannot be rendered.

    messages: flat ones. variables: of the template.
    """
    template = engine.chat_template
    if template is None:
        raise invalid(
            param,
            "This model has no chat template; use /v1/completions.",
            "no_chat_template",
        )
    extra = variables or {}
    for name in sorted(_RESERVED & extra.keys()):
        raise invalid(
            f"chat_template_kwargs.{name}",
            f"'{name}' cannot be set through chat_template_kwargs.",
            "unsupported_parameter",
        )

    def build() -> Prompt:
        shown = list(messages)
        if not template.mentions("tools"):
            shown = shown_in_messages(shown, tools or ())
        text = _render(template, shown, tools, add_generation_prompt, extra, param)
        return Prompt(_encode(engine, text, param), param, _thinking(text, thinks), text)

    thinks = extra.get("enable_thinking") is not False and (
        engine.tokenizer.token_to_id("<think>") is not None or template.mentions("<think>")
    )

    # In a thread: a prompt of a million characters would stop every stream while it is encoded.
    return await asyncio.to_thread(build)


def template_variables(
    given: Mapping[str, Any] | None, enable_thinking: bool | None, effort: str | None
) -> dict[str, Any]:
    """Return the variables a chat template gets: `given` before the request's own parameters."""
    out: dict[str, Any] = {}
    if effort is not None:
        out["reasoning_effort"] = effort
    if effort == "none" and enable_thinking is None:
        enable_thinking = False
    if enable_thinking is not None:
        out["enable_thinking"] = enable_thinking
    return out | dict(given or {})


async def completion_prompts(engine: ServingEngine, prompt: Any) -> list[Prompt]:
    """Return the prompts of a plain completion: texts, or token ids as they are."""
    several = isinstance(prompt, list) and any(isinstance(item, str | list) for item in prompt)
    items: list[Any] = prompt if several else [prompt]
    if len(items) > MAX_PROMPTS:
        raise invalid("prompt", f"'prompt' has {len(items)} prompts; send at most {MAX_PROMPTS}.")
    # In threads: each may be a million characters.
    return [
        await asyncio.to_thread(
            _completion_prompt, engine, item, f"prompt[{i}]" if several else "prompt"
        )
        for i, item in enumerate(items)
    ]


def _completion_prompt(engine: ServingEngine, prompt: Any, where: str) -> Prompt:
    tokenizer, begun = engine.tokenizer, b""
    if isinstance(prompt, str):
        text = prompt
        token_ids = _encode(engine, prompt, where, begin=True)
    elif isinstance(prompt, list):
        _check_token_ids(prompt, engine.vocab_size, where)
        token_ids = prompt
        begun = begun_character(tokenizer.token_bytes, tokenizer.special_ids, prompt)
        text = Detokenizer(tokenizer.token_bytes, tokenizer.special_ids).whole(prompt)
    else:
        raise invalid(
            where, f"'{where}' must be a string or an array of token ids.", "invalid_type"
        )
    if not token_ids:
        raise invalid(where, f"'{where}' is empty; there is nothing to complete.")
    return Prompt(token_ids, "prompt", "off", text, begun)


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
    if room < (limit != 0) or (limit is not None and limit > room):
        asked = limit if room >= 1 else None
        raise context_length_exceeded(prompt.param, size, max_model_len, asked)
    return min(room, default or room) if limit is None else limit


def _thinking(text: str, thinks: bool) -> Thinking:
    """Where the answer to a prompt begins. thinks: whether the model may begin to by itself."""
    end = text.rstrip()
    if end.endswith("<think>"):
        return "open"
    return "possible" if thinks and not end.endswith("</think>") else "off"


def _render(
    template: ServingTemplate,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    add_generation_prompt: bool,
    extra: dict[str, Any],
    param: str,
) -> str:
    try:
        return template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **extra
        )
    except Exception as error:
        # Templates run on the client's values and fail in any way: all of them are about those.
        reason = str(error) if is_for_people(error) else "the chat template failed on them"
        raise invalid(
            param, f"These messages cannot be rendered: {reason}.", "chat_template_error"
        ) from error


def _encode(engine: ServingEngine, text: str, param: str, begin: bool = False) -> list[int]:
    """Token ids of a text; one that cannot fit the context is refused without encoding it.

    begin: with the tokenizer's own beginning of sequence, which a chat template writes itself.
    """
    if len(text) > _LONG * engine.max_model_len:
        least = engine.tokenizer.min_tokens(text)
        if least > engine.max_model_len:
            raise context_length_exceeded(param, least, engine.max_model_len, at_least=True)
    return engine.tokenizer.encode(text, add_special_tokens=begin)


def _check_token_ids(prompt: list[Any], vocab_size: int, where: str) -> None:
    for i, item in enumerate(prompt):
        at = f"{where}[{i}]"
        if not isinstance(item, int) or isinstance(item, bool):
            raise invalid(at, f"'{at}' is not a token id.", "invalid_type")
        if not 0 <= item < vocab_size:
            raise invalid(
                at,
                f"'{at}' is outside the vocabulary; token ids are 0..{vocab_size - 1}.",
            )
