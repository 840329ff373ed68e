"""device_print and debug_assert on a GPU: compiled in only where TILERT_DEBUG=1 asks for it."""

import json
import os
from collections.abc import Callable

from tilert.codegen.bounds import note
from tilert.codegen.emit import Emitter
from tilert.dead_code import remove_dead
from tilert.dtypes import DType, i64
from tilert.fault import Site
from tilert.ir import Block, Function, Op, Value

__all__ = ["check", "print_", "without_debugging"]


def without_debugging(function: Function) -> None:
    """Drop prints and checks, and what only they need, unless they were asked for."""
    if os.environ.get("TILERT_DEBUG", "0") not in ("", "0"):
        return

    def visit(block: Block) -> bool:
        kept = [op for op in block.ops if op.name not in ("print", "check")]
        dropped = len(kept) < len(block.ops)
        block.ops = kept
        for op in kept:
            for region in op.regions:
                dropped |= visit(region)
        return dropped

    if visit(function.body):
        remove_dead(function.body)


def _format(dtype: DType) -> str:
    if dtype.is_float:
        return "%g"
    return "%lld" if dtype == i64 else "%u" if dtype.kind == "u" else "%d"


def _argument(v: Value, text: str) -> str:
    if v.dtype.is_float:
        return f"(double)f32_of({text})"
    return text if v.dtype == i64 else f"({'u32' if v.dtype.kind == 'u' else 'int'}){text}"


def _head(e: Emitter, op: Op) -> tuple[str, list[str]]:
    """Format and arguments of the place and the program."""
    place = f"{op.loc.filename}:{op.loc.line}: " if op.loc is not None else ""
    axes = range(len(e.function.grid))
    numbers = ", ".join("%d" for _ in axes)
    head = f"{place}{e.function.name} ".replace("%", "%%")
    return f"{head}program ({numbers}): ", [f"p{axis}" for axis in axes]


def _printf(e: Emitter, form: str, arguments: list[str]) -> None:
    # JSON's escapes are C's, once it leaves other letters as they are.
    text = json.dumps(form + "\n", ensure_ascii=False)
    e.line(f"printf({', '.join([text, *arguments])});")


def _record(e: Emitter, op: Op) -> None:
    v = op.args[0]
    site = Site("assert", op.loc, message=op.attrs["message"], shape=v.shape)
    noted = note(e, site)

    def act(r: str, index: list[str]) -> None:
        element = e.flat(e.layout(v), r) if v.shape else "0"
        e.line(f"if (!{e.at(v, r)}) fault_note({noted}, {element}, 0);")

    if v.shape:
        _each_element(e, v, act)
    else:
        act("", [])


def _each_element(e: Emitter, v: Value, act: Callable[[str, list[str]], None]) -> None:
    """For every element of a tile, in one of the threads that hold it."""
    layout = e.layout(v)
    copies = layout.copies_expr(e.plan.threads, "(int)threadIdx.x")
    with e.each(layout.registers) as r:
        guard = " && ".join(c for c in (copies, e.inside(layout, r)) if c)
        with e.braces(f"if ({guard})" if guard else ""):
            act(r, [e.index(layout, axis, r) for axis in range(len(v.shape))])


def print_(e: Emitter, op: Op) -> None:
    """A line for every scalar, and for every element of a tile."""
    head, programs = _head(e, op)
    text = op.attrs["text"].replace("%", "%%")
    if not op.args:
        with e.braces("if (threadIdx.x == 0)"):
            _printf(e, head + text, programs)
    for v in op.args:
        kind = _format(v.dtype)
        if not v.shape:
            with e.braces("if (threadIdx.x == 0)"):
                _printf(e, f"{head}{text} {kind}", [*programs, _argument(v, e.names[v])])
            continue
        places = ", ".join("%d" for _ in v.shape)

        def act(r: str, index: list[str], v: Value = v, kind: str = kind, at: str = places) -> None:
            form = f"{head}{text} [{at}] = {kind}"
            _printf(e, form, [*programs, *index, _argument(v, e.at(v, r))])

        _each_element(e, v, act)


def check(e: Emitter, op: Op) -> None:
    """Print what went wrong and stop the kernel; a checked one leaves a record and goes on."""
    if e.checks:
        _record(e, op)
        return
    head, programs = _head(e, op)
    v, message = op.args[0], op.attrs["message"].replace("%", "%%")
    if not v.shape:
        with e.braces(f"if (!{e.names[v]})"):
            with e.braces("if (threadIdx.x == 0)"):
                _printf(e, f"{head}debug_assert failed: {message}", programs)
            e.line("__trap();")
        return
    places = ", ".join("%d" for _ in v.shape)

    def act(r: str, index: list[str]) -> None:
        with e.braces(f"if (!{e.at(v, r)})"):
            form = f"{head}debug_assert failed at [{places}]: {message}"
            _printf(e, form, [*programs, *index])
            e.line("__trap();")

    _each_element(e, v, act)
