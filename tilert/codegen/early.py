"""Where a kernel waits for earlier ones, and lets later ones start (programmatic dependent launch).

A kernel of a graph may be started while the one before it still runs. It then waits before it
touches memory, so that it sees what the other wrote; see `tilert.cuda_graph` for which kernels are.
"""

from tilert.codegen.emit import c_name
from tilert.ir import Function

__all__ = ["END", "begin"]

END = ["  later_grids_may_start();"]
"""What a kernel does last. Earlier, waiting blocks would take the places of running ones."""


def begin(function: Function) -> list[str]:
    """What a kernel does before it touches memory of the device.

    Where pointers are said to have no aliases, NVVM may load what nobody writes above the wait. On
    targets where kernels start early they are not, and are made unknown behind it.
    """
    pointers = [
        c_name(function.params[arg.param]) + "_map" * (arg.kind == "index")
        for arg in function.abi()
        if arg.kind in ("pointer", "index")
    ]
    return ["  wait_for_earlier_grids();", *(f"  behind({pointer});" for pointer in pointers)]
