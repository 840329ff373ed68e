"""POST /tokenize and /detokenize, as vLLM has them."""

import asyncio
from functools import partial
from typing import Any

from fastapi import APIRouter, Request

from server.body import read_json
from server.errors import invalid
from server.logprobs import token_text
from server.messages import flatten_messages
from server.prompts import chat_prompt
from server.schemas import DetokenizeRequest, TokenizeRequest, validated
from server.served import Served
from server.tool_choice import tool_use

__all__ = ["routes"]


def routes(served: Served) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        body, messages = await read_json(request, served.settings, _request)
        served.check_name(body.model)
        tokenizer = served.engine.tokenizer
        ids = await _ids(served, body, messages)
        out: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": served.engine.max_model_len,
            "tokens": ids,
        }
        if body.return_token_strs:
            out["token_strs"] = [token_text(tokenizer, token) for token in ids]
        return out

    @router.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, str]:
        body = await read_json(
            request, served.settings, partial(validated, DetokenizeRequest, neutral={})
        )
        served.check_name(body.model)
        tokenizer = served.engine.tokenizer
        for i, token in enumerate(body.tokens):
            if token >= tokenizer.vocab_size:
                raise invalid(
                    f"tokens[{i}]",
                    f"'tokens[{i}]' is outside the vocabulary; token ids are "
                    f"0..{tokenizer.vocab_size - 1}.",
                )
        return {"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)}

    return router


def _request(raw: dict[str, Any]) -> tuple[TokenizeRequest, list[dict[str, Any]] | None]:
    body = validated(TokenizeRequest, raw, neutral={})
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "Send either 'prompt' or 'messages'.")
    return body, None if body.messages is None else flatten_messages(body.messages)


async def _ids(
    served: Served, body: TokenizeRequest, messages: list[dict[str, Any]] | None
) -> list[int]:
    if messages is None:
        if body.tools or body.chat_template_kwargs or body.add_generation_prompt is not None:
            raise invalid("messages", "Only 'messages' are rendered by a chat template.")
        return await asyncio.to_thread(
            served.engine.tokenizer.encode,
            body.prompt or "",
            add_special_tokens=body.add_special_tokens is not False,
        )
    if body.add_special_tokens:
        raise invalid("add_special_tokens", "A chat template writes its special tokens itself.")
    prompt = await chat_prompt(
        served.engine,
        messages,
        tool_use(body.tools, None, None).for_template(),
        body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt is not False,
    )
    return prompt.token_ids
