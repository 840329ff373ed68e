"""What is checked when a kernel is decorated, before any shape or dtype is known."""

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

from tilert.annotations import Accumulate, Const, Dyn, Mut, Ref
from tilert.errors import KernelError
from tilert.frontend.captured import MISSING as NOTHING
from tilert.frontend.captured import Outside
from tilert.frontend.pieces import check_pieces
from tilert.frontend.source import Source
from tilert.frontend.stores import stores

__all__ = ["MISSING", "TOO_LARGE", "ParamDecl", "check_body", "fits", "read_params"]

MISSING: Any = inspect.Parameter.empty
_FORBIDDEN: dict[type[ast.AST], str] = {
    ast.While: "while is not available in kernels; use `for i in range(...)`",
    ast.Break: "break is not available in kernels; bound the loop instead",
    ast.Continue: "continue is not available in kernels; use where() or an if",
    ast.Try: "try is not available in kernels",
    ast.With: "with is not available in kernels",
    ast.Lambda: "lambda is not available in kernels; use a @tilert.inline function",
    ast.FunctionDef: "a nested function is not available in kernels; use @tilert.inline",
    ast.ClassDef: "class is not available in kernels",
    ast.ListComp: "a comprehension is not available in kernels",
    ast.GeneratorExp: "a comprehension is not available in kernels",
    ast.Global: "global is not available in kernels",
    ast.Nonlocal: "nonlocal is not available in kernels",
    ast.Import: "import is not available in kernels; import at the top of the module",
    ast.ImportFrom: "import is not available in kernels; import at the top of the module",
    ast.Delete: "del is not available in kernels",
    ast.Raise: "raise is not available in kernels",
    ast.Await: "await is not available in kernels",
    ast.Yield: "yield is not available in kernels",
    ast.NamedExpr: "`:=` is not available in kernels",
}


@dataclass(frozen=True)
class ParamDecl:
    """One declared parameter.

    Attributes:
        kind: "mut", "ref" or "const".
        dyn: axes whose extent is run time.
        const_type: int, float or bool for a Const.
        default: value of a Const, or MISSING.
        accumulate: "add", "max" or "min" for a Mut that is only updated.
    """

    name: str
    kind: str
    dyn: frozenset[int] = field(default_factory=frozenset)
    const_type: type = int
    default: Any = MISSING
    accumulate: str = ""


def read_params(fn: Callable[..., Any], source: Source) -> list[ParamDecl]:
    """The parameters of a kernel from its annotations.

    Raises:
        KernelError: at a parameter without a usable annotation.
    """
    decls: list[ParamDecl] = []
    nodes = {a.arg: a for a in source.tree.args.args + source.tree.args.kwonlyargs}
    try:
        signature = inspect.signature(fn, eval_str=True)
    except Exception as e:
        # An annotation in quotes may be any expression, and fail in any way.
        reason = str(e) or type(e).__name__
        raise source.error(f"an annotation cannot be read: {reason}", source.tree) from None
    for p in signature.parameters.values():
        node = nodes.get(p.name, source.tree)
        if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            raise source.error("kernels take plain parameters: no *, ** or /", source.tree)
        decls.append(_decl(p, source, node))
    if not any(d.kind == "mut" for d in decls):
        raise source.error(
            "a kernel needs at least one Mut parameter: its partition gives the grid", source.tree
        )
    return decls


def _decl(p: inspect.Parameter, source: Source, node: ast.AST) -> ParamDecl:
    annotation = p.annotation
    origin = get_origin(annotation) or annotation
    args = get_args(annotation)
    if origin is Mut or origin is Ref:
        kind = "mut" if origin is Mut else "ref"
        modes = [MODES[a] for a in args if any(a is mode for mode in MODES)]
        args = tuple([a for a in args if not any(a is mode for mode in MODES)])
        if any(a is not Dyn for a in args) or len(modes) > 1 or (modes and kind == "ref"):
            also = " and one of Accumulate.Add, .Max and .Min" if kind == "mut" else ""
            raise source.error(f"{origin.__name__}[...] takes only Dyn{also}", node)
        if p.default is not MISSING:
            raise source.error(f"array parameter '{p.name}' takes no default", node)
        dyn = frozenset(range(len(args)))
        return ParamDecl(p.name, kind, dyn, accumulate=modes[0] if modes else "")
    if origin is Const and args and any(args[0] is t for t in (int, float, bool)):
        given = type(p.default)
        if p.default is not MISSING and given is not args[0] and (given, args[0]) != (int, float):
            raise source.error(
                f"the default of '{p.name}' must be of type {args[0].__name__}, got {p.default!r}",
                node,
            )
        if given is int and not fits(p.default, args[0]):
            raise source.error(f"the default of '{p.name}' {TOO_LARGE[args[0]]}", node)
        return ParamDecl(p.name, "const", const_type=args[0], default=p.default)
    raise source.error(
        f"parameter '{p.name}' must be annotated Mut, Ref, Const[int], Const[float] or Const[bool]",
        node,
    )


MODES: dict[type, str] = {Accumulate.Add: "add", Accumulate.Max: "max", Accumulate.Min: "min"}

TOO_LARGE = {
    int: "must fit in 64 bits",
    float: "is an int too large for a float",
}


def fits(value: int, const_type: type) -> bool:
    """Whether an int may be the value of a `Const[int]` or a `Const[float]`."""
    if const_type is int:
        return -(2**63) <= value < 2**64
    try:
        float(value)
    except OverflowError:
        return False
    return True


def check_body(source: Source, decls: list[ParamDecl], outside: Outside) -> None:
    """Refuse what no shape or dtype could make right: rules O1 and O2, words, unknown names.

    Raises:
        KernelError: at the first offence.
    """
    kinds = {d.name: d.kind for d in decls}
    known = set(kinds)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            known.add(node.id)
    for statement in source.tree.body:
        for node in ast.walk(statement):
            message = _FORBIDDEN.get(type(node))
            if message is not None:
                raise source.error(message, node)
            if isinstance(node, ast.Return) and node.value is not None:
                raise source.error("a kernel returns nothing; store results in a Mut", node)
            if isinstance(node, ast.Return):
                raise source.error("return is not available in kernels; use an if", node)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                if node.id not in known and outside.get(node.id) is NOTHING:
                    raise source.error(f"'{node.id}' is not defined", node)
            if isinstance(node, ast.Subscript):
                _check_subscript(source, node, kinds)
            if isinstance(node, ast.Call):
                _check_call(source, node, kinds)
    check_pieces(source, decls)
    for d in decls:
        if d.kind == "mut" and not stores(source.tree, outside, d.name):
            raise _never_stored(source, d)


def _never_stored(source: Source, d: ParamDecl) -> KernelError:
    word = d.accumulate or "store"
    verb = "updated" if d.accumulate else "stored to"
    never = f"O1 exclusive write: Mut '{d.name}' is never {verb}"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == d.name:
            return source.error(
                f"{never}: an assignment only gives the name to something else; call"
                f" {d.name}.{word}(tile)",
                node,
            )
    return source.error(f"{never}; make it a Ref or call {d.name}.{word}(tile)", source.tree)


def _check_subscript(source: Source, node: ast.Subscript, kinds: dict[str, str]) -> None:
    if not isinstance(node.value, ast.Name):
        if isinstance(node.ctx, ast.Store):
            raise source.error(
                "O1 exclusive write: kernels write memory only through y.store(tile) of a Mut",
                node,
            )
        return
    name = node.value.id
    kind = kinds.get(name)
    if isinstance(node.ctx, ast.Store):
        if kind == "ref":
            raise source.error(
                f"O1 exclusive write: '{name}' is a Ref and cannot be written; make it a Mut and "
                f"call {name}.store(tile)",
                node,
            )
        raise source.error(
            f"O2 disjoint pieces: a store takes no index; program i writes piece i: call "
            f"{name}.store(tile)",
            node,
        )
    if kind == "mut":
        raise source.error(
            f"O2 disjoint pieces: a program reaches only its own piece of the Mut '{name}'; use "
            f"{name}.load() and {name}.store()",
            node,
        )


def _check_call(source: Source, node: ast.Call, kinds: dict[str, str]) -> None:
    f = node.func
    if not isinstance(f, ast.Attribute) or not isinstance(f.value, ast.Name):
        return
    kind = kinds.get(f.value.id)
    if f.attr != "store" or kind is None:
        return
    if kind == "ref":
        raise source.error(
            f"O1 exclusive write: '{f.value.id}' is a Ref and cannot be stored to; make it a Mut",
            node,
        )
    if kind == "mut" and (len(node.args) != 1 or node.keywords):
        raise source.error(
            f"O2 disjoint pieces: {f.value.id}.store(tile) takes the tile and no index; program i "
            "writes piece i",
            node,
        )
