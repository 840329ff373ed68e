"""Where a program is in the grid: its coordinates, the pieces it walks, the piece it writes."""

from tilert.codegen.emit import Emitter, c_name
from tilert.ir import Function, Op, Param, walk

__all__ = ["coordinates", "grid_extents", "piece_number", "pieces"]


def coordinates(function: Function, number: str = "blockIdx.x") -> list[str]:
    """C++ at the head of a program: coordinates, unless the pieces that it walks have them.

    Args:
        number: C++ of the program's number in row-major order.
    """
    if any(op.name == "pieces" for op in walk(function.body)):
        return []
    return _coordinates(function, number)


def _coordinates(function: Function, number: str) -> list[str]:
    """Coordinates from a number in row-major order, last grid axis fastest."""
    lines = [f"  int block = {number}; (void)block;"]
    open_axes = [i for i, n in enumerate(function.grid) if n != 1]
    for axis in reversed(range(len(function.grid))):
        if axis not in open_axes:
            lines.append(f"  const int p{axis} = 0; (void)p{axis};")
            continue
        extent = _extent(function, axis)
        if axis == open_axes[0]:
            lines.append(f"  const int p{axis} = block;")
        else:
            lines.append(f"  const int p{axis} = block % {extent}; block /= {extent};")
        lines.append(f"  (void)p{axis};")
    for p in function.params:
        if p.indexed:
            lines.append(f"  const int {c_name(p)}_slot = {c_name(p)}_map[p0];")
    return lines


def _extent(function: Function, axis: int) -> str:
    n = function.grid[axis]
    return str(n) if n is not None else f"g{axis}"


def grid_extents(function: Function) -> list[str]:
    """Extents of the grid, as C++."""
    return [_extent(function, axis) for axis in range(len(function.grid))]


def pieces(e: Emitter, op: Op) -> None:
    """The pieces of a program: every gridDim.x-th, from its own number on."""
    extents = grid_extents(e.function)
    number = e.fresh("piece")
    last = " * ".join(f"(i64){n}" for n in extents) or "1"
    with e.braces(f"for (i64 {number} = blockIdx.x; {number} < {last}; {number} += gridDim.x)"):
        for line in _coordinates(e.function, f"(int){number}"):
            e.line(line.removeprefix("  "))
        outer, e.program = e.program, f"(int){number}"
        e.block(op.regions[0])
        e.program = outer
        # The next piece reuses the shared memory of this one.
        e.line("__syncthreads();")


def piece_number(param: Param, axis: int) -> str:
    """C++ of the number of a program's piece along an axis of its array."""
    if param.place is None:
        return f"p{axis}"
    start, steps = param.place[axis]
    terms = [str(start)] if start else []
    terms += [f"p{g}" if step == 1 else f"{step} * p{g}" for g, step in enumerate(steps) if step]
    return f"({' + '.join(terms) or '0'})"
