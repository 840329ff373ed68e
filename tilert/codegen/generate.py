"""The compiler's table of contents: from a specialised kernel to CUDA C++ text."""

from dataclasses import dataclass

from tilert.codegen.emit import Emitter, c_name, c_type
from tilert.codegen.lower import lower
from tilert.codegen.plan import choose_threads, make_plan
from tilert.codegen.prelude import PRELUDE
from tilert.ir import Function

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
        f'extern "C" __global__ void __launch_bounds__({threads})',
        f"{entry}({', '.join(_parameters(function))}) {{",
        "  extern __shared__ __align__(128) char smem[];",
        f"  char* const scratch = smem + {plan.shared_bytes}; (void)scratch;",
        *_coordinates(function),
        *emitter.head,
        *emitter.lines,
        "}",
        "",
    ]
    return CudaSource("\n".join(lines), entry, threads, shared)


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


def _coordinates(function: Function) -> list[str]:
    """Coordinates from the linear block number, last grid axis fastest."""
    lines = ["  int block = blockIdx.x; (void)block;"]
    open_axes = [i for i, n in enumerate(function.grid) if n != 1]
    for axis in reversed(range(len(function.grid))):
        if axis not in open_axes:
            lines.append(f"  const int p{axis} = 0; (void)p{axis};")
            continue
        n = function.grid[axis]
        extent = str(n) if n is not None else f"g{axis}"
        if axis == open_axes[0]:
            lines.append(f"  const int p{axis} = block;")
        else:
            lines.append(f"  const int p{axis} = block % {extent}; block /= {extent};")
        lines.append(f"  (void)p{axis};")
    for p in function.params:
        if p.indexed:
            lines.append(f"  const int {c_name(p)}_slot = {c_name(p)}_map[p0];")
    return lines
