"""Whether a kernel ever stores to one of its Muts, itself or in the functions that it inlines."""

import ast
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tilert.frontend.captured import MISSING, Outside
from tilert.frontend.inline import Inline
from tilert.frontend.words import METHODS
from tilert.language import Builtin

__all__ = ["stores"]

_VERBS = ("store", "add", "max", "min")
_WORDS = {name for _, name in METHODS}
# A value that is only known where the kernel is traced.
_UNKNOWN: Any = object()


def stores(tree: ast.FunctionDef, outside: Outside, name: str) -> bool:
    """Whether `name.store(...)`, or an update, stands in the body or in what it inlines.

    Under whatever name the Mut is passed on there. What cannot be known before a trace, such as a
    function in a variable, counts as a store.
    """
    return _Body(tree, outside, {name}, set()).stores()


class _Body:
    """One function body, in which some names may stand for the Mut."""

    def __init__(
        self,
        tree: ast.FunctionDef,
        outside: Outside,
        names: set[str],
        seen: set[tuple[int, frozenset[str]]],
    ) -> None:
        self.tree = tree
        self.outside = outside
        self.seen = seen
        self.nodes = [node for statement in tree.body for node in ast.walk(statement)]
        self.inside = {a.arg for a in ast.walk(tree.args) if isinstance(a, ast.arg)}
        self.inside |= set(_stored_names(self.nodes))
        self.names = self._other_names(names)

    def _other_names(self, names: set[str]) -> set[str]:
        """Also those that an assignment or a loop over pieces gives it."""
        self.names = set(names)
        while True:
            found = set(self.names)
            for node in self.nodes:
                if isinstance(node, ast.Assign) and self._is(node.value):
                    found.update(_stored_names(n for t in node.targets for n in ast.walk(t)))
                elif isinstance(node, ast.AnnAssign | ast.For):
                    value = node.value if isinstance(node, ast.AnnAssign) else node.iter
                    if value is not None and self._is(value):
                        found.update(_stored_names(ast.walk(node.target)))
            if found == self.names:
                return found
            self.names = found

    def stores(self) -> bool:
        """Whether it stores to the Mut."""
        # `y.store` that is not called does nothing; bound to a name it may be called later.
        idle = {id(node.value) for node in self.nodes if isinstance(node, ast.Expr)}
        for node in self.nodes:
            if isinstance(node, ast.Attribute) and node.attr in _VERBS and id(node) not in idle:
                if self._is(node.value):
                    return True
            if isinstance(node, ast.Call) and self._passed_on(node):
                return True
        return False

    def _is(self, node: ast.expr) -> bool:
        """Whether a value may be the Mut, a piece of it, or hold one of them."""
        match node:
            case ast.Name():
                return node.id in self.names
            case ast.Tuple() | ast.List():
                return any(self._is(item) for item in node.elts)
            case ast.BoolOp():
                return any(self._is(item) for item in node.values)
            case ast.IfExp():
                return self._is(node.body) or self._is(node.orelse)
            case ast.Starred() | ast.Subscript():
                return self._is(node.value)
            case ast.Call(func=ast.Attribute(value=owner, attr="pieces")):
                return self._is(owner)
            case ast.Call():
                # An inlined function may give back what it was given.
                return self._callee(node.func) is not None and self._given_to(node)
        return False

    def _given_to(self, call: ast.Call) -> bool:
        return any(self._is(value) for value in [*call.args, *[k.value for k in call.keywords]])

    def _passed_on(self, call: ast.Call) -> bool:
        """Whether a call gives the Mut to a function that stores to it."""
        if not self._given_to(call):
            return False
        callee = self._callee(call.func)
        if not isinstance(callee, Inline):
            return callee is not None
        keywords = {k.arg: k.value for k in call.keywords if k.arg is not None}
        spread = any(isinstance(value, ast.Starred) for value in call.args)
        if spread or len(keywords) != len(call.keywords):
            return True
        try:
            bound = callee.bind(list(call.args), keywords)
        except TypeError:
            return True
        names = {name for name, value in bound.items() if _any_of(value, self._is)}
        key = (id(callee), frozenset(names))
        if key in self.seen:
            return False
        self.seen.add(key)
        outside = callee.outside(self.outside.reads)
        return _Body(callee.source.tree, outside, names, self.seen).stores()

    def _callee(self, node: ast.expr) -> Any:
        """The inlined function that is called, None for a word of the language, or unknown."""
        found = self._value(node)
        if isinstance(found, Inline):
            return found
        if isinstance(found, Builtin) or type(found) is type(len):
            return None
        if found is _UNKNOWN and isinstance(node, ast.Attribute) and node.attr in _WORDS:
            return None
        return _UNKNOWN

    def _value(self, node: ast.expr) -> Any:
        """What a name outside the function, or an attribute of one, stands for."""
        if isinstance(node, ast.Name) and node.id not in self.inside:
            found = self.outside.get(node.id)
        elif isinstance(node, ast.Attribute) and (owner := self._value(node.value)) is not _UNKNOWN:
            try:
                found = getattr(owner, node.attr, MISSING)
            except Exception:
                # Whatever that is, the trace says it better.
                return _UNKNOWN
        else:
            return _UNKNOWN
        return _UNKNOWN if found is MISSING else found


def _any_of(value: Any, test: Callable[[ast.expr], bool]) -> bool:
    """Whether the test holds for a bound argument: a node, several of them, or a default."""
    if isinstance(value, tuple):
        return any(_any_of(item, test) for item in value)
    if isinstance(value, dict):
        return any(_any_of(item, test) for item in value.values())
    return isinstance(value, ast.expr) and test(value)


def _stored_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
