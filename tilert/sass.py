"""The machine code of cubins as text, by NVIDIA's disassembler. Needs no GPU."""

import re
import shutil
import struct
import subprocess
import sysconfig
import tempfile
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

from tilert.errors import CompileError

__all__ = [
    "contains",
    "disassemble",
    "disassembler",
    "hasty",
    "hasty_stores",
    "names",
    "overtaking",
]

_SECTION = struct.Struct("<IIQQQQIIQQ")
# A line of the listing: address, perhaps a predicate, and the instruction.
_LINE = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(.*?)\s*;", re.MULTILINE)
_MEMORY = (
    *("LD", "LDG", "LDGSTS", "ST", "STG", "ATOM", "ATOMG", "RED", "REDG"),
    *("UBLKCP", "UBLKRED", "UTMALDG", "UTMASTG", "UTMAREDG"),
)
_BRANCH = re.compile(r"\b(0x[0-9a-f]+)$")
_BYTES = 16
"""Of an instruction."""
_ARRIVAL = re.compile(r"\bSYNCS\.ARRIVE\.TRANS64\.A1T0 RZ, \[")
_BRANCHES = ("BRA", "BSSY", "CALL", "JMP")
_NAME = re.compile(r"^(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)")


def disassemble(cubins: Sequence[bytes], arch: str) -> list[list[str]]:
    """The instructions of each cubin's kernel, in order, as the disassembler writes them.

    Branches name addresses that count from the kernel on. All kernels are read at once, for the
    disassembler takes half a second to start.

    Args:
        cubins: of one kernel each, for real architectures.
        arch: what they were compiled for, such as "sm_90a".

    Raises:
        CompileError: if there is no disassembler, or it does not know the architecture.
    """
    if not cubins:
        return []
    texts = [_text(cubin) for cubin in cubins]
    tool = disassembler()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "instructions"
        path.write_bytes(b"".join(texts))
        target = arch.upper().replace("_", "").replace("A", "a")
        done = subprocess.run(
            [tool, "--binary", target, str(path)], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise CompileError(
            f"{tool} cannot read machine code for {arch}: {done.stderr.strip()[:400]}"
        )
    found = _LINE.findall(done.stdout)
    addresses = [int(address, 16) for address, _ in found]
    starts = list(accumulate(map(len, texts), initial=0))
    ends = [bisect_left(addresses, end) for end in starts]
    return [
        _without_padding([_relative(line, start) for _, line in found[a:b]])
        for start, (a, b) in zip(starts, pairwise(ends), strict=False)
    ]


def _relative(line: str, start: int) -> str:
    """An instruction of a kernel at an address, with what it branches to counted from there."""
    if not _name(line).startswith(_BRANCHES):
        return line
    return _BRANCH.sub(lambda found: hex(int(found[1], 16) - start), line)


def _name(line: str) -> str:
    found = _NAME.match(line)
    return found[1] if found else ""


def _without_padding(lines: list[str]) -> list[str]:
    while lines and lines[-1] == "NOP":
        lines.pop()
    return lines


def names(lines: Sequence[str]) -> list[str]:
    """Name of each instruction of a listing, such as "LDG.E.128.CONSTANT"."""
    return [found[1] for line in lines if (found := _NAME.match(line))]


def contains(name: str, pattern: str) -> bool:
    """Whether an instruction's name is of a kind: "LDG.128" is any LDG that has .128 in its name.

    Args:
        pattern: the instruction, then parts of its name in their order.
    """
    first, *parts = name.split(".")
    wanted, *rest = pattern.split(".")
    left = iter(parts)
    return first == wanted and all(part in left for part in rest)


def hasty(lines: Sequence[str], ahead: bool = True) -> list[str]:
    """Instructions of a listing that touch the device's memory where a thread may not have come
    past `griddepcontrol.wait`. See `tilert.cuda_graph` for why there must be none but copies ahead.

    Args:
        ahead: whether waits that stand under a condition are passed by, as by kernels that may read
            ahead.
    """
    todo, seen = [0], set[int]()
    while todo:
        at = todo.pop()
        if at in seen or at >= len(lines):
            continue
        seen.add(at)
        todo += _next(lines, at, ahead)
    return [name for at in sorted(seen) if (name := _name(lines[at])).split(".")[0] in _MEMORY]


def hasty_stores(lines: Sequence[str]) -> list[str]:
    """Instructions of a listing that write the device's memory where a thread may not have come to
    its second `griddepcontrol.wait`, of a kernel that waits before it reads and before it stores.

    Every wait counts, also under a condition.
    """
    first = next((at for at, line in enumerate(lines) if _name(line) == "ACQBULK"), len(lines))
    rest = ["NOP" if at == first else line for at, line in enumerate(lines)]
    return [name for name in hasty(rest, ahead=False) if name.split(".")[0] not in ("LD", "LDG")]


def overtaking(lines: Sequence[str]) -> list[str]:
    """Loads from shared memory of a listing that an arrival at a barrier may overtake.

    Whoever waits for the arrival may have the copy engine overwrite what is loaded. Until a fence,
    or until threads wait at a barrier of the block, the loads are only under way. Instructions are
    taken in the order of the listing, whatever branches there are.
    """
    found: list[str] = []
    under_way: list[str] = []
    for line in lines:
        name = _name(line)
        kind = name.split(".")[0]
        if kind in ("LDS", "LDSM"):
            under_way.append(name)
        elif kind in ("MEMBAR", "BAR") and not name.startswith("BAR.ARV"):
            under_way.clear()
        elif _ARRIVAL.search(line):
            found += under_way
            under_way.clear()
    return found


def _next(lines: Sequence[str], at: int, ahead: bool) -> list[int]:
    """Places of the instructions that may come after one, before the wait."""
    line = lines[at]
    kind = _name(line).split(".")[0]
    target = _BRANCH.search(line)
    always = not line.startswith("@")
    if kind == "ACQBULK" and (always or not ahead):
        return []
    if kind in ("EXIT", "RET") and always:
        return []
    if kind not in ("BRA", "JMP", "CALL") or target is None:
        return [at + 1]
    there = int(target[1], 16) // _BYTES
    # A branch may have a condition among its operands too: "BRA P3, 0x2300", "BRA.DIV UR4, 0x80".
    whole = always and kind != "CALL" and re.fullmatch(r"(BRA|JMP)(\.U)? 0x[0-9a-f]+", line)
    if not ahead and not whole and there == at + 2 and _name(lines[at + 1]) == "ACQBULK":
        return [at + 1]
    return [there] if whole else [at + 1, there]


def disassembler() -> str:
    """Path of nvdisasm: from PATH, where a toolkit puts it, or from its wheel.

    Raises:
        CompileError: if there is none, with how to install it.
    """
    wheels = Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/nvdisasm")
    found = shutil.which("nvdisasm") or next(map(str, wheels), None)
    if found is None:
        raise CompileError(
            "machine code cannot be read without nvdisasm; install it with"
            " `pip install nvidia-cuda-nvdisasm`"
        )
    return found


def _text(cubin: bytes) -> bytes:
    """The instructions of a cubin, an ELF file of 64 bits: its section .text.KERNEL."""
    if cubin[:5] != b"\x7fELF\x02":
        raise CompileError("no cubin: it does not begin as an ELF file of 64 bits does")
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 58)
    sections = [_SECTION.unpack_from(cubin, table + size * i) for i in range(count)]
    strings = sections[names_at][4]
    for name, _, _, _, offset, length, *_ in sections:
        if cubin.startswith(b".text.", strings + name):
            return cubin[offset : offset + length]
    raise CompileError("no cubin: it has no section of instructions")
