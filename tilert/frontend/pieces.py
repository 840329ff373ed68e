"""`for piece in y.pieces():` the loop of a persistent kernel over the pieces that a program owns.

Piece numbers in row-major order go to programs in turn: program p of n has pieces p, p + n, p + 2n
and so on. No two programs have a piece in common, since what is left on division by n tells them
apart, and every piece has a program (rule O2). What a body computes may not depend on how the
pieces were shared out, so nothing is carried from one to the next.
"""

import ast
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from tilert.frontend.source import Source
from tilert.frontend.values import MutArg, describe
from tilert.ir import Block
from tilert.ops import TypeRuleError, make

if TYPE_CHECKING:
    from tilert.frontend.builder import Builder
    from tilert.frontend.trace import Tracer

__all__ = ["check_held", "check_pieces", "trace_pieces", "walks"]


class _Named(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...


def _walked(node: ast.AST, muts: set[str]) -> bool:
    """Whether it is `y.pieces(...)` of a Mut."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "pieces"
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in muts
    )


def _muts(params: Sequence[_Named]) -> set[str]:
    return {p.name for p in params if p.kind == "mut"}


def walks(source: Source, params: Sequence[_Named]) -> bool:
    """Whether a kernel walks the pieces of its Muts, instead of having one of each."""
    muts = _muts(params)
    return any(isinstance(s, ast.For) and _walked(s.iter, muts) for s in source.tree.body)


def check_pieces(source: Source, params: Sequence[_Named]) -> None:
    """What of a loop over pieces no shape could make right.

    Raises:
        KernelError: if `pieces()` stands anywhere but in a for statement of the kernel's own body.
    """
    muts = _muts(params)
    loops = [s for s in source.tree.body if isinstance(s, ast.For) and _walked(s.iter, muts)]
    heads = {id(loop.iter) for loop in loops}
    for node in ast.walk(source.tree):
        if _walked(node, muts) and id(node) not in heads:
            raise source.error(
                "O2 disjoint pieces: pieces() stands only in a for statement of the kernel's own"
                " body, not inside another loop or an if",
                node,
            )
    for loop in loops:
        if not isinstance(loop.target, ast.Name):
            raise source.error("a loop over pieces has one variable, the piece", loop.target)
        if isinstance(loop.iter, ast.Call) and (loop.iter.args or loop.iter.keywords):
            raise source.error("expected y.pieces() without arguments", loop.iter)


def check_held(b: "Builder", mut: MutArg) -> None:
    """Rule O2 in a kernel that walks its pieces: outside the loop a program has none.

    Raises:
        TypeRuleError: there.
    """
    if b.between_pieces:
        name = mut.param.name
        raise TypeRuleError(
            f"O2 disjoint pieces: outside `for piece in {name}.pieces()` a program of this kernel"
            f" holds no piece of '{name}'; use it inside the loop"
        )


def trace_pieces(tracer: "Tracer", node: ast.For, mut: MutArg) -> None:
    """Trace the loop's body once, for any piece."""
    b = tracer.builder
    if not b.between_pieces or b.block is not tracer.outermost:
        raise tracer.source.error(
            "O2 disjoint pieces: pieces() stands only in a for statement of the kernel's own body,"
            " right after the name of a Mut",
            node.iter,
        )
    outer = dict(tracer.locals)
    saved, b.block = b.block, Block()
    b.between_pieces = False
    try:
        tracer.assign(node.target, mut)
        tracer.statements(node.body)
    finally:
        body, b.block, b.between_pieces = b.block, saved, True
    inner, tracer.locals = tracer.locals, outer
    for name, value in outer.items():
        if inner.get(name) is not value:
            raise tracer.source.error(
                f"O2 disjoint pieces: '{name}' is {describe(value)} before the loop over pieces and"
                " changes in it; nothing is carried from piece to piece, so give it another name"
                " in the loop",
                node,
            )
    body.ops.append(make("yield", []))
    op = make("pieces", [])
    op.regions = [body]
    b.append(op)
    tracer.lost.update(dict.fromkeys(set(inner) - set(outer), "is set only inside a loop"))
