"""What follows the products, some registers at a time: all of it at once would not fit beside the
sums.

Where loads, arithmetic and stores of tiles that lie as the sums do follow each other, they are
written once for each window of registers, so that an element is loaded, worked on and stored before
the next ones are.
"""

from collections.abc import Callable

from tilert.codegen.emit import Emitter
from tilert.codegen.layout import Layout
from tilert.codegen.lower import uses
from tilert.ir import Op, Value
from tilert.ops import ELEMENTWISE

__all__ = ["WINDOW", "in_windows", "write_epilogue", "write_parts"]

WINDOW = 32
"""Registers: loads in flight, against what they take away from the sums."""


def write_epilogue(e: Emitter, ops: list[Op], sums: Value) -> None:
    """Write the operations behind the loop over products.

    Args:
        ops: in order, the last of the function.
        sums: of any of the products.
    """
    layout = e.layout(sums)
    first, together, rest = _split(e, ops, layout)
    for op in first:
        e.op(op)
    for window in _windows(layout) if together else ():
        e.window = window
        with e.braces():
            for op in together:
                e.op(op)
    e.window = None
    for op in rest:
        e.op(op)


def in_windows(e: Emitter, ops: list[Op], sums: list[Value]) -> bool:
    """Whether nothing behind the loop needs more of the sums than some of their registers."""
    first, together, rest = _split(e, ops, e.layout(sums[0]))
    whole = any(v in op.args for op in first for v in sums)
    return bool(together) and not rest and not whole


def write_parts(
    e: Emitter,
    ops: list[Op],
    sums: Value,
    windows: list[tuple[int, int]],
    begin: Callable[[tuple[int, int]], None],
) -> None:
    """Write operations that are `in_windows` once for each block of a cluster.

    Args:
        windows: registers that each block keeps.
        begin: writes what comes before them.
    """
    first, together, _ = _split(e, ops, e.layout(sums))
    for op in first:
        e.op(op)
    for rank, window in enumerate(windows):
        if window[0] == window[1]:
            continue
        with e.braces(f"if (rank == {rank})"):
            e.window = window
            # While they come, the sums are put together.
            loads = [op for op in together if op.name in ("load", "load_piece")]
            for op in loads:
                e.op(op)
            begin(window)
            for op in together:
                if op not in loads:
                    e.op(op)
    e.window = None


def _windows(layout: Layout) -> list[tuple[int, int]]:
    """First and last registers but one; where a thread has several blocks of rows, of one each."""
    block = max((f.stride for f in layout.axes[0] if f.kind == "r"), default=0)
    if block < WINDOW:
        block = layout.registers
    return [
        (start, min(start + WINDOW, first + block))
        for first in range(0, layout.registers, block)
        for start in range(first, first + block, WINDOW)
    ]


def _split(e: Emitter, ops: list[Op], layout: Layout) -> tuple[list[Op], list[Op], list[Op]]:
    """What comes first, what is written window by window, and what comes last."""
    first: list[Op] = []
    together: list[Op] = []
    made: set[Value] = set()
    for place, op in enumerate(ops):
        if _lies_as(e, op, layout):
            together.append(op)
            made |= set(op.results)
        elif op.regions or op.name in _IN_ORDER or made & set(op.args):
            rest = ops[place:]
            break
        else:
            first.append(op)
    else:
        rest = []
    readers = uses(e.function.body)
    if any(reader not in together for v in made for reader in readers.get(v, [])):
        return ops, [], []
    return first, together, rest


_IN_ORDER = ("load_piece", "store_piece", "accumulate_piece", "print", "check")


def _lies_as(e: Emitter, op: Op, layout: Layout) -> bool:
    """Whether an operation touches no element but those of its registers, which lie as the sums."""
    if op.name == "store_piece":
        copies = layout.copies_expr(e.plan.threads, "")
        return _has(e, op.args[0], layout) and not copies
    if not op.results or not _has(e, op.result, layout):
        return False
    if op.name == "broadcast":
        source = op.args[0]
        return not source.shape or e.layout(source) == layout.narrowed(source.shape)
    if op.name == "load":
        return all(a.kind != "gather" for a in op.attrs["access"])
    return op.name == "load_piece" or op.name in ELEMENTWISE


def _has(e: Emitter, v: Value, layout: Layout) -> bool:
    return bool(v.shape) and e.plan.layouts.get(v) == layout
