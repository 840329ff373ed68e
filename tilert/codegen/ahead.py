"""Weights of matrix-vector products that come to registers before the wait for earlier kernels.

Where nobody writes them meanwhile (`early.py`), a program of a grid that starts early has its first
weights under way while the kernels before it end, so that memory is not idle between kernels.
"""

from dataclasses import dataclass

from tilert.codegen.control import begin_loop, carry, constant, note_bounds, unrolling
from tilert.codegen.emit import Emitter, c_name, c_type
from tilert.codegen.memory import Address, address, offset_of, vector
from tilert.ir import Block, Op, Param

__all__ = ["Ahead", "ahead_loop", "begin_early", "find_ahead", "take"]

MOST_WORDS = 40
"""Registers of a thread that wait for weights."""


@dataclass(frozen=True)
class Ahead:
    """What comes early.

    Attributes:
        loop: the loop whose operands they are, None where they are in none.
        loads: of these, each with the variable that holds what it brings.
        steps: of the loop, its first ones; 1 without a loop.
        params: numbers of the parameters, none of which may be written meanwhile.
    """

    loop: Op | None
    loads: dict[Op, str]
    steps: int
    params: tuple[int, ...]


def find_ahead(e: Emitter) -> Ahead | None:
    """The first steps of a loop over weights, as many as there are registers for, or the weights of
    a kernel that takes one step; None where there are none. A piece that an index map places is
    known only when the map has been read."""
    body = e.function.body
    if any(arg.kind == "index" for arg in e.function.abi()):
        return None
    for loop in (None, *(op for op in body.ops if op.name == "for")):
        if loop is not None:
            if constant(loop.args[0]) != 0 or constant(loop.args[2]) != 1:
                continue
            note_bounds(e, loop)
        trips = 1 if loop is None else constant(loop.args[1]) or 0
        inside = body if loop is None else loop.regions[0]
        loads = [op for op in inside.ops if _comes_early(e, inside, op)]
        words = sum(4 * _pieces(e, op) for op in loads)
        if steps := min(trips, MOST_WORDS // words) if words else 0:
            params = {op.attrs["param"].position for op in loads}
            names = {op: f"ahead{i}" for i, op in enumerate(loads)}
            return Ahead(loop, names, steps, tuple(sorted(params)))
    return None


def _comes_early(e: Emitter, block: Block, op: Op) -> bool:
    """Whether an operation of a block reads weights, 16 bytes at a time, from where a thread knows
    before it has read anything."""
    if op.name != "load" or not op.attrs.get("stream") or op.attrs["fill"] != 0:
        return False
    known = all(
        a in block.args[:1] or (a.op is not None and a.op.name in ("program", "const"))
        for a in op.args
    )
    return known and vector(e, _address(e, op), e.layout(op.result)) * _itemsize(op) == 16


def _itemsize(op: Op) -> int:
    return op.result.dtype.itemsize


def _pieces(e: Emitter, op: Op) -> int:
    """Pieces of 16 bytes that a thread has of an operand."""
    return e.layout(op.result).registers * _itemsize(op) // 16


def _address(e: Emitter, op: Op) -> Address:
    """Where an operand is, as C++ that stands before everything else, in a loop over `step`."""
    names = dict(e.names)
    for a in op.args:
        e.names[a] = "step" if a.op is None else e.expression(a.op, [], "0")
    where = address(e, op.attrs["param"], op.attrs["access"], op.args, op.loc)
    e.names = names
    return where


def begin_early(e: Emitter, ahead: Ahead) -> None:
    """Bring what comes early. Without a loop, that is all weights of the kernel."""
    e.ahead = ahead
    for load in ahead.loads:
        _bring(e, ahead, load)
    e.early = ahead.loop is None


def ahead_loop(e: Emitter, ahead: Ahead, loop: Op) -> None:
    """The loop, of which the first steps find their weights in registers."""
    counter, _ = begin_loop(e, loop)
    last = constant(loop.args[1]) or 0
    for first, end, early in ((0, ahead.steps, True), (ahead.steps, last, False)):
        if first == end:
            continue
        e.early = early
        e.line("#pragma unroll" if early else unrolling(loop))
        with e.braces(f"for (int {counter} = {first}; {counter} < {end}; ++{counter})"):
            e.block(loop.regions[0])
            carry(e, loop)
    e.early = False


def _bring(e: Emitter, ahead: Ahead, op: Op) -> None:
    """Begin to read an operand, in text that stands before the wait."""
    param: Param = op.attrs["param"]
    where, layout, name = _address(e, op), e.layout(op.result), ahead.loads[op]
    count, each = _pieces(e, op), 16 // _itemsize(op)
    lines, depth = e.lines, e.depth
    e.lines, e.depth = e.before_wait, 1
    e.line(f"vec16 {name}[{count * ahead.steps}];")
    e.line("#pragma unroll")
    with e.braces(f"for (int step = 0; step < {ahead.steps}; ++step)"):
        e.line(f"const {c_type(param.dtype)}* src = {c_name(param)} + ({where.base});")
        e.line("#pragma unroll")
        with e.braces(f"for (int r = 0; r < {count}; ++r)"):
            place, bounds = offset_of(e, where, layout, f"(r * {each})")
            ok = " && ".join([*where.uniform, *bounds]) or "true"
            e.line(f"{name}[step * {count} + r] = load16_early(src + ({place}), {ok});")
    e.lines, e.depth = lines, depth


def take(e: Emitter, ahead: Ahead, op: Op) -> None:
    """An operand of one of the first steps."""
    name, count = e.declare(op.result), _pieces(e, op)
    each, ctype = 16 // _itemsize(op), c_type(op.result.dtype)
    counter = "0" if ahead.loop is None else e.names[ahead.loop.regions[0].args[0]]
    e.line("#pragma unroll")
    with e.braces(f"for (int r = 0; r < {count}; ++r)"):
        e.line(f"union {{ vec16 v; {ctype} e[{each}]; }} u;")
        e.line(f"u.v = {ahead.loads[op]}[{counter} * {count} + r];")
        e.line("#pragma unroll")
        e.line(f"for (int q = 0; q < {each}; ++q) {name}[r * {each} + q] = u.e[q];")
