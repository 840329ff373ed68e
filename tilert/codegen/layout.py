"""Where the elements of a tile live: which thread, which register.

A layout splits every axis of a tile into factors, innermost first. A register factor steps through
a thread's registers, a thread factor through thread numbers. Vectorised blocked tiles, fragments of
the tensor cores' accumulators and the results of reducing or narrowing either of them are all of
this form, so one set of rules serves them all. Threads that no factor distinguishes hold copies.
"""

from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod

__all__ = [
    "Factor",
    "Layout",
    "blocked",
    "mma_accumulator",
    "mma_swapped",
    "thin_left",
    "wgmma_accumulator",
]


@dataclass(frozen=True)
class Factor:
    """A digit of an index: `(register or thread number // stride) % size`.

    kind: "r" for registers, "t" for threads.
    """

    kind: str
    size: int
    stride: int


@dataclass(frozen=True)
class Layout:
    """A distribution of a tile over the threads of a program.

    Attributes:
        shape: the tile's extents; factors may cover more (padding), never less.
        axes: factors of each axis, innermost first.
    """

    shape: tuple[int, ...]
    axes: tuple[tuple[Factor, ...], ...]

    @cached_property
    def registers(self) -> int:
        """Registers (elements) a thread."""
        return prod(f.size for axis in self.axes for f in axis if f.kind == "r")

    def extent(self, axis: int) -> int:
        """Elements covered along an axis, padding included."""
        return prod(f.size for f in self.axes[axis])

    def padded(self, axis: int) -> bool:
        """Whether an axis covers more than the tile has."""
        return self.extent(axis) > self.shape[axis]

    @cached_property
    def is_padded(self) -> bool:
        """Whether any axis is padded."""
        return any(self.padded(i) for i in range(len(self.shape)))

    def register_index(self, axis: int, register: int) -> int:
        """The register's share of the index along an axis."""
        index, weight = 0, 1
        for f in self.axes[axis]:
            if f.kind == "r":
                index += register // f.stride % f.size * weight
            weight *= f.size
        return index

    def register_expr(self, axis: int, register: str) -> str:
        """`register_index` as C++ for a register number in a variable."""
        terms, weight = [], 1
        for f in self.axes[axis]:
            if f.kind == "r" and f.size > 1:
                terms.append(f"{register} / {f.stride} % {f.size} * {weight}")
            weight *= f.size
        return " + ".join(terms) or "0"

    def thread_expr(self, axis: int, thread: str) -> str:
        """The thread's share of the index along an axis, as C++."""
        terms, weight = [], 1
        for f in self.axes[axis]:
            if f.kind == "t" and f.size > 1:
                terms.append(f"{thread} / {f.stride} % {f.size} * {weight}")
            weight *= f.size
        return " + ".join(terms) or "0"

    @cached_property
    def thread_factors(self) -> tuple[Factor, ...]:
        """All thread factors, by stride."""
        found = [f for axis in self.axes for f in axis if f.kind == "t" and f.size > 1]
        return tuple(sorted(found, key=lambda f: f.stride))

    def copies_expr(self, threads: int, thread: str) -> str:
        """C++ that is true in one of the threads that hold copies, "" if there are none."""
        terms, stride = [], 1
        for f in (*self.thread_factors, Factor("t", 1, threads)):
            gap = f.stride // stride
            if gap > 1:
                terms.append(f"{thread} / {stride} % {gap} == 0")
            stride = f.stride * f.size
        return " && ".join(terms)

    def without(self, axis: int) -> "Layout":
        """The layout of a reduction over an axis."""
        axes = (*self.axes[:axis], *self.axes[axis + 1 :])
        shape = (*self.shape[:axis], *self.shape[axis + 1 :])
        return Layout(shape, _renumber(axes))

    def narrowed(self, shape: tuple[int, ...]) -> "Layout":
        """The layout of a tile with size-1 axes that broadcasts to this one without moving."""
        axes = tuple(
            () if s == 1 and n != 1 else a
            for s, n, a in zip(shape, self.shape, self.axes, strict=True)
        )
        return Layout(shape, _renumber(axes))

    def reshaped(self, shape: tuple[int, ...]) -> "Layout | None":
        """The same elements in the same places as a tile of another shape, in row-major order;
        None where no factors describe that."""
        return self._with_unit_axes(shape) or self._regrouped(shape)

    def _with_unit_axes(self, shape: tuple[int, ...]) -> "Layout | None":
        if [n for n in self.shape if n != 1] != [n for n in shape if n != 1]:
            return None
        if any(a for n, a in zip(self.shape, self.axes, strict=True) if n == 1):
            return None
        kept = iter(a for n, a in zip(self.shape, self.axes, strict=True) if n != 1)
        return Layout(shape, tuple(next(kept) if n != 1 else () for n in shape))

    def _regrouped(self, shape: tuple[int, ...]) -> "Layout | None":
        """Axes joined and cut."""
        if self.is_padded:
            return None
        left = [f for axis in reversed(self.axes) for f in axis if f.size > 1]
        axes: list[tuple[Factor, ...]] = []
        for n in reversed(shape):
            factors: list[Factor] = []
            while n > 1:
                f = left.pop(0)
                size = gcd(f.size, n)
                if size == 1:
                    return None
                if size < f.size:
                    left.insert(0, Factor(f.kind, f.size // size, f.stride * size))
                _append(factors, Factor(f.kind, size, f.stride))
                n //= size
            axes.append(tuple(factors))
        return Layout(shape, tuple(reversed(axes)))

    def source_register(self, narrow: "Layout", register: int) -> int:
        """Register of `narrow` (see `narrowed`) that a register of this layout reads."""
        out = 0
        for mine, theirs in zip(self.axes, narrow.axes, strict=True):
            if theirs:
                for f, g in zip(mine, theirs, strict=True):
                    if f.kind == "r":
                        out += register // f.stride % f.size * g.stride
        return out


def _renumber(axes: tuple[tuple[Factor, ...], ...]) -> tuple[tuple[Factor, ...], ...]:
    """Close the gaps that removed factors left in the register numbering."""
    strides: dict[int, int] = {}
    stride = 1
    for f in sorted((f for a in axes for f in a if f.kind == "r"), key=lambda f: f.stride):
        strides[f.stride] = stride
        stride *= f.size
    return tuple(
        tuple(Factor("r", f.size, strides[f.stride]) if f.kind == "r" else f for f in a)
        for a in axes
    )


def _append(factors: list[Factor], f: Factor) -> None:
    """Add the next digit; two that are digits of one number become one."""
    last = factors[-1] if factors else None
    if last is not None and (last.kind, last.stride * last.size) == (f.kind, f.stride):
        factors[-1] = Factor(f.kind, last.size * f.size, last.stride)
    else:
        factors.append(f)


def _power_of_two_at_least(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def blocked(shape: tuple[int, ...], vector: int, threads: int) -> Layout:
    """Neighbouring threads hold neighbouring vectors along the last axis; registers the rest.

    Args:
        vector: elements a thread holds side by side on the last axis, a power of two.
    """
    axes: list[tuple[Factor, ...]] = []
    thread_stride, register_stride = 1, 1
    for position, n in enumerate(reversed(shape)):
        factors: list[Factor] = []
        left = n
        if position == 0 and vector > 1:
            factors.append(Factor("r", vector, register_stride))
            register_stride *= vector
            left = -(-left // vector)
        spread = min(threads // thread_stride, _power_of_two_at_least(left))
        if spread > 1:
            factors.append(Factor("t", spread, thread_stride))
            thread_stride *= spread
            left = -(-left // spread)
        if left > 1:
            factors.append(Factor("r", left, register_stride))
            register_stride *= left
        axes.append(tuple(factors))
    return Layout(shape, tuple(reversed(axes)))


def mma_accumulator(m: int, n: int, warps_m: int, warps_n: int) -> Layout:
    """Accumulator fragments of mma.m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16").

    Register `(i * tiles_n + j) * 4 + c` is element c of fragment (i, j) of the warp's tile.
    """
    tiles_m = -(-m // (16 * warps_m))
    tiles_n = -(-n // (8 * warps_n))
    rows = [Factor("t", 8, 4), Factor("r", 2, 2)]
    cols = [Factor("r", 2, 1), Factor("t", 4, 1)]
    return _tiled((m, n), rows, cols, (tiles_m, tiles_n), (warps_m, warps_n), 32)


def mma_swapped(m: int, n: int, warps: int) -> Layout:
    """Sums of m rows that warps compute as the columns of n rows, 16 rows a warp: element (i, j)
    lies where (j, i) of the fragments of mma.m16n8k16 does. Past `m` the layout is padded.

    Register `(t * columns + j) * 4 + c` is element c of the warp's 16 rows t and 8 columns j.
    """
    columns, tiles = -(-m // 8), -(-n // (16 * warps))
    rows = [Factor("t", 8, 4), Factor("r", 2, 2)]
    if warps > 1:
        rows.append(Factor("t", warps, 32))
    if tiles > 1:
        rows.append(Factor("r", tiles, 4 * columns))
    return Layout((m, n), (_columns(columns), tuple(rows)))


def _columns(count: int) -> tuple[Factor, ...]:
    more = [Factor("r", count, 4)] if count > 1 else []
    return (Factor("r", 2, 1), Factor("t", 4, 1), *more)


def wgmma_accumulator(m: int, n: int, groups_m: int, groups_n: int) -> Layout:
    """Accumulators of wgmma.m64nNk16 by warpgroups (PTX ISA, "Register Fragments for
    wgmma.mma_async"): as mma.m16n8 has them in each of a group's four warps, 16 rows a warp.

    Register `(i * tiles_n + j) * 4 + c` is element c of columns 8 j to 8 j + 7 of the group's 64
    rows i. `m` is whole 64 rows a group, or fewer, which are padded, `n` whole 8 columns.
    """
    tiles_m, tiles_n = -(-m // (64 * groups_m)), n // (8 * groups_n)
    rows = [Factor("t", 8, 4), Factor("r", 2, 2), Factor("t", 4, 32)]
    cols = [Factor("r", 2, 1), Factor("t", 4, 1)]
    return _tiled((m, n), rows, cols, (tiles_m, tiles_n), (groups_m, groups_n), 128)


def thin_left(m: int, k: int, warps: int) -> Layout:
    """The left operand of such products: as mma.m16n8k16 takes its right one (PTX ISA, "Matrix
    Fragments for mma.m16n8k16"), each warp with k / warps columns of its own.

    Register `j * k / warps / 4 + c * 2 + e` is element e of four lanes' eight columns c of the
    warp's, in rows 8 j to 8 j + 7. `m` is whole 8 rows, or 4, of which both halves of a warp then
    have a copy, `k` whole 16 columns a warp.
    """
    own = k // warps // 8
    columns = [Factor("r", 2, 1), Factor("t", 4, 1), Factor("r", own, 2), Factor("t", warps, 32)]
    rows = [Factor("t", min(m, 8), 4)]
    if m > 8:
        rows.append(Factor("r", m // 8, 2 * own))
    return Layout((m, k), (tuple(rows), tuple(columns)))


def _tiled(
    shape: tuple[int, int],
    rows: list[Factor],
    cols: list[Factor],
    tiles: tuple[int, int],
    groups: tuple[int, int],
    threads: int,
) -> Layout:
    """Fragments of four registers, repeated in registers and over groups of so many threads."""
    if tiles[0] > 1:
        rows.append(Factor("r", tiles[0], 4 * tiles[1]))
    if tiles[1] > 1:
        cols.append(Factor("r", tiles[1], 4))
    if groups[0] > 1:
        rows.append(Factor("t", groups[0], threads))
    if groups[1] > 1:
        cols.append(Factor("t", groups[1], threads * groups[0]))
    return Layout(shape, (tuple(rows), tuple(cols)))
