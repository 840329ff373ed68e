"""The kernel decorator: a Python function over tiles, specialised per shape, dtype and constant."""

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tilert.constant import constant_key
from tilert.errors import LaunchError
from tilert.frontend.captured import Captured, Outside, Reads
from tilert.frontend.check import MISSING, TOO_LARGE, ParamDecl, check_body, fits, read_params
from tilert.frontend.inline import Inline
from tilert.frontend.source import read_source
from tilert.frontend.trace_kernel import trace_kernel
from tilert.frontend.values import describe
from tilert.ir import Function, Param

if TYPE_CHECKING:
    from tilert.op import Op, Plan

__all__ = ["Kernel", "inline", "kernel"]


class Kernel:
    """A decorated kernel. Calling it with partitions, arrays and constants gives a lazy `Op`.

    Attributes:
        name: the function's name.
        decls: its parameters in order.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.source = read_source(fn, "tilert.kernel")
        self.name = fn.__name__
        self.__doc__ = fn.__doc__
        self.decls: list[ParamDecl] = read_params(fn, self.source)
        self._fn = fn
        self._captured = Captured()
        self._cache: dict[Any, Function] = {}
        self._lock = threading.Lock()
        self._places = {d.name: place for place, d in enumerate(self.decls)}
        self._defaults = [d.default for d in self.decls]
        self._consts = [(place, d) for place, d in enumerate(self.decls) if d.kind == "const"]
        check_body(self.source, self.decls, Outside(fn, Reads()))

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Values of the parameters in order.

        Raises:
            LaunchError: for missing, unknown or surplus arguments, or a Const of another type.
        """
        given = len(args)
        if given > len(self.decls):
            raise LaunchError(
                f"kernel '{self.name}' takes {len(self.decls)} arguments, {given} are given"
            )
        values: list[Any] = [*args, *self._defaults[given:]]
        known = True
        for name, named in kwargs.items():
            place = self._places.get(name, -1)
            if place >= given:
                values[place] = named
            elif place >= 0:
                raise LaunchError(f"kernel '{self.name}': argument '{name}' is given twice")
            else:
                known = False
        if not known or len(kwargs) + given < len(values):
            self._check_given(values, kwargs)
        for place, d in self._consts:
            value: Any = values[place]
            kind = type(value)
            if kind is not d.const_type or (kind is int and not -(2**63) <= value < 2**64):
                values[place] = self._constant(d, value)
        return values

    def _check_given(self, values: list[Any], kwargs: dict[str, Any]) -> None:
        for d, value in zip(self.decls, values, strict=True):
            if value is MISSING:
                raise LaunchError(f"kernel '{self.name}': argument '{d.name}' is missing")
        unknown = sorted(kwargs.keys() - self._places.keys())
        if unknown:
            raise LaunchError(
                f"kernel '{self.name}' has no parameter {', '.join(map(repr, unknown))}"
            )

    def _constant(self, d: ParamDecl, value: Any) -> Any:
        if type(value) is int and d.const_type is not bool:
            if not fits(value, d.const_type):
                raise LaunchError(f"kernel '{self.name}': '{d.name}' {TOO_LARGE[d.const_type]}")
            return d.const_type(value)
        if isinstance(value, int) and d.const_type is float and not isinstance(value, bool):
            return float(value)
        if type(value) is not d.const_type:
            raise LaunchError(
                f"kernel '{self.name}': '{d.name}' is a compile-time {d.const_type.__name__}, "
                f"got {describe(value)}"
            )
        return value

    @functools.cached_property
    def plan(self) -> "Plan":
        """What launches need to know of the parameters."""
        from tilert.op import Plan

        return Plan(self.decls)

    def captured(self) -> int:
        """Number of the state that the values outside the body make (see docs/language.md).

        Specialisations of one state have read the same values; a changed value gives another.
        """
        return self._captured.number()

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
        with self._lock:
            state = self._captured.state()
            key = (params, grid, constant_key(consts), state.number)
            function = self._cache.get(key)
            if function is None:
                reads = Reads()
                outside = Outside(self._fn, reads)
                function = trace_kernel(self.source, outside, params, grid, dict(consts))
                state.reads.add(reads)
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
        TypeError: if it is no plain `def`, or its source is not at hand.
        KernelError: if the source breaks a rule that no argument could mend.
    """
    return Kernel(fn)


def inline(fn: Callable[..., Any]) -> Inline:
    """Make a function that kernels may call; its body is inlined at each call.

    Raises:
        TypeError: if it is no plain `def`, or its source is not at hand.
    """
    return Inline(fn)
