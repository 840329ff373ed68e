"""Where a kernel waits for earlier ones, and lets later ones start (programmatic dependent launch).

A kernel of a graph may be started while those before it still run. It then waits before it touches
memory that they write, so that it sees what they wrote. A word among its arguments says what it may
do sooner; see `tilert.cuda_graph` for who sets it.
"""

from collections.abc import Sequence

from tilert.codegen.emit import c_name
from tilert.ir import Function

__all__ = ["AT_ONCE", "END", "MOST_EARLY", "PARAMETER", "START", "begin"]

MOST_EARLY = 31
"""Operands that have a bit in the word, from the lowest on: those that a kernel can read ahead."""

AT_ONCE = 1 << MOST_EARLY
"""The bit by which the next kernel may start when all blocks of this one have. Later would be soon
enough, but now each multiprocessor has a block, and gets one more; where some have none any more,
they get two, which take twice as long."""

PARAMETER = "const u32 early"

START = [f"  if (early & {AT_ONCE}u) later_grids_may_start();"]
"""What a kernel does first."""

END = ["  later_grids_may_start();"]
"""What a kernel does last. Earlier, waiting blocks may take the places of running ones."""


def begin(function: Function, ahead: Sequence[str] = (), bits: int = 0) -> list[str]:
    """What a kernel does before it touches memory of the device that others may write.

    Where pointers are said to have no aliases, NVVM may load what nobody writes above the wait. On
    targets where kernels start early they are not, and are made unknown behind it.

    Args:
        ahead: what comes before the wait where the word has all of `bits`, and else behind it.
    """
    pointers = [
        c_name(function.params[arg.param]) + "_map" * (arg.kind == "index")
        for arg in function.abi()
        if arg.kind in ("pointer", "index")
    ]
    wait = "wait_for_earlier_grids();"
    # To wait once more costs nothing, and what follows has waited whatever the word is.
    first = [f"  if ((early & {bits}u) != {bits}u) {wait}", *ahead] if ahead else []
    return [*first, f"  {wait}", *(f"  behind({p});" for p in pointers)]
