"""Opening an engine for a command, with its progress on the terminal, and closing it."""

import argparse
import contextlib
import dataclasses
import os
import sys
import time
from typing import Any

import grout
from server.cli import ENGINE_OPTIONS
from server.console import say
from server.protocol import ClosableEngine

__all__ = ["CLOSE_SECONDS", "close_engine", "engine_options", "open_engine"]

CLOSE_SECONDS = 3.0
"""Longest wait for the step under way of an engine that is closed."""

HUNG = 1
"""Exit code of a process that has left a hung step behind."""


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the engine options that were given on the command line."""
    return {name: getattr(options, name) for name in ENGINE_OPTIONS if hasattr(options, name)}


def open_engine(options: argparse.Namespace, **defaults: Any) -> ClosableEngine:
    """Return a running engine, after saying on stderr what it is made of."""
    config = grout.EngineConfig(model=options.model, **{**defaults, **engine_options(options)})
    if names := getattr(options, "served_model_name", ()):
        config = dataclasses.replace(config, served_model_name=names[0])
    started = time.monotonic()
    say(f"opening {options.model or 'the default model'}")
    engine: ClosableEngine = grout.create_engine(config, progress=say)
    seconds = time.monotonic() - started
    say(f"loaded {engine.model_id} in {seconds:.1f} s")
    return engine


def close_engine(engine: ClosableEngine) -> None:
    """Close it; ends the process where a step does not end in time.

    The interpreter's own end would wait for the device, too, to free what it holds.
    """
    try:
        closed = engine.close(CLOSE_SECONDS)
    except KeyboardInterrupt:  # whoever cannot wait for that
        closed = engine.close(0)
    if closed:
        return
    hung = engine.hung
    say(f"the engine's step under way {'does not end' if hung else 'goes on'}; leaving without it")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(HUNG if hung else 0)
