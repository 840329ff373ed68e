"""CUDA C++ to machine code with NVRTC. Needs no GPU and no CUDA headers."""

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilert.errors import CompileError

__all__ = ["OPTIONS", "Resources", "build", "compile", "is_loaded", "library", "version"]

# 177: a declared function is not used; every kernel carries the same helpers.
OPTIONS = ("--std=c++17", "-default-device", "--diag-suppress=177")


@dataclass(frozen=True)
class Resources:
    """What the assembler says a kernel uses, per thread except for `shared_bytes`.

    Attributes:
        registers: 32-bit registers.
        spill_stores, spill_loads: bytes moved to and from local memory for want of registers.
        shared_bytes: static shared memory of a block.
    """

    registers: int
    spill_stores: int
    spill_loads: int
    shared_bytes: int


@functools.cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise CompileError(
            f"NVRTC cannot be loaded ({error}); install it with `pip install nvidia-cuda-nvrtc"
            " cuda-bindings`"
        ) from None
    return nvrtc


@functools.cache
def version() -> str:
    """NVRTC's version, such as "13.0"; see `tilert.nvrtc_version` for where it is not loaded."""
    _, major, minor = _nvrtc().nvrtcVersion()
    return f"{major}.{minor}"


def is_loaded() -> bool:
    """Whether NVRTC has been used here, so that it costs nothing to ask it."""
    return _nvrtc.cache_info().currsize > 0


def library() -> str | None:
    """The file that NVRTC has been loaded from, where the system tells."""
    try:
        maps = Path("/proc/self/maps").read_text(errors="replace")
    except OSError:
        return None
    found = re.search(r"/.*/libnvrtc\.so[.\d]*$", maps, re.MULTILINE)
    return None if found is None else found[0]


def compile(text: str, entry: str, arch: str) -> bytes:
    """The cubin of CUDA C++ source for a real architecture such as "sm_90a".

    Args:
        entry: name of the kernel, for messages.

    Raises:
        CompileError: with the compiler's log if it refuses the source, or if NVRTC is missing.
    """
    cubin, _ = _compile(text, entry, arch, ())
    return cubin


def build(text: str, entry: str, arch: str) -> tuple[bytes, Resources]:
    """As `compile`, with what the compiled kernel uses.

    Raises:
        CompileError: as `compile`, or if the assembler reports nothing.
    """
    # What NVRTC finds in a cache of its own is not assembled, and so not reported on.
    cubin, log = _compile(text, entry, arch, ("--ptxas-options=--verbose", "--no-cache"))
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    shared = re.search(r"(\d+) bytes smem", log)
    if registers is None or spills is None:
        raise CompileError(f"kernel '{entry}': the assembler reported no resources:\n{log}")
    used = Resources(
        int(registers[1]),
        int(spills[1]),
        int(spills[2]),
        int(shared[1]) if shared is not None else 0,
    )
    return cubin, used


def _compile(text: str, entry: str, arch: str, extra: tuple[str, ...]) -> tuple[bytes, str]:
    nvrtc = _nvrtc()
    ok = nvrtc.nvrtcResult.NVRTC_SUCCESS

    def checked(name: str, *args: Any) -> Any:
        status, *values = getattr(nvrtc, name)(*args)
        if status != ok:
            _, reason = nvrtc.nvrtcGetErrorString(status)
            raise CompileError(f"kernel '{entry}': {name} failed: {reason.decode()}")
        return values[0] if values else None

    program = checked("nvrtcCreateProgram", text.encode(), f"{entry}.cu".encode(), 0, [], [])
    try:
        options = [f"--gpu-architecture={arch}", *OPTIONS, *extra]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        log = _buffer(checked("nvrtcGetProgramLogSize", program))
        checked("nvrtcGetProgramLog", program, log)
        shown = log.rstrip(b"\0 \n").decode(errors="replace")
        if status != ok:
            _, reason = nvrtc.nvrtcGetErrorString(status)
            raise CompileError(
                f"kernel '{entry}' does not compile for {arch} ({reason.decode()}):\n{shown}"
            )
        size = checked("nvrtcGetCUBINSize", program)
        cubin = _buffer(size)
        checked("nvrtcGetCUBIN", program, cubin)
        return cubin[:size], shown
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _buffer(size: int) -> bytes:
    """Bytes that the bindings write into: of length 2 or more, since Python shares shorter ones."""
    return bytes(size + 2)
