"""Generates the Python code that runs the whole grid of a kernel at once.

The code is specialised to the arrays' shapes and the grid, so that dimensions, loop bounds and
addresses are mostly constants. A build function makes the views of one launch and returns the
closure that runs it.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilert.backends import cpu_debug, cpu_tile_ops
from tilert.backends.cpu_control import emit_for, emit_if
from tilert.backends.cpu_elementwise import RANDOM, elementwise, passing_bytes, random
from tilert.backends.cpu_lifetimes import bounded
from tilert.backends.cpu_load import Place, load, piece_places
from tilert.backends.cpu_place import accumulate, piece_number
from tilert.backends.cpu_product import emit_mma
from tilert.backends.cpu_runtime import NAMESPACE
from tilert.backends.cpu_store import store
from tilert.backends.cpu_value import Form, Grid
from tilert.dtypes import DType, f32, i32
from tilert.ir import Access, Block, Function, Op, Param, Value, walk
from tilert.ops import ELEMENTWISE, OPS

__all__ = ["Emitter", "Generated", "generate"]

# A constant larger than this is computed at every launch instead of being kept.
_KEPT_ELEMENTS = 1 << 12
# A temporary smaller than this is not worth reusing: NumPy serves it from its own cache.
_REUSED_ELEMENTS = 1 << 14


class Emitter:
    """The state of one generation.

    Attributes:
        grid: the grid as axes of run-time arrays.
        extents: shape of every array, by position.
        env: the form of every value emitted so far.
        namespace: globals of the generated code, its constants among them.
        mask: the mask over programs that guards stores, if any (None at run time: everywhere).
        live, uses: operations that matter, and how often those use each value.
        shapes, access: replacements while a loop is emitted as one product.
        sizes: bytes of every new array, by its name.
        passing: bytes of what a line makes and drops, by the line.
        ragged: grid axes whose last program makes a large load a copy.
    """

    def __init__(
        self,
        function: Function,
        extents: Sequence[tuple[int, ...]],
        grid: tuple[int, ...],
        start: tuple[int, ...],
    ) -> None:
        self.function = function
        self.extents = {p.position: tuple(e) for p, e in zip(function.params, extents, strict=True)}
        self.grid = Grid(grid, start, _factors(function, self.extents, grid, start))
        self.env: dict[Value, Form] = {}
        self.namespace: dict[str, Any] = dict(NAMESPACE)
        self.mask: Form | None = None
        self.prologue: list[str] = []
        self.lines: list[str] = []
        self.depth = 2
        self.block = 0
        self.shapes: dict[Value, tuple[int, ...]] = {}
        self.access: dict[Op, tuple[Access, ...]] = {}
        self.live = _live(function.body)
        self.uses = Counter(a for op in self.live for a in op.args)
        self.ragged: set[int] = set()
        self.sizes: dict[str, int] = {}
        self.passing: dict[str, int] = {}
        self._twins = _twins(function.body, self.live)
        self.uses.update(twin.result for twin in self._twins.values())
        self._names = 0
        self._blocks = 0
        self._constants: dict[tuple[str, Any], str] = {}

    # Text

    def name(self, prefix: str = "v") -> str:
        """A new name."""
        self._names += 1
        return f"{prefix}{self._names}"

    def line(self, text: str, passing: int = 0) -> None:
        """Adds a line of the launch, whose helpers take `passing` bytes while it runs."""
        self.lines.append("    " * self.depth + text)
        if passing:
            self.passing[text] = passing

    def let(self, text: str, nbytes: int = 0, passing: int = 0) -> str:
        """Adds a line that names the expression, which makes an array of `nbytes`.

        Without any it holds no memory but what the names in it hold.
        """
        name = self.name()
        self.line(f"{name} = {text}", passing)
        if nbytes:
            self.sizes[name] = nbytes
        return name

    def hoist(self, text: str) -> str:
        """Names an expression that is evaluated once, when the launch is bound."""
        name = self.name("w")
        self.prologue.append(f"    {name} = {text}")
        return name

    def constant(self, value: Any) -> str:
        """The text of a value known now."""
        if isinstance(value, (bool, int)):
            return repr(value) if value >= 0 else f"({value})"
        name = self.name("k")
        self.namespace[name] = value
        return name

    def scalar(self, value: Any, dtype: DType) -> Form:
        """A constant scalar."""
        if dtype.is_float:
            typed = dtype.numpy.type(value)
            key = dtype.name, typed.tobytes()
            if key not in self._constants:
                self._constants[key] = self.constant(typed)
            return Form(self._constants[key], (), dtype, 0, known=typed)
        typed = bool(value) if dtype.kind == "b" else int(value)
        return Form(self.constant(typed), (), dtype, 0, known=typed)

    def fill_form(self, fill: str, dtype: DType, rank: int) -> Form:
        """A tile of the fill value alone."""
        return Form(fill, (), dtype, rank, known=eval(fill, self.namespace))

    def mark(self) -> tuple[int, int]:
        """A place in the code to rewind to."""
        return len(self.prologue), len(self.lines)

    def rewind(self, mark: tuple[int, int]) -> None:
        """Drops the code since the mark."""
        del self.prologue[mark[0] :], self.lines[mark[1] :]

    # Values

    def shape(self, value: Value) -> tuple[int, ...]:
        """The tile shape of a value, grown if it is part of a fused loop."""
        return self.shapes.get(value, value.shape)

    def bind(
        self,
        value: Value,
        text: str,
        shape: tuple[int, ...],
        args: Sequence[Form],
        *,
        view: bool = False,
        fresh: bool = False,
        shares: bool = False,
        passing: int = 0,
    ) -> None:
        """Gives an IR value the expression that computes it from `args`.

        Args:
            shape: run-time shape. view: whether the expression is a view of its argument.
            fresh: whether it is an array that nothing else holds. shares: whether it lies in the
                memory of an argument without being a view. passing: see `line`.
        """
        size = math.prod(shape)
        form = Form("", shape, value.dtype, len(value.shape))
        if all(a.is_known for a in args) and size <= _KEPT_ELEMENTS:
            known = eval(text, self.namespace)
            if shape == ():
                self.env[value] = replace(self.scalar(known, value.dtype), rank=form.rank)
            else:
                self.env[value] = replace(form, text=self.constant(known), known=known)
        elif view and args[0].hoisted:
            self.env[value] = replace(form, text=self.hoist(text), hoisted=True)
        else:
            name = self.let(text, 0 if view or shares or not shape else form.nbytes, passing)
            self.env[value] = replace(form, text=name, fresh=self.block if fresh and shape else -1)

    def materialize(self, form: Form, shape: tuple[int, ...]) -> str:
        """Text of the value as an array of exactly `shape` (itself if shape is ())."""
        if form.shape == shape:
            return form.text
        if form.uniform:
            text = f"full({shape}, {form.text}, T_{form.dtype.name})"
        else:
            text = f"expand({form.text}, {shape})"
        if form.is_known and math.prod(shape) <= _KEPT_ELEMENTS:
            return self.constant(eval(text, self.namespace))
        return self.let(text, replace(form, shape=shape).nbytes if form.uniform else 0)

    def full_tile(self, form: Form, tile: tuple[int, ...]) -> Form:
        """The value with every axis of the tile at its true extent."""
        shape = self.grid.join(tile, self.grid.of(form))
        return replace(form, text=self.materialize(form, shape), shape=shape)

    def reusable(self, value: Value) -> bool:
        """Whether the array of an operand may hold the result of its only user."""
        form = self.env[value]
        return (
            form.fresh == self.block
            and self.uses[value] == 1
            and form.dtype == f32
            and math.prod(form.shape) >= _REUSED_ELEMENTS
        )

    def program(self, axis: int) -> Form:
        """The coordinate on a grid axis."""
        if axis >= len(self.grid.full) or self.grid.position[axis] < 0:
            at = self.grid.start[axis] if axis < len(self.grid.start) else 0
            return Form(str(at), (), i32, 0, known=at)
        shape = [1] * self.grid.rank
        for p, n in enumerate(self.grid.split(axis), self.grid.position[axis]):
            shape[p] = n
        first = self.grid.start[axis]
        known = np.arange(first, first + self.grid.full[axis], dtype=np.int32).reshape(shape)
        return Form(self.constant(known), known.shape, i32, 0, known=known)

    # Operations

    def emit_block(self, block: Block) -> list[Form]:
        """Emits the operations; gives what the block yields."""
        self._blocks += 1
        outer, self.block = self.block, self._blocks
        for op in block.ops:
            if op.name == "yield":
                self.block = outer
                return [self.env[a] for a in op.args]
            if op in self.live:
                self.emit(op)
        self.block = outer
        return []

    def emit(self, op: Op) -> None:
        """Emits one operation."""
        twin = self._twins.get(op)
        if twin is not None:
            self.env[op.result] = replace(self.env[twin.result], fresh=-1)
        elif op.name in ELEMENTWISE:
            self._elementwise(op)
        else:
            _EMIT[op.name](self, op)

    def _elementwise(self, op: Op) -> None:
        args = [self.env[a] for a in op.args]
        value = op.result
        if op.name == "select" and args[0].uniform:
            self._uniform_select(value, args)
            return
        if op.name == "cast" and args[0].dtype == value.dtype:
            self.same(value, op.args[0])
            return
        shape = np.broadcast_shapes(*(a.shape for a in args))
        out = ""
        for operand in op.args:
            if value.dtype == f32 and self.reusable(operand):
                if self.env[operand].shape == shape:
                    out = self.env[operand].text
                break
        if op.name in RANDOM:
            text = random(op.name, args, op.attrs)
        else:
            text = elementwise(op.name, args, value.dtype, out)
        view = op.name == "bitcast"
        passing = math.prod(shape) * passing_bytes(op.name, args, value.dtype)
        self.bind(
            value, text, shape, args,
            view=view, fresh=not view, shares=bool(out), passing=passing,
        )  # fmt: skip

    def _uniform_select(self, value: Value, args: list[Form]) -> None:
        c, a, b = args
        if c.is_known:
            self.env[value] = replace(a if c.known else b, fresh=-1)
            return
        shape = np.broadcast_shapes(a.shape, b.shape)
        if shape == ():
            text = f"({a.text} if {c.text} else {b.text})"
        else:
            left, right = self.materialize(a, shape), self.materialize(b, shape)
            text = f"({left} if {c.text} else {right})"
        self.bind(value, text, shape, args, shares=True)

    def same(self, value: Value, source: Value, rank: int | None = None) -> None:
        """The result is its operand's run-time array."""
        form = self.env[source]
        fresh = form.fresh if self.uses[source] == 1 else -1
        self.env[value] = replace(form, fresh=fresh, rank=form.rank if rank is None else rank)

    def _const(self, op: Op) -> None:
        self.env[op.result] = self.scalar(op.attrs["value"], op.attrs["dtype"])

    def _iota(self, op: Op) -> None:
        known = np.arange(op.attrs["size"], dtype=np.int32)
        self.env[op.result] = Form(self.constant(known), known.shape, i32, 1, known=known)

    def _program(self, op: Op) -> None:
        self.env[op.result] = self.program(op.attrs["axis"])

    def _dim(self, op: Op) -> None:
        n = self.extents[op.attrs["param"].position][op.attrs["axis"]]
        self.env[op.result] = self.scalar(n, i32)

    def _load(self, op: Op) -> None:
        param: Param = op.attrs["param"]
        extents = self.extents[param.position]
        places = []
        for axis, a in enumerate(self.access.get(op, op.attrs["access"])):
            index = self.env[op.args[a.arg]] if a.arg >= 0 else None
            scale = a.size if a.kind == "block" else 1
            kept, each = a.kind != "point", a.kind == "gather"
            size = a.size if kept else 1
            places.append(Place(axis, extents[axis], size, kept, index, scale, each))
        fill = self.scalar(op.attrs.get("fill", 0), param.dtype).text
        self.env[op.result] = load(self, f"a{param.position}", places, fill, param.dtype)

    def _load_piece(self, op: Op) -> None:
        param: Param = op.attrs["param"]
        rows = self._rows(param) if param.indexed else None
        tile = param.tile or ()
        numbers = [piece_number(self, param, axis) for axis in range(len(tile))]
        if rows is not None:
            numbers[0] = rows
        places = piece_places(self.extents[param.position], tile, numbers)
        fill = self.scalar(0, param.dtype).text
        form = load(self, f"a{param.position}", places, fill, param.dtype)
        if form.shape:
            # Later stores must not show through.
            text = self.let(f"{form.text}.copy()", form.nbytes)
            form = replace(form, text=text, hoisted=False)
        self.env[op.result] = form

    def _rows(self, param: Param) -> Form:
        """The row of axis 0 that each program owns."""
        start, name = self.grid.start[0], f"m{param.position}"
        if self.grid.position[0] < 0:
            return Form(self.let(f"int({name}[{start}])"), (), i32, 0)
        shape = (self.grid.full[0], *(1,) * (self.grid.rank - 1))
        text = f"{name}[{start}:{start + self.grid.full[0]}].reshape({shape})"
        return Form(self.hoist(text), shape, i32, 0)

    def _store_piece(self, op: Op) -> None:
        param: Param = op.attrs["param"]
        store(self, param, self.extents[param.position], self.env[op.args[0]])

    def _accumulate_piece(self, op: Op) -> None:
        param: Param = op.attrs["param"]
        rows = self._rows(param) if param.indexed else None
        accumulate(self, param, self.env[op.args[0]], rows)


_EMIT: dict[str, Any] = {
    "const": Emitter._const,
    "iota": Emitter._iota,
    "program": Emitter._program,
    "dim": Emitter._dim,
    "broadcast": cpu_tile_ops.broadcast,
    "reshape": cpu_tile_ops.reshape,
    "transpose": cpu_tile_ops.transpose,
    "permute": cpu_tile_ops.permute,
    "slice": cpu_tile_ops.slice_,
    "concat": cpu_tile_ops.concat,
    "take": cpu_tile_ops.take,
    "reduce": cpu_tile_ops.reduce,
    "scan": cpu_tile_ops.scan,
    "sort": cpu_tile_ops.sort,
    "mma": emit_mma,
    "load": Emitter._load,
    "load_piece": Emitter._load_piece,
    "store_piece": Emitter._store_piece,
    "print": cpu_debug.print_,
    "check": cpu_debug.check,
    "accumulate_piece": Emitter._accumulate_piece,
    "for": emit_for,
    "if": emit_if,
    # Pieces do not depend on who computes them: here every program has one.
    "pieces": lambda em, op: em.emit_block(op.regions[0]),
}


def _factors(
    function: Function,
    extents: Mapping[int, tuple[int, ...]],
    grid: tuple[int, ...],
    start: tuple[int, ...],
) -> dict[int, int]:
    """Grid axes that the function divides by a constant, and that constant.

    Only where stores stay simple: all pieces along the axis are whole and in order.
    """
    factors: dict[int, int] = {}
    for op in walk(function.body):
        if op.name != "floordiv":
            continue
        a, b = (v.op for v in op.args)
        if a is None or b is None or a.name != "program" or b.name != "const":
            continue
        axis, f = a.attrs["axis"], int(b.attrs["value"])
        if 1 < f < grid[axis] and grid[axis] % f == 0 and start[axis] % f == 0:
            factors.setdefault(axis, f)
    if any(param.place is not None for param in function.params):
        return {}
    for param in function.params:
        for axis, size in enumerate(param.tile or ()):
            whole = extents[param.position][axis] >= (start[axis] + grid[axis]) * size
            if not whole or (axis == 0 and param.indexed):
                factors.pop(axis, None)
    return factors


def _live(body: Block) -> set[Op]:
    """The operations that lead to a store or to control flow."""
    live = {op for op in walk(body) if not OPS[op.name].pure or op.name == "yield"}
    pending = list(live)
    while pending:
        for a in pending.pop().args:
            if a.op is not None and a.op not in live:
                live.add(a.op)
                pending.append(a.op)
    return live


def _twins(body: Block, live: set[Op]) -> dict[Op, Op]:
    """For each pure operation that repeats one whose result is at hand, that one."""
    twins: dict[Op, Op] = {}
    same: dict[Value, Value] = {}

    def visit(block: Block, seen: dict[Any, Op]) -> None:
        for op in block.ops:
            for region in op.regions:
                visit(region, dict(seen))
            if op not in live or not OPS[op.name].pure or len(op.results) != 1:
                continue
            attrs = tuple(
                (k, v.position if isinstance(v, Param) else repr(v))
                for k, v in sorted(op.attrs.items())
            )
            first = seen.setdefault((op.name, attrs, *(same.get(a, a) for a in op.args)), op)
            if first is not op:
                twins[op] = first
                same[op.result] = first.result

    visit(body, {})
    return twins


@dataclass(frozen=True)
class Generated:
    """Code of one launch shape.

    Attributes:
        text: source of `build(arrays, maps)`, which returns the closure that runs the launch.
        namespace: globals of the source.
        ragged: grid axes whose last program makes a large load a copy; worth a launch of its own.
        peak: most bytes that its temporaries take at a time, about.
    """

    text: str
    namespace: dict[str, Any]
    ragged: frozenset[int]
    peak: int


def generate(
    function: Function,
    extents: Sequence[tuple[int, ...]],
    grid: tuple[int, ...],
    start: tuple[int, ...],
) -> Generated:
    """The code that runs a grid over arrays of these shapes.

    Args:
        extents: shape of every array. grid: programs to run on each axis, at least 1.
        start: coordinate of the first program on each axis.
    """
    em = Emitter(function, extents, grid, start)
    with np.errstate(all="ignore"):
        em.emit_block(function.body)
    head = ["def build(arrays, maps):"]
    names = [f"a{p.position}" for p in function.params]
    if names:
        head.append(f"    ({', '.join(names)},) = arrays")
    head += [f"    m{p.position} = maps[{p.position}]" for p in function.params if p.indexed]
    lines, peak = bounded(em.lines, em.sizes, em.passing)
    body = lines or ["        pass"]
    run = ["    def run(queue=None):", "        with np.errstate(all='ignore'):"]
    run += ["    " + line for line in body]
    text = "\n".join([*head, *em.prologue, *run, "    return run", ""])
    return Generated(text, em.namespace, frozenset(em.ragged), peak)
