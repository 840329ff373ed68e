"""Where a kernel waits for earlier ones, and lets later ones start (programmatic dependent launch).

A kernel of a graph may be started while those before it still run. It then waits before it touches
memory that they write, so that it sees what they wrote. A word among its arguments says what it may
do sooner; see `tilert.cuda_graph` for who sets it.
"""

from collections.abc import Sequence

from tilert.codegen.emit import c_name
from tilert.ir import Function, Op, walk

__all__ = [
    "APART", "AT_ONCE", "BEHIND_ONE", "END", "MOST_EARLY", "PARAMETER", "START", "START_APART",
    "begin", "begin_apart", "can_be_apart", "first_wait", "unless",
]  # fmt: skip

MOST_EARLY = 29
"""Operands that have a bit in the word, from the lowest on: those that a kernel can read ahead."""

AT_ONCE = 1 << 31
"""The bit by which the next kernel may start when all blocks of this one have. Later would be soon
enough, but now each multiprocessor has a block, and gets one more; where some have none any more,
they get two, which take twice as long."""

APART = 1 << 30
"""The bit of a kernel that shares no memory with the one before: its first block alone waits, so
that it is behind all that come earlier once it is complete."""

BEHIND_ONE = 1 << 29
"""The bit, beside `AT_ONCE`, by which the first block lets the next kernel start only once it has
waited itself: while that one runs, all but this one are then complete."""

PARAMETER = "const u32 early"

START = [f"  if (early & {AT_ONCE}u) later_grids_may_start();"]
"""What a kernel does first."""

START_APART = [
    f"  if ((early & {AT_ONCE}u) && !((early & {BEHIND_ONE}u) && blockIdx.x == 0))"
    " later_grids_may_start();"
]
"""What one does first that `can_be_apart`."""

END = ["  later_grids_may_start();"]
"""What a kernel does last. Earlier, waiting blocks may take the places of running ones."""


def first_wait(function: Function) -> tuple[Op | None, tuple[int, ...]]:
    """The operation before which a kernel has to wait if it has read ahead, and the numbers of the
    parameters that it reads before: Refs, up to where something else is done with memory.

    Registers are then full when the kernel before is complete, and what follows is to store them.
    """
    read: dict[int, None] = {}
    # Where a program's piece is, is read from memory at the beginning.
    for op in function.body.ops if not any(p.indexed for p in function.params) else ():
        inner = [op, *(o for region in op.regions for o in walk(region))]
        loads = [o.attrs["param"] for o in inner if o.name == "load"]
        if any(o.name in _OTHERS for o in inner) or any(p.kind != "ref" for p in loads):
            return op, tuple(read) if len(read) <= MOST_EARLY else ()
        read |= dict.fromkeys(p.position for p in loads)
    return None, ()


_OTHERS = {"load_piece", "store_piece", "accumulate_piece", "pieces", "print", "check"}


def can_be_apart(function: Function) -> bool:
    """Whether a kernel that has read ahead does nothing more with memory than to store pieces, so
    that it need not wait for one whose memory these are not.
    """
    wait, _ = first_wait(function)
    ahead = function.body.ops[: function.body.ops.index(wait)] if wait is not None else []
    late = [op for op in walk(function.body) if op.name == "load" and op not in ahead]
    others = _OTHERS - {"store_piece"}
    return bool(ahead) and not late and all(op.name not in others for op in walk(function.body))


def begin_apart(function: Function) -> list[str]:
    """What comes before the first store of a kernel that `can_be_apart`, behind what it reads."""
    wait = f"  if (!(early & {APART}u) || blockIdx.x == 0) wait_for_earlier_grids();"
    return [wait, *_behind(function)]


def begin(function: Function, ahead: Sequence[str] = (), bits: int = 0) -> list[str]:
    """What a kernel does before it touches memory of the device that others may write.

    Where pointers are said to have no aliases, NVVM may load what nobody writes above the wait. On
    targets where kernels start early they are not, and are made unknown behind it.

    Args:
        ahead: what comes before the wait where the word has all of `bits`, and else behind it.
    """
    first = unless(function, bits)[:1] + list(ahead) if ahead else []
    # To wait once more costs nothing, and what follows has waited whatever the word is.
    return [*first, "  wait_for_earlier_grids();", *_behind(function)]


def unless(function: Function, bits: int) -> list[str]:
    """What a kernel does before it reads ahead: it waits, unless the word has all of `bits`. Behind
    what it reads comes `begin`."""
    wait = f"  if ((early & {bits}u) != {bits}u) wait_for_earlier_grids();"
    return [wait, *_behind(function)]


def _behind(function: Function) -> list[str]:
    pointers = [
        c_name(function.params[arg.param]) + "_map" * (arg.kind == "index")
        for arg in function.abi()
        if arg.kind in ("pointer", "index")
    ]
    return [f"  behind({pointer});" for pointer in pointers]
