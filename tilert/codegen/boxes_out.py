"""Pieces of 16-bit elements that lie as sums do, stored by the copy engine.

A warpgroup lays 64 rows of 64 columns into a box in shared memory, and one of its threads has the
copy engine bring it to its place. What is stored so leaves while the next elements are worked on,
and, at the end of a piece, while the next piece is multiplied.
"""

from tilert.codegen.emit import Emitter
from tilert.codegen.grid import piece_number
from tilert.codegen.layout import Layout
from tilert.dtypes import bf16, f16
from tilert.ir import Op, Param
from tilert.tensor_map import ROW_BYTES, TensorMap

__all__ = ["BOXES", "BOX_BYTES", "boxes_bytes", "move_boxes"]

BOXES = 2
"""Of each warpgroup, filled in turns."""
_ROWS, _COLUMNS = 64, ROW_BYTES // 2
BOX_BYTES = _ROWS * ROW_BYTES
_REGISTERS = _ROWS * _COLUMNS // 128
"""Of a thread for a box."""


def boxes_bytes(groups: int) -> int:
    """Shared memory of the boxes of so many warpgroups."""
    return groups * BOXES * BOX_BYTES


def move_boxes(e: Emitter, op: Op, groups: tuple[int, int], maps: list[TensorMap]) -> bool:
    """Write a store_piece so, if it can be: within a window of registers that is a box.

    Args:
        groups: warpgroups along rows and columns.
        maps: tensor maps of the kernel; that of the piece's array is added.
    """
    param: Param = op.attrs["param"]
    if e.window is None or not _fits(param):
        return False
    start, end = e.window
    layout = e.layout(op.args[0])
    _, columns = _share(layout, groups)
    if end - start != _REGISTERS or start * 2 % columns + _COLUMNS > columns:
        return False
    spec = TensorMap(param.position, (_ROWS, _COLUMNS))
    if spec not in maps:
        maps.append(spec)
    if "int box = 0;" not in e.head:
        e.head.append("int box = 0;")
    row, column = _place(param, layout, groups, start)
    name = e.names[op.args[0]]
    words = ", ".join(f"pack({name}[r + {i}], {name}[r + {i + 1}])" for i in range(0, 8, 2))
    with e.braces():
        e.line(f"const u32 to = boxes + (group * {BOXES} + box) * {BOX_BYTES};")
        # By all threads, those too that have none stored: the assembler takes a branch here for
        # one within the products.
        e.line(f"boxes_read<{BOXES - 1}>();")
        e.line("meet_group(group);")
        e.line("#pragma unroll")
        with e.braces(f"for (int r = {start}; r < {end}; r += 8)"):
            e.line(f"store_matrices(in_box(to, (r - {start}) / 4), {words});")
        e.line("boxes_filled();")
        e.line("meet_group(group);")
        e.line(
            f"if (threadIdx.x % 128 == 0) store_box(&map{maps.index(spec)}, to, {column}, {row});"
        )
        e.line(f"box = box + 1 == {BOXES} ? 0 : box + 1;")
    return True


def _fits(param: Param) -> bool:
    """Whether the copy engine can store pieces of an array."""
    rows, last = (*param.strides, None)[:2]
    return (
        param.dtype in (bf16, f16)
        and len(param.shape) == len(param.tile or ()) == 2
        and not param.indexed
        and param.aligned
        and last == 1
        and rows is not None
        and rows > 0
        and rows * param.dtype.itemsize % 16 == 0
        and 0 not in param.shape
    )


def _share(layout: Layout, groups: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of a warpgroup."""
    rows, columns = (n // share for n, share in zip(layout.shape, groups, strict=True))
    return rows, columns


def _place(
    param: Param, layout: Layout, groups: tuple[int, int], start: int
) -> tuple[str, str]:  # fmt: skip
    """C++ of the first row and column of the box that starts with a register."""
    shares = _share(layout, groups)
    within = start * 2 // shares[1] * _ROWS, start * 2 % shares[1]
    found = []
    for axis, size in enumerate(param.tile or ()):
        of_group = f" + group * {shares[axis]}" if groups[axis] > 1 else ""
        place = f"(i64){piece_number(param, axis)} * {size}{of_group} + {within[axis]}"
        found.append(f"coordinate({place})")
    row, column = found
    return row, column
