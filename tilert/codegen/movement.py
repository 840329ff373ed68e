"""Operations that move elements between threads: reductions, broadcasts, reshapes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tilert.codegen.emit import Emitter, c_type, convert, literal
from tilert.codegen.layout import Layout
from tilert.dtypes import DType, f32, i32
from tilert.ir import Op, Value

__all__ = ["broadcast", "combine", "reduce", "relayout", "reshape", "transpose"]

CHAINS = 4
"""Results of a thread that elements are combined to in turn; see `_chains`."""
PLACES = ("argmax", "argmin")
"""Reductions that give a place, and not what is there."""


def relayout(e: Emitter, v: Value, layout: Layout, position: str = "") -> str:
    """The elements of a tile in another layout, through scratch; gives the new variable.

    Args:
        position: C++ of the place in scratch that a register of `v` is written to, with `{r}` for
            the register; the row-major position by default.
    """
    own = e.layout(v)
    ctype = c_type(v.dtype)
    e.meet(v.type.numel * v.dtype.itemsize)
    with e.each(own.registers) as r:
        guard = e.inside(own, r)
        place = position.format(r=r) if position else e.flat(own, r)
        e.line(f"{f'if ({guard}) ' if guard else ''}(({ctype}*)scratch)[{place}] = {e.at(v, r)};")
    e.line("__syncthreads();")
    name = e.fresh()
    e.line(f"{ctype} {name}[{layout.registers}];")
    with e.each(layout.registers) as r:
        guard = e.inside(layout, r)
        place = e.flat(layout, r)
        e.line(
            f"{name}[{r}] = (({ctype}*)scratch)[{f'({guard}) ? {place} : 0' if guard else place}];"
        )
    return name


def broadcast(e: Emitter, op: Op) -> None:
    """Repeat a scalar, or axes of size 1."""
    source, result = op.args[0], op.result
    layout = e.layout(result)
    if not source.shape:
        name = e.declare(result)
        with e.each(layout.registers) as r:
            e.line(f"{name}[{r}] = {e.names[source]};")
        return
    narrow = layout.narrowed(source.shape)
    held = e.names[source]
    if e.layout(source) != narrow:
        held = relayout(e, source, narrow)
    name = e.declare(result)
    with e.each(layout.registers) as r:
        terms = []
        for mine, theirs in zip(layout.axes, narrow.axes, strict=True):
            for f, g in zip(mine, theirs, strict=False):
                if f.kind == "r" and f.size > 1:
                    terms.append(f"{r} / {f.stride} % {f.size} * {g.stride}")
        e.line(f"{name}[{r}] = {held}[{' + '.join(terms) or '0'}];")


def reshape(e: Emitter, op: Op) -> None:
    """Free where elements stay with their threads (`Layout.reshaped`); else through scratch."""
    source, result = op.args[0], op.result
    if not result.shape or not source.shape:
        _scalar_reshape(e, source, result)
        return
    layout = e.layout(result)
    if e.layout(source).reshaped(result.shape) == layout:
        e.names[result] = e.names[source]
        return
    e.names[result] = relayout(e, source, layout)


def _scalar_reshape(e: Emitter, source: Value, result: Value) -> None:
    if source.shape == result.shape:
        e.names[result] = e.names[source]
    elif result.shape:
        name = e.declare(result)
        with e.each(e.registers(result)) as r:
            e.line(f"{name}[{r}] = {e.names[source]};")
    else:
        whole = Layout(source.shape, tuple(() for _ in source.shape))
        held = e.names[source] if e.layout(source) == whole else relayout(e, source, whole)
        e.line(f"{c_type(result.dtype)} {e.fresh_for(result)} = {held}[0];")


def transpose(e: Emitter, op: Op) -> None:
    """Swap two axes through scratch; transposes that only feed mma never get here."""
    source, result = op.args[0], op.result
    if result not in e.plan.layouts:
        return
    own = e.layout(source)
    rows = source.shape[0]
    position = f"{e.index(own, 1, '{r}')} * {rows} + {e.index(own, 0, '{r}')}"
    e.names[result] = relayout(e, source, e.layout(result), position)


# -- reductions ------------------------------------------------------------------------------


def _identity(kind: str, dtype: DType) -> str:
    if kind in ("sum", "any"):
        return literal(0, dtype)
    if kind in ("prod", "all"):
        return literal(1, dtype)
    low = kind == "max"
    if dtype.is_float:
        return literal(float("-inf") if low else float("inf"), dtype)
    if dtype.kind == "u":
        return literal(0 if low else 2**dtype.bits - 1, dtype)
    return literal(-(2 ** (dtype.bits - 1)) if low else 2 ** (dtype.bits - 1) - 1, dtype)


def combine(kind: str, a: str, b: str) -> str:
    """C++ of what a reduction or a scan makes of two elements."""
    # No || and &&: they would leave out the second operand, which may be a shuffle.
    infix = {"sum": "+", "prod": "*", "any": "|", "all": "&"}.get(kind)
    if infix is not None:
        return f"{a} {infix} {b}"
    return f"op_{'maximum' if kind == 'max' else 'minimum'}({a}, {b})"


@dataclass(frozen=True)
class _Reduction:
    """One of several reductions.

    Attributes:
        acc: the variable that holds a thread's share.
        working: what is computed in.
    """

    op: Op
    acc: str
    working: DType
    layout: Layout
    out: Layout

    @property
    def axis(self) -> int:
        axis: int = self.op.attrs["axis"]
        return axis

    @property
    def kind(self) -> str:
        kind: str = self.op.attrs["kind"]
        return kind


def reduce(e: Emitter, *ops: Op) -> None:
    """Reductions of which none needs another, side by side: one waits for shuffles and barriers as
    long as all of them do. Registers first, then lanes by shuffles, then warps through scratch."""
    for op in ops:
        if op.attrs["kind"] in PLACES:
            _place_of(e, op, e.layout(op.args[0]))
    found = [_begin(e, op) for op in ops if op.attrs["kind"] not in PLACES]
    steps: dict[int, list[_Reduction]] = {}
    for one in found:
        for step in _lanes(one.layout, one.axis):
            steps.setdefault(step, []).append(one)
    for step, those in sorted(steps.items()):
        for one in those:
            with e.each(one.out.registers) as r:
                mine = f"{one.acc}[{r}]"
                e.line(f"{mine} = {combine(one.kind, mine, f'shuffle_xor({mine}, {step})')};")
    _across_warps(e, [one for one in found if _warp_ways(one.layout, one.axis)[0] > 1])
    for one in found:
        _finish(e, one.op.result, one.out, one.acc, one.working)


def _begin(e: Emitter, op: Op) -> _Reduction:
    """Reduce a thread's registers."""
    source, axis, kind = op.args[0], op.attrs["axis"], op.attrs["kind"]
    layout = e.layout(source)
    working = f32 if source.dtype.is_narrow else source.dtype
    out = layout.without(axis)
    acc = e.fresh()
    chains = _chains(e, layout.registers) if out.registers == 1 else 1
    e.line(f"{c_type(working)} {acc}[{out.registers * chains}];")
    with e.each(out.registers * chains) as r:
        e.line(f"{acc}[{r}] = {_identity(kind, working)};")
    target = _target_register(layout, out, axis) if chains == 1 else f"{{r}} % {chains}"
    with e.each(layout.registers) as r:
        guard = f"{e.index(layout, axis, r)} < {layout.shape[axis]}" if layout.padded(axis) else ""
        element = convert(e.at(source, r), source.dtype, working)
        place = f"{acc}[{target.format(r=r)}]"
        combined = combine(kind, place, element)
        e.line(f"{f'if ({guard}) ' if guard else ''}{place} = {combined};")
    _join(e, acc, chains, kind)
    return _Reduction(op, acc, working, layout, out)


def _lanes(layout: Layout, axis: int) -> list[int]:
    """Distances of the lanes that share a row of the reduced axis."""
    found = []
    for f in layout.axes[axis]:
        if f.kind == "t" and f.stride < 32:
            step = f.stride
            while step < min(f.stride * f.size, 32):
                found.append(step)
                step *= 2
    return found


def _chains(e: Emitter, count: int) -> int:
    """By how many results so many elements are combined, before those are.

    Several are there sooner than one, and sums of fewer elements lose less. They take registers,
    of which only what streams has enough.
    """
    return CHAINS if e.plan.streams and count >= 2 * CHAINS and count % CHAINS == 0 else 1


def _join(e: Emitter, acc: str, chains: int, kind: str) -> None:
    """Combine the results of chains in pairs, into the first."""
    while chains > 1:
        chains //= 2
        for i in range(chains):
            e.line(f"{acc}[{i}] = {combine(kind, f'{acc}[{i}]', f'{acc}[{i + chains}]')};")


def _target_register(layout: Layout, out: Layout, axis: int) -> str:
    """C++ of the result's register for a source register `{r}`."""
    kept = (*layout.axes[:axis], *layout.axes[axis + 1 :])
    terms = []
    for mine, theirs in zip(kept, out.axes, strict=True):
        for f, g in zip(mine, theirs, strict=True):
            if f.kind == "r" and f.size > 1:
                terms.append(f"{{r}} / {f.stride} % {f.size} * {g.stride}")
    return " + ".join(terms) or "0"


def _warp_ways(layout: Layout, axis: int) -> tuple[int, str]:
    """How many warps share a row of the reduced axis, and this warp's number among them."""
    ways, terms = 1, []
    for f in layout.axes[axis]:
        if f.kind != "t" or f.stride * f.size <= 32:
            continue
        stride, size = f.stride, f.size
        if stride < 32:
            size, stride = size * stride // 32, 32
        terms.append(f"(int)threadIdx.x / {stride} % {size} * {ways}")
        ways *= size
    return ways, " + ".join(terms) or "0"


def _across_warps(e: Emitter, found: Sequence[_Reduction]) -> None:
    """Add up what warps hold, each reduction in a place of its own of scratch."""
    if not found:
        return
    places: list[str] = []
    nbytes = 0
    for one in found:
        places.append(f"(({c_type(one.working)}*)(scratch + {nbytes}))")
        ways = _warp_ways(one.layout, one.axis)[0]
        nbytes += -(-ways * math.prod(one.out.shape) * one.working.itemsize // 16) * 16
    e.meet(nbytes)
    for one, scratch in zip(found, places, strict=True):
        coordinate = _warp_ways(one.layout, one.axis)[1]
        with e.each(one.out.registers) as r:
            guard = e.inside(one.out, r)
            place = f"({coordinate}) * {math.prod(one.out.shape)} + {e.flat(one.out, r)}"
            e.line(f"{f'if ({guard}) ' if guard else ''}{scratch}[{place}] = {one.acc}[{r}];")
    e.line("__syncthreads();")
    for one, scratch in zip(found, places, strict=True):
        ways = _warp_ways(one.layout, one.axis)[0]
        chains = _chains(e, ways)
        with e.each(one.out.registers) as r:
            guard = e.inside(one.out, r)
            at = f"{scratch}[w * {math.prod(one.out.shape)} + {e.flat(one.out, r)}]"
            with e.braces(f"if ({guard})" if guard else ""):
                e.line(f"{c_type(one.working)} t[{chains}];")
                e.line("#pragma unroll")
                e.line(f"for (int w = 0; w < {chains}; ++w) t[w] = {at};")
                e.line("#pragma unroll")
                e.line(f"for (int w = {chains}; w < {ways}; ++w)")
                e.line(f"  t[w % {chains}] = {combine(one.kind, f't[w % {chains}]', at)};")
                _join(e, "t", chains, one.kind)
                e.line(f"{one.acc}[{r}] = t[0];")


def _finish(e: Emitter, result: Value, out: Layout, acc: str, working: DType) -> None:
    if not result.shape:
        value = convert(f"{acc}[0]", working, result.dtype)
        e.line(f"{c_type(result.dtype)} {e.fresh_for(result)} = {value};")
        return
    if working != result.dtype:
        narrow = e.fresh()
        e.line(f"{c_type(result.dtype)} {narrow}[{out.registers}];")
        with e.each(out.registers) as r:
            e.line(f"{narrow}[{r}] = {convert(f'{acc}[{r}]', working, result.dtype)};")
        acc = narrow
    wanted = e.layout(result)
    if wanted != out:
        held = Value(result.type)
        e.names[held], e.plan.layouts[held] = acc, out
        acc = relayout(e, held, wanted)
    e.names[result] = acc


def _place_of(e: Emitter, op: Op, layout: Layout) -> None:
    """Pairs of value and index; the smaller index wins ties, a NaN wins over numbers."""
    source, result, axis = op.args[0], op.result, op.attrs["axis"]
    kind, better = ("max", ">") if op.attrs["kind"] == "argmax" else ("min", "<")
    out = layout.without(axis)
    working = f32 if source.dtype.is_narrow else source.dtype
    ctype = c_type(working)
    best, where = e.fresh(), e.fresh()
    e.line(f"{ctype} {best}[{out.registers}]; int {where}[{out.registers}];")
    with e.each(out.registers) as r:
        e.line(f"{best}[{r}] = {_identity(kind, working)}; {where}[{r}] = 0x7fffffff;")
    target = _target_register(layout, out, axis)
    take = f"take_{best}"
    e.line(
        f"auto {take} = [&]({ctype}& v, int& i, {ctype} w, int j) {{"
        " bool nv = v != v, nw = w != w;"
        f" if (nw ? (!nv || j < i) : (!nv && (w {better} v || (w == v && j < i))))"
        " { v = w; i = j; } };"
    )
    with e.each(layout.registers) as r:
        i = e.index(layout, axis, r)
        guard = f"if ({i} < {layout.shape[axis]}) " if layout.padded(axis) else ""
        place = target.format(r=r)
        element = convert(e.at(source, r), source.dtype, working)
        e.line(f"{guard}{take}({best}[{place}], {where}[{place}], {element}, {i});")
    for f in layout.axes[axis]:
        if f.kind == "t" and f.stride < 32:
            step = f.stride
            while step < min(f.stride * f.size, 32):
                with e.each(out.registers) as r, e.braces():
                    e.line(f"{ctype} w = shuffle_xor({best}[{r}], {step});")
                    e.line(f"int j = shuffle_xor({where}[{r}], {step});")
                    e.line(f"{take}({best}[{r}], {where}[{r}], w, j);")
                step *= 2
    ways, coordinate = _warp_ways(layout, axis)
    if ways > 1:
        _place_warps(e, out, (best, where, take), ctype, ways, coordinate)
    _finish(e, result, out, where, i32)


def _place_warps(
    e: Emitter, out: Layout, names: tuple[str, str, str], ctype: str, ways: int, coordinate: str
) -> None:
    best, where, take = names
    numel = 1
    for n in out.shape:
        numel *= n
    e.meet(ways * numel * 12)
    indices = f"((int*)(scratch + {ways * numel * 8}))"
    with e.each(out.registers) as r:
        guard = e.inside(out, r)
        with e.braces(f"if ({guard})" if guard else ""):
            e.line(f"const int at = ({coordinate}) * {numel} + {e.flat(out, r)};")
            e.line(f"(({ctype}*)scratch)[at] = {best}[{r}]; {indices}[at] = {where}[{r}];")
    e.line("__syncthreads();")
    with e.each(out.registers) as r:
        guard = e.inside(out, r)
        with e.braces(f"if ({guard})" if guard else ""):
            e.line("#pragma unroll")
            e.line(f"for (int w = 0; w < {ways}; ++w)")
            at = f"w * {numel} + {e.flat(out, r)}"
            e.line(
                f"  {take}({best}[{r}], {where}[{r}], (({ctype}*)scratch)[{at}], {indices}[{at}]);"
            )
