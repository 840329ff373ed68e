"""Blocks of a cluster that share the steps of a piece of few rows, where pieces are too few to fill
the device, since narrower ones would read more of the left operand than of the right.

Each block adds up the products of a part of the steps. Then it sends each of the others a part of
the columns, and adds up what all have of its own part, in the order of the blocks. Each block has
room for what it receives, so that it need not meet the others: a barrier counts the bytes. What
follows the loop over products is written once for each block, for the registers that it keeps.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from tilert.codegen.control import begin_loop, constant
from tilert.codegen.emit import Emitter
from tilert.codegen.epilogue import in_windows, write_parts
from tilert.codegen.lower import is_zero
from tilert.codegen.ring import Ring, plan_of, sums_of
from tilert.ir import Op

__all__ = [
    "CLUSTER_TEMPLATES",
    "begin_steps",
    "blocks_of",
    "expect_sums",
    "part_of_steps",
    "received_bytes",
    "write_shared",
]

MOST_CLUSTERS = {2: 66}
"""Clusters of so many blocks that run at once on an H200, as its driver says: a cluster is within
one of the groups that its 132 multiprocessors come in. Four or eight blocks leave some of them
without any, and products take 3 to 13 % longer."""
LEAST_BLOCKS = 104
"""Fewer do not read at the rate of memory."""
LEAST_STEPS = 4
"""Of each block."""
FRAGMENT = 4
"""Registers of a thread for eight columns."""

CLUSTER_TEMPLATES = r"""
DEV int cluster_rank() { int r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
// All threads of a cluster's blocks do both: barriers that were made ready before the one are there
// behind the other.
DEV void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
DEV void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
// The same place in another block's shared memory.
DEV u32 in_block(u32 at, int rank) {
  u32 there; asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  return there; }
// Four words to a place of another block, one of whose barriers counts their bytes.
DEV void send4(u32 to, const float* v, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
    " [%0], {%1, %2, %3, %4}, [%5];"
    :: "r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(barrier) : "memory"); }
DEV void take4(float* v, u32 at) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
    : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(at) : "memory"); }
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


def received_bytes(ring: Ring) -> int:
    """Shared memory for what a block receives of the others: of the largest part."""
    if ring.cluster == 1:
        return 0
    return max(_bytes_of(ring, window) for window in _windows(ring))


def expect_sums(ring: Ring) -> list[str]:
    """What each block's barrier has to count, of whoever initialises it."""
    return [
        f"if (rank == {rank}) barrier_expect(received, {_bytes_of(ring, window)});"
        for rank, window in enumerate(_windows(ring))
    ]


def write_shared(e: Emitter, ring: Ring, behind: Sequence[str] = ()) -> None:
    """Write the whole kernel for a piece that the blocks of a cluster share.

    Args:
        behind: what comes between the products and what follows them.
    """
    ops, sums = e.function.body.ops, sums_of(ring.loop)
    place = ops.index(ring.loop) + 1
    for op in ops[:place]:
        e.op(op)
    names, windows = [e.names[v] for v in sums], _windows(ring)
    # All have begun, and their barriers are there.
    e.line("cluster_wait();")
    for rank, window in enumerate(windows):
        with e.braces(f"if (rank != {rank} && threadIdx.x < {_threads(ring)})"):
            _send(e, ring, names, window, rank)
    for line in behind:
        e.line(line)

    def add(window: tuple[int, int]) -> None:
        _add_shares(e, ring, names, window, windows.index(window))

    write_parts(e, ops[place:], sums[0], windows, add)


def _windows(ring: Ring) -> list[tuple[int, int]]:
    """Registers of a thread's sums that each block keeps."""
    fragments = plan_of(ring).layouts[sums_of(ring.loop)[0]].registers // FRAGMENT
    edges = [i * fragments // ring.cluster * FRAGMENT for i in range(ring.cluster + 1)]
    return list(pairwise(edges))


def _threads(ring: Ring) -> int:
    """Of the first warps, which have rows that are there."""
    return -(-ring.rows // 16) * 32


def _bytes_of(ring: Ring, window: tuple[int, int]) -> int:
    """What a block receives that keeps a window."""
    registers = len(sums_of(ring.loop)) * (window[1] - window[0])
    return (ring.cluster - 1) * registers * 4 * _threads(ring)


def _place(ring: Ring, window: tuple[int, int], share: str, i: int) -> str:
    """C++ of where a thread's registers from `r` on lie in what is received.

    Args:
        share: C++ of the number of the block that sent them, its own left out.
        i: number of the sums.
    """
    first, end = window
    registers = f"({share} * {len(sums_of(ring.loop))} + {i}) * {end - first} + r - {first}"
    return f"room + (({registers}) * {_threads(ring)} + threadIdx.x * {FRAGMENT}) * 4"


def _send(e: Emitter, ring: Ring, names: list[str], window: tuple[int, int], rank: int) -> None:
    """Write that a block sends another one what that keeps."""
    first, end = window
    for i, name in enumerate(names):
        e.line("#pragma unroll")
        with e.braces(f"for (int r = {first}; r < {end}; r += {FRAGMENT})"):
            at = _place(ring, window, f"(rank - (rank > {rank}))", i)
            e.line(f"send4(in_block({at}, {rank}), {name} + r, in_block(received, {rank}));")


def _add_shares(
    e: Emitter, ring: Ring, names: list[str], window: tuple[int, int], rank: int
) -> None:
    """Write that a block adds up what all have of its window of the sums."""
    first, end = window
    e.line("barrier_wait(received, 0);")
    with e.braces(f"if (threadIdx.x < {_threads(ring)})"):
        for i, name in enumerate(names):
            e.line("#pragma unroll")
            with e.braces(f"for (int r = {first}; r < {end}; r += {FRAGMENT})"):
                e.line(f"float parts[{ring.cluster}][{FRAGMENT}];")
                for source in range(ring.cluster):
                    if source == rank:
                        e.line(f"for (int c = 0; c < {FRAGMENT}; ++c)"
                               f" parts[{rank}][c] = {name}[r + c];")  # fmt: skip
                    else:
                        at = _place(ring, window, str(source - (source > rank)), i)
                        e.line(f"take4(parts[{source}], {at});")
                e.line("#pragma unroll")
                with e.braces(f"for (int c = 0; c < {FRAGMENT}; ++c)"):
                    total = " + ".join(f"parts[{source}][c]" for source in range(ring.cluster))
                    e.line(f"{name}[r + c] = {total};")
