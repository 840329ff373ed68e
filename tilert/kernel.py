"""The kernel decorator: a Python function over tiles, specialised per shape, dtype and constant."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tilert.errors import LaunchError
from tilert.frontend.check import MISSING, ParamDecl, check_body, read_params
from tilert.frontend.inline import Inline, names_of
from tilert.frontend.source import read_source
from tilert.frontend.trace_kernel import trace_kernel
from tilert.ir import Function, Param

if TYPE_CHECKING:
    from tilert.op import Op

__all__ = ["Kernel", "inline", "kernel"]


class Kernel:
    """A decorated kernel. Calling it with partitions, arrays and constants gives a lazy `Op`.

    Attributes:
        name: the function's name.
        decls: its parameters in order.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.name = fn.__name__
        self.__doc__ = fn.__doc__
        self.source = read_source(fn)
        self.decls: list[ParamDecl] = read_params(fn, self.source)
        self._fn = fn
        self._cache: dict[Any, Function] = {}
        self._lock = threading.Lock()
        check_body(self.source, self.decls, names_of(fn))

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Values of the parameters in order.

        Raises:
            LaunchError: for missing, unknown or surplus arguments, or a Const of another type.
        """
        if len(args) > len(self.decls):
            raise LaunchError(
                f"kernel '{self.name}' takes {len(self.decls)} arguments, {len(args)} are given"
            )
        given = dict(zip((d.name for d in self.decls), args, strict=False))
        for name, value in kwargs.items():
            if name in given:
                raise LaunchError(f"kernel '{self.name}': argument '{name}' is given twice")
            given[name] = value
        values: list[Any] = []
        for d in self.decls:
            value = given.pop(d.name, d.default)
            if value is MISSING:
                raise LaunchError(f"kernel '{self.name}': argument '{d.name}' is missing")
            values.append(self._constant(d, value) if d.kind == "const" else value)
        if given:
            raise LaunchError(
                f"kernel '{self.name}' has no parameter {', '.join(map(repr, sorted(given)))}"
            )
        return values

    def _constant(self, d: ParamDecl, value: Any) -> Any:
        if d.const_type is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if type(value) is not d.const_type:
            raise LaunchError(
                f"kernel '{self.name}': '{d.name}' is a compile-time {d.const_type.__name__}, "
                f"got {type(value).__name__} {value!r}"
            )
        return value

    def specialize(
        self,
        params: tuple[Param, ...],
        grid: tuple[int | None, ...],
        consts: tuple[tuple[str, Any], ...],
    ) -> Function:
        """The typed IR for given array types, grid and constants; equal arguments share it.

        Args:
            params: the array parameters in order.
            grid: extents of the grid axes, None where known only at launch.
            consts: name and value of each Const.

        Raises:
            KernelError: where the body does not fit these types.
        """
        key = (params, grid, consts)
        with self._lock:
            function = self._cache.get(key)
            if function is None:
                names = names_of(self._fn)
                function = trace_kernel(self.source, names, params, grid, dict(consts))
                self._cache[key] = function
        return function

    def __call__(self, *args: Any, **kwargs: Any) -> "Op":
        from tilert.op import make_op

        return make_op(self, self.bind(args, kwargs))

    def __repr__(self) -> str:
        return f"<tilert kernel {self.name}>"


def kernel(fn: Callable[..., Any]) -> Kernel:
    """Make a kernel of a function over tiles.

    Raises:
        KernelError: if the source breaks a rule that no argument could mend.
    """
    return Kernel(fn)


def inline(fn: Callable[..., Any]) -> Inline:
    """Make a function that kernels may call; its body is inlined at each call."""
    return Inline(fn)
