"""One specialisation of a kernel: parameters to proxies, body to IR, dead code removed."""

from typing import Any

from tilert.dead_code import remove_dead
from tilert.frontend.builder import Builder
from tilert.frontend.captured import Outside
from tilert.frontend.pieces import walks
from tilert.frontend.source import Source
from tilert.frontend.trace import Tracer
from tilert.frontend.values import MutArg, RefArg
from tilert.ir import Function, Param

__all__ = ["trace_kernel"]


def trace_kernel(
    source: Source,
    outside: Outside,
    params: tuple[Param, ...],
    grid: tuple[int | None, ...],
    consts: dict[str, Any],
) -> Function:
    """Trace a kernel for given parameter types.

    Raises:
        KernelError: at the first expression that does not fit.
    """
    builder = Builder()
    builder.between_pieces = walks(source, params)
    scope: dict[str, Any] = dict(consts)
    for p in params:
        scope[p.name] = MutArg(p) if p.kind == "mut" else RefArg(p)
    try:
        Tracer(source, outside, builder, scope).run()
    except RecursionError:
        raise source.error("expressions are nested too deeply", source.tree) from None
    function = Function(source.name, list(params), grid, builder.block, source.filename)
    remove_dead(function.body)
    return function
