"""What the rings of the pipelined schedule take of shared memory, and how much of it."""

from tilert.codegen.plan import source_of
from tilert.codegen.producer import Lane
from tilert.codegen.ring import COLUMNS, GROUP_ROWS, Box, Ring, Side
from tilert.tensor_map import ROW_BYTES

__all__ = ["element_at", "lanes", "read_bytes"]

MOST_STAGES = 8
UNDER_WAY = 190 * 1024
"""Bytes that a block has under way where reading is what takes time, besides the two stages that
products have: about all that a multiprocessor holds. While a kernel ends, the next one's blocks
take the places of its own, one by one, and fill their rings. With 80 KB, and room for two blocks,
products take up to 11 % longer on an H200, and a decode step of 8 sequences 26 %."""
LEFT_BYTES, THIN_LEFT_STAGES = 96 * 1024, 4
"""Of the ring of left operands, unless two stages are more; and its stages where there are so few
rows that warps compute. They come from the second-level cache. Where the other ring would have no
room, it has fewer."""
WINDOW, LEAST_WINDOW = 64 * 1024, 4
"""Bytes of right operands that have been asked for and have not come, about, where they have a ring
of their own, and stages at least: what keeps memory busy. With all of the ring, requests wait for
each other, and so do blocks of kernels that are nearly complete: 5 to 10 % longer on an H200."""


def lanes(ring: Ring, room: int, boxes: int) -> list[Lane] | None:
    """The rings of all sides, None where one has less than two stages.

    Args:
        room: bytes of shared memory that there are for them, their barriers and what follows.
        boxes: bytes of what comes between the rings and their barriers.
    """
    side, *lefts = ring.sides
    if not lefts:
        return _lanes(ring, side, None, 0, room - boxes, boxes)
    (left,) = lefts
    most = min(max(2, LEFT_BYTES // left.stage_bytes), MOST_STAGES)
    for stages in range(THIN_LEFT_STAGES if ring.thin else most, 1, -1):
        found = _lanes(ring, side, left, stages, room - boxes, boxes)
        if found is not None:
            return found
    return None


def _lanes(
    ring: Ring, side: Side, left: Side | None, left_stages: int, room: int, boxes: int
) -> list[Lane] | None:
    """The same with so many stages of left operands of their own."""
    # The left ring comes first, for what is behind a left operand of few rows is read as well.
    at = left_stages * left.stage_bytes if left is not None else 0
    most = 2 + -(-UNDER_WAY // side.stage_bytes) if ring.few else MOST_STAGES
    stages = min(most, (room - at - 16 * left_stages) // (side.stage_bytes + 16))
    if stages < 2:
        return None
    window = max(LEAST_WINDOW, round(WINDOW / side.stage_bytes)) if left is not None else 0
    barriers = at + stages * side.stage_bytes + boxes
    made = [Lane(side, stages, at, barriers, window if window < stages else 0)]
    if left is not None:
        made.append(Lane(left, left_stages, 0, barriers + 16 * stages))
    return made


def read_bytes(ring: Ring, lanes: list[Lane]) -> int:
    """Shared memory that products of 64 rows read, which fewer rows do not fill."""
    if not ring.grouped:
        return 0
    products = (op for op in ring.loop.regions[0].ops if op.name == "mma")
    lefts = {ring.boxes[source_of(op.args[0])[0]] for op in products}
    return max(
        lane.at
        + (lane.stages - 1) * lane.side.stage_bytes
        + box.offset
        + element_at(box, box.cols - COLUMNS)
        + GROUP_ROWS * ROW_BYTES
        for lane in lanes
        for box in lane.side.boxes
        if box in lefts
    )


def element_at(box: Box, k: int) -> int:
    """Bytes from the first element of a box to the element k of the same row, unswizzled."""
    return k // COLUMNS * box.rows * ROW_BYTES + k % COLUMNS * 2
