"""What operations mean, one at a time: each is compiled by the cpu backend's own generator."""

import builtins
from collections.abc import Callable
from typing import Any

import numpy as np

from tilert.backends.cpu_emit import Emitter
from tilert.backends.cpu_value import Form
from tilert.dtypes import DType
from tilert.ir import Block, Function, Op, TileType, Value

__all__ = ["Tile", "operation"]

Tile = np.ndarray[Any, Any]


def operation(op: Op, dtype: DType | None = None) -> Callable[..., list[Tile]]:
    """A function of the operands' tiles that gives the results, of the shapes and dtypes of the IR.

    Args:
        op: touches no memory and has no regions.
        dtype: element type of operands and results in place of their own, for operations that only
            move elements.
    """

    def stands_for(value: Value) -> Value:
        return Value(TileType(value.shape, dtype or value.dtype))

    args = [stands_for(a) for a in op.args]
    clone = Op(op.name, args, op.attrs, [stands_for(r) for r in op.results], [], op.loc)
    # A function of no arrays on a grid of one program: operands come by name.
    em = Emitter(Function(op.name, [], (), Block()), (), (), ())
    em.depth = 1
    for i, a in enumerate(args):
        em.env[a] = Form(f"x{i}", a.shape, a.dtype, len(a.shape))
    em.emit(clone)
    results = [em.materialize(em.env[r], r.shape) for r in clone.results]
    head = f"def run({', '.join(f'x{i}' for i in range(len(args)))}):"
    end = f"    return ({''.join(f'{text}, ' for text in results)})"
    source = "\n".join([head, *em.prologue, *em.lines, end])
    exec(builtins.compile(source, f"<tilert checker {op.name}>", "exec"), em.namespace)
    run = em.namespace["run"]
    types = [r.dtype.numpy for r in clone.results]

    def call(*tiles: Tile) -> list[Tile]:
        given = [_operand(tile, a.dtype) for tile, a in zip(tiles, args, strict=True)]
        return [np.asarray(x, t) for x, t in zip(run(*given), types, strict=True)]

    return call


def _operand(tile: Tile, dtype: DType) -> Any:
    """As generated code takes it: scalars are Python's ints and bools, and NumPy's floats."""
    if tile.ndim:
        return tile
    return tile[()] if dtype.is_float else tile.item()
