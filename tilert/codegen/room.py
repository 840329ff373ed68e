"""What a ring of the pipelined schedule takes of shared memory, and how much of it."""

from tilert.codegen.plan import source_of
from tilert.codegen.ring import COLUMNS, GROUP_ROWS, Box, Ring, plan_of, sums_of
from tilert.tensor_map import ROW_BYTES

__all__ = ["element_at", "exchanged_bytes", "most_stages", "read_bytes"]

MOST_STAGES = 8
UNDER_WAY = 190 * 1024
"""Bytes that a block has under way where reading is what takes time, besides the two stages that
products have: about all that a multiprocessor holds. While a kernel ends, the next one's blocks
take the places of its own, one by one, and fill their rings. With 80 KB, and room for two blocks,
products take up to 11 % longer on an H200, and a decode step of 8 sequences 26 %."""


def most_stages(ring: Ring) -> int:
    """How many stages a ring has at most."""
    if not ring.few:
        return MOST_STAGES
    return 2 + -(-UNDER_WAY // ring.stage_bytes)


def read_bytes(ring: Ring, stages: int) -> int:
    """Shared memory that products of 64 rows read, which fewer rows do not fill."""
    if not ring.grouped:
        return 0
    lefts = (op.args[0] for op in ring.loop.regions[0].ops if op.name == "mma")
    boxes = (ring.boxes[source_of(left)[0]] for left in lefts)
    last = max(box.offset + element_at(box, box.cols - COLUMNS) for box in boxes)
    return (stages - 1) * ring.stage_bytes + last + GROUP_ROWS * ROW_BYTES


def exchanged_bytes(ring: Ring) -> int:
    """Bytes of sums that blocks of a cluster read of each other, where the ring was."""
    if ring.cluster == 1:
        return 0
    layouts = (plan_of(ring).layouts[v] for v in sums_of(ring.loop))
    return sum(4 * layout.registers * ring.consumers for layout in layouts)


def element_at(box: Box, k: int) -> int:
    """Bytes from the first element of a box to the element k of the same row, unswizzled."""
    return k // COLUMNS * box.rows * ROW_BYTES + k % COLUMNS * 2
