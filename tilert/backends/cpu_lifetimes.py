"""How long the generated code holds its arrays: large ones are dropped behind their last use.

Python drops what a name holds when the function returns, which would be the sum of all temporaries.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["bounded"]

# Bytes from which on an array is dropped early.
_LARGE = 1 << 16

_ASSIGNED = re.compile(r"\s*(\w+(?:, \w+)*) = ")
_WORD = re.compile(r"\b[a-z]\d+\b")
_INDENT = 4


@dataclass
class _Name:
    """A local name: lines that assign it first and mention it last, and the arrays it may hold."""

    first: int
    last: int
    arrays: set[str] = field(default_factory=set)


def bounded(
    lines: Sequence[str], sizes: Mapping[str, int], passing: Mapping[str, int]
) -> tuple[list[str], int]:
    """The lines with large arrays dropped where nothing uses them any more, and the peak in bytes.

    Args:
        sizes: bytes of each new array, by the name that it is assigned to first.
        passing: bytes that a line takes while it runs, by its text.
    """
    if sum(sizes.values()) + sum(passing.values()) < _LARGE:
        return list(lines), 0
    depths = [(len(line) - len(line.lstrip())) // _INDENT for line in lines]
    names = _names(lines, sizes)
    ends = {name: _end(lines, depths, n) for name, n in names.items()}
    gone: dict[str, int] = {}
    for name, n in names.items():
        gone |= {array: max(gone.get(array, 0), ends[name][0]) for array in n.arrays}
    live = [0] * (len(lines) + 1)
    for array, end in gone.items():
        live[names[array].first] += sizes[array]
        live[end] -= sizes[array]
    peak = total = 0
    for line, change in zip(lines, live, strict=False):
        total += change
        peak = max(peak, total + passing.get(line.strip(), 0))
    drops: dict[tuple[int, int], list[str]] = {}
    for name, n in names.items():
        if any(sizes[array] >= _LARGE for array in n.arrays) and ends[name][0] < len(lines):
            drops.setdefault(ends[name], []).append(name)
    out = list(lines)
    # From the last line up, and what ends in an inner block goes before what ends in the outer.
    for (end, depth), dropped in sorted(drops.items(), key=lambda d: (-d[0][0], d[0][1])):
        out.insert(end, " " * (_INDENT * depth) + f"del {', '.join(dropped)}")
    return out, peak


def _names(lines: Sequence[str], sizes: Mapping[str, int]) -> dict[str, _Name]:
    names: dict[str, _Name] = {}
    # A loop's later lines come before its first ones as well.
    for _ in range(2):
        for i, line in enumerate(lines):
            match = _ASSIGNED.match(line)
            mentioned = _WORD.findall(line)
            for target in match[1].split(", ") if match else ():
                name = names.setdefault(target, _Name(i, i))
                if target in sizes:
                    name.arrays.add(target)
                    continue
                for word in mentioned:
                    if word in names:
                        name.arrays |= names[word].arrays
            for word in mentioned:
                if word in names:
                    names[word].last = i
    return names


def _end(lines: Sequence[str], depths: Sequence[int], name: _Name) -> tuple[int, int]:
    """The line before which a name can go, and the depth of the block it ends in."""
    depth = min(depths[name.first : name.last + 1])
    end = name.last + 1
    while end < len(lines) and (
        depths[end] > depth or (depths[end] == depth and lines[end].lstrip() == "else:")
    ):
        end += 1
    return end, depth
