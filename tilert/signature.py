"""What can be called like a kernel: named parameters, and the values that a call gives them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tilert.errors import LaunchError
from tilert.frontend.check import MISSING, TOO_LARGE, ParamDecl, fits
from tilert.frontend.values import describe
from tilert.op import Op, make_op
from tilert.ownership import where

if TYPE_CHECKING:
    from tilert.ir import Function, Param
    from tilert.parameters import Plan

__all__ = ["Signature"]


class Signature(ABC):
    """The parameters of a kernel. Calling it with partitions, arrays and constants gives an `Op`.

    Attributes:
        name: the kernel's name.
        decls: its parameters in order.
        captured: gives the number of the state that the values outside the body make (see
            docs/language.md); specialisations of one state have read the same values, and a changed
            value gives another. Every launch asks.
    """

    def __init__(self, name: str, decls: list[ParamDecl], captured: Callable[[], int]) -> None:
        self.name = name
        self.decls = decls
        self.captured = captured
        self._places = {d.name: place for place, d in enumerate(decls)}
        self._defaults = [d.default for d in decls]
        self._consts = [(place, d) for place, d in enumerate(decls) if d.kind == "const"]
        # How many arguments need no binding if they are all by position.
        self._direct = -1 if self._consts else len(decls)

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

    @property
    @abstractmethod
    def plan(self) -> "Plan":
        """What launches need to know of the parameters."""

    @abstractmethod
    def specialize(
        self,
        params: "tuple[Param, ...]",
        grid: tuple[int | None, ...],
        consts: tuple[tuple[str, Any], ...],
    ) -> "Function":
        """What a device compiles, for given array types, grid and constants."""

    def deferred(
        self,
        params: "tuple[Param, ...]",
        grid: tuple[int | None, ...],
        consts: tuple[tuple[str, Any], ...],
    ) -> "Function":
        """As `specialize`, which may wait until it is known that a device has to compile it."""
        return self.specialize(params, grid, consts)

    def __call__(self, *args: Any, **kwargs: Any) -> Op:
        values: Sequence[Any] = args
        if kwargs or len(args) != self._direct:
            values = self.bind(args, kwargs)
        return make_op(self, values, where(2))
