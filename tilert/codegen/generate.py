"""The compiler's table of contents: from a specialised kernel to CUDA C++ text."""

from dataclasses import dataclass

from tilert.checks import Checks
from tilert.codegen import bounds
from tilert.codegen.ahead import begin_early, find_ahead
from tilert.codegen.attention import Attention, write_attention
from tilert.codegen.attention_form import find_form
from tilert.codegen.cluster import blocks_of
from tilert.codegen.debug import without_debugging
from tilert.codegen.early import (
    END,
    PARAMETER,
    START,
    START_APART,
    begin,
    begin_apart,
    can_be_apart,
    first_wait,
    unless,
)
from tilert.codegen.emit import Emitter, c_name, c_type
from tilert.codegen.grid import coordinates, grid_extents
from tilert.codegen.helpers import with_needed
from tilert.codegen.lower import THIN_ROWS, clone, is_thin, lower, narrow_rights, sink_past
from tilert.codegen.pipelined import Pipelined, write_pipelined
from tilert.codegen.plan import choose_threads, make_plan
from tilert.codegen.prelude import PRELUDE
from tilert.codegen.ring import GROUP_ROWS, Ring, find_ring
from tilert.codegen.row_attention import RowAttention, write_rows
from tilert.codegen.schedules import VARIABLE, enabled
from tilert.codegen.streaming import coarse, far_rows, is_row_sum, lift_loads, triples
from tilert.codegen.unfit import Unfit
from tilert.dtypes import i8
from tilert.fault import Site
from tilert.ir import Function, Op, walk
from tilert.tensor_map import TensorMap

__all__ = ["CudaSource", "generate"]


@dataclass(frozen=True)
class CudaSource:
    """A kernel as text.

    Attributes:
        text: CUDA C++ without headers.
        entry: name of the kernel function.
        threads: threads a block.
        shared_bytes: dynamic shared memory a block.
        sites: what the checks of a checked kernel mean, by number; None where nothing is checked,
            and the kernel takes its arguments alone.
        maps: tensor maps that the kernel takes before its arguments.
        walks: whether a block walks over pieces: so many blocks as run at once are enough.
        waits: whether it waits for earlier grids itself, on targets where grids can. Its last
            argument then says what it may do sooner (`early.py`).
        cluster: blocks that share a piece.
        early: numbers of the parameters that it can read before it waits, by the bits of that word.
        whole: whether it does that with all of them or none.
        apart: whether it need not wait at all behind a kernel that it shares no memory with.
        schedule: how the work is done. "streaming" has no products; "skinny" takes weights through
            registers for a few rows; "staged" multiplies with mma.sync what is copied to shared
            memory; "pipelined", "thin" and "attention" are those of sm_90a; "unsafe" is text that
            was given.
        refused: why it is none of the others, by name.
    """

    text: str
    entry: str
    threads: int
    shared_bytes: int
    sites: tuple[Site, ...] | None = None
    maps: tuple[TensorMap, ...] = ()
    walks: bool = False
    waits: bool = False
    cluster: int = 1
    early: tuple[int, ...] = ()
    whole: bool = False
    apart: bool = False
    schedule: str = "unsafe"
    refused: tuple[tuple[str, str], ...] = ()


def generate(function: Function, arch: str, checks: Checks = Checks.NONE) -> CudaSource:
    """Compile to CUDA C++.

    Args:
        arch: target such as "sm_90a". What runs from sm_80 up is the same text for all of them;
            see `schedules.py` for what is not.
        checks: which checks are compiled in.
    """
    function = clone(function)
    without_debugging(function)
    threads = choose_threads(function)
    # Order: products first become what the hardware will run, since that decides the tiles that
    # layouts are chosen for; layouts decide what shared memory holds; text comes last.
    lowered = lower(function, threads)
    refused = _not_portable(function, lowered, threads)
    try:
        _check_target(arch, checks)
        return _pipelined(lowered, lower(function, 0), refused)
    except Unfit as reason:
        refused |= {name: str(reason) for name in _SM_90A if name not in refused}
    schedule = next(name for name in _PORTABLE if name not in refused)
    streams = schedule == "streaming"
    if streams:
        lift_loads(lowered, threads)
    plan = make_plan(lowered, threads)
    plan.streams = streams
    plan.coarse = set() if schedule == "staged" else coarse(lowered)
    plan.triples = triples(lowered) if streams else {}
    plan.far = far_rows(lowered) if streams and not checks else {}
    emitter = Emitter(lowered, plan, checks)
    ahead = find_ahead(emitter) if schedule == "skinny" and not checks else None
    if ahead is not None:
        begin_early(emitter, ahead)
    first, read = first_wait(lowered) if streams and not checks else (None, ())
    # Sums of several rows a program take eight more registers with the condition, of one row none
    # to five.
    sums = any(op.name == "reduce" for op in walk(lowered.body)) and not is_row_sum(lowered)
    apart = bool(read) and not sums and can_be_apart(lowered)
    if read:
        emitter.waits = first, begin_apart(function) if apart else begin(function)
    emitter.block(lowered.body)
    entry = f"{function.name}_kernel"
    shared = plan.shared_bytes + -(-emitter.scratch_bytes // 16) * 16
    checked = bool(emitter.sites)
    # Where a piece is placed by an index map, it is read from memory.
    where = [bounds.place(grid_extents(function))] * checked
    where += [*coordinates(function), *emitter.head]
    early = ahead.params if ahead else read
    bits = (1 << len(early)) - 1
    wait = unless(function, bits) if read else begin(function, emitter.before_wait, bits)
    parameters = [*_parameters(function), *bounds.PARAMETERS * checked, PARAMETER]
    # Without a number of blocks the assembler moves loads behind the sum that hides their latency.
    blocks = ", 1" if streams and is_row_sum(function) else ""
    lines = [
        PRELUDE,
        *with_needed(emitter.helpers | _types(lowered)),
        f'extern "C" __global__ void __launch_bounds__({threads}{blocks})',
        f"{entry}({', '.join(parameters)}) {{",
        "  extern __shared__ __align__(128) char smem[];",
        f"  char* const scratch = smem + {plan.shared_bytes}; (void)scratch;",
        *(START_APART if apart else START),
        *(where + wait if ahead else wait + where),
        *emitter.lines,
        *END,
        "}",
        "",
    ]
    return CudaSource(
        "\n".join(lines), entry, threads, shared, tuple(emitter.sites) or None, waits=True,
        early=early, whole=bool(early), apart=apart, schedule=schedule,
        refused=tuple(refused.items()),
    )  # fmt: skip


_PORTABLE = ("streaming", "skinny", "staged")
_SM_90A = ("pipelined", "thin", "attention")


def _not_portable(function: Function, lowered: Function, threads: int) -> dict[str, str]:
    """Why two of the three schedules that every target has are not for a function."""
    products = [op for op in walk(function.body) if op.name == "mma"]
    left = [op for op in walk(lowered.body) if op.name == "mma"]
    if not products:
        return dict.fromkeys(("skinny", "staged"), "it has no products of tiles")
    refused = {"streaming": "it has products of tiles"}
    if not left:
        return refused | {"staged": f"its products have {_rows(products)} rows, which is skinny"}
    fat = [op for op in products if not is_thin(op, threads)] or left
    what = f"its products have {_rows(fat)} rows; up to {THIN_ROWS} are taken, of few elements"
    return refused | {"skinny": what}


def _rows(products: list[Op]) -> str:
    return " and ".join(sorted({str(op.result.shape[0]) for op in products}, key=int))


def _check_target(arch: str, checks: Checks) -> None:
    if arch != "sm_90a":
        raise Unfit(f"{arch} has no warpgroup products; sm_90a alone has them")
    if checks:
        raise Unfit("the copy engine's accesses cannot be checked one by one")
    if "pipelined" not in enabled():
        raise Unfit(f"{VARIABLE} leaves it out")


def _pipelined(function: Function, whole: Function, refused: dict[str, str]) -> CudaSource:
    """Under the pipelined schedule or that of attention.

    Args:
        whole: the function with all its products, thin ones too.
        refused: why it is not for another schedule; more are added.

    Raises:
        Unfit: where the function is for neither.
    """
    written: Pipelined | Attention | RowAttention | None
    walks = True
    function = narrow_rights(function)
    try:
        ring = _ring(function)
    except Unfit as reason:
        refused |= dict.fromkeys(("pipelined", "thin"), str(reason))
        form = find_form(whole)
        schedule, maps = "attention", tuple(form.maps)
        walks = form.shares is None
        cluster = 1
        written = write_attention(form) if form.shares is None else write_rows(form, form.shares)
    else:
        schedule, other = ("thin", "pipelined") if ring.thin else ("pipelined", "thin")
        written, maps = write_pipelined(function, ring), tuple(ring.maps)
        cluster = ring.cluster
        walks = cluster == 1
        refused[other] = f"its products have {ring.rows} rows; {schedule} is for so many"
        refused["attention"] = "it does not have two products of which one feeds the other"
    if written is None:
        refused.pop(schedule, None)
        raise Unfit("shared memory has no room for two stages")
    entry = f"{function.name}_kernel"
    shape = f"__cluster_dims__({cluster}, 1, 1) " if cluster > 1 else ""
    head = [f"const __grid_constant__ tensor_map map{i}" for i in range(len(maps))]
    lines = [
        PRELUDE,
        *with_needed(written.consumer.helpers | _types(function)),
        *written.head,
        f'extern "C" __global__ void {shape}__launch_bounds__({written.threads}, {written.blocks})',
        f"{entry}({', '.join([*head, *_parameters(function), PARAMETER])}) {{",
        *written.lines,
        "}",
        "",
    ]
    for name in _PORTABLE:
        refused.setdefault(name, f"{schedule} comes first where a kernel has its form")
    return CudaSource(
        "\n".join(lines), entry, written.threads, written.shared_bytes, None, maps, walks=walks,
        waits=True, cluster=cluster, early=written.early, schedule=schedule,
        refused=tuple(refused.items()),
    )  # fmt: skip


def _ring(function: Function) -> Ring:
    """The ring of a function: of few rows of one warpgroup, shared by the blocks of a cluster where
    there are too few pieces.

    Raises:
        Unfit: where it is for none.
    """
    try:
        ring = find_ring(function, grouped=True)
    except Unfit:
        ring = find_ring(function)
    if not ring.thin:
        # Of few rows all that is needed behind the loop fits beside the sums.
        sink_past(function, ring.loop)
    blocks = blocks_of(ring) if ring.grouped else 1
    if blocks > 1:
        return find_ring(function, True, blocks)
    # What has too few pieces to read at the rate of memory has two warpgroups, where it may.
    return ring if blocks or ring.rows < GROUP_ROWS else find_ring(function)


def _types(function: Function) -> set[str]:
    """The helpers that define the types of a function."""
    dtypes = {p.dtype for p in function.params}
    dtypes |= {v.dtype for op in walk(function.body) for v in op.results}
    found = {"i8"} if i8 in dtypes else set()
    return found | {"f8" for d in dtypes if d.is_narrow and d.bits == 8}


def _parameters(function: Function) -> list[str]:
    out: list[str] = []
    for a in function.abi():
        p = function.params[a.param] if a.param >= 0 else None
        if p is None:
            out.append(f"const int g{a.axis}")
        elif a.kind == "pointer":
            const = "const " if p.kind == "ref" else ""
            out.append(f"{const}{c_type(p.dtype)}* RESTRICT {c_name(p)}")
        elif a.kind == "index":
            out.append(f"const int* RESTRICT {c_name(p)}_map")
        elif a.kind == "dim":
            out.append(f"const int {c_name(p)}_dim{a.axis}")
        else:
            out.append(f"const i64 {c_name(p)}_stride{a.axis}")
    return out
