"""The pipelined schedule of sm_90a: products through a ring in shared memory that one thread fills.

A block walks over pieces. Its last warpgroup is the producer: for every step of the loop over
products it waits until a stage of the ring is free, and tells the copy engine to bring the
operands there. The other warpgroups run the kernel as its text has it, except that a product is
wgmma on what the stage holds. Each stage has two barriers: `full` counts the bytes that have come,
`empty` the warps that have read them. The producer runs ahead over the ends of pieces, so that the
next piece's operands come while sums are still being stored.

Before earlier grids are complete it fills the ring with operands that none of them writes: those
whose bits the word `early` has (`early.py`). The others of these stages it brings later.
"""

from collections.abc import Callable
from math import prod

from tilert.codegen.boxes_out import boxes_bytes, move_boxes
from tilert.codegen.cluster import CLUSTER_TEMPLATES, begin_steps, part_of_steps, write_shared
from tilert.codegen.control import carry, note_bounds
from tilert.codegen.early import END, MOST_EARLY, START, begin
from tilert.codegen.emit import Emitter, c_type
from tilert.codegen.epilogue import write_epilogue
from tilert.codegen.grid import coordinates
from tilert.codegen.hopper import (
    BOX_TEMPLATES,
    ONCE_TEMPLATES,
    PORTABLE_BOXES,
    PORTABLE_TEMPLATES,
    TEMPLATES,
    copy_box,
    wgmma,
    wgmma_some,
)
from tilert.codegen.plan import source_of
from tilert.codegen.quads import move_quads
from tilert.codegen.ring import (
    GROUP,
    GROUP_ROWS,
    WARP,
    Ring,
    plan_of,
    scalars,
    sums_of,
    turn_over,
    wanted,
)
from tilert.codegen.room import element_at, exchanged_bytes, most_stages, read_bytes
from tilert.codegen.thin import (
    SPLIT_TEMPLATES,
    THIN_TEMPLATES,
    ThinConsumer,
    kept_bytes,
    kept_loads,
)
from tilert.dtypes import f32
from tilert.ir import Access, Function, Op
from tilert.tensor_map import ROW_BYTES

__all__ = ["Pipelined", "copy_tile", "write_pipelined"]

SHARED_BYTES = 227 * 1024
"""Shared memory of a block of sm_90."""
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
"""What 128 and 256 threads may have of 64 Ki registers, in the steps of setmaxnreg."""
BAND = 16
"""Rows of tiles that are walked together: as many blocks as run at once then share rows and columns
of operands about equally."""


_CLUSTER_PRODUCER = [
    "    warp_meets();",
    "    cluster_arrive();",
    "    cluster_wait();",
    "    cluster_arrive();",
]
"""Of all threads of the producer, which have nothing to tell the other blocks."""


class Pipelined:
    """A kernel written under the schedule.

    Attributes:
        head: what the text needs besides the prelude and helpers.
        lines: the kernel's body.
        threads: of a block.
        shared_bytes: of a block.
        blocks: a multiprocessor has registers for.
        early: parameters that can be read before earlier grids are complete: those of the maps, and
            of the vectors that stay in shared memory.
    """

    def __init__(
        self, function: Function, ring: Ring, stages: int, scratch: int, boxes: bool
    ) -> None:
        self._function, self._ring, self._stages = function, ring, stages
        # A warpgroup is what gives registers away; where there is nothing to give, a warp will do.
        self.threads = ring.consumers + (WARP if ring.few else GROUP)
        self.blocks = 1
        read = [spec.param for spec in ring.maps]
        kept = [op.attrs["param"].position for op in kept_loads(ring)]
        fits = ring.few and len(read) + len(kept) <= MOST_EARLY and _can_run_ahead(ring)
        self.early = (*read, *kept) if fits else ()
        self._kept_bits = (1 << len(kept)) - 1 << len(read) if fits else 0
        self._boxes = stages * ring.stage_bytes
        self._barriers = self._boxes + boxes * boxes_bytes(prod(ring.groups))
        self._kept = self._barriers + -(-16 * stages // 128) * 128
        self._scratch = self._kept + kept_bytes(ring)
        self.shared_bytes = max(self._scratch + scratch, read_bytes(ring, stages))
        self.consumer: Consumer | ThinConsumer = (
            ThinConsumer(function, ring, stages)
            if ring.thin
            else Consumer(function, ring, stages, boxes)
        )
        producer = Emitter(function, self.consumer.plan)
        producer.depth = self.consumer.depth = 3
        self.consumer.program_body()
        self.head = [PORTABLE_TEMPLATES, TEMPLATES, *_templates(ring)]
        if self.consumer.boxes:
            self.head += [PORTABLE_BOXES, BOX_TEMPLATES]
        self.lines = [*self._prologue(), *self._producer(producer), *self._consumer()]

    def _prologue(self) -> list[str]:
        stages, warps = self._stages, self._ring.consumers // 32
        extents = self._extents()
        return [
            *START,
            *(["  const int rank = cluster_rank();"] if self._ring.cluster > 1 else []),
            "  extern __shared__ __align__(1024) char smem[];",
            f"  char* const scratch = smem + {self._scratch}; (void)scratch;",
            f"  char* const kept = smem + {self._kept}; (void)kept;",
            "  const u32 ring = shared_address(smem);",
            *([f"  const u32 boxes = ring + {self._boxes};"] if self.consumer.boxes else []),
            f"  const u32 full = ring + {self._barriers}, empty = full + {8 * stages};",
            "  if (threadIdx.x == 0) {",
            f"    for (int s = 0; s < {stages}; ++s) {{",
            f"      barrier_init(full + 8 * s, 1); barrier_init(empty + 8 * s, {warps});",
            "    }",
            "    barriers_ready();",
            "  }",
            "  __syncthreads();",
            f"  const i64 pieces = {' * '.join(f'(i64){n}' for n in extents) or '1'};",
        ]

    def _producer(self, e: Emitter) -> list[str]:
        ring, stages = self._ring, self._stages
        _produce(e, self._function, ring, stages, bool(self.early))
        limit = self._limits("fewer", PRODUCER_REGISTERS)
        return [
            f"  if (threadIdx.x >= {ring.consumers}) {{",
            *limit,
            f"    if (threadIdx.x == {ring.consumers}) {{",
            *(["      const u64 once = read_once();"] if ring.few else []),
            *(self._fill(e) if self.early else []),
            *("    " + line for line in begin(self._function)),
            *self._pieces("      ", e.lines, e.head),
            "    }",
            *(_CLUSTER_PRODUCER if ring.cluster > 1 else []),
        ]

    def _fill(self, like: Emitter) -> list[str]:
        """The producer's work before earlier grids are complete: the stages of the ring, once."""
        e = Emitter(self._function, like.plan)
        e.depth = like.depth
        _fill_ahead(e, self._function, self._ring, self._stages)
        return [
            "      int ahead = 0;",
            f"      if (early & {(1 << len(self._ring.maps)) - 1}u) {{",
            *self._walk("        ", e.lines, e.head, on=f" && ahead < {self._stages}"),
            "      }",
        ]

    def _consumer(self) -> list[str]:
        keep, bits = self._keep(), self._kept_bits
        return [
            "  } else {",
            *self._limits("more", CONSUMER_REGISTERS),
            *([f"    if ((early & {bits}u) == {bits}u) {{", *keep, "    }"] if bits else []),
            *("  " + line for line in begin(self._function)),
            *([f"    if ((early & {bits}u) != {bits}u) {{", *keep, "    }"] if bits else keep),
            *self._pieces("    ", self.consumer.lines, self.consumer.head),
            *(["    boxes_stored();"] if self.consumer.boxes else []),
            *("  " + line for line in END),
            *(["    cluster_wait();"] if self._ring.cluster > 1 else []),
            "  }",
        ]

    def _limits(self, word: str, registers: int) -> list[str]:
        # One consumer has all the registers that a thread can have from the start.
        return [f"    {word}_registers<{registers}>();"] if self._ring.consumers > GROUP else []

    def _keep(self) -> list[str]:
        e = self.consumer
        if not isinstance(e, ThinConsumer):
            return []
        written, e.lines, e.depth = e.lines, [], 2
        e.keep()
        kept, e.lines = e.lines, written
        return kept

    def _pieces(self, pad: str, lines: list[str], head: list[str]) -> list[str]:
        return [f"{pad}int stage = 0; u32 turn = 0;", *self._walk(pad, lines, head)]

    def _walk(self, pad: str, lines: list[str], head: list[str], on: str = "") -> list[str]:
        cluster = self._ring.cluster
        # A cluster has one piece: its blocks meet twice for it.
        first, step = (f" / {cluster}", "pieces") if cluster > 1 else ("", "gridDim.x")
        return [
            *(pad + line.strip() for line in head),
            f"{pad}for (i64 piece = blockIdx.x{first}; piece < pieces{on}; piece += {step}) {{",
            *(f"{pad}{line}" for line in self._place()),
            *lines,
            f"{pad}}}",
        ]

    def _extents(self) -> list[str]:
        return [str(n) if n is not None else f"g{i}" for i, n in enumerate(self._function.grid)]

    def _place(self) -> list[str]:
        """Coordinates of a piece: bands of rows of tiles, column after column within a band."""
        function, axes = self._function, self._ring.axes
        if axes is None:
            return coordinates(function, "(int)piece")
        extents = self._extents()
        strides = [" * ".join(extents[i + 1 :]) or "1" for i in range(len(extents))]
        rows, columns = axes
        other = [i for i, n in enumerate(function.grid) if i not in axes and n != 1]
        if self._ring.few and not other:
            # All rows of a column of tiles follow each other: they read the same right operand.
            row, column = (f"(int)piece {sign} {extents[rows]}" for sign in "%/")
            return coordinates(function, f"{row} * {strides[rows]} + {column} * {strides[columns]}")
        lines = [
            f"  const int rows = {extents[rows]}, tiles = rows * {extents[columns]};",
            "  const int tile = (int)piece % tiles;",
            f"  const int band = {BAND} * {extents[columns]}, first = tile / band * {BAND};",
            f"  const int high = min(rows - first, {BAND});",
            f"  const int number = (first + tile % band % high) * {strides[rows]}"
            f" + tile % band / high * {strides[columns]}"
            + (f" + (int)piece / tiles * {strides[other[0]]};" if other else ";"),
        ]
        return lines + coordinates(function, "number")


def write_pipelined(function: Function, ring: Ring) -> Pipelined | None:
    """The kernel with as many stages as shared memory has room for, None where two are too many."""
    scratch, boxes = 0, ring.rows >= GROUP_ROWS and ring.cluster == 1
    while True:
        room = SHARED_BYTES - scratch - kept_bytes(ring) - 128
        room -= boxes * boxes_bytes(prod(ring.groups))
        stages = min(most_stages(ring), room // (ring.stage_bytes + 16))
        if stages < 2 or stages * ring.stage_bytes < exchanged_bytes(ring):
            return None
        written = Pipelined(function, ring, stages, scratch, boxes)
        # How much scratch the text needs, and whether boxes, is known once it is written.
        needed = -(-written.consumer.scratch_bytes // 16) * 16
        if needed <= scratch and written.consumer.boxes == boxes:
            return written
        scratch, boxes = max(scratch, needed), written.consumer.boxes


def _can_run_ahead(ring: Ring) -> bool:
    """Whether the producer's addresses and the number of its steps depend on no memory."""
    found = scalars(ring.function, ring.loop, wanted(ring))
    return found is not None and all(op.name != "load" for part in found for op in part)


def _templates(ring: Ring) -> list[str]:
    ranks = sorted({len(spec.box) + (spec.beside > 0) for spec in ring.maps})
    copies = [copy_box(rank) for rank in ranks]
    if ring.thin:
        once = [ONCE_TEMPLATES, *(copy_box(rank, True) for rank in ranks)]
        split = any(v.dtype == f32 for v in ring.lefts)
        return [*copies, *once, THIN_TEMPLATES, *([SPLIT_TEMPLATES] if split else [])]
    products = [op for op in ring.loop.regions[0].ops if op.name == "mma"]
    found = {(op.result.shape[1], c_type(op.args[0].dtype)) for op in products}
    kinds = sorted((n // ring.groups[1], ctype) for n, ctype in found)
    if ring.few:
        copies += [ONCE_TEMPLATES, *(copy_box(rank, True) for rank in ranks)]
    if ring.cluster > 1:
        copies.append(CLUSTER_TEMPLATES)
    some = kinds if ring.rows < GROUP_ROWS else []
    return [*copies, *(wgmma(*kind) for kind in kinds), *(wgmma_some(*kind) for kind in some)]


# -- the producer ----------------------------------------------------------------------------


def _produce(e: Emitter, function: Function, ring: Ring, stages: int, ahead: bool) -> None:
    def step() -> None:
        if ahead:
            # Of a stage that was filled ahead, what is left.
            e.line("const u32 left = ahead > 0 ? ~early : ~0u;")
            e.line("if (ahead > 0) --ahead;")
        with e.braces("else" if ahead else ""):
            e.line("barrier_wait(empty + 8 * stage, turn ^ 1);")
            e.line(f"barrier_expect(full + 8 * stage, {ring.copied_bytes});")
        e.line(f"const u32 at = ring + stage * {ring.stage_bytes};")
        _copy_boxes(e, ring, "left" if ahead else "")
        turn_over(e, stages)

    _steps(e, function, ring, step)


def _fill_ahead(e: Emitter, function: Function, ring: Ring, stages: int) -> None:
    def step() -> None:
        e.line("const int stage = ahead++;")
        e.line(f"barrier_expect(full + 8 * stage, {ring.copied_bytes});")
        e.line(f"const u32 at = ring + stage * {ring.stage_bytes};")
        _copy_boxes(e, ring, "early")

    _steps(e, function, ring, step, f" && ahead < {stages}")


def _steps(
    e: Emitter, function: Function, ring: Ring, step: Callable[[], None], on: str = ""
) -> None:
    """The loop as whoever only copies has it."""
    loop = ring.loop
    body = loop.regions[0]
    found = scalars(function, loop, wanted(ring))
    if found is None:
        raise ValueError("the producer cannot compute its addresses")
    before, inside = found
    e.depth = 4
    for op in before:
        e.op(op)
    lo, hi, by = (e.names[a] for a in loop.args[:3])
    if ring.cluster > 1:
        lo, hi = part_of_steps(loop, ring.cluster)
    counter = e.names[body.args[0]] = e.fresh("i")
    note_bounds(e, loop)
    e.line("#pragma unroll 1")
    with e.braces(f"for (int {counter} = {lo}; {counter} < {hi}{on}; {counter} += {by})"):
        for op in inside:
            e.op(op)
        step()


def _copy_boxes(e: Emitter, ring: Ring, some: str) -> None:
    """Copy the operands of a step: those whose bits are in the word `some`, or all."""
    for value, box in ring.boxes.items():
        once = ring.few and value in ring.rights
        with e.braces(f"if ({some} & {1 << box.map}u)" if some else ""):
            copy_tile(
                e, box.load, box.cols, box.map, box.offset, box.block, "full", once, box.together
            )  # fmt: skip


def copy_tile(
    e: Emitter, load: Op, cols: int, map: int, offset: int, block: int, full: str,
    once: bool = False, together: bool = False,
) -> None:  # fmt: skip
    """Write the copies of a tile, a box of as many columns as have 128 bytes each.

    Args:
        map: number of the tensor map.
        offset: of the tile's first byte within a stage.
        block: bytes from one box to the next.
        full: name of the barriers that count what has come.
        once: whether the tile is read by this block alone.
        together: whether its boxes are one copy.
    """
    call, policy = ("copy_box_once", ", once") if once else ("copy_box", "")
    access: tuple[Access, ...] = load.attrs["access"]
    places = [_first(e, load, a) for a in access]
    width = ROW_BYTES // load.result.dtype.itemsize
    if together:
        at = [f"{places[-1]} / {width}" if places[-1] != "0" else "0", *places[:-1], "0"]
        given = ", ".join(reversed([f"coordinate({p})" for p in at]))
        e.line(f"{call}(at + {offset}, &map{map}, {full} + 8 * stage{policy}, {given});")
        return
    for column in range(0, cols, width):
        to = offset + column // width * block
        at = [*places[:-1], f"{places[-1]} + {column}" if column else places[-1]]
        given = ", ".join(reversed([f"coordinate({p})" for p in at]))
        e.line(f"{call}(at + {to}, &map{map}, {full} + 8 * stage{policy}, {given});")


def _first(e: Emitter, load: Op, access: Access) -> str:
    """C++ of the first element's index, wide enough not to wrap."""
    if access.kind == "full":
        return "0"
    index = f"(i64){e.names[load.args[access.arg]]}"
    return f"{index} * {access.size}" if access.kind == "block" else index


# -- the consumers ---------------------------------------------------------------------------


class Consumer(Emitter):
    """Writes the kernel for the threads that compute: they meet without the producer.

    Attributes:
        boxes: whether pieces are stored by the copy engine.
    """

    def __init__(self, function: Function, ring: Ring, stages: int, boxes: bool) -> None:
        super().__init__(function, plan_of(ring))
        self._ring = ring
        self._stages = stages
        self._may_box = boxes
        self.boxes = False

    def line(self, text: str) -> None:
        """See `Emitter`."""
        super().line(text.replace("__syncthreads()", f"meet({self.plan.threads})"))

    def program_body(self) -> None:
        """The whole kernel, once for each piece."""
        if self._ring.cluster > 1:
            write_shared(self, self._ring)
            return
        loop, ops = self._ring.loop, self.function.body.ops
        place = ops.index(loop) + 1
        for op in ops[:place]:
            self.op(op)
        write_epilogue(self, ops[place:], sums_of(loop)[0])

    def op(self, op: Op) -> None:
        """See `Emitter`."""
        if op is self._ring.loop:
            self._loop(op)
        elif op.name == "mma":
            self._product(op)
        elif op.name in ("load_piece", "store_piece") and self._moves(op):
            pass
        elif op.name != "load" or op.result not in self._ring.boxes:
            super().op(op)

    def _moves(self, op: Op) -> bool:
        """Whether a piece of whole windows is moved, and written."""
        if self._ring.cluster > 1 or self._ring.rows < GROUP_ROWS:
            return False
        if op.name == "store_piece" and self._may_box:
            boxed = move_boxes(self, op, self._ring.groups, self._ring.maps)
            self.boxes = self.boxes or boxed
            if boxed:
                return True
        return move_quads(self, op)

    def _loop(self, op: Op) -> None:
        body = op.regions[0]
        head = begin_steps(self, op, self._ring.cluster)
        held = self.fresh("held")
        self.line(f"const int group = uniform(threadIdx.x / {GROUP}); (void)group;")
        self.line(f"int {held} = -1;")
        self.line("#pragma unroll 1")
        with self.braces(head):
            self.line("barrier_wait(full + 8 * stage, turn);")
            self.line("wgmma_begin();")
            self.line(f"const u32 at = ring + stage * {self._ring.stage_bytes};")
            self.block(body)
            self.line("wgmma_commit();")
            # The products of the step before are complete: its stage may be filled again.
            self.line("wgmma_wait<1>();")
            self.line(f"if ({held} >= 0 && threadIdx.x % 32 == 0)"
                      f" barrier_arrive(empty + 8 * {held});")  # fmt: skip
            self.line(f"{held} = stage;")
            carry(self, op)
            turn_over(self, self._stages)
        self.line("wgmma_wait<0>();")
        self.line(f"if ({held} >= 0 && threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * {held});")
        for v in sums_of(op):
            self.line(f"wgmma_sums<{self.registers(v)}>({self.names[v]});")

    def _product(self, op: Op) -> None:
        """Add to the sums where they are."""
        name = self.names[op.result] = self.names[op.args[2]]
        a, b = self._ring.boxes[source_of(op.args[0])[0]], self._ring.right(op)
        groups_m, groups_n = self._ring.groups
        (m, n), k = op.result.shape, op.args[0].shape[1]
        blocks, columns = -(-m // (GROUP_ROWS * groups_m)), n // groups_n
        some = f"_some_n{columns}<{m}>" if m < GROUP_ROWS else f"_n{columns}"
        left = f" + group * {blocks * GROUP_ROWS * ROW_BYTES}" if groups_m > 1 else ""
        right = f" + group * {columns * ROW_BYTES}" if groups_n > 1 else ""
        with self.braces():
            self.line(f"const u64 a = descriptor(at + {a.offset}{left});")
            self.line(f"const u64 b = descriptor(at + {b.offset}{right});")
            for step in range(0, k, 16):
                for i in range(blocks):
                    to = f"{name} + {i * columns // 2}"
                    left = f"a + {(element_at(a, step) + i * GROUP_ROWS * ROW_BYTES) // 16}"
                    ctype = c_type(op.args[0].dtype)
                    right = f"b + {element_at(b, step) // 16}"
                    self.line(f"wgmma{some}({to}, {left}, {right}, {ctype}{{}});")
