"""What was generated of a kernel in an earlier process, found without tracing it again.

An entry says which cubin belongs to a specialisation, and how it is launched. Its name is a hash of
the kernel's source, of what it is specialised for, of the target and of all of this package; what
the trace read outside of the source is in the entry, and compared with what is there now.
"""

import functools
import hashlib
import json
import os
import sys
from dataclasses import asdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from tilert import disk_cache, entries, nvrtc, nvrtc_version
from tilert.frontend.remembered import describe, recall
from tilert.ir import Function
from tilert.kernel import DeferredFunction
from tilert.tensor_map import TensorMap

if TYPE_CHECKING:
    from tilert.codegen.generate import CudaSource

__all__ = ["find", "keep"]


def find(function: Function, arch: str) -> "tuple[CudaSource, bytes] | None":
    """The source, without its text, and the cubin of a specialisation; None if not known.

    The code generator is not even imported for it.
    """
    if not isinstance(function, DeferredFunction):
        return None
    data = entries.read(_name(function, arch))
    if data is None:
        return None
    entry: dict[str, Any] = json.loads(data)
    reads = recall(entry["reads"])
    cubin = None if reads is None else entries.read(entry["cubin"])
    if reads is None or cubin is None:
        return None
    function.take_for_read(reads)
    return _source(entry["source"]), cubin


def keep(function: Function, arch: str, source: "CudaSource") -> None:
    """Remember what was generated of a specialisation, if a later process can tell that it holds.

    Its cubin is in the disk cache.
    """
    if not isinstance(function, DeferredFunction):
        return
    reads = describe(function.reads)
    if reads is None:
        return
    entry = {
        "cubin": disk_cache.cubin_name(source.text, source.entry, arch),
        "source": asdict(source) | {"text": ""},
        "reads": reads,
    }
    entries.write(_name(function, arch), json.dumps(entry).encode())


def _name(function: DeferredFunction, arch: str) -> str:
    # How kernels are generated is switched by variables of this prefix.
    switches = sorted(item for item in os.environ.items() if item[0].startswith("TILERT_"))
    versions = sys.version, nvrtc_version.version(), *nvrtc.OPTIONS
    parts = function.identity, arch, repr(switches), *versions, _package()
    return entries.hashed(*parts) + ".kernel"


@functools.cache
def _package() -> str:
    """A hash of the text of this package."""
    top, found = os.path.dirname(__file__), hashlib.sha256()
    for folder, folders, names in os.walk(top):
        folders.sort()
        for name in sorted(names):
            if name.endswith(".py"):
                # Unbuffered: each call that may wait gives up the interpreter's lock.
                path = os.path.join(folder, name)
                with open(path, "rb", buffering=0) as file:
                    found.update(f"{os.path.relpath(path, top)}\0".encode() + file.readall())
                    found.update(b"\0")
    return found.hexdigest()


def _source(saved: dict[str, Any]) -> "CudaSource":
    values = _tuples(saved)
    values["maps"] = tuple(TensorMap(**one) for one in values["maps"])
    return cast("CudaSource", SimpleNamespace(**values))


def _tuples(value: Any) -> Any:
    """Lists as the tuples that they were, also within."""
    if isinstance(value, dict):
        return {name: _tuples(one) for name, one in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
