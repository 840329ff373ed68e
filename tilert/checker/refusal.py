"""Errors about accesses outside of arrays, in the same words on every backend."""

from tilert.errors import CheckError
from tilert.ir import Loc

__all__ = ["outside", "row", "shown"]

Program = tuple[int, ...]


def shown(program: Program) -> str:
    """What people call a program."""
    return f"({', '.join(map(str, program))})"


def row(kernel: str, param: str, program: Program, index: int, rows: int, loc: Loc) -> CheckError:
    """An index map reaches past its array (rule O7)."""
    return CheckError(
        f"O7 indexed pieces: the index map of '{param}' gives program {shown(program)} of kernel"
        f" '{kernel}' row {index}, the array has {rows} rows",
        (f"program {shown(program)} reaches for row {index}", loc.filename, loc.line, loc.column),
    )


def outside(
    kernel: str,
    param: str,
    axis: int,
    program: Program,
    index: int,
    extent: int,
    loc: Loc,
) -> CheckError:
    """A read lies outside, where checks are strict.

    Args:
        param: the array; "" for a tile.
        index: of the element, or of the first of a block or a span.
    """
    of = f"'{param}'" if param else "a tile"
    return CheckError(
        f"strict bounds: kernel '{kernel}' reads at index {index} on axis {axis} of {of}, which has"
        f" {extent} elements; unless checks are strict it reads as the fill value",
        (f"program {shown(program)} reads it", loc.filename, loc.line, loc.column),
    )
