"""The attention schedule of sm_90a for few rows, such as decoding has: reading takes the time.

As in `attention.py`, a producer fills a ring in shared memory with the keys and values of some
steps ahead, but it is one warp: its lanes look up where the operands of as many steps lie, all at
once, and then copy one after the other. The warps that compute have 16 keys of a step each, and do
not meet before the loop ends: every warp has a softmax of its keys alone, which `shares.py` allows.
Products are mma.sync with the sides swapped, so that the 16 rows of the instruction are keys, and
then columns of the values, and few rows of queries are its 8 columns.
"""

from math import gcd

from tilert.codegen.attention import set_up
from tilert.codegen.attention_form import KEYS, Form, Side, scalars
from tilert.codegen.control import begin_loop, carry, note_bounds
from tilert.codegen.early import END, START, begin
from tilert.codegen.emit import Emitter, c_type
from tilert.codegen.grid import coordinates
from tilert.codegen.hopper import (
    ATTENTION_TEMPLATES,
    ONCE_TEMPLATES,
    PORTABLE_ROWS,
    PORTABLE_TEMPLATES,
    ROW_TEMPLATES,
    TEMPLATES,
    copy_box,
)
from tilert.codegen.layout import Layout, blocked, mma_swapped
from tilert.codegen.movement import combine
from tilert.codegen.plan import Plan, make_share_plan
from tilert.codegen.producer import copy_tile
from tilert.codegen.shares import JOIN, Shares
from tilert.codegen.streaming import lift_loads
from tilert.dtypes import f32
from tilert.ir import Function, Op, Value
from tilert.tensor_map import ROW_BYTES

__all__ = ["RowAttention", "write_rows"]

UNDER_WAY = 96 * 1024
"""Bytes of keys and values that a block has under way: so many blocks have room for that."""
MOST_STAGES = 8
LANES = 32


class RowAttention:
    """A kernel written under the schedule.

    Attributes:
        head: what the text needs besides the prelude and helpers.
        lines: the kernel's body.
        threads: of a block.
        shared_bytes: of a block.
        blocks: a multiprocessor has room for: what one begins and ends with takes time that the
            other fills.
        early: parameters that can be read before earlier grids are complete.
    """

    blocks = 2
    early: tuple[int, ...] = ()

    def __init__(self, form: Form, shares: Shares, stages: int) -> None:
        function = form.function
        lift_loads(function, LANES * form.warps)
        plan = _plan(form, shares)
        self.threads = plan.threads + LANES
        barriers = stages * form.stage_bytes
        scratch = barriers + -(-4 * 8 * stages // 128) * 128
        self.consumer = RowConsumer(function, plan, form, shares, stages)
        self.consumer.depth = 2
        self.consumer.block(function.body)
        producer = Emitter(function, plan)
        _produce(producer, form, stages)
        self.shared_bytes = scratch + -(-self.consumer.scratch_bytes // 16) * 16
        self.head = [PORTABLE_TEMPLATES, PORTABLE_ROWS, TEMPLATES]
        self.head += [ATTENTION_TEMPLATES, ROW_TEMPLATES]
        ranks = sorted({len(spec.box) for spec in form.maps})
        self.head += [ONCE_TEMPLATES, *(copy_box(rank, True) for rank in ranks)]
        known = "".join(f" map_ahead(&map{i});" for i in range(len(form.maps)))
        self.lines = [
            *START,
            *set_up(barriers, scratch, stages, form.warps),
            f"  if (threadIdx.x == {plan.threads}) {{{known} }}",
            *begin(function),
            *coordinates(function),
            "  int stage = 0; u32 turn = 0;",
            f"  if (threadIdx.x >= {plan.threads}) {{",
            *(f"  {line}" for line in producer.head),
            *producer.lines,
            "  } else {",
            *(f"  {line}" for line in self.consumer.head),
            *self.consumer.lines,
            *("  " + line for line in END),
            "  }",
        ]


def write_rows(form: Form, shares: Shares) -> RowAttention:
    """The kernel, with as many stages as what is under way takes."""
    stages = max(2, min(MOST_STAGES, UNDER_WAY // form.stage_bytes))
    return RowAttention(form, shares, stages)


def _plan(form: Form, shares: Shares) -> Plan:
    first, second = form.first, form.second
    sums = {
        first: mma_swapped(*_extents(first), form.warps),
        second: mma_swapped(*_extents(second), 1),
    }
    plan = make_share_plan(form.function, LANES * form.warps, sums, {}, spread=True)
    queries = first.args[0]
    plan.layouts.setdefault(queries, blocked(queries.shape, 8, plan.threads))
    return plan


def _extents(product: Op) -> tuple[int, int]:
    m, n = product.result.shape
    return m, n


# -- the producer ----------------------------------------------------------------------------


def _produce(e: Emitter, form: Form, stages: int) -> None:
    found = scalars(form)
    if found is None:
        raise ValueError("the producer cannot compute its addresses")
    e.depth = 2
    for op in found[form.function.body]:
        e.op(op)
    loop = form.loop
    lo, hi, step = (e.names[a] for a in loop.args[:3])
    note_bounds(e, loop)
    base = e.fresh("base")
    e.line(f"const int lane = threadIdx.x % {LANES};")
    # What is read has taken its time, and is not read again before the next step.
    e.line("const u64 once = read_once();")
    e.line("#pragma unroll 1")
    with e.braces(f"for (int {base} = {lo}; {base} < {hi}; {base} += {LANES} * {step})"):
        # Each lane finds out where the operands of one step lie.
        counter = e.names[loop.regions[0].args[0]] = e.fresh("i")
        e.line(f"int {counter} = {base} + lane * {step};")
        e.line(f"const int count = min({LANES}, ({hi} - {base} + {step} - 1) / {step});")
        e.line(f"if (lane >= count) {counter} = {base};")
        for op in found[loop.regions[0]]:
            e.op(op)
        e.line("#pragma unroll 1")
        with e.braces("for (int turns = 0; turns < count; ++turns)"):
            with e.braces("if (lane == turns)"):
                e.line(f"const u32 at = ring + stage * {form.stage_bytes};")
                for name, side in (("keys", form.keys), ("values", form.values)):
                    e.line(f"barrier_wait({name}_free + 8 * stage, turn ^ 1);")
                    e.line(f"barrier_expect({name}_full + 8 * stage, {side.nbytes});")
                    _copy(e, side, name)
            e.line("warp_meets();")
            e.line(f"if (++stage == {stages}) {{ stage = 0; turn ^= 1; }}")


def _copy(e: Emitter, side: Side, name: str) -> None:
    block = side.rows * ROW_BYTES
    for number, load in enumerate(side.loads):
        offset = side.offset + number * side.rows // len(side.loads) * ROW_BYTES
        copy_tile(e, load, side.cols, side.map, offset, block, f"{name}_full", once=True)


# -- the consumers ---------------------------------------------------------------------------


class RowConsumer(Emitter):
    """Writes the kernel for the warps that compute."""

    def __init__(
        self, function: Function, plan: Plan, form: Form, shares: Shares, stages: int
    ) -> None:
        super().__init__(function, plan)
        self._form, self._shares, self._stages = form, shares, stages
        self._queries = ""

    @property
    def _columns(self) -> int:
        """Products beside each other for all rows of queries."""
        return -(-self._form.first.result.shape[0] // 8)

    def line(self, text: str) -> None:
        """See `Emitter`."""
        super().line(text.replace("__syncthreads()", f"meet({self.plan.threads})"))

    def op(self, op: Op) -> None:
        """See `Emitter`."""
        if op is self._form.loop:
            self._loop(op)
        elif op.name == JOIN:
            self._join(op)
        elif op in (self._shares.largest, self._shares.added):
            self._reduce(op)
        elif op is self._form.first.args[0].op:
            self._place_queries(op)
        else:
            super().op(op)

    def expression(self, op: Op, args: list[str], register: str) -> str:
        """See `Emitter`."""
        if op.name == "exp2" and op.result.dtype == f32:
            return f"quick_exp2({args[0]})"
        return super().expression(op, args, register)

    def _place_queries(self, op: Op) -> None:
        """Lay the left operand down in shared memory, and take it as products want it."""
        m, depth = op.result.shape
        parts = op.args if op.name == "concat" and op.attrs["axis"] == 1 else op.results
        if parts is op.results:
            super().op(op)
        # Rows lie in different banks.
        pitch = depth * 2 + 16
        if not self.clean:
            self.line("__syncthreads();")
        self.scratch(m * pitch)
        column = 0
        for part in parts:
            self._lay_down(part, pitch, column)
            column += part.shape[1]
        self.line("__syncthreads();")
        self._queries = self.fresh("queries")
        steps = depth // 32
        self.line(f"u32 {self._queries}[{self._columns * steps * 4}];")
        with self.braces():
            # Past the last row products are nobody's.
            rows = f"min(j * 8 + threadIdx.x % 8, {m - 1})"
            self.line("#pragma unroll")
            with self.braces(f"for (int j = 0; j < {self._columns}; ++j)"):
                at = f"shared_address(scratch) + {rows} * {pitch} + threadIdx.x % 32 / 8 * 16"
                self.line(f"const u32 at = {at};")
                self.line("#pragma unroll")
                target = f"&{self._queries}[(j * {steps} + k) * 4]"
                self.line(f"for (int k = 0; k < {steps}; ++k) ldmatrix4({target}, at + k * 64);")

    def _lay_down(self, part: Value, pitch: int, column: int) -> None:
        layout, name, ctype = self.layout(part), self.names[part], c_type(part.dtype)
        inner = layout.axes[1][:1]
        wide = inner and inner[0].kind == "r" and inner[0].stride == 1
        count = gcd(inner[0].size, 8) if wide else 1
        word = {8: "vec16", 4: "vec8", 2: "u32", 1: "u16"}[count]
        self.line("#pragma unroll")
        with self.braces(f"for (int r = 0; r < {layout.registers}; r += {count})"):
            guard = self.inside(layout, "r")
            row, col = (self.index(layout, axis, "r") for axis in (0, 1))
            self.line(f"union {{ {word} v; {ctype} e[{count}]; }} u;")
            self.line(f"for (int q = 0; q < {count}; ++q) u.e[q] = {name}[r + q];")
            place = f"scratch + {row} * {pitch} + ({col} + {column}) * 2"
            self.line(f"{f'if ({guard}) ' if guard else ''}*({word}*)({place}) = u.v;")

    def joint(self, ops: list[Op]) -> list[Op]:
        """See `Emitter`; rows of scores are reduced in ways of their own."""
        return []

    def _reduce(self, op: Op) -> None:
        """Over the keys of the warp; sums are left to each lane until they are joined."""
        source, kind = op.args[0], op.attrs["kind"]
        layout, name = self.layout(source), self.names[source]
        result = self.declare(op.result)
        for r in range(self.registers(op.result)):
            place = layout.without(1).register_index(0, r)
            parts = [i for i in range(layout.registers) if layout.register_index(0, i) == place]
            text = f"{name}[{parts[0]}]"
            for i in parts[1:]:
                text = combine(kind, text, f"{name}[{i}]")
            self.line(f"{result}[{r}] = {text};")
        if op is self._shares.largest:
            self._across_lanes(kind, result, self.registers(op.result))

    def _across_lanes(self, kind: str, name: str, count: int) -> None:
        for lanes in (4, 8, 16):
            with self.each(count) as r:
                other = f"shuffle_xor({name}[{r}], {lanes})"
                self.line(f"{name}[{r}] = {combine(kind, f'{name}[{r}]', other)};")

    def _loop(self, loop: Op) -> None:
        form = self._form
        _, head = begin_loop(self, loop)
        sums = self.names[self._shares.sums]
        self.names[form.second.result] = sums
        self.line("const int lane = threadIdx.x % 32, warp = threadIdx.x / 32; (void)warp;")
        self.line("#pragma unroll 1")
        with self.braces(head):
            self._scores()
            for op in form.between:
                self.op(op)
            right = self._weights()
            self._scale(sums)
            self._add(sums, right)
            carry(self, loop)
            self.line(f"if (++stage == {self._stages}) {{ stage = 0; turn ^= 1; }}")

    def _tiles(self) -> int:
        """Products of a warp along the keys of a step."""
        return self._form.keys.rows // (KEYS * self._form.warps)

    def _scores(self) -> None:
        """The first product, in two sums, since each product waits for the one it adds to."""
        form, columns = self._form, self._columns
        result, side = form.first.result, form.keys
        ctype, steps = c_type(form.first.args[0].dtype), side.cols // 16
        count = self.registers(result)
        name, other = self.declare(result), self.fresh("other")
        self.line(f"float {other}[{count}];")
        with self.each(count) as r:
            self.line(f"{name}[{r}] = {other}[{r}] = 0.0f;")
        self.line("barrier_wait(keys_full + 8 * stage, turn);")
        with self.braces():
            self.line(f"const u32 at = ring + stage * {form.stage_bytes} + {side.offset};")
            self.line("#pragma unroll")
            with self.braces(f"for (int t = 0; t < {self._tiles()}; ++t)"):
                self.line(f"const int row = (t * {form.warps} + warp) * 16 + lane % 16;")
                self.line("#pragma unroll")
                with self.braces(f"for (int k = 0; k < {steps}; ++k)"):
                    self.line("u32 keys[4];")
                    place = f"box_place(at, {side.rows}, row, k * 16 + lane / 16 * 8)"
                    self.line(f"ldmatrix4(keys, {place});")
                    for j in range(columns):
                        at = f"&(k % 2 ? {other} : {name})[(t * {columns} + {j}) * 4]"
                        b = f"{self._queries}[{2 * j * steps} + 2 * k"
                        self.line(f"mma_step({at}, keys, {b}], {b} + 1], {ctype}{{}});")
        self.line("barrier_arrive_warp(keys_free + 8 * stage);")
        with self.each(count) as r:
            self.line(f"{name}[{r}] += {other}[{r}];")

    def _weights(self) -> str:
        """The weights as the right operand of the second product."""
        source = self._form.narrowed.args[0]
        name, ctype = self.names[source], c_type(self._form.narrowed.result.dtype)
        right, count = self.fresh("right"), self.registers(source) // 2
        self.line(f"u32 {right}[{count}];")
        with self.each(count) as r:
            pair = f"pack_floats({name}[2 * {r}], {name}[2 * {r} + 1], {ctype}{{}})"
            self.line(f"{right}[{r}] = transposed({pair});")
        return right

    def _scale(self, sums: str) -> None:
        op = self._form.scaling
        if op is None:
            raise ValueError("the sums of an online softmax fade")
        factor = next(a for a in op.args if a.op is not None and a.op.name == "broadcast")
        with self.each(self.registers(op.result)) as r:
            self.line(f"{sums}[{r}] *= {self.at(factor, r)};")

    def _add(self, sums: str, right: str) -> None:
        """The second product."""
        form, columns = self._form, self._columns
        side, ctype = form.values, c_type(form.narrowed.result.dtype)
        self.line("barrier_wait(values_full + 8 * stage, turn);")
        with self.braces():
            self.line(f"const u32 at = ring + stage * {form.stage_bytes} + {side.offset};")
            self.line("#pragma unroll")
            with self.braces(f"for (int t = 0; t < {self._tiles()}; ++t)"):
                first = f"(t * {form.warps} + warp) * 16"
                self.line(f"const int row = {first} + lane / 16 * 8 + lane % 8;")
                self.line("#pragma unroll")
                with self.braces(f"for (int d = 0; d < {side.cols // 16}; ++d)"):
                    self.line("u32 values[4];")
                    place = f"box_place(at, {side.rows}, row, d * 16 + lane / 8 % 2 * 8)"
                    self.line(f"ldmatrix4_t(values, {place});")
                    for j in range(columns):
                        b = f"{right}[(t * {columns} + {j}) * 2"
                        at = f"&{sums}[(d * {columns} + {j}) * 4]"
                        self.line(f"mma_step({at}, values, {b}], {b} + 1], {ctype}{{}});")
        self.line("barrier_arrive_warp(values_free + 8 * stage);")

    def _join(self, op: Op) -> None:
        """Put together what the warps have found, through the ring, which nothing is copied to."""
        shares, (m, n), warps = self._shares, self._form.second.result.shape, self._form.warps
        best, total, sums = (self.names[v] for v in op.args[:3])
        # Rows of sums lie in different banks.
        pitch = n + 4
        found, parts = self.fresh("found"), self.fresh("parts")
        self._across_lanes("sum", total, self.registers(shares.total))
        self.line("__syncthreads();")
        self.line(f"float* const {parts} = (float*)smem;")
        self.line(f"float* const {found} = {parts} + {warps * m * pitch};")
        own = self.layout(shares.best)
        with self.each(own.registers) as r:
            row = self.index(own, 0, r)
            with self.braces(f"if (lane / 4 == 0 && {row} < {m})"):
                self.line(f"{found}[(warp * {m} + {row}) * 2] = {best}[{r}];")
                self.line(f"{found}[(warp * {m} + {row}) * 2 + 1] = {total}[{r}];")
        own = self.layout(shares.sums)
        with self.each(own.registers) as r:
            row, col = self.index(own, 0, r), self.index(own, 1, r)
            place = f"{parts}[(warp * {m} + {row}) * {pitch} + {col}]"
            self.line(f"if ({row} < {m}) {place} = {sums}[{r}];")
        for number, v in enumerate(op.args[3:5]):
            self._found_before(v, found, number)
        self.line("__syncthreads();")
        for v in op.results:
            name, layout = self.declare(v), self.layout(v)
            if v is op.results[2]:
                began = self.names[op.args[5]] if self._begins else ""
                self._joined_sums(name, layout, found, parts, pitch, began)
            else:
                self._joined(name, layout, found, v is op.results[0])

    @property
    def _begins(self) -> bool:
        """Whether there is one more share, of what the loop began with."""
        return len(self._shares.join.args) > 3

    def _found_before(self, v: Value, found: str, number: int) -> None:
        """Put what the loop began with beside what the warps have found."""
        m, warps, layout = self._form.second.result.shape[0], self._form.warps, self.layout(v)
        with self.each(layout.registers) as r:
            guard, row = self.inside(layout, r), self.index(layout, 0, r)
            target = f"{found}[({warps * m} + {row}) * 2 + {number}]"
            self.line(f"{f'if ({guard}) ' if guard else ''}{target} = {self.at(v, r)};")

    def _top(self, found: str, row: str) -> None:
        """Declare `row` and `top`, the row's largest score of all warps."""
        m, shares = self._form.second.result.shape[0], self._form.warps + self._begins
        self.line(f"const int row = {row};")
        self.line(f"float top = {found}[row * 2];")
        self.line("#pragma unroll")
        self.line(
            f"for (int w = 1; w < {shares}; ++w)"
            f" top = op_maximum(top, {found}[(w * {m} + row) * 2]);"
        )

    def _joined(self, name: str, layout: Layout, found: str, best: bool) -> None:
        m, shares = self._form.second.result.shape[0], self._form.warps + self._begins
        with self.each(layout.registers) as r:
            guard = self.inside(layout, r)
            self.line(f"{name}[{r}] = 0.0f;")
            with self.braces(f"if ({guard})" if guard else ""):
                self._top(found, self.index(layout, 0, r))
                if best:
                    self.line(f"{name}[{r}] = top;")
                else:
                    self.line("#pragma unroll")
                    with self.braces(f"for (int w = 0; w < {shares}; ++w)"):
                        self.line(f"const float* const its = {found} + (w * {m} + row) * 2;")
                        self.line(f"{name}[{r}] += its[1] * quick_exp2(its[0] - top);")

    def _joined_sums(
        self, name: str, layout: Layout, found: str, parts: str, pitch: int, began: str
    ) -> None:
        m, warps = self._form.second.result.shape[0], self._form.warps
        inner = layout.axes[1][:1]
        wide = bool(inner) and inner[0].kind == "r" and inner[0].stride == 1
        vector = 4 if wide and inner[0].size % 4 == 0 else 1
        word = "vec16" if vector == 4 else "u32"
        self.line("#pragma unroll")
        with self.braces(f"for (int r = 0; r < {layout.registers}; r += {vector})"):
            guard = self.inside(layout, "r")
            self.line(f"for (int q = 0; q < {vector}; ++q) {name}[r + q] = 0.0f;")
            with self.braces(f"if ({guard})" if guard else ""):
                self._top(found, self.index(layout, 0, "r"))
                if began:
                    at = f"{found}[({warps * m} + row) * 2]"
                    self.line(f"const float fade = quick_exp2({at} - top);")
                    each = f"for (int q = 0; q < {vector}; ++q)"
                    self.line(f"{each} {name}[r + q] = {began}[r + q] * fade;")
                self.line("#pragma unroll")
                with self.braces(f"for (int w = 0; w < {warps}; ++w)"):
                    self.line(f"union {{ {word} v; float e[{vector}]; }} u;")
                    col = self.index(layout, 1, "r")
                    self.line(
                        f"u.v = *(const {word}*)({parts} + (w * {m} + row) * {pitch} + {col});"
                    )
                    self.line(f"const float fade = quick_exp2({found}[(w * {m} + row) * 2] - top);")
                    self.line("#pragma unroll")
                    self.line(f"for (int q = 0; q < {vector}; ++q) {name}[r + q] += u.e[q] * fade;")
