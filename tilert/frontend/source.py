"""A kernel's source text and the errors that point into it."""

import ast
import inspect
import textwrap
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
        indent: columns removed from every line before parsing.
    """

    name: str
    filename: str
    lines: tuple[str, ...]
    first_line: int
    indent: int
    tree: ast.FunctionDef

    def loc(self, node: ast.AST) -> Loc:
        """Where a node stands in the file."""
        line = getattr(node, "lineno", 1) + self.first_line - 1
        return Loc(self.filename, line, getattr(node, "col_offset", 0) + self.indent)

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
    text = textwrap.dedent("".join(raw))
    indent = len(raw[0]) - len(raw[0].lstrip())
    tree = ast.parse(text).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise TypeError(f"'{fn.__name__}' is not a plain `def` function")
    return Source(fn.__name__, filename, tuple(raw), first_line, indent, tree)
