"""Matrix products: one BLAS call where the operands vary over different grid axes."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from tilert.backends.cpu_value import Form
from tilert.dtypes import f32
from tilert.ir import Op

if TYPE_CHECKING:
    from tilert.backends.cpu_emit import Emitter

__all__ = ["emit_mma"]


def emit_mma(em: "Emitter", op: Op) -> None:
    """The result of args[0] @ args[1] + args[2] in f32."""
    (m, k), n = em.shape(op.args[0]), em.shape(op.args[1])[1]
    a = em.full_tile(em.env[op.args[0]], (m, k))
    b = em.full_tile(em.env[op.args[1]], (k, n))
    acc = em.env[op.args[2]]
    if em.grid.varies(a) & em.grid.varies(b):
        text = _batched(em, a, b, m, k, n)
    else:
        text = _one_product(em, a, b, m, k, n)
    shape = em.grid.join((m, n), em.grid.of(a), em.grid.of(b))
    result = Form(text, shape, f32, 2, fresh=em.block)
    if not (acc.uniform and acc.is_known and acc.known == 0):
        total = em.grid.join((m, n), em.grid.of(result), em.grid.of(acc))
        if total == shape:
            em.line(f"add({text}, {acc.text}, {text})")
        else:
            result = replace(result, shape=total)
            result = replace(result, text=em.let(f"({text} + {acc.text})", result.nbytes))
    em.env[op.result] = result


def _one_product(em: "Emitter", a: Form, b: Form, m: int, k: int, n: int) -> str:
    """Text of the product with the grid axes of `a` as rows and those of `b` as columns."""
    left, right = a.text, b.text
    if a.shape != (m, k):
        left = _matrix(em, a, f"matrix({a.text}, {k})")
    if b.shape != (k, n):
        right = _matrix(em, b, f"right_matrix({b.text})")
    rows, columns = em.grid.of(a), em.grid.of(b)
    shape = em.grid.join((m, n), rows, columns)
    text = em.let(f"matmul({left}, {right})", math.prod(shape) * f32.itemsize)
    if shape == (m, n):
        return text
    in_rows = em.grid.varies(a)
    lead = [g for g in range(em.grid.rank) if g in in_rows]
    trail = [g for g in range(em.grid.rank) if g not in in_rows]
    split = (*(rows[g] for g in lead), m, *(columns[g] for g in trail), n)
    if m == 1 or not any(columns[g] != 1 for g in trail):
        # The row axis may move over axes of extent 1, so the grid's axes can stand in order.
        if not lead or all(columns[g] == 1 for g in trail):
            return em.let(f"{text}.reshape({shape})")
    labels = [*lead, em.grid.rank, *trail, em.grid.rank + 1]
    order = sorted(range(len(labels)), key=labels.__getitem__)
    view = f"{text}.reshape({split})"
    if order != list(range(len(order))):
        view += f".transpose({', '.join(map(str, order))})"
    return em.let(view)


def _batched(em: "Emitter", a: Form, b: Form, m: int, k: int, n: int) -> str:
    """Text of the products with a batch for each program of `b`.

    Grid axes on which only `a` varies become rows: fewer and larger products.
    """
    rows, columns = em.grid.of(a), em.grid.of(b)
    only = [g for g in range(em.grid.rank) if rows[g] != 1 and columns[g] == 1]
    nbytes = math.prod(em.grid.join((m, n), rows, columns)) * f32.itemsize
    if not only:
        return em.let(f"batch_matmul({a.text}, {b.text})", nbytes)
    rest = [g for g in range(em.grid.rank) if g not in only]
    order = [*rest, *only, em.grid.rank, em.grid.rank + 1]
    height = math.prod(rows[g] for g in only) * m
    left = f"{a.text}.transpose({', '.join(map(str, order))})"
    left = em.let(f"{left}.reshape({(*(rows[g] for g in rest), height, k)})", a.nbytes)
    batches = tuple(columns[g] for g in rest)
    right = em.let(f"{b.text}.reshape({(*batches, k, n)})", b.nbytes)
    text = em.let(f"batch_matmul({left}, {right})", nbytes)
    outer = tuple(max(rows[g], columns[g]) for g in rest)
    split = (*outer, *(rows[g] for g in only), m, n)
    back = sorted(range(len(order)), key=order.__getitem__)
    return em.let(f"{text}.reshape({split}).transpose({', '.join(map(str, back))})")


def _matrix(em: "Emitter", form: Form, text: str) -> str:
    """A matrix made of the operand: when the launch is bound, if that takes no copy."""
    if not form.hoisted:
        return em.let(text, form.nbytes)
    view = em.hoist(f"if_view({text}, {form.text})")
    return em.let(f"{view} if {view} is not None else {text}")
