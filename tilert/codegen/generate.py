"""The compiler's table of contents: from a specialised kernel to CUDA C++ text."""

from dataclasses import dataclass

from tilert.codegen.debug import without_debugging
from tilert.codegen.emit import Emitter, c_name, c_type
from tilert.codegen.grid import coordinates
from tilert.codegen.helpers import with_needed
from tilert.codegen.lower import clone, lower
from tilert.codegen.plan import choose_threads, make_plan
from tilert.codegen.prelude import PRELUDE
from tilert.dtypes import i8
from tilert.ir import Function, walk

__all__ = ["CudaSource", "generate"]


@dataclass(frozen=True)
class CudaSource:
    """A kernel as text.

    Attributes:
        text: CUDA C++ without headers.
        entry: name of the kernel function.
        threads: threads a block.
        shared_bytes: dynamic shared memory a block.
    """

    text: str
    entry: str
    threads: int
    shared_bytes: int


def generate(function: Function, arch: str) -> CudaSource:
    """Compile to CUDA C++.

    Args:
        arch: target such as "sm_90a"; all present schedules run from sm_80 up.
    """
    del arch
    function = clone(function)
    without_debugging(function)
    threads = choose_threads(function)
    # Order: products first become what the hardware will run, since that decides the tiles that
    # layouts are chosen for; layouts decide what shared memory holds; text comes last.
    lowered = lower(function, threads)
    plan = make_plan(lowered, threads)
    emitter = Emitter(lowered, plan)
    emitter.block(lowered.body)
    entry = f"{function.name}_kernel"
    shared = plan.shared_bytes + -(-emitter.scratch_bytes // 16) * 16
    lines = [
        PRELUDE,
        *with_needed(emitter.helpers | _types(lowered)),
        f'extern "C" __global__ void __launch_bounds__({threads})',
        f"{entry}({', '.join(_parameters(function))}) {{",
        "  extern __shared__ __align__(128) char smem[];",
        f"  char* const scratch = smem + {plan.shared_bytes}; (void)scratch;",
        *coordinates(function),
        *emitter.head,
        *emitter.lines,
        "}",
        "",
    ]
    return CudaSource("\n".join(lines), entry, threads, shared)


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
