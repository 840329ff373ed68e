"""Loops and branches: Python's own where all programs agree, masks where they do not."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tilert.backends.cpu_elementwise import elementwise
from tilert.backends.cpu_fusion import match_contraction
from tilert.backends.cpu_value import Form
from tilert.dtypes import bool_, i32
from tilert.ir import Block, Op, walk

if TYPE_CHECKING:
    from tilert.backends.cpu_emit import Emitter

__all__ = ["emit_for", "emit_if"]

# Elements in a region from which on it is skipped where no program takes it.
_COSTLY = 1 << 12


def emit_for(em: "Emitter", op: Op) -> None:
    """The carried values after the loop."""
    lo, hi, step = (em.env[a] for a in op.args[:3])
    inits = [em.env[a] for a in op.args[3:]]
    if not (lo.uniform and hi.uniform and step.uniform):
        _masked_loop(em, op, inits)
        return
    if not (lo.is_known and hi.is_known and step.is_known):
        _plain_loop(em, op, inits, None)
        return
    trips = range(lo.known, hi.known, step.known)
    if len(trips) == 0:
        _give(em, op, [replace(f, fresh=-1) for f in inits])
    elif not _fused(em, op, inits, trips):
        if len(trips) == 1:
            body = op.regions[0]
            em.env[body.args[0]] = em.scalar(trips[0], i32)
            em.env.update(zip(body.args[1:], (replace(f, fresh=-1) for f in inits), strict=True))
            _give(em, op, [replace(f, fresh=-1) for f in em.emit_block(body)])
        else:
            _plain_loop(em, op, inits, (min(trips), max(trips)))


def _give(em: "Emitter", op: Op, forms: list[Form]) -> None:
    em.env.update(zip(op.results, forms, strict=True))


def _fused(em: "Emitter", op: Op, inits: list[Form], trips: range) -> bool:
    """Emits the loop as one product if it is one."""
    if trips.step != 1:
        return False
    found = match_contraction(op, trips.start, len(trips), em.extents, em.live, em.uses)
    if found is None:
        return False
    body = op.regions[0]
    em.shapes |= found.shapes
    em.access |= found.access
    em.env[body.args[0]] = em.scalar(found.start, i32)
    em.env.update(zip(body.args[1:], inits, strict=True))
    ends = em.emit_block(body)
    # A value that the loop only passes on is not a new array.
    fresh = [em.block if chain else -1 for chain in found.chains]
    _give(em, op, [replace(f, fresh=b) for f, b in zip(ends, fresh, strict=True)])
    return True


def _joined(em: "Emitter", tile: tuple[int, ...], *forms: Form) -> tuple[int, ...]:
    """The run-time shape that holds any of the values, tile axes at their true extents."""
    if not tile and all(f.uniform for f in forms):
        return ()
    grid = tuple(max(column) for column in zip(*(em.grid.of(f) for f in forms), strict=True))
    return grid if not tile else em.grid.join(tile, grid)


def _carry(
    em: "Emitter", op: Op, inits: list[Form], head: list[str], index: Form, mask: Form | None
) -> None:
    """A Python loop whose carried values keep one run-time shape, widened until it fits.

    Args:
        head: lines that begin the loop. mask: programs that still iterate (it may be None at run
            time, when all do); values of the others stay.
    """
    body = op.regions[0]
    lead = [] if mask is None else [replace(mask, rank=0)]
    shapes = [_joined(em, a.shape, f, *lead) for a, f in zip(body.args[1:], inits, strict=True)]
    names = [em.name("c") for _ in inits]
    mark = em.mark()
    while True:
        carried = [
            Form(name, shape, a.dtype, len(a.shape))
            for name, shape, a in zip(names, shapes, body.args[1:], strict=True)
        ]
        for form, init in zip(carried, inits, strict=True):
            em.line(f"{form.text} = {em.materialize(init, form.shape)}")
        em.line(head[0])
        em.depth += 1
        for line in head[1:]:
            em.line(line)
        em.env[body.args[0]] = index
        em.env.update(zip(body.args[1:], carried, strict=True))
        outer, em.mask = em.mask, mask if mask is not None else em.mask
        ends = em.emit_block(body)
        em.mask = outer
        wider = [
            _joined(em, a.shape, c, e) for a, c, e in zip(body.args[1:], carried, ends, strict=True)
        ]
        if wider == shapes:
            break
        em.depth -= 1
        em.rewind(mark)
        shapes = wider
    _assign_carried(em, carried, ends, mask)
    em.depth -= 1
    _give(em, op, carried)


def _assign_carried(
    em: "Emitter", carried: list[Form], ends: list[Form], mask: Form | None
) -> None:
    texts = []
    merged = 0
    for c, e in zip(carried, ends, strict=True):
        text = em.materialize(e, c.shape)
        if mask is not None:
            text = f"merge({mask.text}, {text}, {c.text}, {c.rank})"
            merged += c.nbytes
        texts.append(text)
    if texts:
        em.line(f"{', '.join(c.text for c in carried)} = {', '.join(texts)}", merged)
    else:
        em.line("pass")


def _plain_loop(em: "Emitter", op: Op, inits: list[Form], bounds: tuple[int, int] | None) -> None:
    lo, hi, step = (em.env[a] for a in op.args[:3])
    if bounds is None and lo.is_known and step.is_known and step.known > 0:
        # The upper end is not known, the lower is: kept for what it proves about points.
        bounds = lo.known, (1 << 31) - 1
    name = em.name("i")
    by = "" if step.is_known and step.known == 1 else f", {step.text}"
    head = [f"for {name} in range({lo.text}, {hi.text}{by}):"]
    _carry(em, op, inits, head, Form(name, (), i32, 0, bounds=bounds), None)


def _masked_loop(em: "Emitter", op: Op, inits: list[Form]) -> None:
    """Runs to the largest trip count; programs that are done keep their values."""
    lo, hi, step = (em.env[a] for a in op.args[:3])
    outer = em.mask
    forms = [lo, hi, step] + ([outer] if outer is not None else [])
    shape = np.broadcast_shapes(*(f.shape for f in forms))
    guard = outer.text if outer is not None else "None"
    count = em.let(f"trips({lo.text}, {hi.text}, {step.text}, {guard})")
    # With no program there is no launch, so the minimum exists.
    least = em.let(f"int({count}.min())")
    most = em.let(f"int({count}.max())")
    # Not m: index maps are called so.
    turn, name, mask = em.name("t"), em.name("i"), em.name("b")
    varying = np.broadcast_shapes(lo.shape, step.shape)
    head = [
        f"for {turn} in range({most}):",
        f"{name} = {lo.text} + {turn} * {step.text}",
        f"{mask} = None if {turn} < {least} else {count} > {turn}",
    ]
    _carry(em, op, inits, head, Form(name, varying, i32, 0), Form(mask, shape, bool_, 0))


def emit_if(em: "Emitter", op: Op) -> None:
    """The values that the chosen region yields."""
    condition = em.env[op.args[0]]
    if condition.is_known and condition.uniform:
        which = 0 if condition.known else 1
        forms = em.emit_block(op.regions[which]) if which < len(op.regions) else []
        _give(em, op, [replace(f, fresh=-1) for f in forms])
    elif condition.uniform:
        _branch(em, op, condition)
    else:
        _select_regions(em, op, condition)


def _branch(em: "Emitter", op: Op, condition: Form) -> None:
    outer = em.lines
    sides: list[tuple[list[str], list[Form]]] = []
    em.depth += 1
    for region in op.regions:
        em.lines = []
        ends = em.emit_block(region)
        sides.append((em.lines, ends))
    results = []
    for j, value in enumerate(op.results):
        forms = [ends[j] for _, ends in sides]
        shape = _joined(em, value.shape, *forms)
        if len({f.shape for f in forms}) == 1:
            shape = forms[0].shape
        result = Form(em.name("r"), shape, value.dtype, len(value.shape))
        for (lines, _), form in zip(sides, forms, strict=True):
            em.lines = lines
            em.line(f"{result.text} = {em.materialize(form, shape)}")
        results.append(result)
    em.depth -= 1
    em.lines = outer
    for text, (lines, _) in zip((f"if {condition.text}:", "else:"), sides, strict=False):
        if lines or text != "else:":
            em.line(text)
            em.lines += lines or ["    " * (em.depth + 1) + "pass"]
    _give(em, op, results)


def _select_regions(em: "Emitter", op: Op, condition: Form) -> None:
    """Runs both regions, each storing only where it is chosen, and selects the values."""
    outer = em.mask
    shapes = [condition.shape] + ([outer.shape] if outer is not None else [])
    shape = np.broadcast_shapes(*shapes)
    sides = []
    for region, side in zip(op.regions, (condition.text, f"~{condition.text}"), strict=False):
        text = f"both({outer.text}, {side})" if outer is not None else side
        em.mask = Form(em.let(text), shape, bool_, 0)
        sides.append(
            _guarded(em, region, em.mask) if _costly(em, region) else em.emit_block(region)
        )
    em.mask = outer
    for j, value in enumerate(op.results):
        rank = len(value.shape)
        test = condition
        if rank:
            wide = condition.shape + (1,) * rank
            test = Form(em.let(f"{condition.text}.reshape({wide})"), wide, bool_, rank)
        args = [test, sides[0][j], sides[1][j]]
        text = elementwise("select", args, value.dtype)
        em.bind(value, text, np.broadcast_shapes(*(a.shape for a in args)), args)


def _costly(em: "Emitter", region: Block) -> bool:
    """Whether to ask first if any program takes a region."""
    programs = math.prod(em.grid.extents)
    return any(
        op.name == "for" or any(programs * r.type.numel >= _COSTLY for r in op.results)
        for op in walk(region)
        if op in em.live
    )


def _plain(em: "Emitter", region: Block, _: Form) -> list[Form]:
    return em.emit_block(region)


def _guarded(em: "Emitter", region: Block, mask: Form) -> list[Form]:
    """The values that a region yields; where no program takes it, it does not run."""
    em.line(f"if {mask.text}.any():")
    em.depth += 1
    ends = em.emit_block(region)
    given = [
        e if e.is_known or e.hoisted else replace(e, text=em.name("r"), fresh=-1) for e in ends
    ]
    pairs = [(g, e) for g, e in zip(given, ends, strict=True) if g is not e]
    for g, e in pairs:
        em.line(f"{g.text} = {e.text}")
    em.line("pass")
    em.depth -= 1
    if pairs:
        em.line("else:")
        for g, _ in pairs:
            # Nobody selects it; its shape counts.
            zero = em.scalar(0, g.dtype).text
            if g.shape:
                zero = f"np.broadcast_to(T_{g.dtype.name}.type({zero}), {g.shape})"
            em.line(f"    {g.text} = {zero}")
    return given
