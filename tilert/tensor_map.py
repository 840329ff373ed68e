"""Tensor maps: what the copy engine of sm_90 knows of an array from which it copies boxes.

A kernel says which boxes it copies of which parameter (`TensorMap`); every launch makes the maps of
its arrays (`encoding`), and the driver packs them into 128 bytes that travel as kernel parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilert import kernel_launch
from tilert.dtypes import DType, bf16, f16, f32
from tilert.errors import LaunchError

if TYPE_CHECKING:
    from tilert.array import Array

__all__ = [
    "LINE",
    "MOST_AXES",
    "MOST_ROWS",
    "ROW_BYTES",
    "Encoding",
    "TensorMap",
    "encoding",
    "packed",
]

MOST_AXES = 5
MOST_ROWS = 256
"""Elements of a box along any axis."""
ROW_BYTES = 128
"""Of a box's innermost axis, which is the span of the swizzle."""
LINE = 128
"""Bytes of a line of the second-level cache."""

_KINDS = {bf16: "BFLOAT16", f16: "FLOAT16", f32: "FLOAT32"}


@dataclass(frozen=True)
class TensorMap:
    """Boxes of one array.

    Attributes:
        param: position of the array parameter.
        box: elements of a box along each axis of the array, the last one contiguous.
        beside: boxes that are copied together, next to each other along the last axis: they come
            one after the other. 0 where there is one box a copy; otherwise the map has one more
            axis, the outermost, which numbers them.
        fetch: bytes that the second-level cache brings where one of its lines is missing: a line,
            or two. Two help where blocks share operands. What is read once from memory takes
            1 to 6 % longer with them on an H200.
    """

    param: int
    box: tuple[int, ...]
    beside: int = 0
    fetch: int = 2 * LINE


@dataclass(frozen=True)
class Encoding:
    """Arguments of cuTensorMapEncodeTiled, axes innermost first.

    Always: element strides of 1, no interleaving, a swizzle of 128 bytes, zeros outside.

    Attributes:
        address: of the first element.
        dims: extents of the array.
        strides: bytes, of all axes but the innermost.
        box: extents of a box.
        fetch: bytes, see `TensorMap`.
    """

    dtype: DType
    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    fetch: int = 2 * LINE


def encoding(
    spec: TensorMap, dtype: DType, address: int, shape: Sequence[int], strides: Sequence[int]
) -> Encoding:
    """The map of one array.

    Args:
        shape: extents, outermost first.
        strides: in elements.

    Raises:
        LaunchError: if the copy engine cannot address such an array.
    """
    size = dtype.itemsize
    dims = tuple(reversed(shape))
    box = tuple(reversed(spec.box))
    steps = tuple(
        # The stride of an axis with one element says nothing.
        stride * size if n != 1 else ROW_BYTES
        for n, stride in zip(dims[1:], tuple(reversed(strides))[1:], strict=True)
    )
    if spec.beside:
        dims = (box[0], *dims[1:], dims[0] // box[0])
        steps = (*steps, box[0] * size)
        box = (*box, spec.beside)
    problems = [
        (dtype not in _KINDS, f"of {dtype.name}"),
        (not 1 < len(dims) <= MOST_AXES, f"with {len(shape)} axes"),
        (spec.beside > 0 and shape[-1] % spec.box[-1] != 0, f"with {shape[-1]} columns"),
        (address % 16 != 0, f"at an address that is {address % 16} past a multiple of 16"),
        (not all(0 < n <= 2**32 for n in dims), f"of shape {tuple(shape)}"),
        (strides[-1] != 1 and shape[-1] != 1, f"with a last stride of {strides[-1]}"),
        (any(s % 16 or not 0 < s < 2**40 for s in steps), f"with strides {tuple(strides)}"),
        (any(not 0 < n <= MOST_ROWS for n in box), f"in boxes of {spec.box}"),
        (box[0] * size > ROW_BYTES, f"in boxes of {spec.box}"),
    ]
    for wrong, what in problems:
        if wrong:
            raise LaunchError(
                f"parameter {spec.param}: the copy engine takes no array {what}; set"
                " TILERT_SCHEDULES=none"
            )
    return Encoding(dtype, address, dims, steps, box, spec.fetch)


def packed(spec: TensorMap, array: "Array") -> kernel_launch.TensorMap:
    """The map of an array as the driver packs it.

    Raises:
        LaunchError: as `encoding`.
        DeviceError: if the driver refuses it.
    """
    e = encoding(spec, array.dtype, array.address, array.shape, array.strides)
    return kernel_launch.tensor_map(_KINDS[e.dtype], e.address, e.dims, e.strides, e.box, e.fetch)
