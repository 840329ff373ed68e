"""A device that runs generated CUDA C++ on the host: compiled by g++, a block's threads in turn.

It shows without a GPU what the text of a kernel computes: layouts, index arithmetic, barriers, the
copies and products of sm_90a with their descriptors. What the compiler for the device makes of the
text, and PTX instructions, it does not show.
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
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tilert import ir, kernel_launch
from tilert.checks import Check, checks_of
from tilert.codegen import generate
from tilert.codegen.cluster import CLUSTER_TEMPLATES
from tilert.codegen.helpers import HELPERS
from tilert.codegen.hopper import (
    ATTENTION_TEMPLATES,
    BOX_TEMPLATES,
    ONCE_TEMPLATES,
    ROW_TEMPLATES,
    TEMPLATES,
)
from tilert.codegen.prelude import PORTABLE, PRELUDE
from tilert.cpu_device import CpuDevice, host_view
from tilert.fault import RECORD, Faults, Watch
from tilert.tensor_map import TensorMap, encoding

__all__ = ["EmulatedDevice", "compiler"]

HERE = Path(__file__).parent
HEADER, HOPPER_HEADER = "emulator.h", "emulator_hopper.h"
RUNTIME, HOPPER_RUNTIME = "emulator", "emulator_hopper"
# The header has what these do in PTX.
_REPLACED = {"cut"}
# Blocks that run at once, as far as a kernel can tell.
WALKING = 2
FLAGS = ["-std=c++17", "-fPIC", "-ffp-contract=off", "-w", "-U_FORTIFY_SOURCE"]
# Kernels share the variables of the runtime.
_one_at_a_time = threading.Lock()
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
    """Where compiled kernels are, for as long as the process runs, and what all of them share."""
    path = Path(tempfile.mkdtemp(prefix="emulated"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    for name in (HEADER, HOPPER_HEADER):
        shutil.copy(HERE / name, path)
    build(["-x", "c++-header", str(path / HEADER), "-o", str(path / f"{HEADER}.gch")])
    objects: list[str] = []
    for name in (RUNTIME, HOPPER_RUNTIME):
        objects.append(str(path / f"{name}.o"))
        build(["-O2", "-c", str(HERE / f"{name}.cpp"), "-o", objects[-1]])
        build(["-shared", *objects, "-o", str(path / f"{name}.so")])
    return path


def library(text: str) -> Path:
    """A kernel's text, compiled as it is written, which takes the least time."""
    path = folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.so"
    if not path.exists():
        source = path.with_suffix(".cpp")
        source.write_text(text, encoding="utf-8")
        runtime = folder() / f"{HOPPER_RUNTIME if HOPPER_HEADER in text else RUNTIME}.so"
        # What the runtime is linked to needs no looking for.
        build(["-shared", "-nostdlib", "-o", str(path), str(source), str(runtime)])
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
    for templates in (
        TEMPLATES,
        ATTENTION_TEMPLATES,
        BOX_TEMPLATES,
        CLUSTER_TEMPLATES,
        ONCE_TEMPLATES,
        ROW_TEMPLATES,
    ):
        body = body.replace(templates, "")
    body = re.sub(r"DEV void copy_box(?:_once)?\(.*?\n}?.*?\); \}\n", "", body, flags=re.DOTALL)
    body = re.sub(
        r"DEV void wgmma_n(\d+)\(float\* d, u64 a, u64 b, (\w+)\) \{.*?\)\); \}\n",
        r"DEV void wgmma_n\1(float* d, u64 a, u64 b, \2 t) {"
        r" emulator::product<\1>(d, a, b, t); }\n",
        body,
        flags=re.DOTALL,
    )
    body = re.sub(
        r"DEV void wgmma_left_n(\d+)\(float\* d, const u32\* a, u64 b, (\w+)\) \{.*?\)\); \}\n",
        r"DEV void wgmma_left_n\1(float* d, const u32* a, u64 b, \2 t) {"
        r" emulator::product_left<\1, ACROSS>(d, a, b, KEEP, t); }\n",
        body,
        flags=re.DOTALL,
    )
    body = re.sub(r"wgmma_n(\d+)\(d, a, b, t\)", r"emulator::product<\1, ROWS>(d, a, b, t)", body)
    # All blocks of a cluster run at once, as threads of one after the other.
    cluster = int(shape[1]) if (shape := re.search(r"__cluster_dims__\((\d+)", body)) else 1
    if cluster > 1:
        body = re.sub(r"__cluster_dims__\(.*?\) ", "", body)
        body = body.replace("threadIdx.x", f"((int)threadIdx.x % {threads})")
        body = body.replace("blockIdx.x", f"(blockIdx.x * {cluster} + emulator::block())")
        body = re.sub(
            r"extern __shared__ .* smem\[\];", "char* const smem = emulator::memory();", body
        )
    for name in _REPLACED:
        body = body.replace(HELPERS[name], "")
    body = re.sub(r"&map(\d+),", r"emulator::may_read(&map\1, early >> \1 & 1),", body)
    body = re.sub(r"\n( *\w+\* dst\d+ = )", r"\nemulator::may_write();\n\1", body)
    bits = re.search(r"if \(\(early & (\d+)u\) != ", body)
    if bits:
        allowed = f"(early & {bits[1]}) == {bits[1]}"
        body = body.replace("load16_early(", f"emulator::read_early({allowed}, ")
    entry = re.search(r"__launch_bounds__\([\d, ]+\)\n(\w+)\((.*?)\) \{", body)
    assert entry is not None
    parameters = entry[2].split(", ")
    names = [p.split()[-1].lstrip("*") for p in parameters]
    # Values lose their const, so that they can be set; what pointers lead to keeps it.
    kept = "\n".join(
        f"static {p if '*' in p else p.removeprefix('const ')};" for p in parameters
    ).replace("RESTRICT ", "")
    # Tensor maps come as pointers: they are larger than what a call from here can pass.
    taken = re.sub(r"const __grid_constant__ tensor_map (\w+)", r"const tensor_map* \1", entry[2])
    given = [f"*{n}" if "tensor_map" in p else n for p, n in zip(parameters, names, strict=True)]
    return "\n".join(
        [
            f'#include "{HEADER}"',
            *([f'#include "{HOPPER_HEADER}"'] if TEMPLATES in text else []),
            PORTABLE,
            body,
            "namespace kept {",
            kept,
            f"void call() {{ {entry[1]}({', '.join(names)}); }}",
            "}",
            f'extern "C" const char* run(int blocks, {taken}) {{',
            *["  emulator::word = early;"] * ("early" in names),
            *(f"  kept::{n} = {value};" for n, value in zip(names, given, strict=True)),
            "  gridDim.x = blocks;",
            "  for (int b = 0; b < blocks; ++b) {",
            "    blockIdx.x = b;",
            # What another block left in shared memory must not matter.
            "    std::memset(smem, 0xA5, sizeof smem);",
            f"    if (const char* wrong = emulator::run({threads}, kept::call, {cluster}))",
            "      return wrong;",
            "  }",
            "  return nullptr;",
            "}",
        ]
    )


def pack(spec: TensorMap, array: Any) -> kernel_launch.TensorMap:
    """A tensor map as the header has it: address, axes and element size, extents, strides, box."""
    host = host_view(array)
    e = encoding(spec, array.dtype, host.ctypes.data, array.shape, array.strides)
    words = [e.address, len(e.dims) | e.dtype.itemsize << 8]
    for values, room in ((e.dims, 5), (e.strides, 4), (e.box, 5)):
        words += [*values, *[0] * (room - len(values))]
    packed = kernel_launch.TensorMap()
    (ctypes.c_uint64 * 16).from_address(packed.address)[:] = words
    return packed


class _Launcher:
    def __init__(self, function: ir.Function, device: "EmulatedDevice") -> None:
        arch = device.arch
        source = generate(function, arch, device.checks)
        self.text = source.text
        text = host_text(source.text, function, source.threads)
        self._run = ctypes.CDLL(str(library(text))).run
        self._run.restype = ctypes.c_char_p
        self._abi = function.abi()
        self._after = device.faults.arguments(function, source.sites)
        self._maps = source.maps
        self._walks = source.walks
        self._run.argtypes = [
            ctypes.c_int,
            *(ctypes.c_void_p for _ in self._maps),
            *(_TYPES[a.kind] for a in self._abi),
            *(ctypes.c_void_p, ctypes.c_int)[: len(self._after)],
            ctypes.c_uint,
        ]
        self._early = device.early

    def bind(
        self,
        arrays: "Sequence[Any]",
        index_maps: "Mapping[int, Any]",
        grid: tuple[int, ...],
        programs: int | None = None,
    ) -> Callable[..., None]:
        pieces = math.prod(grid)
        packed = [pack(spec, arrays[spec.param]) for spec in self._maps]
        values: list[int] = [p.address for p in packed]
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
        values += [*self._after, self._early]

        # Of a kernel whose blocks walk over pieces, blocks get several.
        most = programs or (WALKING if self._walks else pieces)

        def call(*_: object, held: object = (arrays, index_maps, packed)) -> None:
            with _one_at_a_time:
                wrong = self._run(min(most, pieces), *values)
            assert wrong is None, wrong.decode()

        return call


class EmulatedDevice(CpuDevice):
    """Host memory, kernels from their CUDA text.

    Attributes:
        arch: what the text is made for.
        checks: which checks are compiled in.
        early: what kernels may do before they wait for earlier ones.
    """

    def __init__(self, arch: str = "sm_90a", check: Check = False, early: int = 0) -> None:
        super().__init__(check=False)
        self.early = early
        self.arch = arch
        self.checks = checks_of(check)
        self.faults = Faults(self.allocate(RECORD.itemsize))
        self.watch = Watch(self.faults)
        self.trail = self.watch.trail

    def compile(self, function: ir.Function) -> Any:
        """See `Device`."""
        return _Launcher(function, self)

    def synchronize(self) -> None:
        """See `Device`."""
        with self.watch:
            super().synchronize()
        self.watch.trail.clear()

    def download(self, source: "Any") -> Any:
        """See `Device`."""
        with self.watch:
            return super().download(source)
