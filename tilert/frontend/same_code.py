"""Whether a function's text is the one that its code was compiled from."""

import ast
import copy
import dis
from types import CodeType
from typing import Any

__all__ = ["same_code"]

# What a function computes; where it jumps to follows, and differs between compilers.
_TELLING = ("LOAD_", "STORE_", "BINARY_", "UNARY_", "COMPARE_", "CALL", "IS_OP", "CONTAINS_OP")
_FUTURE = 0x1FE0000  # Compiler flags of `from __future__`, see the module of that name.


def same_code(tree: ast.FunctionDef, code: CodeType) -> bool:
    """Whether compiling `tree` gives `code`.

    Test runners rewrite assert statements, so where there are some, what lies between the other
    instructions is not compared.
    """
    if tree.name != code.co_name:
        return False
    asserts = any(isinstance(node, ast.Assert) for node in ast.walk(tree))
    try:
        found = _compiled(tree, code, without_asserts=False)
        if found is None:
            return False
        if _parts(found) == _parts(code) or _telling(found) == _telling(code):
            return True
        bare = _compiled(tree, code, without_asserts=True) if asserts else None
    except (SyntaxError, ValueError):
        return False
    if bare is None or _arguments(bare) != _arguments(code):
        return False
    rest = iter(_telling(code))
    return all(step in rest for step in _telling(bare))


def _compiled(tree: ast.FunctionDef, code: CodeType, without_asserts: bool) -> CodeType | None:
    body = tree.body
    if without_asserts:
        body = [_WithoutAsserts().visit(copy.deepcopy(statement)) for statement in body]
    inner = ast.FunctionDef(tree.name, _bare(tree.args), body, [], None, None)
    # A function around it makes variables of the closure what they were.
    free = [ast.arg(name) for name in code.co_freevars]
    none: Any = ast.arguments([], free, None, [], [], None, [])
    # Its own name is the closure's or the module's, as any other.
    names: list[ast.stmt] = [] if tree.name in code.co_freevars else [ast.Global([tree.name])]
    outer = ast.FunctionDef("around", none, [*names, inner], [], None, None)
    for node in (inner, outer):
        node.type_params = []  # type: ignore[attr-defined,unused-ignore]
    module = ast.fix_missing_locations(ast.Module([outer], []))
    compiled: CodeType = compile(
        module, code.co_filename, "exec", flags=code.co_flags & _FUTURE, dont_inherit=True
    )
    for name in ("around", tree.name):
        inside = [c for c in compiled.co_consts if isinstance(c, CodeType) and c.co_name == name]
        if len(inside) != 1:
            return None
        compiled = inside[0]
    return compiled


def _bare(args: ast.arguments) -> ast.arguments:
    """Parameters without annotations and defaults, which the function around it computes."""

    def plain(arg: ast.arg | None) -> Any:
        return None if arg is None else ast.arg(arg.arg)

    return ast.arguments(
        [plain(a) for a in args.posonlyargs],
        [plain(a) for a in args.args],
        plain(args.vararg),
        [plain(a) for a in args.kwonlyargs],
        [None for _ in args.kwonlyargs],
        plain(args.kwarg),
        [],
    )


class _WithoutAsserts(ast.NodeTransformer):
    def visit_Assert(self, node: ast.Assert) -> ast.Pass:
        """Nothing in its place."""
        return ast.Pass()


def _arguments(code: CodeType) -> tuple[Any, ...]:
    count = code.co_argcount + code.co_kwonlyargcount
    return code.co_argcount, code.co_kwonlyargcount, code.co_varnames[:count]


def _parts(code: CodeType) -> tuple[Any, ...]:
    constants = [_shown(c) for c in code.co_consts]
    return (
        *_arguments(code),
        code.co_code,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        constants,
    )


def _telling(code: CodeType) -> list[tuple[str, str]]:
    steps = [("arguments", repr(_arguments(code)))]
    for one in dis.get_instructions(code):
        if one.opname.startswith(_TELLING):
            steps.append(_step(one))
    return steps


def _step(one: dis.Instruction) -> tuple[str, str]:
    # Calling `name.word()` is another instruction where the module imports the name, which its
    # text alone does not tell.
    if one.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL"):
        return one.opname.replace("METHOD", "ATTR"), str(one.argval)
    return one.opname, _shown(one.argval) if isinstance(one.argval, CodeType) else one.argrepr


def _shown(constant: object) -> str:
    # A nested function is refused later, with a better message.
    return "a function" if isinstance(constant, CodeType) else repr(constant)
