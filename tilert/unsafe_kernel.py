"""Unsafe kernels: CUDA C++ text behind the signature and the launch rules of a kernel (rule O9).

The text may do what it likes with its pointers, so somebody vouches for it: it has a reason, which
`tilert.audit()` lists, and a NumPy reference, which says what it means and runs on the cpu.
"""

import ast
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tilert.checks import Checks
from tilert.errors import LaunchError, OwnershipError
from tilert.frontend.check import read_params
from tilert.frontend.source import Source, read_source
from tilert.ir import Arg, Block, Function, Param
from tilert.opt_out import opt_out
from tilert.ownership import caller
from tilert.signature import Signature

if TYPE_CHECKING:
    from tilert.codegen.generate import CudaSource
    from tilert.op import Plan

__all__ = ["UnsafeFunction", "UnsafeKernel", "cuda_source", "unsafe_kernel"]

_MAX_THREADS = 1024


class UnsafeKernel(Signature):
    """A kernel given as CUDA C++ and NumPy. Called like any kernel; see `unsafe_kernel`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        source: str,
        reference: Callable[..., Any],
        reason: str,
        threads: int,
        shared_bytes: int,
    ) -> None:
        name = getattr(fn, "__name__", "")
        shown = f"{getattr(fn, '__module__', '')}.{name}"
        self.opt_out = opt_out("unsafe kernel", shown, reason, caller(2))
        stub = read_source(fn, "tilert.unsafe_kernel")
        _check_stub(stub)
        # The text reads nothing from outside.
        super().__init__(name, read_params(fn, stub), lambda: 0)
        self.__doc__ = fn.__doc__
        self.reference = reference
        self.threads = threads
        self.shared_bytes = shared_bytes
        self.text = source
        if not callable(reference):
            raise OwnershipError(
                f"O9 opt-out: unsafe kernel '{name}' needs reference=, a NumPy function of the same"
                " arguments"
            )
        if not 1 <= threads <= _MAX_THREADS or shared_bytes < 0:
            raise LaunchError(
                f"unsafe kernel '{name}' takes 1 to {_MAX_THREADS} threads and no negative"
                f" shared_bytes, got {threads} and {shared_bytes}"
            )
        self.parameters = _entry_parameters(source, name)

    @functools.cached_property
    def plan(self) -> "Plan":
        """What launches need to know of the parameters."""
        from tilert.op import Plan

        return Plan(self.decls)

    def specialize(
        self,
        params: tuple[Param, ...],
        grid: tuple[int | None, ...],
        consts: tuple[tuple[str, Any], ...],
    ) -> "UnsafeFunction":
        """See `Kernel.specialize`.

        Raises:
            LaunchError: if a partition has a map, or the text takes other parameters.
        """
        for p in params:
            if p.place is not None:
                raise LaunchError(
                    f"O9 opt-out: unsafe kernel '{self.name}' cannot be told where the pieces of"
                    f" '{p.name}' are; partition it without pieces= and map="
                )
        return UnsafeFunction(self, params, grid, consts)

    def __repr__(self) -> str:
        return f"<tilert unsafe kernel {self.name}>"


class UnsafeFunction(Function):
    """An unsafe kernel for given array types: its CUDA C++ text, and its reference."""

    def __init__(
        self,
        kernel: UnsafeKernel,
        params: tuple[Param, ...],
        grid: tuple[int | None, ...],
        consts: tuple[tuple[str, Any], ...],
    ) -> None:
        super().__init__(kernel.name, list(params), grid, Block(), kernel.opt_out.filename)
        self.opt_out = kernel.opt_out
        self._kernel = kernel
        self._consts = consts
        expected = [self._shown(arg) for arg in self.abi()]
        if len(kernel.parameters) != len(expected):
            raise LaunchError(
                f"O9 opt-out: the source of unsafe kernel '{kernel.name}' takes"
                f" {len(kernel.parameters)} parameters, this launch passes {len(expected)}:"
                f" {', '.join(expected)}"
            )

    def _shown(self, arg: Arg) -> str:
        if arg.kind == "grid":
            return f"int grid{arg.axis}"
        p = self.params[arg.param]
        if arg.kind == "pointer":
            return f"{'' if p.kind == 'mut' else 'const '}{p.dtype.name}* {p.name}"
        if arg.kind == "index":
            return f"const int* {p.name}_map"
        kind = "int" if arg.kind == "dim" else "long long"
        return f"{kind} {p.name}_{arg.kind}{arg.axis}"

    def cuda_source(self) -> "CudaSource":
        """The text, after the constants of this launch as `tilert::name`."""
        from tilert.codegen.generate import CudaSource

        kernel = self._kernel
        known: list[str] = []
        for p in self.params:
            known += _known("int", f"{p.name}_dim", p.shape)
            known += _known("long long", f"{p.name}_stride", p.strides)
            known += _known("int", f"{p.name}_tile", p.tile or ())
        known += _known("int", "grid", self.grid)
        known += [_constant(kernel.name, name, value) for name, value in self._consts]
        head = "namespace tilert {\n" + "\n".join(known) + "\n}\n"
        text = f'{head}#line 1 "{kernel.name}"\n{kernel.text}'
        return CudaSource(text, kernel.name, kernel.threads, kernel.shared_bytes)

    def bind(
        self,
        arrays: Sequence[np.ndarray[Any, Any]],
        index_maps: Mapping[int, np.ndarray[Any, Any]],
        grid: tuple[int, ...],
    ) -> Callable[..., None]:
        """A call of the reference on the whole arrays; it can write to the `Mut`s alone."""
        named = dict(self._consts)
        given: list[np.ndarray[Any, Any]] = []
        for p, array in zip(self.params, arrays, strict=True):
            view = array.view()
            view.flags.writeable = p.kind == "mut"
            given.append(view)
            if p.indexed:
                rows = index_maps[p.position].view()
                rows.flags.writeable = False
                named[f"{p.name}_map"] = rows
        return lambda queue=None: self._run(given, named)

    def _run(self, given: list[np.ndarray[Any, Any]], named: dict[str, Any]) -> None:
        try:
            self._kernel.reference(*given, **named)
        except ValueError as error:
            if "read-only" not in str(error):
                raise
            raise OwnershipError(
                f"O1 exclusive write: the reference of unsafe kernel '{self.name}' writes to a Ref;"
                " make it a Mut"
            ) from error


def cuda_source(function: Function, arch: str, checks: Checks = Checks.NONE) -> "CudaSource":
    """CUDA C++ of a function: its own, in which nothing is checked, or generated."""
    if isinstance(function, UnsafeFunction):
        return function.cuda_source()
    from tilert.codegen import generate

    return generate(function, arch, checks)


def unsafe_kernel(
    *,
    source: str,
    reference: Callable[..., Any],
    reason: str,
    threads: int = 128,
    shared_bytes: int = 0,
) -> Callable[[Callable[..., Any]], UnsafeKernel]:
    """Make a kernel of CUDA C++ text. The decorated function gives name and parameters; its body is
    `...`.

    A launch follows the rules of all kernels: the `Mut`s are partitioned and move (O5), agree on
    the grid (O2), and share no memory with other arguments (O3). What the text does with the
    pointers nobody checks.

    Args:
        source: defines `extern "C" __global__ void NAME(...)`, with the function's name. It takes,
            for each array in order, a pointer to its first element, `const int*` to the row
            numbers if a `Mut` has an index map, an `int` for each `Dyn` extent and a `long long`
            for each stride that follows from one; then an `int` for each run-time axis of the
            grid. All other extents, strides, tiles, grid axes and constants are `tilert::y_dim0`,
            `tilert::y_stride0`, `tilert::y_tile0`, `tilert::grid0` and `tilert::NAME`. A block is
            a program: `blockIdx.x` counts them in row-major order.
        reference: NumPy function of the whole arrays in order, the `Ref`s read-only, with the
            constants by name and the row numbers of an indexed `Mut` as `NAME_map`.
        reason: why this is no ordinary kernel, and why it is right; `tilert.audit()` shows it.
        threads: threads of a block.
        shared_bytes: dynamic shared memory of a block.

    Raises:
        OwnershipError: without a reason or a reference (O9).
        KernelError: if the function's body or an annotation is wrong.
        LaunchError: if the source has no such kernel.
    """
    return lambda fn: UnsafeKernel(fn, source, reference, reason, threads, shared_bytes)


def _check_stub(stub: Source) -> None:
    for statement in stub.tree.body:
        constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not constant and not isinstance(statement, ast.Pass):
            raise stub.error(
                "O9 opt-out: the body of an unsafe kernel is its source= text; write ... here",
                statement,
            )


def _entry_parameters(source: str, name: str) -> list[str]:
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", source, flags=re.DOTALL)
    found = re.search(rf'extern\s+"C"[^;{{}}]*\b{re.escape(name)}\s*\(([^)]*)\)', text)
    if found is None or "__global__" not in found[0]:
        raise LaunchError(
            f"O9 opt-out: the source of unsafe kernel '{name}' has no"
            f' extern "C" __global__ void {name}(...)'
        )
    return [part for part in found[1].split(",") if part.strip()]


def _known(kind: str, prefix: str, values: Sequence[int | None]) -> list[str]:
    return [
        f"constexpr {kind} {prefix}{axis} = {n};" for axis, n in enumerate(values) if n is not None
    ]


def _constant(kernel: str, name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, int):
        kind, end = ("unsigned long long", "ULL") if value >= 2**63 else ("long long", "LL")
        shown = "(-9223372036854775807LL - 1)" if value == -(2**63) else f"{value}{end}"
        return f"constexpr {kind} {name} = {shown};"
    if not math.isfinite(value):
        raise LaunchError(
            f"unsafe kernel '{kernel}': '{name}' is {value}, which CUDA C++ has no constant for"
        )
    return f"constexpr double {name} = {float(value).hex()};"
