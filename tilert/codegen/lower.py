"""Rewrites of the tile IR before layouts are chosen for the cuda backend.

Order matters: `lower_thin_mma` turns products with few rows into elementwise work and a sum, which
`defer_sums` then moves out of the loops; transposes that only thin products read die in between,
before `widen_mma` would convert them.
"""

from tilert.dead_code import remove_dead
from tilert.dtypes import bf16, f16, f32, i8
from tilert.ir import Block, Function, Op, TileType, Value, walk
from tilert.ops import make

__all__ = ["clone", "is_thin", "lower", "narrow_rights", "sink_past", "uses"]

# Products with at most this many rows stream their weights through registers instead of the
# tensor cores, as long as a thread's share of the partial sums stays below THIN_REGISTERS.
THIN_ROWS = 4
THIN_REGISTERS = 64


def lower(function: Function, threads: int) -> Function:
    """The function as the cuda backend compiles it: the pass list, in order."""
    function = clone(function)
    lower_thin_mma(function, threads)
    remove_dead(function.body)
    widen_mma(function)
    defer_sums(function)
    return function


def narrow_rights(function: Function) -> Function:
    """The function with products of f32 whose right operands are bf16 in truth as products of f32
    and bf16, which no other pass knows; the same one where it has none."""
    wide = [op for op in walk(function.body) if op.name == "mma" and _narrow_right(op) is not None]
    if not wide:
        return function
    function = clone(function)
    for op in walk(function.body):
        narrow = _narrow_right(op) if op.name == "mma" else None
        if narrow is not None and op.args[1].op is not None:
            turned = op.args[1].op
            turned.args = [narrow]
            turned.results[0].type = TileType(turned.result.shape, narrow.dtype)
    remove_dead(function.body)
    return function


def _narrow_right(op: Op) -> Value | None:
    """The bf16 [n, k] tile of which the right operand of a product of f32 is made."""
    w = _weights(op)
    if w is None or w.dtype != f32 or w.op is None or w.op.name != "cast":
        return None
    return w.op.args[0] if w.op.args[0].dtype == bf16 else None


def clone(function: Function) -> Function:
    """A deep copy that passes may change; parameters are shared."""
    values: dict[Value, Value] = {}

    def copy_value(v: Value, op: Op | None) -> Value:
        values[v] = Value(v.type, op, v.name)
        return values[v]

    def copy_block(block: Block) -> Block:
        out = Block([copy_value(a, None) for a in block.args])
        for op in block.ops:
            new = Op(op.name, [values[a] for a in op.args], dict(op.attrs), loc=op.loc)
            new.regions = [copy_block(r) for r in op.regions]
            new.results = [copy_value(r, new) for r in op.results]
            out.ops.append(new)
        return out

    body = copy_block(function.body)
    return Function(
        function.name, function.params, function.grid, body, function.filename, function.options
    )


def uses(block: Block) -> dict[Value, list[Op]]:
    """Every operation that reads a value, nested blocks included."""
    found: dict[Value, list[Op]] = {}

    def visit(b: Block) -> None:
        for op in b.ops:
            for a in op.args:
                found.setdefault(a, []).append(op)
            for region in op.regions:
                visit(region)

    visit(block)
    return found


def is_zero(value: Value) -> bool:
    """Whether a value is the constant 0 or a broadcast of it."""
    op = value.op
    if op is not None and op.name == "broadcast":
        op = op.args[0].op
    return op is not None and op.name == "const" and op.attrs["value"] == 0


class _Rewriter:
    """Emits replacement operations in front of a position of a block."""

    def __init__(self) -> None:
        self.ops: list[Op] = []

    def __call__(self, name: str, *args: Value, **attrs: object) -> Value:
        op = make(name, list(args), **attrs)
        self.ops.append(op)
        return op.results[0]

    def spread(self, x: Value, unit: tuple[int, ...], shape: tuple[int, ...]) -> Value:
        x = x if x.dtype == f32 else self("cast", x, dtype=f32)
        x = x if x.shape == unit else self("reshape", x, shape=unit)
        return x if x.shape == shape else self("broadcast", x, shape=shape)


def _weights(op: Op) -> Value | None:
    """The [n, k] tile behind a transposed right operand."""
    b = op.args[1].op
    return b.args[0] if b is not None and b.name == "transpose" else None


def is_thin(op: Op, threads: int) -> bool:
    """Whether `lower_thin_mma` takes a product in a program of so many threads."""
    w = _weights(op)
    m, k = op.args[0].shape
    if op.args[0].dtype == i8:
        return False
    return w is not None and m <= THIN_ROWS and m * w.shape[0] * k <= THIN_REGISTERS * threads


def lower_thin_mma(function: Function, threads: int) -> None:
    """Few rows: `acc + sum(a[:, None, :] * w[None, :, :], axis=2)`, weights on the wide side."""

    def visit(block: Block) -> None:
        ops: list[Op] = []
        for op in block.ops:
            for region in op.regions:
                visit(region)
            w = _weights(op) if op.name == "mma" else None
            if w is None or not is_thin(op, threads):
                ops.append(op)
                continue
            m, k = op.args[0].shape
            n = w.shape[0]
            load = w.op.args[0].op if w.op is not None and w.op.name == "cast" else w.op
            if load is not None and load.name == "load":
                load.attrs["stream"] = True
            r = _Rewriter()
            shape = (m, n, k)
            a3 = r.spread(op.args[0], (m, 1, k), shape)
            w3 = r.spread(w, (1, n, k), shape)
            total = r("reduce", r("mul", a3, w3), kind="sum", axis=2)
            ops += r.ops
            add = Op("add", [op.args[2], total], {}, op.results, loc=op.loc)
            op.results[0].op = add
            ops.append(add)
        block.ops = ops

    visit(function.body)


def widen_mma(function: Function) -> None:
    """Products of 8-bit floats as products of f16, which holds every one of them.

    The tensor cores of sm_89 and sm_90 take 8-bit floats as they are, but keep fewer bits of the
    sums than f32 has.
    """

    def visit(block: Block) -> None:
        ops: list[Op] = []
        for op in block.ops:
            for region in op.regions:
                visit(region)
            if op.name == "mma":
                r = _Rewriter()
                op.args[:2] = [_widened(r, a) for a in op.args[:2]]
                ops += r.ops
            ops.append(op)
        block.ops = ops

    visit(function.body)
    remove_dead(function.body)


def _widened(r: _Rewriter, x: Value) -> Value:
    if not (x.dtype.is_narrow and x.dtype.bits == 8):
        return x
    # A transpose costs nothing only where it is the last step before the product.
    if x.op is not None and x.op.name == "transpose":
        return r("transpose", r("cast", x.op.args[0], dtype=f16))
    return r("cast", x, dtype=f16)


def defer_sums(function: Function) -> None:
    """`acc = acc + sum(x)` around a loop: carry x's shape, sum once after the loop."""

    def visit(block: Block) -> None:
        ops: list[Op] = []
        for op in block.ops:
            for region in op.regions:
                visit(region)
            before, after = _defer_in(op, readers) if op.name == "for" else ([], [])
            ops += [*before, op, *after]
        block.ops = ops

    readers = uses(function.body)
    visit(function.body)


def _defer_in(loop: Op, readers: dict[Value, list[Op]]) -> tuple[list[Op], list[Op]]:
    """Defer what can be deferred of one loop: operations to put before it and after it."""
    body = loop.regions[0]
    out = body.ops[-1]
    before: list[Op] = []
    after: list[Op] = []
    for i, arg in enumerate(body.args[1:]):
        result = out.args[i]
        add = result.op
        if (
            add is None
            or add.name != "add"
            or add not in body.ops
            or arg not in add.args
            or readers.get(arg) != [add]
            or readers.get(result) != [out]
            or not is_zero(loop.args[3 + i])
        ):
            continue
        term = add.args[1] if add.args[0] is arg else add.args[0]
        total = term.op
        if total is None or total.name != "reduce" or total.attrs["kind"] != "sum":
            continue
        if readers.get(term) != [add] or total not in body.ops or arg.dtype != f32:
            continue
        wide = total.args[0]
        r = _Rewriter()
        zero = r("const", value=0.0, dtype=f32)
        loop.args[3 + i] = r("broadcast", zero, shape=wide.shape)
        before += r.ops
        new_arg = Value(TileType(wide.shape, f32))
        body.args[1 + i] = new_arg
        new_add = make("add", [new_arg, wide])
        position = body.ops.index(add)
        body.ops[position] = new_add
        body.ops.remove(total)
        out.args[i] = new_add.results[0]
        carried = Value(TileType(wide.shape, f32), loop)
        old = loop.results[i]
        loop.results[i] = carried
        final = Op("reduce", [carried], dict(total.attrs), [old], loc=total.loc)
        old.op = final
        after.append(final)
    return before, after


_EFFECTS = ("store_piece", "accumulate_piece", "print", "check")


def sink_past(function: Function, loop: Op) -> None:
    """Move what the loop does not use from before it to behind it: registers are scarce inside.

    Nothing is moved past what has an effect, for it may be loaded from there.
    """
    ops = function.body.ops
    place = ops.index(loop)
    before = ops[:place]
    if any(o.name in _EFFECTS for first in (*before, loop) for o in walk(Block(ops=[first]))):
        return
    needed: set[Op] = set()
    todo = [*loop.args, *(a for op in walk(loop.regions[0]) for a in op.args)]
    while todo:
        op = todo.pop().op
        if op is not None and op not in needed:
            needed.add(op)
            todo += [*op.args, *(a for r in op.regions for o in walk(r) for a in o.args)]
    early = [op for op in before if op in needed]
    late = [op for op in before if op not in needed]
    ops[:] = [*early, loop, *late, *ops[place + 1 :]]
