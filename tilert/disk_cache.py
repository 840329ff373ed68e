"""Compiled kernels on disk, so that a second start compiles nothing; see `tilert.entries`."""

from collections.abc import Callable

from tilert import nvrtc, nvrtc_version
from tilert.entries import hashed, read, write

__all__ = ["cubin", "cubin_name"]


def cubin_name(text: str, entry: str, arch: str) -> str:
    """The name of a cubin's entry."""
    return hashed(text, entry, arch, nvrtc_version.version(), *nvrtc.OPTIONS) + ".cubin"


def cubin(
    text: str, entry: str, arch: str, compiler: Callable[[str, str, str], bytes] = nvrtc.compile
) -> bytes:
    """The cubin of a kernel, from disk if it has been compiled before.

    A corrupt entry is compiled again. A folder that cannot be read or written costs the cache,
    never the kernel.

    Raises:
        CompileError: if the source does not compile.
    """
    found = read(cubin_name(text, entry, arch))
    if found is None:
        found = compiler(text, entry, arch)
        # Now that there is a compiler its version is certain.
        write(cubin_name(text, entry, arch), found)
    return found
