"""Runs a kernel's syntax tree once, symbolically, and leaves the operations behind."""

import ast
import builtins
import operator
from collections.abc import Callable
from typing import Any

from tilert import language
from tilert.dtypes import i32
from tilert.frontend.builder import Builder
from tilert.frontend.inline import Inline
from tilert.frontend.source import Source
from tilert.frontend.values import BoundMethod, MutArg, RefArg, TileIndex, describe
from tilert.frontend.words import FUNCTIONS, METHODS, attribute
from tilert.ir import Block, TileType, Value
from tilert.ops import TypeRuleError, make

__all__ = ["Tracer"]

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
}


class _Return(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class Tracer:
    """Traces one function body; inlined functions get a tracer of their own."""

    def __init__(
        self, source: Source, names: dict[str, Any], builder: Builder, scope: dict[str, Any]
    ) -> None:
        self.source = source
        self.builder = builder
        self.names = names
        self.locals: dict[str, Any] = dict(scope)
        self.lost: dict[str, str] = {}

    # -- statements --------------------------------------------------------------------------

    def run(self) -> Any:
        """Trace the body; gives what an inlined function returns."""
        try:
            self.statements(self.source.tree.body)
        except _Return as r:
            return r.value
        return None

    def statements(self, body: list[ast.stmt]) -> None:
        """Trace statements in order."""
        for node in body:
            method = getattr(self, f"stmt_{type(node).__name__}", None)
            if method is None:
                raise self.source.error(f"{_word(node)} is not available in kernels", node)
            self.builder.loc = self.source.loc(node)
            self._checked(method, node)

    def _checked(self, method: Callable[..., Any], node: ast.AST, *args: Any) -> Any:
        try:
            return method(node, *args)
        except TypeRuleError as e:
            raise self.source.error(str(e), node) from None

    def stmt_Pass(self, node: ast.Pass) -> None:
        """Nothing."""

    def stmt_Expr(self, node: ast.Expr) -> None:
        """An expression for its effect, or a docstring."""
        if not (isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)):
            self.expr(node.value)

    def stmt_Return(self, node: ast.Return) -> None:
        """The end of an inlined function."""
        raise _Return(self.expr(node.value) if node.value is not None else None)

    def stmt_Assign(self, node: ast.Assign) -> None:
        """`name = ...` or `a, b = ...`."""
        value = self.expr(node.value)
        for target in node.targets:
            self.assign(target, value)

    def stmt_AnnAssign(self, node: ast.AnnAssign) -> None:
        """`name: type = ...`; the annotation is for people."""
        if node.value is not None:
            self.assign(node.target, self.expr(node.value))

    def stmt_AugAssign(self, node: ast.AugAssign) -> None:
        """`name += ...`."""
        if not isinstance(node.target, ast.Name):
            raise self.source.error("only a name can be updated in place", node.target)
        old = self.expr_Name(node.target)
        self.assign(node.target, self.binary(node, node.op, old, self.expr(node.value)))

    def stmt_Assert(self, node: ast.Assert) -> None:
        """A compile-time condition on shapes and constants."""
        held = self.expr(node.test)
        if not isinstance(held, bool | int):
            raise self.source.error("assert takes a compile-time condition", node.test)
        if not held:
            message = self.expr(node.msg) if node.msg is not None else "assertion failed"
            raise self.source.error(str(message), node)

    def assign(self, target: ast.expr, value: Any) -> None:
        """Bind a name or a tuple of names."""
        if isinstance(target, ast.Name):
            self.locals[target.id] = value
            self.lost.pop(target.id, None)
        elif isinstance(target, ast.Tuple):
            if not isinstance(value, tuple) or len(value) != len(target.elts):
                raise self.source.error(
                    f"cannot unpack {describe(value)} into {len(target.elts)} names", target
                )
            for t, v in zip(target.elts, value, strict=True):
                self.assign(t, v)
        else:
            raise self.source.error(
                "O1 exclusive write: kernels write memory only through y.store(tile) of a Mut",
                target,
            )

    def stmt_If(self, node: ast.If) -> None:
        """A compile-time choice, or a run-time `if` on a bool scalar."""
        condition = self.expr(node.test)
        if not isinstance(condition, Value):
            self.statements(node.body if condition else node.orelse)
            return
        outer = dict(self.locals)
        then, then_locals = self._region(node.body, outer)
        other, other_locals = self._region(node.orelse, outer)
        merged = self._merge(node, outer, (then, then_locals), (other, other_locals))
        types = [t for _, t in merged]
        op = self.builder.append(make("if", [condition], types=tuple(types)))
        op.regions = [then, other]
        self.locals = outer
        for (name, _), result in zip(merged, op.results, strict=True):
            self.locals[name] = result
        for name in (set(then_locals) | set(other_locals)) - set(self.locals):
            self.lost[name] = "is set in only one branch of an if"

    def _region(
        self, body: list[ast.stmt], outer: dict[str, Any], args: list[Value] | None = None
    ) -> tuple[Block, dict[str, Any]]:
        saved, block = self.builder.block, Block(list(args or []))
        self.builder.block, self.locals = block, dict(outer)
        try:
            self.statements(body)
        finally:
            self.builder.block = saved
        inner, self.locals = self.locals, outer
        return block, inner

    def _merge(
        self,
        node: ast.If,
        outer: dict[str, Any],
        then: tuple[Block, dict[str, Any]],
        other: tuple[Block, dict[str, Any]],
    ) -> list[tuple[str, TileType]]:
        names = [
            n
            for n in then[1]
            if n in other[1]
            and not (then[1][n] is other[1][n] and then[1][n] is outer.get(n))
            and not _same_static(then[1][n], other[1][n])
        ]
        merged: list[tuple[str, TileType]] = []
        yields: list[list[Value]] = [[], []]
        for n in names:
            pair = []
            for block, scope in (then, other):
                saved, self.builder.block = self.builder.block, block
                pair.append(self.builder.value(scope[n]))
                self.builder.block = saved
            if pair[0].type != pair[1].type:
                raise self.source.error(
                    f"'{n}' is {describe(pair[0])} in one branch and {describe(pair[1])} in the"
                    " other",
                    node,
                )
            yields[0].append(pair[0])
            yields[1].append(pair[1])
            merged.append((n, pair[0].type))
        for (block, _), values in zip((then, other), yields, strict=True):
            block.ops.append(make("yield", values))
        return merged

    def stmt_For(self, node: ast.For) -> None:
        """A loop over `range`, `tiles` or `static_range`."""
        if node.orelse:
            raise self.source.error("for-else is not available in kernels", node)
        call = node.iter
        word = self.expr(call.func) if isinstance(call, ast.Call) else None
        if not isinstance(call, ast.Call) or word not in (
            language.range_,
            language.tiles,
            language.static_range,
        ):
            raise self.source.error("a loop runs over range(), tiles() or static_range()", call)
        args, kwargs = self._arguments(call)
        if word is language.static_range:
            if kwargs or len(args) != 1:
                raise self.source.error(f"expected {word.signature}", call)
            self._static_loop(node, args[0])
            return
        bounds = self._tiles if word is language.tiles else self._range
        try:
            lo, hi, step, size = bounds(*args, **kwargs)
        except TypeError:
            raise self.source.error(f"expected {word.signature}", call) from None
        self._loop(node, lo, hi, step, size)

    def _static_loop(self, node: ast.For, stop: Any) -> None:
        if not isinstance(stop, int):
            raise TypeRuleError("static_range takes a compile-time int; use range()")
        for i in range(stop):
            self.assign(node.target, i)
            self.statements(node.body)

    def _range(self, a: Any, b: Any = None, step: Any = 1) -> tuple[Any, Any, Any, int | None]:
        return (0, a, step, None) if b is None else (a, b, step, None)

    def _tiles(
        self, array: Any, axis: Any, size: Any, start: Any = 0, stop: Any = None
    ) -> tuple[Any, Any, Any, int | None]:
        if not isinstance(array, RefArg | MutArg):
            raise TypeRuleError(f"tiles() walks an array parameter, got {describe(array)}")
        if not isinstance(axis, int) or not isinstance(size, int) or size < 1:
            raise TypeRuleError("tiles() takes a compile-time axis and a positive size")
        if stop is None:
            stop = FUNCTIONS["cdiv"](self.builder, self.builder.extent(array, axis), size)
        return start, stop, 1, size

    def _loop(self, node: ast.For, lo: Any, hi: Any, step: Any, size: int | None) -> None:
        if all(isinstance(x, int) for x in (lo, hi, step)):
            if step == 0:
                raise self.source.error("a loop's step must not be 0", node.iter)
            trips = len(range(lo, hi, step))
            if trips <= 1:
                if trips:
                    self.assign(node.target, TileIndex(lo, size) if size else lo)
                    self.statements(node.body)
                return
        if not isinstance(step, int) or step < 1:
            raise self.source.error("a run-time loop's step must be a positive int", node.iter)
        b = self.builder
        carried = [n for n in _assigned(node.body) if n in self.locals]
        inits: list[Value] = []
        for n in carried:
            try:
                inits.append(b.value(self.locals[n]))
            except TypeRuleError:
                raise self.source.error(
                    f"'{n}' is {describe(self.locals[n])} and cannot be changed in a loop", node
                ) from None
        bounds = [b.value(x, i32) for x in (lo, hi, step)]
        op = make("for", [*bounds, *inits])
        op.loc = b.loc
        counter = Value(TileType((), i32))
        args = [Value(v.type) for v in inits]
        outer = dict(self.locals)
        inner = dict(outer)
        inner.update(zip(carried, args, strict=True))
        saved, b.block = b.block, Block([counter, *args])
        self.locals = inner
        self.assign(node.target, TileIndex(counter, size) if size else counter)
        self.statements(node.body)
        results: list[Value] = []
        for n, init in zip(carried, inits, strict=True):
            out = b.value(self.locals[n], init.dtype)
            if out.type != init.type:
                raise self.source.error(
                    f"'{n}' changes from {describe(init)} to {describe(out)} in the loop", node
                )
            results.append(out)
        b.block.ops.append(make("yield", results))
        op.regions = [b.block]
        b.block = saved
        b.append(op)
        fresh = set(self.locals) - set(outer)
        self.locals = outer
        self.locals.update(zip(carried, op.results, strict=True))
        self.lost.update(dict.fromkeys(fresh, "is set only inside a loop"))

    # -- expressions -------------------------------------------------------------------------

    def expr(self, node: ast.expr) -> Any:
        """Trace an expression."""
        method = getattr(self, f"expr_{type(node).__name__}", None)
        if method is None:
            raise self.source.error(f"{_word(node)} is not available in kernels", node)
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
        if node.id in self.names:
            value = self.names[node.id]
        elif hasattr(builtins, node.id):
            value = getattr(builtins, node.id)
        else:
            raise self.source.error(f"'{node.id}' is not defined", node)
        try:
            return _PYTHON_WORDS.get(value, value)
        except TypeError:
            return value

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
        if not isinstance(x, Value):
            fold: dict[type, Callable[[Any], Any]] = {
                ast.USub: operator.neg,
                ast.UAdd: operator.pos,
                ast.Invert: operator.invert,
                ast.Not: operator.not_,
            }
            return fold[type(node.op)](x)
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
        if not isinstance(a, Value) and not isinstance(b, Value):
            for x in (a, b):
                if isinstance(x, TileIndex):
                    raise self.source.error(
                        "a tile index takes no arithmetic; use its .number, .start or .offsets",
                        node,
                    )
            try:
                return fold(a, b)
            except (TypeError, ZeroDivisionError) as e:
                raise self.source.error(str(e), node) from None
        if name == "**":
            raise self.source.error("** is not available on tiles; multiply or use exp/log", node)
        return self.builder.binary(name, a, b)

    def expr_Compare(self, node: ast.Compare) -> Any:
        """One comparison."""
        if len(node.ops) != 1:
            raise self.source.error("chained comparisons: write (a < b) & (b < c)", node)
        a, b = self.expr(node.left), self.expr(node.comparators[0])
        if type(node.ops[0]) in (ast.Is, ast.IsNot) and not isinstance(a, Value):
            return (a is b) == (type(node.ops[0]) is ast.Is)
        if type(node.ops[0]) not in _COMPARE:
            raise self.source.error(f"{_word(node.ops[0])} is not available in kernels", node)
        name, fold = _COMPARE[type(node.ops[0])]
        if not isinstance(a, Value) and not isinstance(b, Value):
            return fold(a, b)
        return self.builder.binary(name, a, b)

    def expr_BoolOp(self, node: ast.BoolOp) -> Any:
        """`and`, `or` on compile-time values."""
        value: Any = None
        for part in node.values:
            value = self.expr(part)
            if isinstance(value, Value):
                raise self.source.error("use & and | on bool tiles", part)
            if bool(value) == isinstance(node.op, ast.Or):
                break
        return value

    def expr_IfExp(self, node: ast.IfExp) -> Any:
        """A compile-time choice."""
        condition = self.expr(node.test)
        if isinstance(condition, Value):
            raise self.source.error("use where(condition, a, b) on tiles", node)
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
        if not isinstance(owner, Value | TileIndex | RefArg | MutArg) and hasattr(owner, node.attr):
            found = getattr(owner, node.attr)
            return _PYTHON_WORDS.get(found, found) if callable(found) else found
        raise self.source.error(f"{describe(owner)} has no attribute '{node.attr}'", node)

    def expr_Subscript(self, node: ast.Subscript) -> Any:
        """`array[...]`, `tile[:, None]` or a tuple item."""
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
            return self._insert_axes(owner, index if isinstance(index, tuple) else (index,), node)
        try:
            return owner[index]
        except (TypeError, IndexError, KeyError) as e:
            raise self.source.error(f"cannot index {describe(owner)}: {e}", node) from None

    def _insert_axes(self, x: Value, index: tuple[Any, ...], node: ast.AST) -> Value:
        kept = [i for i in index if i is not None]
        if any(i != slice(None) for i in kept) or len(kept) > len(x.shape):
            raise self.source.error(
                "a tile is indexed only to insert axes, as in x[:, None]; slices of tiles are "
                "read from the array",
                node,
            )
        sizes = iter(x.shape)
        shape = [1 if i is None else next(sizes) for i in index]
        return self.builder.reshape(x, (*shape, *sizes))

    def _arguments(self, node: ast.Call) -> tuple[list[Any], dict[str, Any]]:
        args: list[Any] = []
        for a in node.args:
            if isinstance(a, ast.Starred):
                args += self.expr(a.value)
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
            word = METHODS[(type(callee.owner), callee.name)]
            return self._apply(word, node, f".{callee.name}()", [callee.owner, *args], kwargs)
        if isinstance(callee, language.Builtin):
            if callee.name not in FUNCTIONS:
                raise self.source.error(f"{callee.name}() stands only in a for statement", node)
            return self._apply(FUNCTIONS[callee.name], node, callee.signature, args, kwargs)
        if isinstance(callee, Inline):
            return self._inline(callee, node, args, kwargs)
        if callee in (len, int, float, bool) and not any(isinstance(a, Value) for a in args):
            return callee(*args)
        raise self.source.error(
            f"{describe(callee)} cannot be called in a kernel; decorate helpers with "
            "@tilert.inline",
            node,
        )

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
        return Tracer(callee.source, callee.names(), self.builder, scope).run()


def _assigned(body: list[ast.stmt]) -> list[str]:
    names: dict[str, None] = {}
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names[node.id] = None
    return list(names)


def _same_static(a: Any, b: Any) -> bool:
    if isinstance(a, Value) or isinstance(b, Value):
        return a is b
    return type(a) is type(b) and bool(a == b)


def _word(node: ast.AST) -> str:
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
    }
    name = type(node).__name__
    return words.get(name, name.lower())
