"""Which optional schedules the code generator may choose: the one switch for all of them.

It chooses from all, unless TILERT_SCHEDULES names those that are left, separated by commas; "none"
leaves none. It is read whenever a kernel is compiled.
"""

import os

from tilert.errors import CompileError

__all__ = ["SCHEDULES", "VARIABLE", "enabled"]

VARIABLE = "TILERT_SCHEDULES"
NONE = "none"
SCHEDULES = {
    "pipelined": "sm_90a: products through a ring that the copy engine fills, by warpgroups",
}


def enabled() -> frozenset[str]:
    """The schedules that are switched on.

    Raises:
        CompileError: if TILERT_SCHEDULES names one that does not exist.
    """
    names = {name.strip() for name in os.environ.get(VARIABLE, "").split(",")} - {""}
    if not names:
        return frozenset(SCHEDULES)
    names -= {NONE}
    unknown = sorted(names - SCHEDULES.keys())
    if unknown:
        raise CompileError(
            f"{VARIABLE} names {', '.join(map(repr, unknown))}; there are"
            f" {', '.join(map(repr, [*sorted(SCHEDULES), NONE]))}"
        )
    return frozenset(names)
