"""Faults: what a failing check of a kernel leaves in memory, for the host to read where it waits.

The first thread whose check fails writes a record, no thread makes an access that fails, and the
kernel runs to its end: the device stays usable, and the host knows what was wrong and where.
"""

import linecache
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tilert.errors import CheckError, KernelError, TilertError
from tilert.ir import Function, Loc
from tilert.trail import Trail

if TYPE_CHECKING:
    from tilert.device import Block

__all__ = ["RECORD", "Faults", "Site", "Watch"]

RECORD = np.dtype(
    [
        ("state", np.uint32),
        ("kernel", np.int32),
        ("site", np.int32),
        ("program", np.int32),
        ("grid", np.int32, 32),
        ("index", np.int64),
        ("extent", np.int64),
    ]
)
"""`fault_record` of `codegen/helpers.py`. state: 0 nothing, 1 being written, 2 written."""

_WRITTEN = 2


@dataclass(frozen=True)
class Site:
    """What a check in a kernel means.

    Attributes:
        kind: "row" of an index map (O7); "outside", for an index that the language lets lie
            outside; "believed", for one that the compiler takes to be inside; "assert".
        param: the array; "" for a tile.
        does: what the access does, as a verb.
        size: elements that index and extent count in.
        shift: what the check adds to both.
        message, shape: text and tile of a debug_assert, whose index counts elements in row-major
            order.
    """

    kind: str
    loc: Loc | None
    param: str = ""
    axis: int = 0
    does: str = ""
    size: int = 1
    shift: int = 0
    message: str = ""
    shape: tuple[int, ...] = ()


class Faults:
    """The record of a device, and the kernels that may write it.

    Args:
        block: host memory that the device can write, of `RECORD.itemsize` bytes or more.
    """

    def __init__(self, block: "Block") -> None:
        if block.host is None:
            raise ValueError("the host reads the record")
        self._block = block
        self._record: np.ndarray[Any, Any] = block.host[: RECORD.itemsize].view(RECORD)
        self._record[:] = 0
        self._kernels: list[tuple[Function, tuple[Site, ...]]] = []
        # Of threads that take: between reading and emptying, a kernel writes nothing.
        self._lock = threading.Lock()

    def arguments(self, function: Function, sites: tuple[Site, ...] | None) -> list[int]:
        """What a kernel takes after its own arguments: nothing if it has no checks."""
        if sites is None:
            return []
        self._kernels.append((function, sites))
        return [self._block.address, len(self._kernels) - 1]

    def take(self, trail: Trail) -> TilertError | None:
        """The error that the record holds, which is empty afterwards; None if it was empty.

        Args:
            trail: which ops have been enqueued.
        """
        with self._lock:
            if self._record["state"][0] != _WRITTEN:
                return None
            record = self._record[0].copy()
            self._record["state"] = 0
        function, sites = self._kernels[int(record["kernel"])]
        grid = record["grid"][: len(function.grid)]
        program = tuple([int(i) for i in np.unravel_index(int(record["program"]), grid)])
        site = sites[int(record["site"])]
        error = _error(function, site, program, int(record["index"]), int(record["extent"]))
        trail.name(error, function.name)
        return error


class Watch:
    """`with watch:` around what waits for a device: what has gone wrong is said with its causes.

    Raises:
        CheckError: if a check of a kernel has failed; KernelError for a debug_assert.

    Attributes:
        trail: which ops were enqueued last.
        faults: where checked kernels leave what is wrong, if the device is checked.
    """

    def __init__(self, faults: Faults | None) -> None:
        self.trail = Trail()
        self.faults = faults

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        found = self.faults.take(self.trail) if self.faults is not None else None
        if error is None:
            if found is not None:
                # These ops are not to be taken for the cause of a later error.
                self.trail.clear()
                raise found
            return
        if isinstance(error, TilertError):
            self.trail.explain(error)
        if found is not None:
            error.add_note(f"before that: {found}")


def _error(
    function: Function, site: Site, program: tuple[int, ...], index: int, extent: int
) -> TilertError:
    from tilert.checker.refusal import outside, row, shown

    name, loc = function.name, site.loc or Loc(function.filename, 1, 0)
    index, extent = (index - site.shift) * site.size, (extent - site.shift) * site.size
    if site.kind == "assert":
        place = [int(i) for i in np.unravel_index(index, site.shape)] if site.shape else None
        where = "" if place is None else f", element {place}"
        text = linecache.getline(loc.filename, loc.line)
        return KernelError(
            f"debug_assert failed in program {shown(program)}{where}: {site.message}",
            loc.filename, loc.line, loc.column, text,
        )  # fmt: skip
    if site.kind == "row":
        return row(name, site.param, program, index, extent, loc)
    if site.kind == "outside":
        return outside(name, site.param, site.axis, program, index, extent, loc)
    return CheckError(
        f"bounds: kernel '{name}' is at index {index} on axis {site.axis} of '{site.param}', which"
        f" has {extent} elements; the compiler takes it to be inside, so please report this",
        (f"program {shown(program)} {site.does} it", loc.filename, loc.line, loc.column),
    )
