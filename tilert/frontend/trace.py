"""Runs a kernel's syntax tree once, symbolically, and leaves the operations behind."""

import ast
from typing import Any

from tilert import language
from tilert.constant import constant_key
from tilert.dtypes import bool_, i32
from tilert.frontend.expressions import Expressions, word
from tilert.frontend.pieces import trace_pieces
from tilert.frontend.values import PROXIES, BoundMethod, MutArg, RefArg, TileIndex, describe
from tilert.frontend.words import FUNCTIONS
from tilert.ir import Block, TileType, Value
from tilert.limits import MAX_STATEMENTS, MAX_UNROLLED
from tilert.ops import TypeRuleError, make

__all__ = ["Tracer"]


class _Return(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class Tracer(Expressions):
    """Traces one function body; inlined functions get a tracer of their own."""

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
                raise self.source.error(f"{word(node)} is not available in kernels", node)
            self.builder.loc = self.source.loc(node)
            self.builder.statements += 1
            if self.builder.statements > MAX_STATEMENTS:
                raise self.source.error(
                    f"a kernel has at most {MAX_STATEMENTS} statements once its loops are unrolled"
                    " and its helpers inlined; use range()",
                    node,
                )
            self._checked(method, node)

    def stmt_Pass(self, node: ast.Pass) -> None:
        """Nothing."""

    def stmt_Expr(self, node: ast.Expr) -> None:
        """An expression for its effect, or a docstring."""
        if not (isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)):
            self.expr(node.value)

    def stmt_Return(self, node: ast.Return) -> None:
        """The end of an inlined function."""
        if self.builder.block is not self.outermost:
            raise self.source.error(
                "return is not available inside a run-time loop or if; assign a variable and"
                " return it at the end",
                node,
            )
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
            raise self.source.error(
                "assert takes a compile-time condition; debug_assert(condition, message) a run-time"
                " one",
                node.test,
            )
        if not held:
            message = self.expr(node.msg) if node.msg is not None else "assertion failed"
            raise self.source.error(str(message), node)

    def assign(self, target: ast.expr, value: Any) -> None:
        """Bind a name or a tuple of names."""
        if isinstance(target, ast.Name):
            self.locals[target.id] = value
            self.lost.pop(target.id, None)
        elif isinstance(target, ast.Tuple | ast.List):
            for t in target.elts:
                if isinstance(t, ast.Starred):
                    raise self.source.error(
                        "a starred target is not available in kernels; name every item", t
                    )
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
            self._refuse_proxies(node.test, condition)
            self.statements(node.body if condition else node.orelse)
            return
        if condition.shape or condition.dtype != bool_:
            hint = "; where(condition, a, b) chooses for each element" if condition.shape else ""
            raise self.source.error(
                f"an if needs a bool scalar, got {describe(condition)}{hint}", node.test
            )
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
        for name, value in then_locals.items():
            if name in other_locals and _same_static(value, other_locals[name]):
                self.locals[name] = value
        for name in [n for n in outer if n not in then_locals or n not in other_locals]:
            # It has become the counter of a loop in one of the branches.
            del self.locals[name]
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
        loop: Any = self.expr(call.func) if isinstance(call, ast.Call) else None
        if isinstance(loop, BoundMethod) and loop.name == "pieces" and self.depth == 0:
            trace_pieces(self, node, loop.owner)
            return
        loops = (language.range_, language.tiles, language.static_range)
        if not isinstance(call, ast.Call) or not any(loop is one for one in loops):
            raise self.source.error("a loop runs over range(), tiles() or static_range()", call)
        args, kwargs = self._arguments(call)
        if loop is language.static_range:
            if kwargs or len(args) != 1:
                raise self.source.error(f"expected {loop.signature}", call)
            self._static_loop(node, call, args[0])
            return
        bounds = self._tiles if loop is language.tiles else self._range
        try:
            lo, hi, step, size = bounds(*args, **kwargs)
        except TypeRuleError as e:
            raise self.source.error(str(e), call) from None
        except TypeError:
            raise self.source.error(f"expected {loop.signature}", call) from None
        self._loop(node, lo, hi, step, size)

    def _static_loop(self, node: ast.For, call: ast.Call, stop: Any) -> None:
        if not isinstance(stop, int):
            raise self.source.error(
                f"static_range takes a compile-time int, got {describe(stop)}; use range()", call
            )
        if stop > MAX_UNROLLED:
            raise self.source.error(
                f"static_range unrolls at most {MAX_UNROLLED} iterations, got {describe(stop)}; use"
                " range()",
                call,
            )
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
        for x in (lo, hi, step):
            scalar = isinstance(x, Value) and not x.shape and x.dtype == i32
            if not scalar and (not isinstance(x, int) or isinstance(x, bool)):
                raise self.source.error(
                    f"loop bounds must be ints or i32 scalars, got {describe(x)}", node.iter
                )
        if all(isinstance(x, int) for x in (lo, hi, step)):
            if step == 0:
                raise self.source.error("a loop's step must not be 0", node.iter)
            trips = max(0, -(-(hi - lo) // step))
            if trips <= 1:
                if trips:
                    self.assign(node.target, TileIndex(lo, size) if size else lo)
                    self.statements(node.body)
                return
        if not isinstance(step, int) or step < 1:
            raise self.source.error("a run-time loop's step must be a positive int", node.iter)
        b = self.builder
        counters = _counters(node)
        carried = [n for n in _assigned(node.body) if n in self.locals and n not in counters]
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
        for n in counters:
            self.locals.pop(n, None)
        self.lost.update(dict.fromkeys(fresh.union(counters), "is set only inside a loop"))


def _assigned(body: list[ast.stmt]) -> list[str]:
    names: dict[str, None] = {}
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names[node.id] = None
    return list(names)


def _counters(loop: ast.For) -> set[str]:
    """Variables of a loop and of those inside it: they have no value after it."""
    found: set[str] = set()
    for node in ast.walk(loop):
        if isinstance(node, ast.For):
            found |= {n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)}
    return found


def _same_static(a: Any, b: Any) -> bool:
    if isinstance(a, Value) or isinstance(b, Value):
        return a is b
    if isinstance(a, tuple) and isinstance(b, tuple):
        same = type(a) is type(b) and len(a) == len(b)
        return same and all(map(_same_static, a, b))
    if isinstance(a, PROXIES):
        return type(a) is type(b) and bool(a == b)
    return constant_key(a) == constant_key(b)
