"""The consumers of products of few rows: warps that share the columns of the operands.

Reading the right operand takes the time, so it goes from the ring straight to the tensor cores, as
the left operand of mma.m16n8k16: 16 of its rows are those of the instruction, and 8 of the few rows
are its columns. The left operand passes through registers, where it may be computed on the way, and
no barrier is needed: each warp has columns of its own, and adds up products of these alone. Behind
the loop the warps' sums are added up.

(With wgmma, an operand that threads compute would have to go through shared memory, behind a fence
of the asynchronous proxy and a barrier, in every step.)
"""

from collections.abc import Sequence

from tilert.codegen.control import begin_loop, carry, constant
from tilert.codegen.emit import Emitter, c_name, c_type
from tilert.codegen.layout import Factor
from tilert.codegen.plan import source_of
from tilert.codegen.producer import Lane
from tilert.codegen.ring import WARPS, Box, Ring, plan_of, sums_of, turn_over
from tilert.dtypes import f32
from tilert.ir import Access, Function, Op, Param, Value
from tilert.tensor_map import ROW_BYTES

__all__ = ["SPLIT_TEMPLATES", "THIN_TEMPLATES", "ThinConsumer", "kept_bytes", "kept_loads"]

MOST_KEPT = 16 * 1024
"""Bytes of vectors that stay in shared memory."""
PIECE = 8
"""Elements of 16 bytes."""

THIN_TEMPLATES = r"""
// Adds up the sums of all warps: those of the first N registers for the first warp, of the next N
// for the second and so on, as far as there are so many.
template <int N, int COUNT> DEV void share_sums(float* mine, const float* sums, float* room) {
  const int threads = 128, warp = threadIdx.x / 32;
  // Of the piece before, warps may still read what there was.
  meet(threads);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) room[i * threads + threadIdx.x] = sums[i];
  meet(threads);
  if (warp * N < COUNT) {
#pragma unroll
    for (int i = 0; i < N; ++i)
      for (int from = threadIdx.x % 32; from < threads; from += 32)
        mine[i] += room[(warp * N + i) * threads + from];
  }
  meet(threads); }
"""


SPLIT_TEMPLATES = r"""
// Of two floats what bf16 holds of them, in the lower half of a warp; in the upper half what bf16
// holds of what is left.
DEV u32 split_pair(float a, float b) {
  bf16 first = to<bf16>::from(a), second = to<bf16>::from(b);
  if (threadIdx.x & 16) {
    first = to<bf16>::from(a - f32_of(first));
    second = to<bf16>::from(b - f32_of(second));
  }
  return pack(first, second); }
// Of what is as narrow nothing is left.
template <class T> DEV u32 split_pair(T a, T b) { return threadIdx.x & 16 ? 0u : pack(a, b); }
"""


class ThinConsumer(Emitter):
    """Writes the kernel for the threads that compute: they meet without the producer.

    Attributes:
        kept: loads of the loop whose vectors lie in shared memory; see `kept_loads`.
        boxes: whether pieces are stored by the copy engine.
    """

    boxes = False

    def __init__(self, function: Function, ring: Ring, lanes: Sequence[Lane]) -> None:
        super().__init__(function, plan_of(ring))
        self._ring = ring
        self._lanes = lanes
        self.kept = kept_loads(ring)
        self._sums_at: dict[Value, str] = {}
        self._split = any(v.dtype == f32 for v in ring.lefts)

    def line(self, text: str) -> None:
        """See `Emitter`."""
        super().line(text.replace("__syncthreads()", f"meet({self.plan.threads})"))

    def program_body(self) -> None:
        """The whole kernel, once for each piece."""
        self.block(self.function.body)

    def op(self, op: Op) -> None:
        """See `Emitter`."""
        if op is self._ring.loop:
            self._loop(op)
        elif op.name == "mma":
            self._product(op)
        elif op in self.kept:
            self._read_kept(op)
        elif op.name != "load" or op.result not in self._ring.boxes:
            super().op(op)
        elif op.result in self._ring.read:
            self._read(op.result)

    def keep(self) -> None:
        """Bring vectors that are the same for all pieces to shared memory, before the first one."""
        for op, (offset, count) in self.kept.items():
            param: Param = op.attrs["param"]
            (extent,) = param.shape
            step = PIECE * self.plan.threads
            with self.braces(f"for (int i = threadIdx.x * {PIECE}; i < {count}; i += {step})"):
                inside = f"i < {extent} ? load16({c_name(param)} + i) : vec16{{}}"
                self.line(f"*(vec16*)(kept + {offset} + i * 2) = {inside};")
        if self.kept:
            self.line("__syncthreads();")

    def _read_kept(self, op: Op) -> None:
        """A step's part of a vector that was kept."""
        layout, name = self.layout(op.result), self.declare(op.result)
        counter, ctype = self.names[op.args[0]], c_type(op.result.dtype)
        pairs = layout.axes[0][0] == Factor("r", 2, 1)
        self.line("#pragma unroll")
        with self.braces(f"for (int r = 0; r < {layout.registers}; r += {1 + pairs})"):
            at = f"{counter} * {layout.shape[0]} + {self.index(layout, 0, 'r')}"
            vector = f"((const {ctype}*)(kept + {self.kept[op][0]}) + {at})"
            if pairs:
                self.line(f"union {{ u32 v; {ctype} e[2]; }} u;")
                self.line(f"u.v = *(const u32*){vector};")
                self.line(f"{name}[r] = u.e[0]; {name}[r + 1] = u.e[1];")
            else:
                self.line(f"{name}[r] = *{vector};")

    def _read(self, tile: Value) -> None:
        """A tile that was copied, to registers, pair by pair."""
        layout, name = self.layout(tile), self.declare(tile)
        box, ctype = self._ring.boxes[tile], c_type(tile.dtype)
        lane = next(lane for lane in self._lanes if box in lane.side.boxes)
        self.line("#pragma unroll")
        with self.braces(f"for (int r = 0; r < {layout.registers}; r += 2)"):
            row, column = (self.index(layout, axis, "r") for axis in (0, 1))
            self.line(f"const int row = {row}, column = {column};")
            at = f"smem + {lane.stage_at} + {_place(box)}"
            word = "u32" if box.itemsize == 2 else "vec8"
            self.line(f"union {{ {word} v; {ctype} e[2]; }} u;")
            self.line(f"u.v = *(const {word}*)({at});")
            self.line(f"{name}[r] = u.e[0]; {name}[r + 1] = u.e[1];")

    def _loop(self, op: Op) -> None:
        body = op.regions[0]
        _, head = begin_loop(self, op)
        partial: dict[Value, str] = {}
        for v in sums_of(op):
            name = partial[v] = self.fresh("sums")
            self.line(f"float {name}[{_sums(v)}] = {{}};")
            # What products add to, in the order of the loop's values.
            self._sums_at[body.args[1 + op.results.index(v)]] = name
        self.line("#pragma unroll 1")
        with self.braces(head):
            for lane in self._lanes:
                self.line(lane.wait())
            self.line(f"const u32 at = ring + {self._lanes[0].stage_at};")
            self.block(body)
            # What a warp has taken from the stages is in its registers.
            for lane in self._lanes:
                name = lane.side.name
                self.line(f"barrier_arrive_warp({name}empty + 8 * {name}stage);")
            carry(self, op)
            for lane in self._lanes:
                turn_over(self, lane.stages, lane.side.name)
        for v, name in partial.items():
            block = _rows(v) // 2
            shared = self.names[v]
            if self._split:
                shared = self.fresh("shared")
                self.line(f"float {shared}[{self.registers(v)}] = {{}};")
            for turn, first in enumerate(range(0, _sums(v), block * WARPS)):
                count = min(block * WARPS, _sums(v) - first)
                room = self.scratch(4 * count * self.plan.threads)
                to = f"{shared} + {turn * block}"
                self.line(f"share_sums<{block}, {count}>({to}, {name} + {first}, (float*){room});")
            if self._split:
                # The other two lanes of a row have what was left of its elements.
                both = f"{shared}[r] + shuffle_xor({shared}[r], 2)"
                self.line("#pragma unroll")
                with self.braces(f"for (int r = 0; r < {self.registers(v)}; ++r)"):
                    self.line(f"{self.names[v]}[r] += {both};")

    def _product(self, op: Op) -> None:
        """Add to the sums where they are."""
        ring = self._ring
        name = self._sums_at[op.result] = self._sums_at[op.args[2]]
        self.names[op.result] = self.names[op.args[2]]
        left, ctype = source_of(op.args[0])[0], c_type(op.args[1].dtype)
        pack = "split_pair" if self._split else "pack"
        box = ring.right(op)
        (m, n), k = op.result.shape, left.shape[1]
        own, blocks, tokens = k // WARPS, -(-n // 16), -(-m // 8)
        with self.braces():
            self.line("const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;")
            self.line("#pragma unroll")
            with self.braces(f"for (int k = 0; k < {own}; k += 16)"):
                self.line(f"const int column = warp * {own} + k + lane / 16 * 8;")
                self.line("#pragma unroll")
                with self.braces(f"for (int i = 0; i < {blocks}; ++i)"):
                    self.line(f"const int row = min(i * 16 + lane % 16, {n - 1});")
                    self.line("u32 weights[4];")
                    self.line(f"ldmatrix4(weights, at + {_place(box)});")
                    self.line("#pragma unroll")
                    with self.braces(f"for (int j = 0; j < {tokens}; ++j)"):
                        x = f"{self.names[left]}[j * {own // 4} + k / 4"
                        pairs = ", ".join(f"{pack}({x} + {e}], {x} + {e + 1}])" for e in (0, 2))
                        to = f"&{name}[(i * {tokens} + j) * 4]"
                        self.line(f"mma_step({to}, weights, {pairs}, {ctype}{{}});")


def _sums(v: Value) -> int:
    """A warp's sums of a tile, each thread's."""
    return -(-v.shape[1] // 16) * _rows(v) // 2


def _rows(v: Value) -> int:
    """Rows of a tile that the instruction has."""
    return -(-v.shape[0] // 8) * 8


def _place(box: Box) -> str:
    """C++ of the bytes from a stage's beginning to an element of a box at `row` and `column`."""
    row = f"column / {box.width} * {box.block} + row * {ROW_BYTES}"
    return f"{box.offset} + swizzled({row} + column % {box.width} * {box.itemsize})"


def kept_loads(ring: Ring) -> dict[Op, tuple[int, int]]:
    """Loads of the loop whose vectors can stay in shared memory: of blocks that the step alone
    numbers. Gives the byte that each vector begins at, and its elements with what fills the last
    step."""
    loop = ring.loop
    lo, hi, by = (constant(a) for a in loop.args[:3])
    found: dict[Op, tuple[int, int]] = {}
    if not ring.thin or lo != 0 or hi is None or by != 1:
        return found
    offset = 0
    for op in loop.regions[0].ops:
        if op.name != "load" or op.args != [loop.regions[0].args[0]]:
            continue
        param: Param = op.attrs["param"]
        access: tuple[Access, ...] = op.attrs["access"]
        fits = (
            param.kind == "ref"
            and param.aligned
            and param.dtype.itemsize == 2
            and len(access) == 1
            and access[0].kind == "block"
            and param.strides == (1,)
            and param.shape[0] is not None
            and param.shape[0] % PIECE == 0
            and op.result.shape[0] % PIECE == 0
            and op.attrs["fill"] == 0
        )
        count = hi * op.result.shape[0] if fits else 0
        if fits and offset + 2 * count <= MOST_KEPT:
            found[op] = offset, count
            offset += 2 * count
    return found


def kept_bytes(ring: Ring) -> int:
    """What they take."""
    return sum(2 * count for _, count in kept_loads(ring).values())
