"""Who fills the rings of the pipelined schedule: for each step of the loop over products a thread
waits until a stage is free, and tells the copy engine to bring the operands there.

A thread may begin before earlier grids are complete, where none of them writes what it brings: the
word `early` has the bits of such operands (`early.py`). Of few rows each side has a thread and a
ring of its own, so that weights come while the left operand is still being written.
"""

from dataclasses import dataclass

from tilert.codegen.cluster import part_of_steps
from tilert.codegen.control import note_bounds
from tilert.codegen.emit import Emitter
from tilert.codegen.ring import Ring, Side, scalars, turn_over, wanted
from tilert.ir import Access, Function, Op
from tilert.tensor_map import ROW_BYTES

__all__ = ["Lane", "bring", "can_run_ahead", "copy_tile"]


@dataclass(frozen=True)
class Lane:
    """The ring of a side.

    Attributes:
        stages: of the ring.
        at: its first byte.
        barriers: the first byte of those that count what has come; those that count who has read it
            follow.
        window: stages that are under way at most, 0 where all may be.
    """

    side: Side
    stages: int
    at: int
    barriers: int
    window: int = 0

    @property
    def nbytes(self) -> int:
        """Shared memory of the stages."""
        return self.stages * self.side.stage_bytes

    @property
    def bits(self) -> int:
        """Of the word `early`: what it brings."""
        return sum({1 << box.map for box in self.side.boxes})

    def names(self) -> str:
        """C++ of where its barriers are."""
        name = self.side.name
        full = f"ring + {self.barriers}"
        return f"  const u32 {name}full = {full}, {name}empty = {name}full + {8 * self.stages};"

    def begin(self, warps: int) -> list[str]:
        """What its thread does first.

        Args:
            warps: that read a stage.
        """
        name = self.side.name
        return [
            *(f"map_ahead(&map{number});" for number in sorted({b.map for b in self.side.boxes})),
            f"for (int s = 0; s < {self.stages}; ++s) {{",
            f"  barrier_init({name}full + 8 * s, 1); barrier_init({name}empty + 8 * s, {warps});",
            "}",
        ]

    @property
    def stage_at(self) -> str:
        """C++ of the bytes from the ring's beginning to the stage that is next."""
        start = f"{self.at} + " if self.at else ""
        return f"{start}{self.side.name}stage * {self.side.stage_bytes}"

    def wait(self) -> str:
        """C++ that waits until that stage has come."""
        name = self.side.name
        return f"barrier_wait({name}full + 8 * {name}stage, {name}turn);"

    def counters(self) -> str:
        """C++ of the stage that is next."""
        name = self.side.name
        return f"int {name}stage = 0; u32 {name}turn = 0;"

    def window_counters(self) -> list[str]:
        """C++ of how many stages are under way, and of the first of them."""
        return ["int under_way = 0, come = 0; u32 come_turn = 0;"] if self.window else []


def bring(e: Emitter, function: Function, ring: Ring, lane: Lane) -> None:
    """Write what a thread does for a piece: the loop as whoever only copies has it."""
    loop, side, name = ring.loop, lane.side, lane.side.name
    body = loop.regions[0]
    found = scalars(function, loop, wanted(ring))
    if found is None:
        raise ValueError("the producer cannot compute its addresses")
    before, inside = found
    e.depth = 1
    for op in before:
        e.op(op)
    lo, hi, by = (e.names[a] for a in loop.args[:3])
    if ring.cluster > 1:
        lo, hi = part_of_steps(loop, ring.cluster)
    counter = e.names[body.args[0]] = e.fresh("i")
    note_bounds(e, loop)
    e.line("#pragma unroll 1")
    with e.braces(f"for (int {counter} = {lo}; {counter} < {hi}; {counter} += {by})"):
        for op in inside:
            e.op(op)
        if lane.window:
            with e.braces(f"if (under_way == {lane.window})"):
                e.line(f"barrier_wait({name}full + 8 * come, come_turn);")
                e.line(f"if (++come == {lane.stages}) {{ come = 0; come_turn ^= 1; }}")
            e.line("else ++under_way;")
        e.line(f"barrier_wait({name}empty + 8 * {name}stage, {name}turn ^ 1);")
        e.line(f"barrier_expect({name}full + 8 * {name}stage, {side.copied_bytes});")
        e.line(f"const u32 at = ring + {lane.stage_at};")
        for box in side.boxes:
            with e.braces():
                copy_tile(
                    e, box.load, box.cols, box.map, box.offset, box.block, f"{name}full",
                    box in side.once, box.together, f"{name}stage",
                )  # fmt: skip
        turn_over(e, lane.stages, name)


def can_run_ahead(ring: Ring) -> bool:
    """Whether addresses and the number of steps depend on no memory."""
    found = scalars(ring.function, ring.loop, wanted(ring))
    return found is not None and all(op.name != "load" for part in found for op in part)


def copy_tile(
    e: Emitter, load: Op, cols: int, map: int, offset: int, block: int, full: str,
    once: bool = False, together: bool = False, stage: str = "stage",
) -> None:  # fmt: skip
    """Write the copies of a tile, a box of as many columns as have 128 bytes each.

    Args:
        map: number of the tensor map.
        offset: of the tile's first byte within a stage.
        block: bytes from one box to the next.
        full: name of the barriers that count what has come.
        once: whether the tile is read by this block alone.
        together: whether its boxes are one copy.
        stage: name of the stage's number.
    """
    call, policy = ("copy_box_once", ", once") if once else ("copy_box", "")
    access: tuple[Access, ...] = load.attrs["access"]
    places = [_first(e, load, a) for a in access]
    width = ROW_BYTES // load.result.dtype.itemsize
    barrier = f"{full} + 8 * {stage}"
    if together:
        at = [f"{places[-1]} / {width}" if places[-1] != "0" else "0", *places[:-1], "0"]
        given = ", ".join(reversed([f"coordinate({p})" for p in at]))
        e.line(f"{call}(at + {offset}, &map{map}, {barrier}{policy}, {given});")
        return
    for column in range(0, cols, width):
        to = offset + column // width * block
        at = [*places[:-1], f"{places[-1]} + {column}" if column else places[-1]]
        given = ", ".join(reversed([f"coordinate({p})" for p in at]))
        e.line(f"{call}(at + {to}, &map{map}, {barrier}{policy}, {given});")


def _first(e: Emitter, load: Op, access: Access) -> str:
    """C++ of the first element's index, wide enough not to wrap."""
    if access.kind == "full":
        return "0"
    index = f"(i64){e.names[load.args[access.arg]]}"
    return f"{index} * {access.size}" if access.kind == "block" else index
