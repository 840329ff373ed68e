"""The pipelined schedule of sm_90a: products through a ring in shared memory that one thread fills.

A block walks over pieces. Its last warps are the producers: for every step of the loop over
products one waits until a stage of its ring is free, and tells the copy engine to bring operands
there (`producer.py`). The other warpgroups run the kernel as its text has it, except that a product
is wgmma on what the stages hold. Each stage has two barriers: `full` counts the bytes that have
come, `empty` the warps that have read them. Producers run ahead over the ends of pieces, so that
the next piece's operands come while sums are still being stored.
"""

import functools
from collections.abc import Callable
from math import prod
from operator import or_

from tilert.codegen.boxes_out import boxes_bytes, move_boxes
from tilert.codegen.cluster import (
    CLUSTER_TEMPLATES,
    begin_steps,
    expect_sums,
    received_bytes,
    write_shared,
)
from tilert.codegen.control import carry
from tilert.codegen.early import END, MOST_EARLY, START, begin, unless
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
from tilert.codegen.producer import Lane, bring, can_run_ahead
from tilert.codegen.quads import move_quads
from tilert.codegen.ring import (
    GROUP,
    GROUP_ROWS,
    WARP,
    Box,
    Ring,
    plan_of,
    sums_of,
    turn_over,
)
from tilert.codegen.room import element_at, lanes, read_bytes
from tilert.codegen.streaming import coarse
from tilert.codegen.thin import (
    SPLIT_TEMPLATES,
    THIN_TEMPLATES,
    ThinConsumer,
    kept_bytes,
    kept_loads,
)
from tilert.dtypes import f32
from tilert.ir import Block, Function, Op, walk
from tilert.tensor_map import ROW_BYTES

__all__ = ["Pipelined", "write_pipelined"]

SHARED_BYTES = 227 * 1024
"""Shared memory of a block of sm_90."""
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
"""What 128 and 256 threads may have of 64 Ki registers, in the steps of setmaxnreg."""
BAND = 16
"""Rows of tiles that are walked together: as many blocks as run at once then share rows and columns
of operands about equally."""


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
        self, function: Function, ring: Ring, lanes: list[Lane], scratch: int, boxes: bool
    ) -> None:
        self._function, self._ring, self._lanes = function, ring, lanes
        # A warpgroup is what gives registers away; where there is nothing to give, warps will do.
        self.threads = ring.consumers + (WARP * len(lanes) if ring.few else GROUP)
        self.blocks = 1
        # Maps of what is stored follow those of the operands.
        bits = functools.reduce(or_, (lane.bits for lane in lanes))
        read = [spec.param for spec in ring.maps[: bits.bit_length()]]
        kept = [op.attrs["param"].position for op in kept_loads(ring)]
        # A piece that an index map places is known only when the map has been read.
        known = can_run_ahead(ring) and not any(p.indexed for p in function.params)
        fits = ring.few and known and len(read) + len(kept) <= MOST_EARLY
        self._operand_bits = bits
        self.early = (*read, *kept) if fits else ()
        self._kept_bits = (1 << len(kept)) - 1 << len(read) if fits else 0
        self._boxes = sum(lane.nbytes for lane in lanes)
        barriers = 16 * sum(lane.stages for lane in lanes)
        self._received = lanes[0].barriers + barriers
        self._kept = lanes[0].barriers + -(-(barriers + 8 * (ring.cluster > 1)) // 128) * 128
        self._room = self._kept + kept_bytes(ring)
        self._scratch = self._room + received_bytes(ring)
        self.shared_bytes = max(self._scratch + scratch, read_bytes(ring, lanes))
        self.consumer: Consumer | ThinConsumer = (
            ThinConsumer(function, ring, lanes)
            if ring.thin
            else Consumer(function, ring, lanes, boxes, bool(self.early))
        )
        # What follows the loop is not hidden: neither its work nor the time to fetch its code.
        self.consumer.plan.coarse = coarse(function)
        self.consumer.depth = 3
        self.consumer.program_body()
        self.head = [PORTABLE_TEMPLATES, TEMPLATES, *_templates(ring)]
        if self.consumer.boxes:
            self.head += [PORTABLE_BOXES, BOX_TEMPLATES]
        self.lines = [*self._prologue(), *self._producers(), *self._consumer()]

    def _prologue(self) -> list[str]:
        shared = f"  const u32 received = ring + {self._received}, room = ring + {self._room};"
        return [
            *START,
            *(["  const int rank = cluster_rank();"] if self._ring.cluster > 1 else []),
            "  extern __shared__ __align__(1024) char smem[];",
            f"  char* const scratch = smem + {self._scratch}; (void)scratch;",
            f"  char* const kept = smem + {self._kept}; (void)kept;",
            "  const u32 ring = shared_address(smem);",
            *([f"  const u32 boxes = ring + {self._boxes};"] if self.consumer.boxes else []),
            *(lane.names() for lane in self._lanes),
            *([shared] if self._ring.cluster > 1 else []),
            f"  const i64 pieces = {' * '.join(f'(i64){n}' for n in self._extents()) or '1'};",
        ]

    def _producers(self) -> list[str]:
        ring = self._ring
        shared = ring.cluster > 1
        return [
            f"  if (threadIdx.x >= {ring.consumers}) {{",
            *self._limits("fewer", PRODUCER_REGISTERS),
            *(["    const u64 once = read_once();"] if ring.few else []),
            *self._each(self._begin),
            "    warp_meets();",
            f"    come_by({self.threads});",
            *(["    cluster_arrive();"] if shared else []),
            *self._each(self._bring),
            *(["    warp_meets();", "    cluster_wait();"] if shared else []),
        ]

    def _each(self, written: Callable[[Lane], list[str]]) -> list[str]:
        """What the thread of each side does."""
        out = []
        for i, lane in enumerate(self._lanes):
            out += [
                f"    if (threadIdx.x == {self._ring.consumers + i * WARP}) {{",
                *("      " + line for line in written(lane)),
                "    }",
            ]
        return out

    def _begin(self, lane: Lane) -> list[str]:
        first = self._ring.cluster > 1 and lane is self._lanes[0]
        return [
            *lane.begin(self._ring.consumers // 32),
            *(["barrier_init(received, 1);", *expect_sums(self._ring)] if first else []),
            "barriers_ready();",
        ]

    def _bring(self, lane: Lane) -> list[str]:
        e = Emitter(self._function, self.consumer.plan)
        bring(e, self._function, self._ring, lane)
        wait = unless(self._function, lane.bits) if self.early else begin(self._function)
        counters = [lane.counters(), *lane.window_counters()]
        return [*(line.strip() for line in wait), *counters, *self._walk("", e.lines, e.head)]

    def _consumer(self) -> list[str]:
        keep, bits = self._keep(), self._kept_bits
        late = isinstance(self.consumer, Consumer) and self.consumer.late
        wait = unless(self._function, self._operand_bits) if late else begin(self._function)
        return [
            "  } else {",
            # The barriers are there.
            f"    wait_for_all({self.threads});",
            *(["    cluster_arrive();"] if self._ring.cluster > 1 else []),
            *self._limits("more", CONSUMER_REGISTERS),
            *([f"    if ((early & {bits}u) == {bits}u) {{", *keep, "    }"] if bits else []),
            *("  " + line for line in wait),
            *([f"    if ((early & {bits}u) != {bits}u) {{", *keep, "    }"] if bits else keep),
            *(f"    {lane.counters()}" for lane in self._lanes),
            *self._walk("    ", self.consumer.lines, self.consumer.head),
            *(["    boxes_stored();"] if self.consumer.boxes else []),
            # A block without a piece holds its place as long as the others.
            *("  " + line for line in (begin(self._function) if late else [])),
            *("  " + line for line in END),
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

    def _walk(self, pad: str, lines: list[str], head: list[str]) -> list[str]:
        cluster = self._ring.cluster
        # A cluster has one piece: it receives sums once.
        first, step = (f" / {cluster}", "pieces") if cluster > 1 else ("", "gridDim.x")
        return [
            *(pad + line.strip() for line in head),
            f"{pad}for (i64 piece = blockIdx.x{first}; piece < pieces; piece += {step}) {{",
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
    scratch, behind, boxes = 0, 0, ring.rows >= GROUP_ROWS and ring.cluster == 1
    while True:
        taken = scratch + behind + kept_bytes(ring) + received_bytes(ring) + 136
        made = lanes(ring, SHARED_BYTES - taken, boxes * boxes_bytes(prod(ring.groups)))
        if made is None:
            return None
        written = Pipelined(function, ring, made, scratch, boxes)
        # How much scratch the text needs, and whether boxes, is known once it is written.
        needed = -(-written.consumer.scratch_bytes // 16) * 16
        if needed > scratch or written.consumer.boxes != boxes:
            scratch, boxes = max(scratch, needed), written.consumer.boxes
        elif written.shared_bytes > SHARED_BYTES:
            # Products read behind the rings.
            behind += written.shared_bytes - SHARED_BYTES
        else:
            return written


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


# -- the consumers ---------------------------------------------------------------------------


class Consumer(Emitter):
    """Writes the kernel for the threads that compute: they meet without the producer.

    Attributes:
        boxes: whether pieces are stored by the copy engine.
        late: whether products may come before the wait for earlier grids, where none of them writes
            an operand. What follows the loop is behind it.
    """

    def __init__(
        self, function: Function, ring: Ring, lanes: list[Lane], boxes: bool, early: bool
    ) -> None:
        super().__init__(function, plan_of(ring))
        self._ring = ring
        self._lanes = lanes
        self._may_box = boxes
        self.boxes = False
        self.late = early and ring.grouped and _reads_boxes_alone(ring)

    def line(self, text: str) -> None:
        """See `Emitter`."""
        super().line(text.replace("__syncthreads()", f"meet({self.plan.threads})"))

    def program_body(self) -> None:
        """The whole kernel, once for each piece."""
        behind = [line.strip() for line in begin(self.function)] if self.late else []
        if self._ring.cluster > 1:
            write_shared(self, self._ring, behind)
            return
        loop, ops = self._ring.loop, self.function.body.ops
        place = ops.index(loop) + 1
        for op in ops[:place]:
            self.op(op)
        for line in behind:
            self.line(line)
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
        held = [f"{lane.side.name}held" for lane in self._lanes]
        given = " ".join(
            f"barrier_arrive({lane.side.name}empty + 8 * {name});"
            for lane, name in zip(self._lanes, held, strict=True)
        )
        # Of the stages of the step before.
        given = f"if (held >= 0 && threadIdx.x % 32 == 0) {{ {given} }}"
        self.line(f"const int group = uniform(threadIdx.x / {GROUP}); (void)group;")
        self.line(f"int {', '.join(f'{name} = -1' for name in held)};")
        self.line("#pragma unroll 1")
        with self.braces(head):
            for lane in self._lanes:
                self.line(lane.wait())
            self.line("wgmma_begin();")
            for lane in self._lanes:
                self.line(f"const u32 {lane.side.name}at = ring + {lane.stage_at};")
            self.block(body)
            self.line("wgmma_commit();")
            # The products of the step before are complete: its stages may be filled again.
            self.line("wgmma_wait<1>();")
            self.line(given)
            for lane, name in zip(self._lanes, held, strict=True):
                self.line(f"{name} = {lane.side.name}stage;")
            carry(self, op)
            for lane in self._lanes:
                turn_over(self, lane.stages, lane.side.name)
        self.line("wgmma_wait<0>();")
        self.line(given)
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
            self.line(f"const u64 a = descriptor({self._at(a)} + {a.offset}{left});")
            self.line(f"const u64 b = descriptor({self._at(b)} + {b.offset}{right});")
            for step in range(0, k, 16):
                for i in range(blocks):
                    to = f"{name} + {i * columns // 2}"
                    left = f"a + {(element_at(a, step) + i * GROUP_ROWS * ROW_BYTES) // 16}"
                    ctype = c_type(op.args[0].dtype)
                    right = f"b + {element_at(b, step) // 16}"
                    self.line(f"wgmma{some}({to}, {left}, {right}, {ctype}{{}});")

    def _at(self, box: Box) -> str:
        """Name of where the stage begins that holds a box."""
        return next(f"{lane.side.name}at" for lane in self._lanes if box in lane.side.boxes)


def _reads_boxes_alone(ring: Ring) -> bool:
    """Whether nothing is read up to the end of the loop but what producers bring."""
    ops = ring.function.body.ops
    first = Block(ops=ops[: ops.index(ring.loop) + 1])
    return all(op.name not in _READS or op.result in ring.boxes for op in walk(first))


_READS = ("load", "load_piece", "pieces")
