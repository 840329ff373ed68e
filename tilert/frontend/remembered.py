"""What a trace has read outside a kernel's body, as text that outlives the process."""

import hashlib
import sys
from typing import Any

from tilert import language
from tilert.dtypes import DType
from tilert.frontend.captured import MISSING, Reads
from tilert.frontend.inline import Inline
from tilert.language import Builtin

__all__ = ["describe", "recall"]

Remembered = list[list[str]]
"""Module, name, and what tells the value of the name from others."""


def describe(reads: Reads) -> Remembered | None:
    """The reads as text, None where they hold what text does not tell apart: closures, objects."""
    if reads.attributes:
        return None
    found: Remembered = []
    for namespace, name, value in reads.names:
        module, told = _module(namespace), _told(value)
        if module is None or told is None:
            return None
        found.append([module, name, told])
    return found


def recall(found: Remembered) -> Reads | None:
    """Reads of the same names, None where one has another value now, or is gone."""
    reads = Reads()
    for module, name, told in found:
        namespace = getattr(sys.modules.get(module), "__dict__", None)
        if namespace is None or _told(reads.name(namespace, name)) != told:
            return None
    return reads


def _module(namespace: dict[str, Any]) -> str | None:
    name = namespace.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    return name if module is not None and module.__dict__ is namespace else None


def _told(value: Any) -> str | None:
    """What is the same for two values of two processes only if a trace takes them for the same.

    What the package itself defines goes by name: who compares takes its source into account.
    """
    if value is MISSING:
        return "missing"
    if type(value) in (bool, int, float, str, type(None)):
        return f"{type(value).__name__} {value!r}"
    if type(value) is DType:
        return f"dtype {value.name}"
    if type(value) is Builtin:
        name = next((n for n, word in vars(language).items() if word is value), None)
        return None if name is None else f"word {name}"
    if type(value) is Inline:
        text = "".join(value.source.lines)
        return f"inline {hashlib.sha256(text.encode()).hexdigest()}"
    if isinstance(value, type) and value.__module__ == "builtins":
        return f"type {value.__name__}"
    return None
