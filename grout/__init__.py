"""The decode engine: requests, KV pages, scheduling, step graphs."""

from grout.config import EngineConfig
from grout.engine import Engine
from grout.errors import (
    ConfigError,
    EngineClosed,
    EngineDead,
    GroutError,
    InvalidPrompt,
    InvalidSamplingParams,
    OutOfMemory,
    PageError,
    PromptTooLong,
    RequestAborted,
    RequestError,
    StepFailed,
)
from grout.loading import create_engine
from grout.request import Delta, FinishReason, SamplingParams

__all__ = [
    "ConfigError",
    "Delta",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineDead",
    "FinishReason",
    "GroutError",
    "InvalidPrompt",
    "InvalidSamplingParams",
    "OutOfMemory",
    "PageError",
    "PromptTooLong",
    "RequestAborted",
    "RequestError",
    "SamplingParams",
    "StepFailed",
    "create_engine",
]
