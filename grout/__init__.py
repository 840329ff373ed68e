"""The decode engine: requests, KV pages, scheduling, step graphs."""

from grout.config import EngineConfig
from grout.engine import Engine
from grout.errors import (
    BadLogits,
    ConfigError,
    EngineClosed,
    EngineDead,
    EngineHung,
    GrammarError,
    GroutError,
    InvalidPrompt,
    InvalidSamplingParams,
    OutOfMemory,
    PageError,
    PromptTooLong,
    QueueFull,
    RequestAborted,
    RequestError,
    RequestTimeout,
    StepFailed,
)
from grout.grammar import Grammar
from grout.loading import create_engine
from grout.request import Delta, FinishReason, SamplingParams, TokenLogprob

__all__ = [
    "BadLogits",
    "ConfigError",
    "Delta",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineDead",
    "EngineHung",
    "FinishReason",
    "Grammar",
    "GrammarError",
    "GroutError",
    "InvalidPrompt",
    "InvalidSamplingParams",
    "OutOfMemory",
    "PageError",
    "PromptTooLong",
    "QueueFull",
    "RequestAborted",
    "RequestError",
    "RequestTimeout",
    "SamplingParams",
    "StepFailed",
    "TokenLogprob",
    "create_engine",
]
