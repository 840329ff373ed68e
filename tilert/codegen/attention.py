"""The attention schedule of sm_90a: two products a step, the second of what the first gives.

As in `pipelined.py`, blocks walk over pieces, and the last warpgroup is a producer that fills a
ring in shared memory. Keys and values of a step have barriers of their own, since the values are
read later. The other warpgroups have 64 rows each: the left operand in registers, sums in
registers. The loop is turned by half a step, so that the tensor cores have the first product of a
step and the second one of the step before it while the work between the two is done:

    scores of 0; work on 0
    for each i from 1 on: scores of i and sums of i - 1 begin; work on i; sums of i - 1 are there
    sums of the last
"""

from tilert.codegen.attention_form import Form, Side, scalars
from tilert.codegen.control import carry, note_bounds
from tilert.codegen.early import END, START, begin
from tilert.codegen.emit import Emitter, c_type
from tilert.codegen.grid import coordinates
from tilert.codegen.hopper import (
    ATTENTION_TEMPLATES,
    PORTABLE_ATTENTION,
    PORTABLE_TEMPLATES,
    TEMPLATES,
    copy_box,
    wgmma_left,
)
from tilert.codegen.layout import wgmma_accumulator
from tilert.codegen.lower import uses
from tilert.codegen.movement import combine
from tilert.codegen.plan import Plan, make_group_plan
from tilert.codegen.producer import copy_tile
from tilert.codegen.ring import COLUMNS, GROUP
from tilert.dtypes import f32
from tilert.ir import Function, Op, Value
from tilert.tensor_map import ROW_BYTES

__all__ = ["Attention", "set_up", "write_attention"]

SHARED_BYTES = 227 * 1024
"""Shared memory of a block of sm_90."""
MOST_STAGES = 6
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
"""What 128 and 256 threads may have of 64 Ki registers, in the steps of setmaxnreg."""
BARRIERS = ("keys_full", "keys_free", "values_full", "values_free")


class Attention:
    """A kernel written under the schedule.

    Attributes:
        head: what the text needs besides the prelude and helpers.
        lines: the kernel's body.
        threads: of a block.
        shared_bytes: of a block.
        blocks: a multiprocessor has room for.
        early: parameters that can be read before earlier grids are complete.
    """

    blocks = 1
    early: tuple[int, ...] = ()

    def __init__(self, form: Form, stages: int, scratch: int) -> None:
        function = form.function
        plan = make_group_plan(function, (form.groups, 1))
        left = form.first.args[0]
        rows, depth = left.shape
        plan.layouts[left] = wgmma_accumulator(rows, depth, form.groups, 1)
        self._function, self._form, self._stages = function, form, stages
        self.threads = form.consumers + GROUP
        self._barriers = stages * form.stage_bytes
        self._scratch = self._barriers + -(-len(BARRIERS) * 8 * stages // 128) * 128
        self.shared_bytes = self._scratch + scratch
        self.consumer = Consumer(function, plan, form, stages)
        self.consumer.depth = 3
        self.consumer.block(function.body)
        producer = Emitter(function, plan)
        _produce(producer, form, stages)
        self.head = [PORTABLE_TEMPLATES, PORTABLE_ATTENTION, TEMPLATES, ATTENTION_TEMPLATES]
        self.head += _templates(form)
        self.lines = [*self._prologue(), *self._producer(producer), *self._consumer()]

    def _prologue(self) -> list[str]:
        extents = [str(n) if n is not None else f"g{i}" for i, n in enumerate(self._function.grid)]
        warps = self._form.consumers // 32
        return [
            *START,
            *set_up(self._barriers, self._scratch, self._stages, warps),
            *begin(self._function),
            f"  const i64 pieces = {' * '.join(f'(i64){n}' for n in extents) or '1'};",
        ]

    def _producer(self, e: Emitter) -> list[str]:
        consumers = self._form.consumers
        return [
            f"  if (threadIdx.x >= {consumers}) {{",
            *self._limits("fewer", PRODUCER_REGISTERS),
            f"    if (threadIdx.x == {consumers}) {{",
            *self._pieces("      ", e.lines, e.head),
            "    }",
        ]

    def _consumer(self) -> list[str]:
        e, form = self.consumer, self._form
        turns = [
            f"    const int group = uniform(threadIdx.x / {GROUP}); (void)group;",
            f"    if (group == 1) pass_turn(0, {form.consumers});",
        ]
        return [
            "  } else {",
            *self._limits("more", CONSUMER_REGISTERS),
            *(turns if form.groups > 1 else []),
            *self._pieces("    ", e.lines, e.head),
            *("  " + line for line in END),
            "  }",
        ]

    def _limits(self, word: str, registers: int) -> list[str]:
        # One consumer has all the registers that a thread can have from the start.
        return [f"    {word}_registers<{registers}>();"] if self._form.groups > 1 else []

    def _pieces(self, pad: str, lines: list[str], head: list[str]) -> list[str]:
        """A walk over the pieces: the last ones first, which see most, and every other lap
        backwards, so that all blocks have about as much to do."""
        return [
            *(pad + line.strip() for line in head),
            f"{pad}int stage = 0; u32 turn = 0;",
            f"{pad}for (i64 lap = 0; lap * gridDim.x < pieces; ++lap) {{",
            f"{pad}  const i64 behind = lap * gridDim.x"
            " + (lap % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);",
            f"{pad}  if (behind >= pieces) continue;",
            *(pad + x for x in coordinates(self._function, "(int)(pieces - 1 - behind)")),
            *lines,
            f"{pad}}}",
        ]


def set_up(barriers: int, scratch: int, stages: int, warps: int) -> list[str]:
    """Names of places in shared memory, and barriers that all threads know to be ready.

    Args:
        barriers, scratch: where they begin, behind the ring.
        warps: that compute.
    """
    places = ", ".join(f"{n} = ring + {barriers + i * 8 * stages}" for i, n in enumerate(BARRIERS))
    init = " ".join(
        f"barrier_init({name} + 8 * s, {1 if name.endswith('full') else warps});"
        for name in BARRIERS
    )
    return [
        "  extern __shared__ __align__(1024) char smem[];",
        f"  char* const scratch = smem + {scratch}; (void)scratch;",
        "  const u32 ring = shared_address(smem);",
        f"  const u32 {places};",
        "  if (threadIdx.x == 0) {",
        f"    for (int s = 0; s < {stages}; ++s) {{ {init} }}",
        "    barriers_ready();",
        "  }",
        "  __syncthreads();",
    ]


def write_attention(form: Form) -> Attention | None:
    """The kernel with as many stages as shared memory has room for, None where two are too many."""
    scratch = 0
    for _ in range(2):
        room = SHARED_BYTES - scratch - 256
        stages = min(MOST_STAGES, room // form.stage_bytes)
        if stages < 2:
            return None
        written = Attention(form, stages, scratch)
        # How much scratch the text needs is known once it is written.
        scratch = -(-written.consumer.scratch_bytes // 16) * 16
        if written.shared_bytes + scratch <= SHARED_BYTES:
            break
    return Attention(form, stages, scratch)


def _templates(form: Form) -> list[str]:
    ranks = sorted({len(spec.box) for spec in form.maps})
    ctype = c_type(form.first.args[0].dtype)
    widths = sorted({op.result.shape[1] for op in (form.first, form.second)})
    return [*(copy_box(rank) for rank in ranks), *(wgmma_left(n, ctype) for n in widths)]


# -- the producer ----------------------------------------------------------------------------


def _produce(e: Emitter, form: Form, stages: int) -> None:
    found = scalars(form)
    if found is None:
        raise ValueError("the producer cannot compute its addresses")
    e.depth = 4
    for op in found[form.function.body]:
        e.op(op)
    for loop in form.path:
        lo, hi, step = (e.names[a] for a in loop.args[:3])
        counter = e.names[loop.regions[0].args[0]] = e.fresh("i")
        note_bounds(e, loop)
        e.line("#pragma unroll 1")
        e.line(f"for (int {counter} = {lo}; {counter} < {hi}; {counter} += {step}) {{")
        e.depth += 1
        for op in found[loop.regions[0]]:
            e.op(op)
    e.line(f"const u32 at = ring + stage * {form.stage_bytes};")
    for name, side in (("keys", form.keys), ("values", form.values)):
        e.line(f"barrier_wait({name}_free + 8 * stage, turn ^ 1);")
        e.line(f"barrier_expect({name}_full + 8 * stage, {side.nbytes});")
        _copy(e, side, name)
    e.line(f"if (++stage == {stages}) {{ stage = 0; turn ^= 1; }}")
    for _ in form.path:
        e.depth -= 1
        e.line("}")


def _copy(e: Emitter, side: Side, name: str) -> None:
    block = side.rows * ROW_BYTES
    for number, load in enumerate(side.loads):
        offset = side.offset + number * side.rows // len(side.loads) * ROW_BYTES
        copy_tile(e, load, side.cols, side.map, offset, block, f"{name}_full")


# -- the consumers ---------------------------------------------------------------------------


class Consumer(Emitter):
    """Writes the kernel for the threads that compute: they meet without the producer."""

    def __init__(self, function: Function, plan: Plan, form: Form, stages: int) -> None:
        super().__init__(function, plan)
        self._form, self._stages = form, stages
        self._queries = ""

    def line(self, text: str) -> None:
        """See `Emitter`."""
        super().line(text.replace("__syncthreads()", f"meet({self.plan.threads})"))

    def op(self, op: Op) -> None:
        """See `Emitter`."""
        if op is self._form.loop:
            self._loop(op)
        elif op.name != "reduce" or not self._reduce(op):
            super().op(op)
        if op is self._form.first.args[0].op:
            self._pack_queries(op.result)
        if op is self._form.path[0]:
            self._complete()

    def joint(self, ops: list[Op]) -> list[Op]:
        """See `Emitter`; rows of scores are reduced in ways of their own."""
        return []

    def expression(self, op: Op, args: list[str], register: str) -> str:
        """See `Emitter`."""
        if op.name == "exp2" and op.result.dtype == f32:
            return f"quick_exp2({args[0]})"
        return super().expression(op, args, register)

    def _reduce(self, op: Op) -> bool:
        """Reduce rows of scores, in two chains a row; false for anything else."""
        source, kind = op.args[0], op.attrs["kind"]
        rows = self._form.first.result
        fits = source.dtype == f32 and op.attrs["axis"] == 1 and kind in ("max", "sum")
        if not fits or self.plan.layouts.get(source) != self.layout(rows):
            return False
        name, parts = self.names[source], self.fresh()
        self.line(f"float {parts}[4] = {{{', '.join(f'{name}[{r}]' for r in (0, 2, 4, 6))}}};")
        self.line("#pragma unroll")
        with self.braces(f"for (int r = 1; r < {self.registers(source)}; ++r)"):
            part = f"{parts}[r / 2 % 4]"
            self.line(f"if (r > 7 || r % 2) {part} = {combine(kind, part, f'{name}[r]')};")
        result = self.declare(op.result)
        for r in range(2):
            self.line(f"{result}[{r}] = {combine(kind, f'{parts}[{r}]', f'{parts}[{r + 2}]')};")
        if op not in self._form.partial:
            self._across_quad(kind, result)
        return True

    def _across_quad(self, kind: str, name: str) -> None:
        for lanes in (1, 2):
            for r in range(2):
                other = f"shuffle_xor({name}[{r}], {lanes})"
                self.line(f"{name}[{r}] = {combine(kind, f'{name}[{r}]', other)};")

    def _complete(self) -> None:
        """Put together what the lanes of a row have kept apart."""
        for total in self._form.partial.values():
            self._across_quad("sum", self.names[total])

    def _pack_queries(self, queries: Value) -> None:
        self._queries = self.fresh("left")
        count, name = self.registers(queries) // 2, self.names[queries]
        self.line(f"u32 {self._queries}[{count}];")
        with self.each(count) as r:
            self.line(f"{self._queries}[{r}] = pack({name}[2 * {r}], {name}[2 * {r} + 1]);")

    def _loop(self, loop: Op) -> None:
        form = self._form
        body = loop.regions[0]
        lo, hi, step = (self.names[a] for a in loop.args[:3])
        self._begin(loop)
        counter = self.names[body.args[0]] = self.fresh("i")
        note_bounds(self, loop)
        sums = self.names[form.second.result] = self.names[form.second.args[2]] = self._carried()
        left = self.fresh("left")
        weights = self.registers(form.narrowed.result)
        with self.braces(f"if ({lo} < {hi})"):
            self.line(f"u32 {left}[{weights // 2}];")
            self.line(f"int held = stage; u32 held_turn = turn; int {counter} = {lo};")
            with self.braces():
                self._scores()
                self.line("wgmma_wait<0>();")
                self._work(left, waits=False)
            self.line("#pragma unroll 1")
            with self.braces(f"for ({counter} += {step}; {counter} < {hi}; {counter} += {step})"):
                self._take_turn()
                self._scores()
                self._add(sums, left)
                self._pass_turn()
                self.line("wgmma_wait<1>();")
                self._work(left, waits=True)
            self._add(sums, left)
            self._added(sums)

    def _begin(self, loop: Op) -> None:
        """Names of what the loop carries: where a loop around it carries the same, in its place."""
        body = loop.regions[0]
        around = [arg for outer in self._form.path[:-1] for arg in outer.regions[0].args]
        readers = uses(self.function.body)
        for arg, result, init in zip(body.args[1:], loop.results, loop.args[3:], strict=True):
            if init in around and readers[init] == [loop]:
                name = self.names[result] = self.names[init]
            else:
                name = self.declare(result)
                with self.each(self.registers(result)) as r:
                    self.line(f"{self.at(result, r)} = {self.at(init, r)};")
            self.names[arg] = name

    def _carried(self) -> str:
        """Variable of the sums of the second product."""
        loop = self._form.loop
        place = loop.regions[0].ops[-1].args.index(self._form.second.result)
        return self.names[loop.results[place]]

    def _take_turn(self) -> None:
        if self._form.groups > 1:
            self.line(f"take_turn(group, {self._form.consumers});")

    def _pass_turn(self) -> None:
        if self._form.groups > 1:
            self.line(f"pass_turn(1 - group, {self._form.consumers});")

    def _scores(self) -> None:
        """Begin the first product of the step."""
        form = self._form
        first, side = form.first, form.keys
        n, ctype = first.result.shape[1], c_type(first.args[0].dtype)
        name = self.declare(first.result)
        self.line("barrier_wait(keys_full + 8 * stage, turn);")
        self.line("wgmma_begin();")
        with self.braces():
            at = f"ring + stage * {form.stage_bytes} + {side.offset}"
            self.line(f"const u64 keys = descriptor({at});")
            for k in range(0, side.cols, 16):
                further = (k // COLUMNS * side.rows * ROW_BYTES + k % COLUMNS * 2) // 16
                given = f"{name}, {self._queries} + {k // 4}, keys + {further}, {ctype}{{}}"
                self.line(f"wgmma_left_n{n}<{int(k > 0)}, 0>({given});")
        self.line("wgmma_commit();")

    def _add(self, sums: str, left: str) -> None:
        """Begin the second product of the step before."""
        form = self._form
        second, side = form.second, form.values
        n, ctype = second.result.shape[1], c_type(second.args[0].dtype)
        self.line("barrier_wait(values_full + 8 * held, held_turn);")
        self.line("wgmma_begin();")
        with self.braces():
            at = f"ring + held * {form.stage_bytes} + {side.offset}"
            self.line(f"const u64 values = descriptor_across({at}, {side.rows * ROW_BYTES});")
            for k in range(0, side.rows, 16):
                further = k * ROW_BYTES // 16
                given = f"{sums}, {left} + {k // 4}, values + {further}, {ctype}{{}}"
                self.line(f"wgmma_left_n{n}<1, 1>({given});")
        self.line("wgmma_commit();")

    def _added(self, sums: str) -> None:
        """The second product of the step before is complete: its values may be overwritten."""
        self.line("wgmma_wait<0>();")
        self.line(f"wgmma_sums<{self.registers(self._form.second.result)}>({sums});")
        self.line("if (threadIdx.x % 32 == 0) barrier_arrive(values_free + 8 * held);")

    def _work(self, left: str, *, waits: bool) -> None:
        """From the scores, which are complete, to the left operand of the second product.

        Args:
            waits: whether the second product of the step before is under way.
        """
        form = self._form
        scores = form.first.result
        self.line(f"wgmma_sums<{self.registers(scores)}>({self.names[scores]});")
        self.line("if (threadIdx.x % 32 == 0) barrier_arrive(keys_free + 8 * stage);")
        for op in form.between:
            self.op(op)
        source = form.narrowed.args[0]
        name, ctype = self.names[source], c_type(form.narrowed.result.dtype)
        if waits:
            # The work is for the time until then: the compiler must not put it behind.
            self.line(f"wgmma_sums<{self.registers(source)}>({name});")
        self._scale(form.scaling, waits=waits)
        with self.each(self.registers(source) // 2) as r:
            pair = f"{name}[2 * {r}], {name}[2 * {r} + 1]"
            self.line(f"{left}[{r}] = pack_floats({pair}, {ctype}{{}});")
        self.line("held = stage; held_turn = turn;")
        carry(self, form.loop)
        self.line(f"if (++stage == {self._stages}) {{ stage = 0; turn ^= 1; }}")

    def _scale(self, op: Op | None, *, waits: bool) -> None:
        """Multiply the sums where they are, unless all factors of the warp are 1.

        Args:
            waits: whether the sums are not there yet. The assembler puts a wait as early as it can,
                so it stands in the branches, of which it knows only when the work is done.
        """
        sums = self.names[self._form.second.result]
        if op is None:
            if waits:
                self._added(sums)
            return
        factor = next(a for a in op.args if a.op is not None and a.op.name == "broadcast")
        row = factor.op.args[0] if factor.op is not None else factor
        changes = " || ".join(f"{self.at(row, str(r))} != 1.0f" for r in range(self.registers(row)))
        with self.braces(f"if (any_lane({changes}))"):
            if waits:
                self._added(sums)
            with self.each(self.registers(op.result)) as r:
                self.line(f"{sums}[{r}] *= {self.at(factor, r)};")
        if waits:
            with self.braces("else"):
                self._added(sums)
