"""A kernel's source text and the errors that point into it."""

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilert.errors import KernelError
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


def read_source(fn: Callable[..., Any]) -> Source:
    """Read and parse a function.

    Raises:
        TypeError: if its source is not available or it is not a plain `def`.
    """
    try:
        raw, first_line = inspect.getsourcelines(fn)
        filename = inspect.getsourcefile(fn) or "<unknown>"
    except (OSError, TypeError) as e:
        raise TypeError(
            f"the source of '{getattr(fn, '__name__', fn)}' is not available: {e}; "
            "a kernel must be a `def` in a file"
        ) from None
    tree = _parsed("".join(raw))
    if tree is None:
        raise TypeError(f"'{fn.__name__}' is not a plain `def` function")
    return Source(fn.__name__, filename, tuple(raw), first_line, tree)


def _parsed(text: str) -> ast.FunctionDef | None:
    # An indented function keeps its columns under an `if`; dedenting would trip over strings that
    # reach further left than the code.
    wrapped = text[:1] in (" ", "\t")
    try:
        tree: ast.stmt = ast.parse("if 1:\n" + text if wrapped else text).body[0]
    except SyntaxError:
        return None
    if wrapped and isinstance(tree, ast.If):
        tree = ast.increment_lineno(tree.body[0], -1)
    return tree if isinstance(tree, ast.FunctionDef) else None
