"""The compiler's table of contents: from a specialised kernel to CUDA C++ text."""

from dataclasses import dataclass

from tilert.checks import Checks
from tilert.codegen import bounds
from tilert.codegen.attention import Attention, write_attention
from tilert.codegen.attention_form import find_form
from tilert.codegen.debug import without_debugging
from tilert.codegen.emit import Emitter, c_name, c_type
from tilert.codegen.grid import coordinates, grid_extents
from tilert.codegen.helpers import with_needed
from tilert.codegen.lower import clone, lower, sink_past
from tilert.codegen.pipelined import Pipelined, write_pipelined
from tilert.codegen.plan import choose_threads, make_plan
from tilert.codegen.prelude import PRELUDE
from tilert.codegen.ring import find_ring
from tilert.codegen.schedules import enabled
from tilert.dtypes import i8
from tilert.fault import Site
from tilert.ir import Function, walk
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
    """

    text: str
    entry: str
    threads: int
    shared_bytes: int
    sites: tuple[Site, ...] | None = None
    maps: tuple[TensorMap, ...] = ()
    walks: bool = False


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
    if arch == "sm_90a" and not checks and "pipelined" in enabled():
        written = _pipelined(lowered)
        if written is not None:
            return written
    plan = make_plan(lowered, threads)
    emitter = Emitter(lowered, plan, checks)
    emitter.block(lowered.body)
    entry = f"{function.name}_kernel"
    shared = plan.shared_bytes + -(-emitter.scratch_bytes // 16) * 16
    checked = bool(emitter.sites)
    lines = [
        PRELUDE,
        *with_needed(emitter.helpers | _types(lowered)),
        f'extern "C" __global__ void __launch_bounds__({threads})',
        f"{entry}({', '.join(_parameters(function) + bounds.PARAMETERS * checked)}) {{",
        "  extern __shared__ __align__(128) char smem[];",
        f"  char* const scratch = smem + {plan.shared_bytes}; (void)scratch;",
        *([bounds.place(grid_extents(function))] if checked else []),
        *coordinates(function),
        *emitter.head,
        *emitter.lines,
        "}",
        "",
    ]
    return CudaSource("\n".join(lines), entry, threads, shared, tuple(emitter.sites) or None)


def _pipelined(function: Function) -> CudaSource | None:
    """Under the pipelined schedule or that of attention, where the function is one for it."""
    ring = find_ring(function)
    form = find_form(function) if ring is None else None
    written: Pipelined | Attention | None = None
    maps: tuple[TensorMap, ...] = ()
    if ring is not None:
        sink_past(function, ring.loop)
        written, maps = write_pipelined(function, ring), tuple(ring.maps)
    elif form is not None:
        written, maps = write_attention(form), tuple(form.maps)
    if written is None:
        return None
    entry = f"{function.name}_kernel"
    head = [f"const __grid_constant__ tensor_map map{i}" for i in range(len(maps))]
    lines = [
        PRELUDE,
        *with_needed(written.consumer.helpers | _types(function)),
        *written.head,
        # One block a multiprocessor: what it may have of the registers depends on that.
        f'extern "C" __global__ void __launch_bounds__({written.threads}, 1)',
        f"{entry}({', '.join(head + _parameters(function))}) {{",
        *written.lines,
        "}",
        "",
    ]
    text = "\n".join(lines)
    return CudaSource(text, entry, written.threads, written.shared_bytes, None, maps, walks=True)


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
            out.append(f"{const}{c_type(p.dtype)}* __restrict__ {c_name(p)}")
        elif a.kind == "index":
            out.append(f"const int* __restrict__ {c_name(p)}_map")
        elif a.kind == "dim":
            out.append(f"const int {c_name(p)}_dim{a.axis}")
        else:
            out.append(f"const i64 {c_name(p)}_stride{a.axis}")
    return out
