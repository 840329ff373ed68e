"""Blocks of a cluster that share the steps of a piece of few rows, where pieces are too few to fill
the device, since narrower ones would read more of the left operand than of the right.

Each block adds up the products of a part of the steps. Then it lays its sums into its shared
memory, and adds up a part of the columns of all blocks, in their order. What follows the loop over
products is written once for each block, for the registers that it keeps.
"""

from itertools import pairwise
from math import prod

from tilert.codegen.control import begin_loop, constant
from tilert.codegen.emit import Emitter
from tilert.codegen.epilogue import in_windows, write_parts
from tilert.codegen.lower import is_zero
from tilert.codegen.ring import Ring, plan_of, sums_of
from tilert.ir import Op

__all__ = ["CLUSTER_TEMPLATES", "begin_steps", "blocks_of", "part_of_steps", "write_shared"]

MOST_CLUSTERS = {2: 66}
"""Clusters of so many blocks that run at once on an H200, as its driver says: a cluster is within
one of the groups that its 132 multiprocessors come in. Four or eight blocks leave some of them
without any, and products take 3 to 13 % longer."""
LEAST_BLOCKS = 112
"""Fewer do not read at the rate of memory."""
LEAST_STEPS = 4
"""Of each block."""
FRAGMENT = 4
"""Registers of a thread for eight columns."""

CLUSTER_TEMPLATES = r"""
DEV int cluster_rank() { int r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
// All threads of a cluster's blocks that have not ended do both in turns: what they wrote to shared
// memory before the one is there behind the other.
DEV void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
DEV void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
DEV void warp_meets() { __syncwarp(); }
// Of the same place in another block's shared memory.
DEV void read_block(float* v, u32 at, int rank) {
  u32 there; asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
    : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(there) : "memory"); }
"""


def blocks_of(ring: Ring) -> int:
    """How many blocks share a piece: as many as there is room for beside each other. 0 where that
    does not fill the device, or what follows the loop cannot be shared out."""
    function, loop = ring.function, ring.loop
    lo, hi, step = (constant(v) for v in loop.args[:3])
    if lo is None or hi is None or step is None:
        return 0
    # Rows are known at launch, and few.
    pieces = prod(n for n in function.grid if n is not None)
    if pieces >= LEAST_BLOCKS:
        return 1
    sums, steps = sums_of(loop), len(range(lo, hi, step))
    zeros = all(is_zero(init) for init in loop.args[3:])
    behind = function.body.ops[function.body.ops.index(loop) + 1 :]
    if sums != loop.results or not zeros:
        return 0
    if not in_windows(Emitter(function, plan_of(ring)), behind, sums):
        return 0
    fitting = [
        count
        for count, most in MOST_CLUSTERS.items()
        if pieces <= most and pieces * count >= LEAST_BLOCKS and steps >= LEAST_STEPS * count
    ]
    return max(fitting, default=0)


def begin_steps(e: Emitter, loop: Op, count: int) -> str:
    """As `begin_loop`, of a block's part of the steps; gives the head of the loop."""
    counter, head = begin_loop(e, loop)
    if count <= 1:
        return head
    first, last = part_of_steps(loop, count)
    step = e.names[loop.args[2]]
    return f"for (int {counter} = {first}; {counter} < {last}; {counter} += {step})"


def part_of_steps(loop: Op, count: int) -> tuple[str, str]:
    """C++ of where a block's steps begin and end."""
    lo, hi, step = (constant(v) for v in loop.args[:3])
    if lo is None or hi is None or step is None:
        raise ValueError("the steps of a cluster are known")
    steps = len(range(lo, hi, step))
    first, last = (
        f"{lo} + {share} * {steps} / {count} * {step}" for share in ("rank", "(rank + 1)")
    )
    return first, last


def write_shared(e: Emitter, ring: Ring) -> None:
    """Write the whole kernel for a piece that the blocks of a cluster share."""
    ops, sums = e.function.body.ops, sums_of(ring.loop)
    place = ops.index(ring.loop) + 1
    for op in ops[:place]:
        e.op(op)
    names, registers = [e.names[v] for v in sums], e.registers(sums[0])
    _lay_sums(e, names, registers)
    edges = _edges(registers, ring.cluster)
    windows = list(pairwise(edges))

    def add(window: tuple[int, int]) -> None:
        _add_shares(e, names, registers, ring.cluster, window)

    write_parts(e, ops[place:], sums[0], windows, add)
    # Nothing of other blocks is read any more; they end when nothing of theirs is.
    e.line("cluster_arrive();")


def _edges(registers: int, count: int) -> list[int]:
    """Registers of a thread's sums where the part of one block ends, and the next one's begins."""
    fragments = registers // FRAGMENT
    return [i * fragments // count * FRAGMENT for i in range(count + 1)]


def _lay_sums(e: Emitter, names: list[str], registers: int) -> None:
    """Write that a block lays its sums into its shared memory, from the ring's beginning on."""
    threads = e.plan.threads
    e.line(f"meet({threads});")
    for i, name in enumerate(names):
        e.line("#pragma unroll")
        with e.braces(f"for (int r = 0; r < {registers}; r += {FRAGMENT})"):
            place = f"({i * registers} + r) * {threads} + threadIdx.x * {FRAGMENT}"
            e.line(f"float* const to = (float*)smem + {place};")
            e.line("#pragma unroll")
            e.line(f"for (int c = 0; c < {FRAGMENT}; ++c) to[c] = {name}[r + c];")
    e.line("cluster_arrive();")
    e.line("cluster_wait();")


def _add_shares(
    e: Emitter, names: list[str], registers: int, count: int, window: tuple[int, int]
) -> None:
    """Write that a block adds up what all have of a window of the sums."""
    first, end = window
    threads = e.plan.threads
    with e.braces():
        e.line(f"float parts[{len(names)}][{count}][{end - first}];")
        e.line("#pragma unroll")
        with e.braces(f"for (int from = 0; from < {count}; ++from)"):
            for i in range(len(names)):
                e.line("#pragma unroll")
                with e.braces(f"for (int r = {first}; r < {end}; r += {FRAGMENT})"):
                    place = f"({i * registers} + r) * {threads} + threadIdx.x * {FRAGMENT}"
                    e.line(
                        f"read_block(&parts[{i}][from][r - {first}], ring + ({place}) * 4, from);"
                    )
        for i, name in enumerate(names):
            e.line("#pragma unroll")
            with e.braces(f"for (int r = {first}; r < {end}; ++r)"):
                e.line(f"{name}[r] = parts[{i}][0][r - {first}];")
                e.line("#pragma unroll")
                e.line(f"for (int from = 1; from < {count}; ++from)"
                       f" {name}[r] += parts[{i}][from][r - {first}];")  # fmt: skip
