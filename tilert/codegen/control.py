"""Loops and branches. Bounds and conditions are scalars, equal in all threads of a program."""

from tilert.codegen.emit import SMALL_BODY, UNROLL, WHOLE, Emitter, c_type
from tilert.codegen.plan import Operand
from tilert.ir import Op, Value

__all__ = ["begin_loop", "carry", "constant", "for_loop", "if_else", "note_bounds", "unrolling"]


def _assign(e: Emitter, target: Value, name: str, source: Value) -> None:
    with e.each(e.registers(target)) as r:
        left = f"{name}[{r}]" if target.shape else name
        e.line(f"{left} = {e.at(source, r)};")


def constant(v: Value) -> int | None:
    """The number that a value is known to be."""
    return v.op.attrs["value"] if v.op is not None and v.op.name == "const" else None


def _trips(op: Op) -> int | None:
    lo, hi, step = (constant(a) for a in op.args[:3])
    if lo is None or hi is None or step is None:
        return None
    return len(range(lo, hi, step))


def unrolling(op: Op) -> str:
    """Loops that stream weights, and small ones, are unrolled: loads of several iterations fly.

    Unrolling anything larger costs compile time and registers and hides nothing.
    """
    ops = op.regions[0].ops
    streams = any(o.attrs.get("stream") for o in ops)
    if any(o.regions for o in ops) or (len(ops) > SMALL_BODY and not streams):
        return "#pragma unroll 1"
    trips = _trips(op)
    return "#pragma unroll" if trips is not None and trips <= WHOLE else f"#pragma unroll {UNROLL}"


def note_bounds(e: Emitter, op: Op) -> None:
    """Loops from a constant >= 0 to a constant prove the bounds of their counter."""
    lo, hi = constant(op.args[0]), constant(op.args[1])
    if lo is not None and hi is not None and lo >= 0:
        e.loop_bounds[op.regions[0].args[0]] = hi


def begin_loop(e: Emitter, op: Op) -> tuple[str, str]:
    """Declare what a loop carries and its counter; gives the counter and the head, as C++."""
    body = op.regions[0]
    for result, init in zip(op.results, op.args[3:], strict=True):
        name = e.declare(result)
        _assign(e, result, name, init)
    for arg, result in zip(body.args[1:], op.results, strict=True):
        e.names[arg] = e.names[result]
    lo, hi, step = (e.names[a] for a in op.args[:3])
    counter = e.fresh("i")
    e.names[body.args[0]] = counter
    note_bounds(e, op)
    return counter, f"for (int {counter} = {lo}; {counter} < {hi}; {counter} += {step})"


def for_loop(e: Emitter, op: Op) -> None:
    """`for`: carried values live in variables that each iteration overwrites."""
    from tilert.codegen.ahead import ahead_loop

    if e.ahead is not None and e.ahead.loop is op:
        ahead_loop(e, e.ahead, op)
        return
    body = op.regions[0]
    counter, head = begin_loop(e, op)
    operands = e.plan.pipelined.get(op, [])
    if operands:
        _pipelined(e, op, operands, counter)
        return
    e.line(unrolling(op))
    with e.braces(head):
        e.block(body)
        carry(e, op)


def carry(e: Emitter, op: Op) -> None:
    """Overwrite the carried variables with what the iteration yields."""
    body = op.regions[0]
    names = {e.names[r] for r in op.results}
    moves: list[tuple[Value, Value]] = []
    for result, v in zip(op.results, body.ops[-1].args, strict=True):
        if e.names[v] == e.names[result]:
            continue
        # Reading a carried variable, under its own name or that of a reshape: another move may
        # overwrite it first, so it is copied aside.
        moves.append((result, _aside(e, v) if e.names[v] in names else v))
    for result, v in moves:
        _assign(e, result, e.names[result], v)


def _aside(e: Emitter, v: Value) -> Value:
    copy = Value(v.type)
    if v.shape:
        e.plan.layouts[copy] = e.layout(v)
    name = e.fresh("t")
    e.line(f"{c_type(v.dtype)} {name}{f'[{e.registers(v)}]' if v.shape else ''};")
    _assign(e, v, name, v)
    e.names[copy] = name
    return copy


def _pipelined(e: Emitter, op: Op, operands: list[Operand], counter: str) -> None:
    """A ring of buffers: the copies of later iterations run while this one computes."""
    from tilert.codegen.matmul import issue_copy

    lo, hi, step = (e.names[a] for a in op.args[:3])
    stages = operands[0].stages
    issue, ring = e.fresh("issue"), e.fresh("ring")
    body = op.regions[0]
    e.line("__syncthreads();")
    with e.braces(f"auto {issue} = [&](int at_, int stage_)"):
        saved = dict(e.names)
        e.names[body.args[0]] = "at_"
        for o in operands:
            issue_copy(e, o, op, "stage_")
        e.names = saved
    e.line(";")
    e.line(f"for (int s = 0; s < {stages - 1}; ++s) {{")
    e.line(f"  if ({lo} + s * {step} < {hi}) {issue}({lo} + s * {step}, s);")
    e.line("  copy_commit();")
    e.line("}")
    e.line(f"int {ring} = 0;")
    with e.braces(f"for (int {counter} = {lo}; {counter} < {hi}; {counter} += {step})"):
        e.line(f"copy_wait<{stages - 2}>();")
        e.line("__syncthreads();")
        e.line(f"{{ const int ahead = {counter} + {stages - 1} * {step};")
        e.line(f"  int slot = {ring} + {stages - 1}; if (slot >= {stages}) slot -= {stages};")
        e.line(f"  if (ahead < {hi}) {issue}(ahead, slot);")
        e.line("  copy_commit(); }")
        for o in operands:
            e.stage_of[o] = ring
        e.block(body)
        carry(e, op)
        e.line(f"if (++{ring} == {stages}) {ring} = 0;")
    e.line("copy_wait<0>();")


def if_else(e: Emitter, op: Op) -> None:
    """`if` on a scalar."""
    for result in op.results:
        e.declare(result)
    for region, head in zip(op.regions, (f"if ({e.names[op.args[0]]})", "else"), strict=True):
        with e.braces(head):
            e.block(region)
            for result, v in zip(op.results, region.ops[-1].args, strict=True):
                _assign(e, result, e.names[result], v)
