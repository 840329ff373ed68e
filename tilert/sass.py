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

__all__ = ["contains", "disassemble", "hasty", "names"]

_SECTION = struct.Struct("<IIQQQQIIQQ")
# A line of the listing: address, perhaps a predicate, and the instruction.
_LINE = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(.*?)\s*;", re.MULTILINE)
_MEMORY = (
    *("LD", "LDG", "LDGSTS", "ST", "STG", "ATOM", "ATOMG", "RED", "REDG"),
    *("UBLKCP", "UBLKRED", "UTMALDG", "UTMASTG", "UTMAREDG"),
)
_NAME = re.compile(r"^(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)")


def disassemble(cubins: Sequence[bytes], arch: str) -> list[list[str]]:
    """The instructions of each cubin's kernel, in order, as the disassembler writes them.

    Branches name addresses that count from the first kernel on. All of them are read at once, for
    the disassembler takes half a second to start.

    Args:
        cubins: of one kernel each, for real architectures.
        arch: what they were compiled for, such as "sm_90a".

    Raises:
        CompileError: if there is no disassembler, or it does not know the architecture.
    """
    if not cubins:
        return []
    texts = [_text(cubin) for cubin in cubins]
    tool = _tool()
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
    ends = [bisect_left(addresses, end) for end in accumulate(map(len, texts), initial=0)]
    return [_without_padding([line for _, line in found[a:b]]) for a, b in pairwise(ends)]


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


def hasty(lines: Sequence[str]) -> list[str]:
    """Instructions of a listing that touch the device's memory before `griddepcontrol.wait`.

    All that do where a kernel never waits. See `tilert.cuda_graph` for why there must be none.
    """
    waits = [at for at, name in enumerate(names(lines)) if name == "ACQBULK"]
    before = lines[: waits[0]] if waits else lines
    return [name for name in names(before) if name.split(".")[0] in _MEMORY]


def _tool() -> str:
    """From PATH, where a toolkit puts it, or from its wheel."""
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
