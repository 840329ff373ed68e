"""The expressions of a kernel: compile-time values are computed, tiles leave operations behind."""

import ast
import builtins
import operator
from collections.abc import Callable
from typing import Any

from tilert import language
from tilert.errors import KernelError
from tilert.frontend.builder import Builder
from tilert.frontend.captured import MISSING, Outside
from tilert.frontend.inline import Inline
from tilert.frontend.source import Source
from tilert.frontend.tile_words import subscript
from tilert.frontend.values import (
    CONSTANTS,
    PROXIES,
    BoundMethod,
    MutArg,
    RefArg,
    TileIndex,
    describe,
)
from tilert.frontend.words import FUNCTIONS, METHODS, attribute
from tilert.ir import Value
from tilert.limits import MAX_BITS
from tilert.ops import TypeRuleError

__all__ = ["Expressions", "word"]

_BINARY: dict[type, tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("add", operator.add),
    ast.Sub: ("sub", operator.sub),
    ast.Mult: ("mul", operator.mul),
    ast.Div: ("div", operator.truediv),
    ast.FloorDiv: ("floordiv", operator.floordiv),
    ast.Mod: ("mod", operator.mod),
    ast.BitAnd: ("and", operator.and_),
    ast.BitOr: ("or", operator.or_),
    ast.BitXor: ("xor", operator.xor),
    ast.LShift: ("shl", operator.lshift),
    ast.RShift: ("shr", operator.rshift),
    ast.Pow: ("**", operator.pow),
}
_COMPARE: dict[type, tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Eq: ("eq", operator.eq),
    ast.NotEq: ("ne", operator.ne),
    ast.Lt: ("lt", operator.lt),
    ast.LtE: ("le", operator.le),
    ast.Gt: ("gt", operator.gt),
    ast.GtE: ("ge", operator.ge),
}
_PYTHON_WORDS = {
    builtins.range: language.range_,
    builtins.abs: language.abs,
    builtins.min: language.min,
    builtins.max: language.max,
    builtins.sum: language.sum,
    builtins.any: language.any,
    builtins.all: language.all,
    builtins.pow: language.pow,
    builtins.round: language.round,
}
_MAX_DEPTH = 64


# NumPy's names of what tiles have methods for.
_METHODS = {"astype": "to", "ravel": "reshape", "flatten": "reshape", "transpose": "permute"}


def _instead(name: str) -> str:
    """What does the same as an attribute of NumPy's arrays, as the end of a message; or ""."""
    if name in _METHODS:
        return f"; use {METHODS[(Value, _METHODS[name])][0]}"
    if name in FUNCTIONS:
        return f"; use {getattr(language, name).signature} of tilert.language"
    return ""


class Expressions:
    """Traces expressions in the scope of one function; `Tracer` adds the statements."""

    def __init__(
        self,
        source: Source,
        outside: Outside,
        builder: Builder,
        scope: dict[str, Any],
        depth: int = 0,
    ) -> None:
        self.source = source
        self.depth = depth
        self.outermost = builder.block
        self.builder = builder
        self.outside = outside
        self.locals: dict[str, Any] = dict(scope)
        self.lost: dict[str, str] = {}

    def run(self) -> Any:
        """Trace the function's body; gives what an inlined function returns."""
        raise NotImplementedError

    def _checked(self, method: Callable[..., Any], node: ast.AST, *args: Any) -> Any:
        try:
            return method(node, *args)
        except TypeRuleError as e:
            raise self.source.error(str(e), node) from None

    def expr(self, node: ast.expr) -> Any:
        """Trace an expression."""
        method = getattr(self, f"expr_{type(node).__name__}", None)
        if method is None:
            raise self.source.error(f"{word(node)} is not available in kernels", node)
        return self._checked(method, node)

    def expr_Constant(self, node: ast.Constant) -> Any:
        """A literal."""
        return node.value

    def expr_Name(self, node: ast.Name) -> Any:
        """A local, a parameter, or a name of the module."""
        if node.id in self.locals:
            return self.locals[node.id]
        if node.id in self.lost:
            raise self.source.error(f"'{node.id}' {self.lost[node.id]}", node)
        value = self.outside.get(node.id)
        if value is MISSING:
            raise self.source.error(f"'{node.id}' is not defined", node)
        return _as_word(value)

    def expr_Tuple(self, node: ast.Tuple) -> tuple[Any, ...]:
        """A compile-time tuple."""
        return tuple(self.expr(e) for e in node.elts)

    def expr_Slice(self, node: ast.Slice) -> slice:
        """A slice inside `[...]`."""
        parts = (node.lower, node.upper, node.step)
        return slice(*(None if p is None else self.expr(p) for p in parts))

    def expr_UnaryOp(self, node: ast.UnaryOp) -> Any:
        """`-x`, `+x`, `~x`, and `not` on compile-time values."""
        x = self.expr(node.operand)
        self._refuse_proxies(node.operand, x)
        if not isinstance(x, Value):
            fold: dict[type, Callable[[Any], Any]] = {
                ast.USub: operator.neg,
                ast.UAdd: operator.pos,
                ast.Invert: operator.invert,
                ast.Not: operator.not_,
            }
            return self._folded(node, fold[type(node.op)], x)
        if isinstance(node.op, ast.Not):
            raise self.source.error("`not` needs a compile-time value; use ~ on bool tiles", node)
        if isinstance(node.op, ast.UAdd):
            return x
        return self.builder.unary("neg" if isinstance(node.op, ast.USub) else "not", x)

    def expr_BinOp(self, node: ast.BinOp) -> Any:
        """Arithmetic."""
        return self.binary(node, node.op, self.expr(node.left), self.expr(node.right))

    def binary(self, node: ast.AST, op: ast.operator, a: Any, b: Any) -> Any:
        """`a op b` on compile-time values or tiles."""
        if type(op) is ast.MatMult:
            raise self.source.error("write mma(a, b, acc) for a matrix product", node)
        name, fold = _BINARY[type(op)]
        self._refuse_proxies(node, a, b)
        if not isinstance(a, Value) and not isinstance(b, Value):
            return self._folded(node, fold, a, b)
        if name == "**":
            return self.builder.power(a, b)
        return self.builder.binary(name, a, b)

    def _folded(self, node: ast.AST, fold: Callable[..., Any], *args: Any) -> Any:
        try:
            if _may_be_large(fold, args):
                raise ValueError(f"a compile-time value of more than {MAX_BITS} bits or items")
            result = fold(*args)
        except (TypeError, ValueError, ArithmeticError) as e:
            raise self.source.error(str(e), node) from None
        if isinstance(result, int) and result.bit_length() > MAX_BITS:
            raise self.source.error(f"a compile-time int of more than {MAX_BITS} bits", node)
        return result

    def _refuse_proxies(self, node: ast.AST, *xs: Any) -> None:
        for x in xs:
            if isinstance(x, TileIndex):
                raise self.source.error(
                    "a tile index is no number; use its .number, .start or .offsets", node
                )
            if isinstance(x, PROXIES):
                raise self.source.error(f"{describe(x)} is no tile or number", node)
            if not isinstance(x, (Value, *CONSTANTS)):
                raise self.source.error(
                    f"{describe(x)} is no compile-time constant; use numbers, dtypes and tuples",
                    node,
                )

    def expr_Compare(self, node: ast.Compare) -> Any:
        """One comparison."""
        if len(node.ops) != 1:
            raise self.source.error("chained comparisons: write (a < b) & (b < c)", node)
        a, b = self.expr(node.left), self.expr(node.comparators[0])
        if type(node.ops[0]) in (ast.Is, ast.IsNot) and not isinstance(a, Value):
            return (a is b) == (type(node.ops[0]) is ast.Is)
        if type(node.ops[0]) not in _COMPARE:
            raise self.source.error(f"{word(node.ops[0])} is not available in kernels", node)
        name, fold = _COMPARE[type(node.ops[0])]
        self._refuse_proxies(node, a, b)
        if not isinstance(a, Value) and not isinstance(b, Value):
            return self._folded(node, fold, a, b)
        return self.builder.binary(name, a, b)

    def expr_BoolOp(self, node: ast.BoolOp) -> Any:
        """`and`, `or` on compile-time values."""
        value: Any = None
        for part in node.values:
            value = self.expr(part)
            if isinstance(value, Value):
                raise self.source.error("use & and | on bool tiles", part)
            self._refuse_proxies(part, value)
            if bool(value) == isinstance(node.op, ast.Or):
                break
        return value

    def expr_IfExp(self, node: ast.IfExp) -> Any:
        """A compile-time choice."""
        condition = self.expr(node.test)
        if isinstance(condition, Value):
            raise self.source.error("use where(condition, a, b) on tiles", node)
        self._refuse_proxies(node.test, condition)
        return self.expr(node.body if condition else node.orelse)

    def expr_Attribute(self, node: ast.Attribute) -> Any:
        """A property, a method, or a name in a module."""
        owner = self.expr(node.value)
        if (type(owner), node.attr) in METHODS:
            return BoundMethod(owner, node.attr)
        value = attribute(self.builder, owner, node.attr)
        if value is not None:
            return value
        if isinstance(owner, RefArg) and node.attr == "store":
            raise self.source.error(
                f"O1 exclusive write: '{owner.param.name}' is a Ref and cannot be stored to; "
                "make it a Mut",
                node,
            )
        if not isinstance(owner, (Value, *PROXIES)):
            try:
                found = self.outside.reads.attribute(owner, node.attr)
            except Exception as e:
                raise self.source.error(f"'{node.attr}' cannot be read: {e}", node) from None
            if found is not MISSING:
                return _as_word(found)
        hint = _instead(node.attr) if isinstance(owner, Value) else ""
        raise self.source.error(f"{describe(owner)} has no attribute '{node.attr}'{hint}", node)

    def expr_Subscript(self, node: ast.Subscript) -> Any:
        """`array[...]`, `tile[...]` or a tuple item."""
        owner = self.expr(node.value)
        index = self.expr(node.slice)
        if isinstance(owner, RefArg):
            return self.builder.load(owner, index if isinstance(index, tuple) else (index,), 0)
        if isinstance(owner, MutArg):
            raise self.source.error(
                f"O2 disjoint pieces: a program reaches only its own piece of the Mut "
                f"'{owner.param.name}'; use .load() and .store()",
                node,
            )
        if isinstance(owner, Value):
            return subscript(self.builder, owner, index if isinstance(index, tuple) else (index,))
        if not isinstance(owner, tuple | str | bytes):
            raise self.source.error(
                f"{describe(owner)} cannot be indexed in a kernel; use a tuple", node
            )
        try:
            return owner[index]
        except (TypeError, IndexError, KeyError) as e:
            raise self.source.error(f"cannot index {describe(owner)}: {e}", node) from None

    def _arguments(self, node: ast.Call) -> tuple[list[Any], dict[str, Any]]:
        args: list[Any] = []
        for a in node.args:
            if isinstance(a, ast.Starred):
                items = self.expr(a.value)
                if not isinstance(items, tuple):
                    raise self.source.error(f"* needs a tuple, got {describe(items)}", a)
                args += items
            else:
                args.append(self.expr(a))
        kwargs = {k.arg: self.expr(k.value) for k in node.keywords if k.arg is not None}
        if len(kwargs) != len(node.keywords):
            raise self.source.error("** arguments are not available in kernels", node)
        return args, kwargs

    def expr_Call(self, node: ast.Call) -> Any:
        """A word of the language, a method, or an inlined function."""
        callee = self.expr(node.func)
        args, kwargs = self._arguments(node)
        if isinstance(callee, BoundMethod):
            signature, word = METHODS[(type(callee.owner), callee.name)]
            return self._apply(word, node, signature, [callee.owner, *args], kwargs)
        if isinstance(callee, language.Builtin):
            if callee.name not in FUNCTIONS:
                raise self.source.error(f"{callee.name}() stands only in a for statement", node)
            return self._apply(FUNCTIONS[callee.name], node, callee.signature, args, kwargs)
        if isinstance(callee, Inline):
            return self._inline(callee, node, args, kwargs)
        if any(callee is f for f in (len, int, float, bool)):
            if not any(isinstance(a, Value) for a in args):
                self._refuse_proxies(node, *args)
                return self._folded(node, callee, *args)
        if isinstance(node.func, ast.Attribute) and node.func.attr in FUNCTIONS:
            raise self.source.error(
                f"{ast.unparse(node.func)} is not a word of the language; use {node.func.attr} of"
                " tilert.language",
                node,
            )
        hint = "decorate helpers with @tilert.inline"
        if callee is print:
            hint = f"use {language.device_print.signature} of tilert.language"
        raise self.source.error(f"{describe(callee)} cannot be called in a kernel; {hint}", node)

    def _apply(
        self,
        word: Callable[..., Any],
        node: ast.Call,
        signature: str,
        args: list[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        try:
            return word(self.builder, *args, **kwargs)
        except TypeError:
            raise self.source.error(f"wrong arguments; expected {signature}", node) from None

    def _inline(
        self, callee: Inline, node: ast.Call, args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        try:
            scope = callee.bind(args, kwargs)
        except TypeError as e:
            raise self.source.error(f"{callee.source.name}(): {e}", node) from None
        if self.depth == _MAX_DEPTH:
            raise self.source.error(
                f"{callee.source.name}() is inlined {_MAX_DEPTH} deep; inlined functions cannot"
                " recurse",
                node,
            )
        outside, depth = callee.outside(self.outside.reads), self.depth + 1
        try:
            return type(self)(callee.source, outside, self.builder, scope, depth).run()
        except KernelError as e:
            if depth == 1:
                loc = self.source.loc(node)
                e.add_note(f"in a function that {self.source.name}() calls at line {loc.line}")
            raise


def _as_word(value: Any) -> Any:
    """The word of the language for a Python function of the same meaning."""
    # By identity: what a module holds need be neither hashable nor comparable.
    return next((w for python, w in _PYTHON_WORDS.items() if python is value), value)


def _may_be_large(fold: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether computing it could fill the memory or never end."""
    if len(args) != 2:
        return False
    a, b = args
    if fold is operator.pow and isinstance(a, int) and isinstance(b, int):
        return a.bit_length() > 1 and b * a.bit_length() > 2 * MAX_BITS
    if fold is operator.lshift and isinstance(a, int) and isinstance(b, int):
        return b > MAX_BITS
    if fold is operator.mul:
        for items, count in ((a, b), (b, a)):
            if isinstance(items, str | bytes | tuple) and isinstance(count, int):
                return len(items) * count > MAX_BITS
    return False


def word(node: ast.AST) -> str:
    """What a person would call a piece of syntax."""
    words = {
        "While": "while (use for i in range(...))",
        "FunctionDef": "a nested function",
        "Lambda": "lambda",
        "ListComp": "a comprehension",
        "Try": "try",
        "With": "with",
        "Break": "break",
        "Continue": "continue",
        "Global": "global",
        "JoinedStr": "an f-string",
        "Dict": "a dict",
        "List": "a list",
        "Starred": "a starred value",
    }
    name = type(node).__name__
    return words.get(name, name.lower())
