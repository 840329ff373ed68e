"""Checks of a checked kernel: one that fails makes no access, and leaves a record for the host.

The text calls `fault_sure` of `helpers.py`; what a check means stays here, as a `Site` with the
number that the record holds. See `tilert/fault.py`.
"""

from dataclasses import dataclass

from tilert.checks import Checks
from tilert.codegen.emit import Emitter
from tilert.fault import Site
from tilert.ir import Loc

__all__ = ["PARAMETERS", "Bounds", "below", "note", "place"]

PARAMETERS = ["fault_record* fault_to", "const int fault_kernel"]
"""What a checked kernel takes after its arguments: the record, and its own number."""


def place(grid: list[str]) -> str:
    """C++ at the head of a checked kernel: where faults go, and what every one says.

    Args:
        grid: extents, as C++.
    """
    return f"  const fault_place fault = {{fault_to, fault_kernel, {{{', '.join(grid)}}}}};"


def note(e: Emitter, site: Site) -> str:
    """C++ arguments that say which check of which program has failed."""
    e.helpers.add("fault")
    e.sites.append(site)
    return f"fault, {len(e.sites) - 1}, {e.program}"


def below(index: str, extent: str, wide: bool, noted: str = "") -> str:
    """C++ of 0 <= index < extent. Arithmetic on a `wide` index must not wrap.

    Args:
        noted: from `note`, where the host wants to know of an index that is outside.
    """
    if noted:
        return f"fault_sure({index}, {extent}, {noted})"
    return f"(u64)({index}) < (u64){extent}" if wide else f"(u32)({index}) < (u32){extent}"


@dataclass(frozen=True)
class Bounds:
    """The checks of one access to an array.

    Attributes:
        does: what the access does, as a verb.
    """

    e: Emitter
    does: str
    param: str
    loc: Loc | None

    def outside(self, axis: int, size: int = 1, shift: int = 0) -> str:
        """For an index that the language lets lie outside: noted where checks are strict.

        Args:
            size: elements that the index counts in.
            shift: added to index and extent, by a check that any of `shift` + 1 elements is inside.
        """
        return self._note("outside", axis, size, shift) if self.e.checks == Checks.STRICT else ""

    def believed(self, axis: int, size: int = 1) -> str:
        """For an index that the compiler takes to be inside: checked all the same."""
        return self._note("believed", axis, size) if self.e.checks else ""

    def row(self) -> str:
        """For a row that an index map names (rule O7)."""
        return self._note("row") if self.e.checks else ""

    def _note(self, kind: str, axis: int = 0, size: int = 1, shift: int = 0) -> str:
        return note(self.e, Site(kind, self.loc, self.param, axis, self.does, size, shift))
