"""Helper functions that kernels inline."""

import inspect
from collections.abc import Callable
from typing import Any

from tilert.frontend.captured import Outside, Reads
from tilert.frontend.source import Source, read_source

__all__ = ["Inline"]


class Inline:
    """A function over tiles, made by `tilert.inline`, that kernels call by inlining it."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.source: Source = read_source(fn, "tilert.inline")
        self._fn = fn
        self._signature = inspect.signature(fn)
        self.__doc__ = fn.__doc__

    def outside(self, reads: Reads) -> Outside:
        """Names that its body may use besides its parameters."""
        return Outside(self._fn, reads)

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
