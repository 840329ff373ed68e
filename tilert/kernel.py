"""The kernel decorator: a Python function over tiles, specialised per shape, dtype and constant."""

import functools
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tilert.constant import constant_key
from tilert.frontend.captured import Captured, Outside, Reads
from tilert.frontend.check import check_body, read_params
from tilert.frontend.inline import Inline
from tilert.frontend.pieces import walks
from tilert.frontend.source import read_source
from tilert.frontend.trace_kernel import trace_kernel
from tilert.ir import Block, Function, Param
from tilert.signature import Signature

if TYPE_CHECKING:
    from tilert.op import Plan

__all__ = ["Kernel", "inline", "kernel"]

_KEPT_SPECIALISATIONS = 64
"""Of one kernel, for other devices: a device has what it has compiled."""


class Kernel(Signature):
    """A decorated kernel. Calling it with partitions, arrays and constants gives a lazy `Op`.

    Attributes:
        name: the function's name.
        decls: its parameters in order.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.source = read_source(fn, "tilert.kernel")
        self._captured = Captured()
        super().__init__(fn.__name__, read_params(fn, self.source), self._captured.number)
        self.__doc__ = fn.__doc__
        self._fn = fn
        self._cache: OrderedDict[Any, tuple[Function, Reads]] = OrderedDict()
        self._lock = threading.Lock()
        check_body(self.source, self.decls, Outside(fn, Reads()))

    @functools.cached_property
    def plan(self) -> "Plan":
        """What launches need to know of the parameters."""
        from tilert.op import Plan

        return Plan(self.decls, walks(self.source, self.decls))

    def specialize(
        self,
        params: tuple[Param, ...],
        grid: tuple[int | None, ...],
        consts: tuple[tuple[str, Any], ...],
    ) -> Function:
        """The typed IR for given array types, grid and constants; equal arguments mostly share it.

        Args:
            params: the array parameters in order.
            grid: extents of the grid axes, None where known only at launch.
            consts: name and value of each Const.

        Raises:
            KernelError: where the body does not fit these types.
        """
        return self.traced(params, grid, consts)[0]

    def traced(
        self,
        params: tuple[Param, ...],
        grid: tuple[int | None, ...],
        consts: tuple[tuple[str, Any], ...],
    ) -> tuple[Function, Reads]:
        """As `specialize`, and what the trace has read outside of the body."""
        with self._lock:
            state = self._captured.state()
            key = (params, grid, constant_key(consts), state.number)
            found = self._cache.get(key)
            if found is None:
                reads = Reads()
                outside = Outside(self._fn, reads)
                function = trace_kernel(self.source, outside, params, grid, dict(consts))
                state.reads.add(reads)
                found = self._cache[key] = function, reads
                if len(self._cache) > _KEPT_SPECIALISATIONS:
                    self._cache.popitem(last=False)
            else:
                self._cache.move_to_end(key)
        return found

    def deferred(
        self,
        params: tuple[Param, ...],
        grid: tuple[int | None, ...],
        consts: tuple[tuple[str, Any], ...],
    ) -> "DeferredFunction":
        """See `Signature`."""
        return DeferredFunction(self, params, grid, consts)

    def take_for_read(self, reads: Reads) -> None:
        """Have values that were read in another process, and are the same here, count as read."""
        with self._lock:
            self._captured.state().reads.add(reads)

    @functools.cached_property
    def origin(self) -> str:
        """A hash of module, name in it, and source text."""
        parts = self._fn.__module__, self._fn.__qualname__, *self.source.lines
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def __repr__(self) -> str:
        return f"<tilert kernel {self.name}>"


class DeferredFunction(Function):
    """A specialisation that is traced when somebody looks at its body.

    Attributes:
        identity: equal for equal specialisations of the same source, in any process.
        reads: what the trace has read outside of the kernel's body.
    """

    def __init__(
        self,
        kernel: Kernel,
        params: tuple[Param, ...],
        grid: tuple[int | None, ...],
        consts: tuple[tuple[str, Any], ...],
    ) -> None:
        self._kernel = kernel
        self._consts = consts
        self._traced: tuple[Function, Reads] | None = None
        self.name, self.params, self.grid = kernel.name, list(params), grid
        self.filename, self.options = kernel.source.filename, {}

    def _trace(self) -> tuple[Function, Reads]:
        if self._traced is None:
            self._traced = self._kernel.traced(tuple(self.params), self.grid, self._consts)
        return self._traced

    @property
    def body(self) -> Block:  # type: ignore[override]
        """See `Function`.

        Raises:
            KernelError: where the body does not fit the types.
        """
        return self._trace()[0].body

    @property
    def reads(self) -> Reads:
        """See the class."""
        return self._trace()[1]

    @property
    def identity(self) -> str:
        """See the class."""
        consts = constant_key(self._consts)
        return repr((self._kernel.origin, self.params, self.grid, consts))

    def take_for_read(self, reads: Reads) -> None:
        """See `Kernel`."""
        self._kernel.take_for_read(reads)


def kernel(fn: Callable[..., Any]) -> Kernel:
    """Make a kernel of a function over tiles.

    Raises:
        TypeError: if it is no plain `def`.
        KernelError: if its source is not at hand, or breaks a rule that no argument could mend.
    """
    return Kernel(fn)


def inline(fn: Callable[..., Any]) -> Inline:
    """Make a function that kernels may call; its body is inlined at each call.

    Raises:
        TypeError: if it is no plain `def`.
        KernelError: if its source is not at hand.
    """
    return Inline(fn)
