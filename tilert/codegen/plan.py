"""Decisions made before any text is written: threads, layouts, operands of mma, copies."""

from dataclasses import dataclass, field

from tilert.codegen.layout import Layout, blocked, mma_accumulator, wgmma_accumulator
from tilert.codegen.lower import is_thin, uses
from tilert.codegen.shares import JOIN
from tilert.codegen.streaming import streaming_threads
from tilert.dtypes import bf16, f16
from tilert.ir import Block, Function, Op, Value, walk
from tilert.ops import ELEMENTWISE

__all__ = [
    "Operand",
    "Plan",
    "choose_threads",
    "make_group_plan",
    "make_plan",
    "make_share_plan",
    "operand_only",
    "source_of",
]

_THIN_THREADS = 128
_MAX_STAGES = 4
_STAGE_BYTES = 96 * 1024


@dataclass(eq=False)
class Operand:
    """A tile that mma reads from shared memory.

    Attributes:
        value: the tile as it is loaded or computed.
        rows, cols: its extents as stored: row-major, `cols` contiguous.
            load: the asynchronous load that fills it, None where registers fill it.
        stages: buffers in the ring (1 where not pipelined).
        offset: first byte in shared memory; stage: bytes of one buffer; pitch: bytes of a row.
    """

    value: Value
    rows: int
    cols: int
    load: Op | None = None
    stages: int = 1
    offset: int = 0
    pitch: int = 0

    @property
    def padded_rows(self) -> int:
        """Rows rounded up to whole fragments."""
        return -(-self.rows // 16) * 16

    @property
    def padded_cols(self) -> int:
        """Columns rounded up to whole fragments."""
        return -(-self.cols // 16) * 16

    @property
    def stage(self) -> int:
        """Bytes of one buffer."""
        return self.padded_rows * self.pitch


@dataclass(eq=False)
class Plan:
    """What the emitter follows.

    Attributes:
        layouts: layout of every tile of rank >= 1 that lives in registers.
        operands: shared-memory operands by the value they hold.
        pipelined: asynchronous operands of each loop.
        warps: (along m, along n) of each mma.
        groups: warpgroups (along m, along n) where they compute the products, None where warps do.
        sums, lefts: layouts of the sums of products, and of left operands in registers, where
            whoever makes the plan says them.
        direct: mma operations whose left operand is taken from registers.
        shared_bytes: shared memory of the operands; scratch follows it.
        least_bytes: fewest bytes for which one access moves several elements.
        spread: whether small tiles are in all threads, rather than in vectors of 16 bytes.
        coarse: operations of f32 that may be some ulps off, see `streaming.coarse`.
        triples: the three factors of what is rounded once, see `streaming.triples`.
        streams: whether it is under the streaming schedule (`streaming.py`).
        far: loads of rows, and how many rows later comes the one that the second-level cache is
            told to bring, see `streaming.far_rows`.
    """

    threads: int
    layouts: dict[Value, Layout] = field(default_factory=dict)
    operands: dict[Value, Operand] = field(default_factory=dict)
    pipelined: dict[Op, list[Operand]] = field(default_factory=dict)
    warps: dict[Op, tuple[int, int]] = field(default_factory=dict)
    groups: tuple[int, int] | None = None
    sums: dict[Op, Layout] = field(default_factory=dict)
    lefts: dict[Value, Layout] = field(default_factory=dict)
    direct: set[Op] = field(default_factory=set)
    shared_bytes: int = 0
    least_bytes: int = 8
    spread: bool = False
    coarse: set[Op] = field(default_factory=set)
    triples: dict[Op, tuple[Value, ...]] = field(default_factory=dict)
    streams: bool = False
    far: dict[Op, int] = field(default_factory=dict)

    def accumulator(self, product: Op) -> Layout:
        """Layout of the sums of a product."""
        if product in self.sums:
            return self.sums[product]
        m, n = product.result.shape
        if self.groups is not None:
            return wgmma_accumulator(m, n, *self.groups)
        return mma_accumulator(m, n, *self.warps[product])


def choose_threads(function: Function) -> int:
    """Threads a program: by the tensor-core tile if there is one, else what streams takes."""
    tiles = [op for op in walk(function.body) if op.name == "mma"]
    fat = [op for op in tiles if not is_thin(op, _THIN_THREADS)]
    if fat:
        m, n = max((op.result.shape for op in fat), key=lambda s: s[0] * s[1])
        return 256 if m * n >= 128 * 128 else 128
    if tiles:
        return _THIN_THREADS
    return streaming_threads(function)


def make_plan(function: Function, threads: int) -> Plan:
    """Choose layouts and shared memory for a lowered function."""
    plan = Plan(threads)
    _plan_mma(function, plan)
    _assign_layouts(function, plan)
    _choose_direct(function, plan)
    _plan_operands(function, plan)
    return plan


def make_group_plan(function: Function, groups: tuple[int, int]) -> Plan:
    """Layouts of a function whose products warpgroups compute, from operands placed elsewhere."""
    # Pairs of 16-bit sums lie side by side, and there are many of them.
    plan = Plan(128 * groups[0] * groups[1], groups=groups, least_bytes=4)
    _assign_layouts(function, plan)
    return plan


def make_share_plan(
    function: Function,
    threads: int,
    sums: dict[Op, Layout],
    lefts: dict[Value, Layout],
    spread: bool = False,
) -> Plan:
    """Layouts of a function whose products' sums and left operands lie as said, where right ones
    are placed elsewhere."""
    plan = Plan(threads, sums=sums, lefts=lefts, least_bytes=4, spread=spread)
    _assign_layouts(function, plan)
    return plan


def _plan_mma(function: Function, plan: Plan) -> None:
    warps = plan.threads // 32
    for op in walk(function.body):
        if op.name != "mma":
            continue
        m, n = op.result.shape
        fragments_m, fragments_n = -(-m // 16), -(-n // 8)
        best = (1, warps)
        cost = None
        for wm in (1, 2, 4, 8, 16):
            if warps % wm:
                continue
            wn = warps // wm
            rows, cols = -(-fragments_m // wm) * 16, -(-fragments_n // wn) * 8
            # Time goes with the larger of the multiplications and the operands read.
            c = (rows * cols, rows + cols)
            if cost is None or c < cost:
                best, cost = (wm, wn), c
        plan.warps[op] = best


def _prefer_rows(function: Function, plan: Plan) -> None:
    """Chained products (attention) keep a row in one warp, so that P stays in registers."""
    products = [op for op in walk(function.body) if op.name == "mma"]
    warps = plan.threads // 32
    for op in products:
        if _feeds_mma(op.result, function) and op.result.shape[0] >= 16 * warps:
            plan.warps[op] = (warps, 1)
    if any(w == (warps, 1) for w in plan.warps.values()):
        for op in products:
            if op.result.shape[0] >= 16 * warps:
                plan.warps[op] = (warps, 1)


def _feeds_mma(value: Value, function: Function) -> bool:
    readers = uses(function.body)
    branches = {r.ops[-1]: op for op in walk(function.body) if op.name == "if" for r in op.regions}
    seen: set[Value] = set()
    todo = [value]
    while todo:
        v = todo.pop()
        if v in seen:
            continue
        seen.add(v)
        for op in readers.get(v, []):
            if op.name == "mma" and v is not op.args[2]:
                return True
            if op.name in ELEMENTWISE:
                todo += op.results
            elif op in branches:
                pairs = zip(op.args, branches[op].results, strict=True)
                todo += [r for a, r in pairs if a is v]
    return False


class _Classes:
    """Union-find over tiles that must share a layout."""

    def __init__(self) -> None:
        self.parent: dict[Value, Value] = {}

    def find(self, v: Value) -> Value:
        self.parent.setdefault(v, v)
        while self.parent[v] is not v:
            self.parent[v] = self.parent[self.parent[v]]
            v = self.parent[v]
        return v

    def union(self, a: Value, b: Value) -> None:
        if a.shape:
            self.parent[self.find(a)] = self.find(b)


def _assign_layouts(function: Function, plan: Plan) -> None:
    _prefer_rows(function, plan)
    classes = _Classes()
    unseen = operand_only(function) - set(plan.lefts)
    relations: list[tuple[str, Value, Value, int]] = []
    fixed: list[tuple[Value, Layout]] = list(plan.lefts.items())

    def tile(v: Value) -> bool:
        return bool(v.shape) and v not in unseen

    def visit(block: Block) -> None:
        for op in block.ops:
            for v in op.results:
                if tile(v):
                    classes.find(v)
            if op.name in ELEMENTWISE:
                for a in op.args:
                    if tile(a) and tile(op.result):
                        classes.union(a, op.result)
            elif op.name == "mma":
                classes.union(op.args[2], op.result)
                fixed.append((op.result, plan.accumulator(op)))
            elif op.name == "for":
                body = op.regions[0]
                rows = zip(op.args[3:], body.args[1:], op.results, body.ops[-1].args, strict=True)
                for group in rows:
                    for a in group[1:]:
                        classes.union(a, group[0])
            elif op.name == "if":
                for region in op.regions:
                    for a, r in zip(region.ops[-1].args, op.results, strict=True):
                        classes.union(a, r)
            elif op.name in ("scan", "sort"):
                for r in op.results:
                    classes.union(op.args[0], r)
            elif op.name == JOIN:
                # What the loop began with is added to the sums where they are.
                for a in op.args[5:]:
                    classes.union(a, op.results[2])
            elif op.name == "take":
                classes.union(op.args[1], op.result)
            elif op.name == "reduce":
                relations.append(("reduce", op.args[0], op.result, op.attrs["axis"]))
            elif op.name in ("broadcast", "reshape") and op.args[0].shape:
                relations.append((op.name, op.args[0], op.result, 0))
            for region in op.regions:
                visit(region)

    visit(function.body)
    found: dict[Value, Layout] = {}
    for v, layout in fixed:
        found.setdefault(classes.find(v), layout)

    members: dict[Value, list[Value]] = {}
    for v in list(classes.parent):
        members.setdefault(classes.find(v), []).append(v)

    def known(v: Value) -> Layout | None:
        return found.get(classes.find(v)) if v.shape and v not in unseen else None

    def derive() -> bool:
        changed = False
        for kind, src, dst, axis in relations:
            a, b = known(src), known(dst)
            if kind == "reduce" and a is not None and b is None and dst.shape:
                found[classes.find(dst)] = a.without(axis)
                changed = True
            elif kind == "broadcast" and b is not None and a is None and tile(src):
                found[classes.find(src)] = b.narrowed(src.shape)
                changed = True
            elif kind == "reshape" and (a is None) != (b is None):
                given, want = (a, dst) if a is not None else (b, src)
                layout = given.reshaped(want.shape) if given and tile(want) else None
                if layout is not None:
                    found[classes.find(want)] = layout
                    changed = True
        return changed

    while True:
        while derive():
            pass
        open_ = [root for root in members if root not in found and root.shape]
        if not open_:
            break
        root = max(open_, key=lambda v: (v.type.numel, len(v.shape)))
        feeding = _feeding(root, members, classes, relations)
        vector = _vector(feeding)
        while plan.spread and vector > 1 and vector * plan.threads > root.type.numel:
            vector //= 2
        found[root] = blocked(root.shape, vector, plan.threads)
    for v in list(classes.parent):
        if v.shape:
            plan.layouts[v] = found[classes.find(v)]


def _feeding(
    root: Value,
    members: dict[Value, list[Value]],
    classes: _Classes,
    relations: list[tuple[str, Value, Value, int]],
) -> list[Value]:
    """Tiles of a class and those that reach it through broadcasts and reshapes, widest first."""
    found, todo = [root], [root]
    while todo:
        v = todo.pop()
        for kind, src, dst, _ in relations:
            if kind != "reduce" and classes.find(dst) is v and src in classes.parent:
                origin = classes.find(src)
                if origin not in found:
                    found.append(origin)
                    todo.append(origin)
    return [m for f in found for m in members[f]]


def _vector(members: list[Value]) -> int:
    """Elements a thread takes side by side: 16 bytes of the narrowest element type given."""
    n = members[0].shape[-1]
    bits = min((v.dtype.bits for v in members if v.dtype.name != "bool"), default=32)
    vector = 128 // bits
    while vector > 1 and n % vector:
        vector //= 2
    return vector


def operand_only(function: Function) -> set[Value]:
    """Values that only feed mma's two operands: loads into shared memory, and transposes."""
    readers = uses(function.body)
    found: set[Value] = set()

    def only_mma(v: Value) -> bool:
        ops = readers.get(v, [])
        return bool(ops) and all(
            (op.name == "mma" and v is not op.args[2])
            or (op.name == "transpose" and only_mma(op.result))
            for op in ops
        )

    for op in walk(function.body):
        if op.name in ("load", "transpose") and op.result.shape and only_mma(op.result):
            found.add(op.result)
    return found


def source_of(value: Value) -> tuple[Value, bool]:
    """The tile behind an operand and whether mma reads it transposed."""
    op = value.op
    if op is not None and op.name == "transpose":
        return op.args[0], True
    return value, False


def _choose_direct(function: Function, plan: Plan) -> None:
    for op in walk(function.body):
        if op.name != "mma" or op.args[0].dtype not in (bf16, f16):
            continue
        a = op.args[0]
        layout = plan.layouts.get(a)
        if layout is None or a.shape[1] % 16:
            continue
        wm, wn = plan.warps[op]
        if wn == 1 and layout == mma_accumulator(a.shape[0], a.shape[1], wm, 1):
            plan.direct.add(op)


def can_copy_async(load: Op, cols: int) -> bool:
    """Whether rows of a load can be copied in 16-byte pieces, each wholly in or out of bounds."""
    p = load.attrs["param"]
    access = load.attrs["access"]
    vector = 16 // p.dtype.itemsize
    if load.name != "load" or not p.aligned or p.strides[-1] != 1 or load.attrs["fill"] != 0:
        return False
    last = access[-1]
    if last.kind not in ("block", "full") or last.size % vector or cols % 16:
        return False
    if p.shape[-1] is None or p.shape[-1] % vector:
        return False
    return all(s is not None and s % vector == 0 for s in p.strides[:-1])


def _plan_operands(function: Function, plan: Plan) -> None:
    homes: dict[Value, Op | None] = {}

    def visit(block: Block, loop: Op | None) -> None:
        for op in block.ops:
            for v in op.results:
                homes[v] = loop
            if op.name == "mma":
                for position, side in enumerate(op.args[:2]):
                    if position == 0 and op in plan.direct:
                        continue
                    _add_operand(plan, side, position, homes)
            for region in op.regions:
                # What an `if` in a loop loads is not known an iteration ahead.
                visit(region, op if op.name == "for" else None)

    visit(function.body, None)
    for operands in plan.pipelined.values():
        total = sum(o.stage for o in operands)
        stages = max(2, min(_MAX_STAGES, _STAGE_BYTES // max(total, 1)))
        for o in operands:
            o.stages = stages
    offset = 0
    for o in plan.operands.values():
        o.offset = offset
        offset += -(-o.stage * o.stages // 128) * 128
    plan.shared_bytes = offset


def _add_operand(plan: Plan, side: Value, position: int, homes: dict[Value, Op | None]) -> None:
    value, transposed = source_of(side)
    if value in plan.operands:
        return
    rows, cols = value.shape
    o = Operand(value, rows, cols)
    o.pitch = o.padded_cols * value.dtype.itemsize + 16
    plan.operands[value] = o
    op = value.op
    if op is None or op.name != "load" or value in plan.layouts:
        return
    # The extent that products sum over must be whole fragments, for copies do not pad with zeros.
    depth = rows if (position == 0) == transposed else cols
    if value.dtype not in (bf16, f16) or not can_copy_async(op, cols) or depth % 16:
        # Filled through registers: give it a layout after all.
        plan.layouts[value] = blocked(value.shape, _vector([value]), plan.threads)
        return
    o.load = op
    loop = homes.get(value)
    if loop is not None and _pure_slice(op, loop):
        plan.pipelined.setdefault(loop, []).append(o)


def _pure_slice(load: Op, loop: Op) -> bool:
    """Whether the load's address is known for a later iteration: it uses no carried value."""
    body = loop.regions[0]
    carried = set(body.args[1:])
    inside = {r: op for op in body.ops for r in op.results}
    todo, seen = list(load.args), set()
    while todo:
        v = todo.pop()
        if v in carried:
            return False
        op = inside.get(v)
        if op is None or v in seen:
            continue
        seen.add(v)
        if op.regions or op.name == "load_piece" or v.shape:
            return False
        todo += op.args
    return True
