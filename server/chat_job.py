"""A chat request made ready to run: what /v1/chat/completions and /v1/responses share."""

import asyncio
from collections.abc import Sequence
from typing import Any

from grout.grammar import Grammar
from server.choices import ChatChoices
from server.constraint import constraint
from server.errors import invalid
from server.generation import Generations
from server.prompts import Prompt, chat_prompt, template_variables, token_budget
from server.sampling import of_choice, sampling_params
from server.schemas import ChatRequest
from server.served import Served
from server.structured import Structure, structure
from server.tool_choice import ToolUse, tool_use

__all__ = ["begin_chat"]


async def begin_chat(
    served: Served,
    request: ChatRequest,
    messages: Sequence[dict[str, Any]],
    param: str = "messages",
    format_param: str = "response_format",
    tool_param: str = "tools[{}].function",
) -> ChatChoices:
    """Return the answers in the making; raises ApiError for what is refused.

    messages: flat ones, which `request.messages` need not hold. param, format_param, tool_param:
    what the client calls them, the answer's format, and what says of a tool by its number.
    """
    engine = served.engine
    tools = tool_use(request.tools, request.tool_choice, request.parallel_tool_calls)
    variables = template_variables(
        request.chat_template_kwargs, request.enable_thinking, request.reasoning_effort
    )
    shape = await asyncio.to_thread(structure, request, format_param)
    # OpenAI's own format may come with a forced call, and is of the content, which that has not.
    if shape is not None and tools.mode == "required" and not shape.param.startswith(format_param):
        raise invalid(
            shape.param,
            f"'{shape.param}' and a 'tool_choice' that forces a call cannot be asked for together.",
        )
    shown = await asyncio.to_thread(tools.for_template) if tools.shown else None
    prompt = await chat_prompt(engine, messages, shown, variables, param=param)
    budget = token_budget(prompt, request.token_limit, engine.max_model_len)
    grammar = await _grammar(served, shape, tools, prompt, tool_param)
    params = sampling_params(request, engine, budget, grammar)
    wanted = [(prompt, of_choice(params, i)) for i in range(request.n or 1)]
    return ChatChoices(
        Generations.begin(engine, wanted, served.metrics),
        tools,
        engine.tokenizer,
        logprobs=params.logprobs is not None,
    )


async def _grammar(
    served: Served, shape: Structure | None, tools: ToolUse, prompt: Prompt, tool_param: str
) -> Grammar | None:
    if shape is None and not tools.guided:
        return None
    # In a thread: compiling a large schema takes a while.
    return await asyncio.to_thread(
        constraint, shape, tools, prompt.thinking, served.engine.tokenizer, tool_param
    )
