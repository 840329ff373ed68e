"""A device that runs generated CUDA C++ on the host: compiled by g++, a block's threads in turn.

It shows without a GPU what the text of a kernel computes: layouts, index arithmetic, barriers. What
the compiler for the device makes of the text, and PTX instructions, it does not show.
"""

import atexit
import ctypes
import functools
import hashlib
import math
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tilert import ir
from tilert.codegen import generate
from tilert.codegen.helpers import HELPERS
from tilert.codegen.prelude import PORTABLE, PRELUDE
from tilert.cpu_device import CpuDevice, host_view

__all__ = ["EmulatedDevice", "compiler"]

HEADER = Path(__file__).with_name("emulator.h")
# The header has what these do in PTX.
_REPLACED = {"cut"}
FLAGS = ["-std=c++17", "-O0", "-fPIC", "-ffp-contract=off", "-w"]
_TYPES = {
    "pointer": ctypes.c_void_p,
    "index": ctypes.c_void_p,
    "dim": ctypes.c_int,
    "grid": ctypes.c_int,
    "stride": ctypes.c_longlong,
}


def compiler() -> str | None:
    """The C++ compiler, if there is one."""
    return shutil.which("g++")


@functools.cache
def folder() -> Path:
    """Where compiled kernels are, for as long as the process runs."""
    path = Path(tempfile.mkdtemp(prefix="emulated"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    # Compiled once for all kernels.
    shutil.copy(HEADER, path)
    build([str(path / HEADER.name), "-x", "c++-header", "-o", str(path / f"{HEADER.name}.gch")])
    return path


def build(arguments: list[str]) -> None:
    """Call the compiler."""
    made = subprocess.run(
        [compiler() or "g++", *FLAGS, *arguments], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr


def host_text(text: str, function: ir.Function, threads: int) -> str:
    """The text of a kernel as a C++ file with a function `run(blocks, arguments...)`."""
    body = text.replace(PRELUDE, "")
    for name in _REPLACED:
        body = body.replace(HELPERS[name], "")
    entry = re.search(r"__launch_bounds__\(\d+\)\n(\w+)\((.*?)\) \{", body)
    assert entry is not None
    parameters = entry[2].split(", ")
    names = [p.split()[-1].lstrip("*") for p in parameters]
    # Values lose their const, so that they can be set; what pointers lead to keeps it.
    kept = "\n".join(
        f"static {p if '*' in p else p.removeprefix('const ')};" for p in parameters
    ).replace("__restrict__ ", "")
    return "\n".join(
        [
            f'#include "{HEADER.name}"',
            PORTABLE,
            body,
            "namespace kept {",
            kept,
            f"void call() {{ {entry[1]}({', '.join(names)}); }}",
            "}",
            f'extern "C" const char* run(int blocks, {entry[2]}) {{',
            *(f"  kept::{n} = {n};" for n in names),
            "  gridDim.x = blocks;",
            "  for (int b = 0; b < blocks; ++b) {",
            "    blockIdx.x = b;",
            # What another block left in shared memory must not matter.
            "    std::memset(smem, 0xA5, sizeof smem);",
            f"    if (const char* wrong = emulator::run({threads}, kept::call)) return wrong;",
            "  }",
            "  return nullptr;",
            "}",
        ]
    )


class _Launcher:
    def __init__(self, function: ir.Function, arch: str) -> None:
        source = generate(function, arch)
        self.text = source.text
        text = host_text(source.text, function, source.threads)
        name = hashlib.sha256(text.encode()).hexdigest()[:24]
        library = folder() / f"{name}.so"
        if not library.exists():
            path = folder() / f"{name}.cpp"
            path.write_text(text, encoding="utf-8")
            build(["-shared", "-o", str(library), str(path)])
        self._run = ctypes.CDLL(str(library)).run
        self._run.restype = ctypes.c_char_p
        self._abi = function.abi()
        self._run.argtypes = [ctypes.c_int, *(_TYPES[a.kind] for a in self._abi)]

    def bind(
        self,
        arrays: "Sequence[Any]",
        index_maps: "Mapping[int, Any]",
        grid: tuple[int, ...],
        programs: int | None = None,
    ) -> Callable[[], None]:
        pieces = math.prod(grid)
        values: list[int] = []
        for a in self._abi:
            if a.kind == "pointer":
                values.append(host_view(arrays[a.param]).ctypes.data)
            elif a.kind == "index":
                values.append(host_view(index_maps[a.param]).ctypes.data)
            elif a.kind == "dim":
                values.append(arrays[a.param].shape[a.axis])
            elif a.kind == "stride":
                values.append(arrays[a.param].strides[a.axis])
            else:
                values.append(grid[a.axis])

        def call(*_: object, held: object = (arrays, index_maps)) -> None:
            wrong = self._run(min(programs or pieces, pieces), *values)
            assert wrong is None, wrong.decode()

        return call


class EmulatedDevice(CpuDevice):
    """Host memory, kernels from their CUDA text.

    Attributes:
        arch: what the text is made for.
    """

    def __init__(self, arch: str = "sm_90a") -> None:
        super().__init__()
        self.arch = arch

    def compile(self, function: ir.Function) -> Any:
        """See `Device`."""
        return _Launcher(function, self.arch)
