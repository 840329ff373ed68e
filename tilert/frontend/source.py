"""A kernel's source text and the errors that point into it."""

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from tilert.errors import KernelError
from tilert.frontend.same_code import same_code
from tilert.ir import Loc

__all__ = ["Source", "read_source"]


@dataclass(frozen=True)
class Source:
    """The text of one function as it stands in its file.

    Attributes:
        tree: the function definition.
        first_line: line of the file at which `lines` begin (1-based).
    """

    name: str
    filename: str
    lines: tuple[str, ...]
    first_line: int
    tree: ast.FunctionDef

    def loc(self, node: ast.AST) -> Loc:
        """Where a node stands in the file."""
        line = getattr(node, "lineno", 1) + self.first_line - 1
        shown = self.lines[min(max(line - self.first_line, 0), len(self.lines) - 1)]
        # Python counts columns in bytes of UTF-8, people in characters.
        before = shown.encode()[: getattr(node, "col_offset", 0)]
        return Loc(self.filename, line, len(before.decode(errors="ignore")))

    def error(self, message: str, node: ast.AST) -> KernelError:
        """A `KernelError` that points at a node."""
        loc = self.loc(node)
        line = self.lines[min(max(loc.line - self.first_line, 0), len(self.lines) - 1)]
        return KernelError(message, self.filename, loc.line, loc.column, line)


def read_source(fn: Callable[..., Any], decorator: str) -> Source:
    """Read and parse a function.

    Args:
        decorator: what it is read for, such as "tilert.kernel".

    Raises:
        KernelError: if its source is in no file.
        TypeError: if it is no plain `def`, or its source is not what runs.
    """
    code = _checked(fn, decorator).__code__
    name = fn.__name__
    try:
        # Of the code, not of the function: `__wrapped__` leads to another function's text.
        raw, first_line = inspect.getsourcelines(code)
        filename = inspect.getsourcefile(code) or code.co_filename
    except (OSError, TypeError, IndexError):
        raise KernelError(
            f"the source of '{name}' is not at hand: {decorator} reads it from a file, and what is"
            " typed at a prompt, given to python -c or on stdin, or made by exec() is in none; put"
            " it in a .py file, and run or import that",
            code.co_filename,
            code.co_firstlineno,
            0,
            f"def {name}(...)",
        ) from None
    tree = _parsed("".join(raw))
    if tree is None or not same_code(tree, code):
        raise TypeError(
            f"the text at {filename}:{first_line} is not the source of '{name}': the file has"
            " changed since it was imported, or exec() made the function under the file's name; a"
            " kernel must be a `def` in a file"
        )
    return Source(name, filename, tuple(raw), first_line, tree)


def _checked(fn: Callable[..., Any], decorator: str) -> FunctionType:
    found: object = fn
    if isinstance(found, FunctionType):
        if found.__code__.co_name == "<lambda>":
            raise TypeError(f"{decorator} takes a plain `def` function, got a lambda")
        if inspect.iscoroutinefunction(found) or inspect.isasyncgenfunction(found):
            raise TypeError(f"{decorator} takes a plain `def` function, got an async one")
        if hasattr(found, "__wrapped__"):
            raise TypeError(
                f"'{found.__name__}' is what another decorator made; put @{decorator} next to the"
                " def"
            )
        return found
    shown = getattr(found, "__name__", None)
    kind = "a class" if isinstance(found, type) else f"a {type(found).__name__}"
    named = f" '{shown}'" if isinstance(shown, str) else ""
    raise TypeError(f"{decorator} takes a plain `def` function, got {kind}{named}")


def _parsed(text: str) -> ast.FunctionDef | None:
    # An indented function keeps its columns under an `if`; dedenting would trip over strings that
    # reach further left than the code.
    wrapped = text[:1] in (" ", "\t")
    try:
        tree: ast.stmt = ast.parse("if 1:\n" + text if wrapped else text).body[0]
    except (SyntaxError, IndexError, ValueError):
        return None
    if wrapped and isinstance(tree, ast.If):
        tree = ast.increment_lineno(tree.body[0], -1)
    return tree if isinstance(tree, ast.FunctionDef) else None
