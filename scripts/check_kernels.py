"""What serving kernels compile to, beside what is expected of them, for every target. Needs no GPU.

    python -m scripts.check_kernels [TARGET...]           # measured beside expected; 1 if any fails
    python -m scripts.check_kernels --write [TARGET...]   # and bring the table's limits up to date

The table is tests/models/kernel_expectations.csv; tests/models/test_compile_targets.py holds
kernels to it. `--write` adds a row for each kernel that has none, drops those that nothing compiles
any more, and sets every limit anew; it keeps the instructions that a row names. What it changed is
to be looked at like any other change.
"""

import argparse
import csv
import io
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

import tilert
from models.batch import Features, Slot
from models.presets import PRESETS
from models.prompt import PromptChunk
from models.transformer import Transformer
from tilert import sass
from tilert.target_device import CompiledKernel, TargetDevice

__all__ = [
    "TABLE",
    "WALKS",
    "Found",
    "Row",
    "TableError",
    "Walk",
    "expected",
    "found",
    "problems",
    "read",
    "serve",
    "text",
]

TABLE = Path(__file__).resolve().parent.parent / "tests" / "models" / "kernel_expectations.csv"


class TableError(ValueError):
    """The table cannot be read; the message names file and line."""


@dataclass(frozen=True)
class Walk:
    """Which sizes the serving path is walked with.

    Attributes:
        batches: sequences of a decode step.
        prompts: tokens of a prompt of one sequence.
        several: tokens of a prefill of several sequences.
    """

    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    several: tuple[int, ...]


_ALL = Walk(batches=(1, 2, 8, 16, 32, 128), prompts=(5, 40, 200, 1000, 4096), several=(5, 200))
"""Both sides of every switch in models.tiling."""
_LARGEST = Walk(batches=(1, 128), prompts=(40, 4096), several=())
"""A size for every schedule, and of the tiles the largest, which take most registers."""
WALKS = {"sm_80": _ALL, "sm_89": _LARGEST, "sm_90a": _ALL, "sm_100a": _LARGEST, "sm_120a": _LARGEST}
"""By target. sm_89, sm_100a and sm_120a compile the text of sm_80, apart from tile sizes."""

_OWN = {
    "streaming": ("LDG.128", "STG.128"),
    "skinny": ("LDG.128",),
    "staged": ("HMMA", "LDSM", "LDGSTS.128"),
    "pipelined": ("HGMMA", "UTMALDG"),
    "thin": ("HMMA", "LDSM", "UTMALDG"),
    "attention": ("HGMMA", "UTMALDG"),
}
"""What a new row requires, where all of its kernels have it: what makes the schedule."""
_FOREIGN = {
    "pipelined": ("HMMA", "LDGSTS"),
    "thin": ("HGMMA", "LDGSTS"),
    "attention": ("HMMA", "LDGSTS"),
}
"""What a new row forbids besides local memory, where none of its kernels has it."""
_LOCAL = ("LDL", "STL")

_FILE_REGISTERS, _MOST_REGISTERS, _MOST_THREADS, _MOST_BLOCKS = 65536, 255, 2048, 32
"""Of a multiprocessor; registers of a thread."""


@dataclass(frozen=True)
class Row:
    """What is expected of a kernel under a schedule on a target, in all of its specialisations.

    Attributes:
        registers: most that a thread may have.
        spill: most bytes of local memory that may be written, or read, for want of registers.
        shared: most bytes of shared memory of a block.
        required, forbidden: instructions, as `tilert.sass.contains` takes them.
    """

    target: str
    kernel: str
    schedule: str
    registers: int
    spill: int
    shared: int
    required: tuple[str, ...]
    forbidden: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells rows apart."""
        return self.target, self.kernel, self.schedule


@dataclass(frozen=True)
class Found:
    """What one specialisation of a kernel compiled to; see `Row`.

    Attributes:
        most_shared: bytes of shared memory that a block of the target can have.
        hasty: what touches memory before it waits for earlier kernels, where kernels can.
        overtaken: loads from what the copy engine may overwrite before they are complete.
    """

    target: str
    kernel: str
    schedule: str
    threads: int
    registers: int
    spill: int
    shared: int
    most_shared: int
    instructions: frozenset[str]
    hasty: tuple[str, ...] = ()
    overtaken: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str, str]:
        """Of its row."""
        return self.target, self.kernel, self.schedule

    def has(self, pattern: str) -> bool:
        """Whether one of its instructions is of a kind."""
        return any(sass.contains(name, pattern) for name in self.instructions)


def serve(device: TargetDevice, preset: str, walk: Walk) -> None:
    """Walk the serving path of a model, compiling what it launches."""
    model = Transformer.random(PRESETS[preset], device, tilert.bf16, max_len=4096)
    cache = model.new_cache(64, max(walk.batches))
    cache.set_pages(0, list(range(64)))
    for size in walk.batches:
        model.decode(cache, model.new_batch(cache, size))
    model.decode(cache, model.new_batch(cache, 2), Features(edits=True, logprobs=True))
    batch = model.new_batch(cache, 1)
    batch.set([Slot(row=0, token=0, position=0)])
    for length in walk.prompts:
        model.prefill(cache, batch, [PromptChunk(np.zeros(length, np.int32), 0)])
    model.score(model.new_batch(cache, 16), 0, [1, 2, 3])
    if walk.several:
        several = model.new_batch(cache, 8)
        several.set([Slot(row=0, token=0, position=0), *[Slot(row=-1, token=0, position=0)] * 7])
        for length in walk.several:
            model.prefill(cache, several, [PromptChunk(np.zeros(length, np.int32), 0)])


def found(device: TargetDevice) -> list[Found]:
    """What the kernels of a device compiled to.

    Raises:
        CompileError: where the disassembler is missing.
    """
    # Several specialisations may have compiled to the same.
    cubins = list(dict.fromkeys(kernel.cubin for kernel in device.kernels))
    listings = dict(zip(cubins, sass.disassemble(cubins, device.arch), strict=True))
    return [
        Found(
            device.arch, k.name, k.schedule, k.threads, k.resources.registers,
            max(k.resources.spill_stores, k.resources.spill_loads),
            k.resources.shared_bytes + k.shared_bytes, device.shared_bytes or 0,
            frozenset(sass.names(listings[k.cubin])),
            _hasty(k, listings[k.cubin]) if int(device.arch[3:].rstrip("a")) >= 90 else (),
            tuple(sass.overtaking(listings[k.cubin])),
        )
        for k in device.kernels
    ]  # fmt: skip


_AHEAD = {
    "thin": ("UTMALDG", "LDG.128"),
    "pipelined": ("UTMALDG",),
    "skinny": ("LDG.128.STRONG",),
    "streaming": ("LDG",),
}
"""How kernels of a schedule read operands ahead that no kernel of their graph writes. What else a
matrix-vector product reads is read by weak loads."""


def _hasty(kernel: CompiledKernel, lines: Sequence[str]) -> tuple[str, ...]:
    """What touches memory too early: in kernels that can read ahead, all but reading."""
    found = sass.hasty(lines)
    allowed = _AHEAD.get(kernel.schedule, ()) if kernel.early else ()
    if kernel.apart:
        # Under a condition of its own, which is looked at below.
        allowed = *allowed, "STG"
    hasty = [n for n in found if not any(sass.contains(n, kind) for kind in allowed)]
    if kernel.apart:
        hasty += sass.hasty_stores(lines)
    if kernel.schedule == "streaming":
        # Nothing at all where they may not.
        hasty += sass.hasty(lines, ahead=False)
    return tuple(hasty)


def problems(rows: Iterable[Row], kernels: Iterable[Found]) -> list[str]:
    """Where kernels are not what their rows expect, each once, for people."""
    table = {row.key: row for row in rows}
    out: dict[str, None] = {}
    unseen = dict(table)
    for kernel in kernels:
        row = table.get(kernel.key)
        unseen.pop(kernel.key, None)
        out |= dict.fromkeys(_missing(kernel) if row is None else _excess(row, kernel))
    return [*out, *map(_unused, unseen.values())]


def _missing(kernel: Found) -> list[str]:
    return [
        f"{_shown(kernel.key)} has no row in {TABLE.name}. If the schedule is the one that it"
        f" should have, `python -m scripts.check_kernels --write {kernel.target}` adds the row"
    ]


def _unused(row: Row) -> str:
    return (
        f"{_shown(row.key)} has a row in {TABLE.name}, but nothing that serving launches compiles"
        f" to it. If it should be gone, `python -m scripts.check_kernels --write {row.target}`"
        " drops the row"
    )


def _excess(row: Row, kernel: Found) -> list[str]:
    limits = [
        (kernel.registers, row.registers, "registers a thread"),
        (kernel.spill, row.spill, "bytes spilled"),
        (kernel.shared, row.shared, "bytes of shared memory a block"),
    ]
    over = kernel.shared > kernel.most_shared
    return [
        f"{_shown(row.key)}: {problem}"
        for problem in (
            *(f"{n} {what}, at most {most} are expected" for n, most, what in limits if n > most),
            *([f"{kernel.shared} bytes of shared memory a block, more than there are"] * over),
            *(
                f"{name} touches memory before the kernel has waited for earlier ones"
                for name in kernel.hasty
            ),
            *(
                f"{name} may be under way when what it reads is given back to the copy engine"
                for name in kernel.overtaken
            ),
            *(f"no {name} in its machine code" for name in row.required if not kernel.has(name)),
            *(f"{name} in its machine code" for name in row.forbidden if kernel.has(name)),
        )
    ]


def _shown(key: tuple[str, str, str]) -> str:
    target, kernel, schedule = key
    return f"{target}: {kernel} ({schedule})"


# -- the table -----------------------------------------------------------------------------------


def read(path: Path = TABLE) -> list[Row]:
    """The rows of a table.

    Raises:
        TableError: where it is no table.
    """
    names = [field.name for field in fields(Row)]
    out: list[Row] = []
    seen: set[tuple[str, str, str]] = set()
    with path.open(newline="", encoding="utf-8") as file:
        for number, cells in enumerate(csv.reader(file, skipinitialspace=True), 1):
            cells = [cell.strip() for cell in cells]
            where = f"{path.name}:{number}"
            if number == 1 and cells != names:
                raise TableError(f"{where}: the columns are {', '.join(names)}")
            if number == 1:
                continue
            try:
                target, kernel, schedule, registers, spill, shared, required, forbidden = cells
                numbers = int(registers), int(spill), int(shared)
            except ValueError:
                raise TableError(
                    f"{where}: a row has {len(names)} columns, three of them whole numbers"
                ) from None
            row = Row(
                target, kernel, schedule, *numbers, tuple(required.split()),
                tuple(forbidden.split()),
            )  # fmt: skip
            if target not in WALKS:
                raise TableError(f"{where}: no target {target}; there are {', '.join(WALKS)}")
            if row.key in seen:
                raise TableError(f"{where}: {_shown(row.key)} has a row already")
            seen.add(row.key)
            out.append(row)
    return out


def text(rows: Iterable[Row]) -> str:
    """The table of rows, with columns of one width, so that it can be read as it is."""
    order = list(WALKS)
    ordered = sorted(rows, key=lambda row: (row.kernel, row.schedule, order.index(row.target)))
    lines = [[field.name for field in fields(Row)]]
    lines += [
        [*row.key, str(row.registers), str(row.spill), str(row.shared), " ".join(row.required),
         " ".join(row.forbidden)]
        for row in ordered
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    out = io.StringIO()
    for cells in lines:
        padded = [f"{cell},".ljust(width + 2) for cell, width in zip(cells, widths, strict=True)]
        out.write("".join(padded).rstrip().removesuffix(",") + "\n")
    return out.getvalue()


def expected(rows: Iterable[Row], kernels: Sequence[Found], targets: Iterable[str]) -> list[Row]:
    """The table with the limits of what was found; rows of other targets stay as they are.

    A register limit is the most with which as many blocks of a kernel fit a multiprocessor as do
    now: a change fails where it costs places for blocks, not where the assembler takes one more.
    """
    old = {row.key: row for row in rows}
    done = set(targets)
    out = [row for row in old.values() if row.target not in done]
    for key in dict.fromkeys(kernel.key for kernel in kernels):
        mine = [kernel for kernel in kernels if kernel.key == key]
        own, shared = _OWN.get(key[2], ()), max(k.shared for k in mine)
        row = Row(
            *key, max(map(_register_limit, mine)), max(k.spill for k in mine), shared,
            tuple(name for name in own if all(k.has(name) for k in mine)),
            tuple(name for name in (*_LOCAL, *_FOREIGN.get(key[2], ()))
                  if not any(k.has(name) for k in mine)),
        )  # fmt: skip
        if key in old:
            row = replace(row, required=old[key].required, forbidden=old[key].forbidden)
        out.append(row)
    return out


def _register_limit(kernel: Found) -> int:
    # Registers are given out by eights.
    most = min(_MOST_THREADS // kernel.threads, _MOST_BLOCKS)
    blocks = min(_FILE_REGISTERS // (-(-kernel.registers // 8) * 8 * kernel.threads), most)
    return min(_FILE_REGISTERS // (blocks * kernel.threads) // 8 * 8, _MOST_REGISTERS)


def _report(rows: Iterable[Row], kernels: Sequence[Found]) -> str:
    """Measured beside expected, a line a row."""
    lines = []
    table = {row.key: row for row in rows}
    for key in sorted({kernel.key for kernel in kernels}):
        mine, row = [kernel for kernel in kernels if kernel.key == key], table.get(key)
        cells = [
            f"{max(getattr(k, name) for k in mine)}/{getattr(row, name) if row else '-'}"
            for name in ("registers", "spill", "shared")
        ]
        state = "no row" if row is None else "FAILS" if problems([row], mine) else "as expected"
        lines.append([*key, str(len(mine)), *cells, state])
    head = ["target", "kernel", "schedule", "built", "registers", "spill", "shared", ""]
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in (head, *lines)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if a kernel is not as expected, 2 where that cannot be told."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(WALKS)}")
    parser.add_argument("--write", action="store_true", help="bring the table up to date")
    chosen = parser.parse_args(arguments)
    targets = chosen.targets or list(WALKS)
    if unknown := [target for target in targets if target not in WALKS]:
        parser.error(f"no target {unknown[0]}; there are {', '.join(WALKS)}")
    try:
        # What is needed last is looked for first: compiling takes minutes.
        sass.disassembler()
        rows = read(TABLE) if TABLE.exists() else []
        kernels: list[Found] = []
        for target in targets:
            device = TargetDevice(target)
            serve(device, "qwen3-4b", WALKS[target])
            kernels += found(device)
    except (tilert.TilertError, TableError) as error:
        print(f"check_kernels: error: {error}", file=sys.stderr)
        return 2
    print("measured / most expected")
    print(_report(rows, kernels))
    if chosen.write:
        rows = expected(rows, kernels, targets)
        TABLE.write_text(text(rows), encoding="utf-8")
        print(f"\nwrote {TABLE.name}; what is as it should not be:")
    failures = problems([row for row in rows if row.target in targets], kernels)
    print("", *failures or ["all kernels are as expected"], sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
