"""What a checked cpu device knows of its memory."""

import weakref
from typing import TYPE_CHECKING

from tilert.checker.launch import CheckedKernel
from tilert.checker.shadow import Written
from tilert.checker.unsafe import CheckedReference
from tilert.cpu_device import HostBlock
from tilert.device import Launcher
from tilert.ir import Function
from tilert.unsafe_kernel import UnsafeFunction

if TYPE_CHECKING:
    from tilert.array import Array
    from tilert.storage import Storage

__all__ = ["Checker"]


class Checker:
    """Shadows of the storages of a device; memory of other libraries counts as written.

    Args:
        strict: whether reads that lie outside of what they read are errors.
    """

    def __init__(self, strict: bool = False) -> None:
        self._strict = strict
        self._shadows: weakref.WeakKeyDictionary[Storage, Written] = weakref.WeakKeyDictionary()

    def written(self, storage: "Storage") -> Written:
        """The shadow of a storage."""
        found = self._shadows.get(storage)
        if found is None:
            found = Written(storage, not isinstance(storage.block, HostBlock))
            self._shadows[storage] = found
        return found

    def launcher(self, function: Function) -> Launcher:
        """A kernel whose launches are checked."""
        if isinstance(function, UnsafeFunction):
            return CheckedReference(function, self.written)
        return CheckedKernel(function, self.written, self._strict)

    def note(self, array: "Array") -> None:
        """Something has written all of an array."""
        self.written(array.storage).note(array)

    def note_copy(self, target: "Array", source: "Array") -> None:
        """An array has been copied: what was unwritten still is."""
        self.written(target.storage).copy(target, source, self.written(source.storage))
