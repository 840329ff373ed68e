"""What the compiler makes of a kernel: `explain`. Nothing is launched, and no GPU is needed."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tilert import ir, nvrtc, sass
from tilert.array import Array, empty
from tilert.checks import Checks
from tilert.device import Call, device
from tilert.dtypes import DType
from tilert.errors import CompileError, DeviceError, LaunchError
from tilert.estimate import Estimate, estimate
from tilert.ir import format_function
from tilert.op import Op
from tilert.partition import Partition
from tilert.signature import Signature
from tilert.storage import Storage
from tilert.target_device import TargetDevice
from tilert.unsafe_kernel import UnsafeFunction, cuda_source

if TYPE_CHECKING:
    from tilert.codegen.generate import CudaSource

__all__ = ["Explanation", "explain"]

DEFAULT = "sm_90a"
"""The target where there is no GPU."""

SCHEDULES = {
    "streaming": "every thread loads, computes and stores its share of the tiles",
    "skinny": "few rows: weights stream through registers in 16-byte loads, sums meet at the end",
    "staged": "operands are copied to shared memory, some steps ahead; warps multiply (mma.sync)",
    "pipelined": "the copy engine fills a ring in shared memory; warpgroups multiply (wgmma)",
    "thin": "few rows: the copy engine fills a ring in shared memory, warps share its columns"
    " (mma.sync)",
    "attention": "keys and values come as in pipelined; two products, one of which feeds the other,"
    " by warpgroups, or of few rows by warps with keys of their own",
    "unsafe": "the text that was given, as it is",
}

# What the page counts of the machine code: memory, products, and what waits.
_NOTED = ("LDG", "STG", "LDS", "STS", "LDL", "STL", "LDSM", "STSM", "LDGSTS", "UTMALDG", "UTMASTG",
          "ATOMG", "RED", "REDG", "HMMA", "IMMA", "HGMMA", "IGMMA", "BAR")  # fmt: skip


@dataclass(frozen=True, repr=False)
class Explanation:
    """What the compiler makes of a kernel for given arguments. Printing it shows all of it.

    Attributes:
        kernel: its name.
        arch: the target, such as "sm_90a".
        tile_ir: the kernel as typed tile operations, before schedules change it.
        schedule: the chosen one; see docs/codegen.md.
        refused: why it is none of the others, by name.
        grid: programs on each axis.
        blocks: thread blocks of a launch; None where it is as many as run at once.
        threads: threads of a block.
        source: CUDA C++, all of it.
        shared_bytes: dynamic shared memory of a block.
        estimate: flops and bytes of a launch.
        resources: registers and spills of a thread, None where it was not compiled.
        machine_code: its instructions in order, none where they were not read.
        missing: what could not be done, and why.
    """

    kernel: str
    arch: str
    tile_ir: str
    schedule: str
    refused: dict[str, str]
    grid: tuple[int, ...]
    blocks: int | None
    threads: int
    source: str
    shared_bytes: int
    estimate: Estimate | None
    resources: nvrtc.Resources | None
    machine_code: list[str]
    missing: list[str]

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        head = [("schedule", f"{self.schedule}: {SCHEDULES[self.schedule]}")]
        head += [("", f"not {name}: {why}") for name, why in sorted(self.refused.items())]
        head += [("launch", self._launch()), ("a thread has", self._thread())]
        head += [("a block has", self._block()), *self._moved()]
        if self.machine_code:
            head.append(("instructions", self._instructions()))
        head += [("missing", why) for why in self.missing]
        width = max(len(name) for name, _ in head)
        summary = "\n".join(f"  {name.ljust(width)}  {text}" for name, text in head)
        helpers, start, own = self.source.partition('extern "C"')
        left_out = f", after {len(helpers.splitlines())} lines of helpers" if helpers else ""
        return (
            f"kernel '{self.kernel}' for {self.arch}\n{summary}\n\ntile IR\n{self.tile_ir}\n\n"
            f"CUDA C++{left_out}\n{start}{own}"
        )

    def _launch(self) -> str:
        programs = f"{' x '.join(map(str, self.grid))} programs"
        if self.blocks is None:
            return f"{programs}, which as many blocks as run at once take in turns"
        shared = self.blocks // math.prod(self.grid)
        return f"{programs}, {f'{shared} blocks' if shared > 1 else 'a block'} each"

    def _thread(self) -> str:
        if self.resources is None:
            return "not known: it was not compiled"
        used = self.resources
        spilled = f"{used.spill_stores} bytes spilled and {used.spill_loads} loaded again"
        spills = spilled if used.spill_stores or used.spill_loads else "no spills"
        return f"{used.registers} registers, {spills}"

    def _block(self) -> str:
        static = self.resources.shared_bytes if self.resources is not None else 0
        return f"{self.threads} threads, {self.shared_bytes + static} bytes of shared memory"

    def _moved(self) -> list[tuple[str, str]]:
        found = self.estimate
        if found is None:
            return []
        more = "" if found.complete else ", with one turn of each loop whose length arrays hold"
        asked = f", {_scaled(found.asked)}B asked for by all programs"
        flops = f"{_scaled(found.flops)}FLOP"
        if found.least:
            flops += f", {found.flops / found.least:.3g} for each byte"
        return [
            ("a launch moves", f"{_scaled(found.least)}B{asked}{more}"),
            ("and computes", flops),
        ]

    def _instructions(self) -> str:
        names = Counter(
            name for name in sass.names(self.machine_code) if name.split(".")[0] in _NOTED
        )
        shown = ", ".join(f"{count} {name}" for name, count in sorted(names.items()))
        return (
            f"{len(self.machine_code)}, of them {shown}" if shown else f"{len(self.machine_code)}"
        )


def explain(
    kernel: Signature, /, *arguments: Any, arch: str | None = None, **named: Any
) -> Explanation:
    """What the compiler makes of a kernel with such arguments.

    Args:
        kernel: made by `tilert.kernel` or `tilert.unsafe_kernel`.
        arguments: as in a call of the kernel. In place of arrays that need not exist: (shape,
            dtype) for a `Ref`, (shape, dtype, tile) for a `Mut`.
        arch: the target, such as "sm_90a"; by default that of the GPU that the arrays are on, else
            of the first GPU here, else sm_90a.
        named: more arguments, by name.

    Raises:
        LaunchError, OwnershipError: as a call of the kernel would.
        KernelError: where the body does not fit the arguments.
        CompileError: where the generator refuses the kernel. Missing compilers are no error: the
            explanation says what it lacks.
    """
    if isinstance(kernel, Op):
        raise LaunchError(
            f"explain takes a kernel and its arguments, not the op that they make: write"
            f" explain({kernel.kernel}, ...) in place of explain({kernel.kernel}(...))"
        )
    if not isinstance(kernel, Signature):
        raise LaunchError(
            f"explain takes a kernel that tilert.kernel made, got {type(kernel).__name__}"
        )
    values = kernel.bind(arguments, named)
    given = [v.array if isinstance(v, Partition) else v for v in values]
    devices = [v.device for v in given if isinstance(v, Array) and v.device.arch is not None]
    sheet = _Sheet(arch or (devices[0].arch if devices else None) or _default_arch())
    sheet.checks = devices[0].checks if devices else Checks.NONE
    storages: dict[int, Storage] = {}
    pairs = zip(kernel.decls, values, strict=True)
    drawn = [_drawn(kernel.name, d, value, sheet, storages) for d, value in pairs]
    op = kernel(**dict(zip([d.name for d in kernel.decls], drawn, strict=True)))
    op.release()
    return _explanation(sheet)


@dataclass
class _Blueprint:
    """Stands in for a compiled kernel, and sees what a launch is given."""

    function: ir.Function
    arrays: list[Array] = field(default_factory=list)
    grid: tuple[int, ...] = ()
    walks: bool = False

    def bind(
        self,
        arrays: Sequence[Array],
        index_maps: Any,
        grid: tuple[int, ...],
        programs: int | None = None,
    ) -> Call:
        """Keep what is given; the call does nothing."""
        self.arrays, self.grid, self.walks = list(arrays), grid, programs is not None
        return lambda queue: None


class _Sheet(TargetDevice):
    """A target that compiles nothing: it keeps what it is asked to compile."""

    made: _Blueprint | None = None

    def compile(self, function: ir.Function) -> _Blueprint:
        """See `Device`."""
        self.made = _Blueprint(function)
        return self.made


def _default_arch() -> str:
    try:
        return device("cuda").arch or DEFAULT
    except (DeviceError, ImportError):
        return DEFAULT


def _drawn(kernel: str, decl: Any, value: Any, sheet: _Sheet, storages: dict[int, Storage]) -> Any:
    """A value of the same form on the sheet."""
    if decl.kind == "const":
        return value
    if isinstance(value, Array):
        return _view(value, sheet, storages)
    if isinstance(value, Partition):
        array = _view(value.array, sheet, storages)
        out = Partition(array, value.tile, programs=value.programs)
        out.index_map, out.placement, out.grid = value.index_map, value.placement, value.grid
        return out
    if not isinstance(value, tuple):
        # The call refuses it, and says what it takes.
        return value
    written = decl.kind == "mut"
    if (
        len(value) != 2 + written
        or not isinstance(value[1], DType)
        or not all(isinstance(sizes, tuple | list) for sizes in value[::2])
    ):
        wanted = "(shape, dtype, tile)" if written else "(shape, dtype)"
        raise LaunchError(
            f"argument '{decl.name}' of kernel '{kernel}': what stands for a {decl.kind.title()} is"
            f" {wanted}, such as ((512, 512), tilert.bf16{', (128, 64)' * written}); got {value!r}"
        )
    array = empty(tuple(value[0]), value[1], sheet)
    return array.partition(*value[2]) if written else array


def _view(array: Array, sheet: _Sheet, storages: dict[int, Storage]) -> Array:
    """The same view of memory on the sheet."""
    if array.device is sheet:
        return array
    own = array.storage
    if id(own) not in storages:
        storages[id(own)] = Storage(sheet, own.nbytes + 16)
    past = own.address % 16 // array.dtype.itemsize
    return Array(
        storages[id(own)], array.dtype, array.shape, array.strides, array.offset + past,
        array.readonly,
    )  # fmt: skip


def _explanation(sheet: _Sheet) -> Explanation:
    made = sheet.made
    if made is None:
        raise LaunchError("nothing is compiled for these arguments: the grid has no programs")
    function, source = made.function, cuda_source(made.function, sheet.arch, sheet.checks)
    unsafe = isinstance(function, UnsafeFunction)
    resources, code, missing = _built(source, sheet.arch)
    in_turns = source.walks or made.walks
    return Explanation(
        kernel=function.name,
        arch=sheet.arch,
        tile_ir="an unsafe kernel has none" if unsafe else format_function(function),
        schedule=source.schedule,
        refused=dict(source.refused),
        grid=made.grid,
        blocks=None if in_turns else math.prod(made.grid) * source.cluster,
        threads=source.threads,
        source=source.text,
        shared_bytes=source.shared_bytes,
        estimate=None if unsafe else estimate(function, made.arrays, made.grid),
        resources=resources,
        machine_code=code,
        missing=missing,
    )


def _built(source: "CudaSource", arch: str) -> tuple[nvrtc.Resources | None, list[str], list[str]]:
    """Resources and machine code as far as there are compilers for them; what is missing."""
    try:
        cubin, used = nvrtc.build(source.text, source.entry, arch)
    except CompileError as error:
        return None, [], [str(error)]
    try:
        (code,) = sass.disassemble([cubin], arch)
    except CompileError as error:
        return used, [], [str(error)]
    return used, code, []


def _scaled(number: float) -> str:
    """With three digits and a prefix, such as "1.5 M"."""
    for prefix in ("", "k", "M", "G", "T"):
        if number < 999.5:
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.3g} P"
