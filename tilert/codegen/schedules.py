"""Which optional schedules the code generator may choose: the one switch for all of them.

TILERT_SCHEDULES names them, separated by commas; unset or empty, kernels are generated without.
It is read whenever a kernel is compiled.
"""

import os

from tilert.errors import CompileError

__all__ = ["SCHEDULES", "VARIABLE", "enabled"]

VARIABLE = "TILERT_SCHEDULES"
SCHEDULES = {
    "pipelined": "sm_90a: products through a ring that the copy engine fills, by warpgroups",
}


def enabled() -> frozenset[str]:
    """The schedules that are switched on.

    Raises:
        CompileError: if TILERT_SCHEDULES names one that does not exist.
    """
    names = {name.strip() for name in os.environ.get(VARIABLE, "").split(",")} - {""}
    unknown = sorted(names - SCHEDULES.keys())
    if unknown:
        raise CompileError(
            f"{VARIABLE} names {', '.join(map(repr, unknown))}; there are"
            f" {', '.join(map(repr, sorted(SCHEDULES)))}"
        )
    return frozenset(names)
