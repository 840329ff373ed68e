"""Operations on whole tiles as NumPy expressions: shapes, movement, reductions, scans, order."""

from dataclasses import replace
from typing import TYPE_CHECKING

from tilert.backends.cpu_value import Form
from tilert.dtypes import DType, bool_
from tilert.ir import Op

if TYPE_CHECKING:
    from tilert.backends.cpu_emit import Emitter

__all__ = [
    "broadcast",
    "concat",
    "permute",
    "reduce",
    "reshape",
    "scan",
    "slice_",
    "sort",
    "take",
    "transpose",
]

# Reductions that give one element a run of equal ones, so that a repeated axis need not be spread.
_IDEMPOTENT = ("max", "min", "any", "all")


def broadcast(em: "Emitter", op: Op) -> None:
    """A scalar, or axes of extent 1, repeated: nothing to do where NumPy does it later."""
    form = em.env[op.args[0]]
    rank = len(op.result.shape)
    if form.rank == rank or form.uniform:
        em.same(op.result, op.args[0], rank)
        return
    shape = form.shape + (1,) * rank
    em.bind(op.result, f"{form.text}.reshape({shape})", shape, [form], view=True)


def reshape(em: "Emitter", op: Op) -> None:
    """Row-major reshape."""
    form, value = em.env[op.args[0]], op.result
    source, target = em.shape(op.args[0]), em.shape(value)
    if form.uniform:
        em.same(value, op.args[0], len(target))
        return
    tile = em.grid.tile(form)
    view = [n for n in source if n != 1] == [n for n in target if n != 1]
    if tile != source:
        moved = [n for n, full in zip(tile, source, strict=True) if full != 1]
        if view:
            target = tuple(1 if n == 1 else moved.pop(0) for n in target)
        else:
            form = em.full_tile(form, source)
    shape = em.grid.join(target, em.grid.of(form))
    if shape == form.shape:
        em.env[value] = replace(form, rank=len(value.shape), fresh=-1)
        return
    if shape == ():
        text = f"{form.text}.item()" if not form.dtype.is_float else f"{form.text}.reshape(())[()]"
    else:
        text = f"{form.text}.reshape({shape})"
    em.bind(value, text, shape, [form], view=view and shape != ())


def transpose(em: "Emitter", op: Op) -> None:
    """The two axes swapped."""
    _permuted(em, op, (1, 0))


def permute(em: "Emitter", op: Op) -> None:
    """The axes in another order."""
    _permuted(em, op, op.attrs["axes"])


def _permuted(em: "Emitter", op: Op, axes: tuple[int, ...]) -> None:
    form = em.env[op.args[0]]
    if form.uniform:
        em.same(op.result, op.args[0])
        return
    lead = len(form.shape) - form.rank
    shape = form.shape[:lead] + tuple(form.shape[lead + a] for a in axes)
    if axes == (1, 0):
        text = f"{form.text}.swapaxes(-1, -2)"
    else:
        order = (*range(lead), *(lead + a for a in axes))
        text = f"{form.text}.transpose({order})"
    em.bind(op.result, text, shape, [form], view=True)


def slice_(em: "Emitter", op: Op) -> None:
    """Every `step`-th element from `start`; an axis that repeats one element stays as it is."""
    form, value = em.env[op.args[0]], op.result
    if form.uniform:
        em.same(value, op.args[0])
        return
    cuts: list[str] = []
    tile: list[int] = []
    places = zip(
        em.grid.tile(form), op.args[0].shape, op.attrs["start"], op.attrs["step"], value.shape,
        strict=True,
    )  # fmt: skip
    for present, n, start, step, size in places:
        if present == 1 or (size == n and step == 1):
            cuts.append(":")
            tile.append(present)
            continue
        end = start + size * step
        cuts.append(f"{start}:{end if end >= 0 else ''}:{step}")
        tile.append(size)
    lead = form.shape[: len(form.shape) - form.rank]
    text = f"{form.text}[{', '.join([*[':'] * len(lead), *cuts])}]"
    em.bind(value, text, (*lead, *tile), [form], view=True)


def concat(em: "Emitter", op: Op) -> None:
    """Tiles one after the other."""
    forms = [em.env[a] for a in op.args]
    extents = [em.grid.of(f) for f in forms]
    whole = em.grid.join(op.result.shape, *extents)
    lead = whole[: len(whole) - len(op.result.shape)]
    parts = [
        f"({f.text}, {(*lead, *a.shape)}, T_{f.dtype.name})"
        for f, a in zip(forms, op.args, strict=True)
    ]
    axis = op.attrs["axis"] - len(op.result.shape)
    em.bind(op.result, f"concat({axis}, {', '.join(parts)})", whole, forms, fresh=True)


def take(em: "Emitter", op: Op) -> None:
    """Elements by index along an axis."""
    x, index = (em.full_tile(em.env[a], a.shape) for a in op.args)
    axis = op.attrs["axis"] - len(op.result.shape)
    extents = [em.grid.of(f) for f in (x, index)]
    shape = em.grid.join(op.result.shape, *extents)
    texts = [_all_axes(f, len(shape)) for f in (x, index)]
    em.bind(op.result, f"take({texts[0]}, {texts[1]}, {axis})", shape, [x, index], fresh=True)


def _all_axes(form: Form, rank: int) -> str:
    """The value with axes of extent 1 in front, so that it has `rank`."""
    if len(form.shape) == rank:
        return form.text
    return f"{form.text}.reshape({(1,) * (rank - len(form.shape)) + form.shape})"


def reduce(em: "Emitter", op: Op) -> None:
    """One axis reduced."""
    kind, value = op.attrs["kind"], op.result
    source = em.shape(op.args[0])
    axis = op.attrs["axis"] - len(source)
    form = em.env[op.args[0]]
    tile = em.grid.tile(form)
    if form.uniform or (tile[axis] == 1 != source[axis] and kind not in _IDEMPOTENT):
        form = em.full_tile(
            form,
            source
            if form.uniform
            else (*tile[: len(tile) + axis], source[axis], *tile[len(tile) + axis + 1 :]),
        )
        tile = em.grid.tile(form)
    at = len(tile) + axis
    rest = tile[:at] + tile[at + 1 :]
    shape = em.grid.join(rest, em.grid.of(form))
    text = _wide(form)
    if kind in ("argmax", "argmin"):
        text = f"{kind}({text}, {axis})"
        text = f"int({text})" if shape == () else f"{text}.astype(T_i32)"
    else:
        wraps = form.dtype.is_int and kind in ("sum", "prod")
        text = f"reduce_{kind}({text}, {axis}{f', T_{form.dtype.name}' if wraps else ''})"
        if form.dtype.is_narrow:
            text = _narrow(text, form.dtype)
        elif shape == () and not form.dtype.is_float:
            text = f"{'bool' if form.dtype == bool_ else 'int'}({text})"
    em.bind(value, text, shape, [form], fresh=True)


def _wide(form: Form) -> str:
    return f"{form.text}.astype(T_f32)" if form.dtype.is_narrow else form.text


def _narrow(text: str, dtype: DType) -> str:
    name = f"T_{dtype.name}"
    return f"to_narrow({text}, {name})" if dtype.bits == 8 else f"{text}.astype({name})"


def scan(em: "Emitter", op: Op) -> None:
    """Running sums and the like."""
    form = em.full_tile(em.env[op.args[0]], op.result.shape)
    axis = op.attrs["axis"] - len(op.result.shape)
    dtype = f", T_{form.dtype.name}" if form.dtype.is_int else ""
    text = f"scan_{op.attrs['kind']}({_wide(form)}, {axis}{dtype})"
    if form.dtype.is_narrow:
        text = _narrow(text, form.dtype)
    em.bind(op.result, text, form.shape, [form], fresh=True)


def sort(em: "Emitter", op: Op) -> None:
    """The elements in order, and where they were."""
    form = em.full_tile(em.env[op.args[0]], op.args[0].shape)
    axis = op.attrs["axis"] - len(op.args[0].shape)
    order = f"order({_wide(form)}, {axis}, {op.attrs['descending']})"
    values, places = op.results
    em.bind(places, order, form.shape, [form], fresh=True)
    found = em.env[places]
    em.bind(
        values, f"take_along({form.text}, {found.text}, {axis})", form.shape, [form, found],
        fresh=True,
    )  # fmt: skip
