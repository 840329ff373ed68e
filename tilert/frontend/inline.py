"""Helper functions that kernels inline."""

import inspect
from collections.abc import Callable
from typing import Any

from tilert.frontend.source import Source, read_source

__all__ = ["Inline", "names_of"]


def names_of(fn: Callable[..., Any]) -> dict[str, Any]:
    """The module's names as a function sees them, its closure included."""
    names = dict(fn.__globals__)
    code, cells = fn.__code__, fn.__closure__ or ()
    for name, cell in zip(code.co_freevars, cells, strict=True):
        try:
            names[name] = cell.cell_contents
        except ValueError:
            continue
    return names


class Inline:
    """A function over tiles, made by `tilert.inline`, that kernels call by inlining it."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.source: Source = read_source(fn)
        self._fn = fn
        self._signature = inspect.signature(fn)
        self.__doc__ = fn.__doc__

    def names(self) -> dict[str, Any]:
        """Names that its body may use besides its parameters."""
        return names_of(self._fn)

    def bind(self, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Parameter values of a call.

        Raises:
            TypeError: if they do not fit the signature.
        """
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{self.source.name}() is a tilert.inline function: call it in a kernel")
