"""Bounds on what a program may ask for, so that a slip is an error and fills no memory."""

__all__ = [
    "MAX_AXES",
    "MAX_BITS",
    "MAX_BYTES",
    "MAX_EXTENT",
    "MAX_STATEMENTS",
    "MAX_TILE",
    "MAX_UNROLLED",
]

MAX_AXES = 32
"""Axes of an array or a tile."""

MAX_EXTENT = 2**31 - 1
"""Elements of one axis of an array that a kernel takes, and of one axis of a piece."""

MAX_TILE = 2**26
"""Elements of a tile, and of a piece."""

MAX_UNROLLED = 4096
"""Iterations of one `static_range` loop."""

MAX_STATEMENTS = 2**16
"""Statements of a kernel, counted after unrolling and inlining."""

MAX_BITS = 4096
"""Bits of a compile-time int."""

MAX_BYTES = 2**62
"""Bytes between the ends of an array; no machine has as many."""
