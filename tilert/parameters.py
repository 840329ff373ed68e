"""The parameters of a kernel by kind, as launches need them."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tilert.constant import constant_key

__all__ = ["Decl", "Plan"]


class Decl(Protocol):
    """What an op needs to know of a declared parameter."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def dyn(self) -> frozenset[int]: ...
    @property
    def accumulate(self) -> str: ...


class Plan:
    """The parameters of a kernel by kind, so that a launch need not sort them.

    Attributes:
        muts, refs: (place in the signature, place among the arrays, declaration).
        consts, mut_places, ref_places: places in the signature.
        arrays: places of all arrays.
        walks: whether programs walk the pieces they own, so that there may be fewer programs.
        key: of a kernel and the values of its parameters, what tells launches apart: partitions go
            by their own keys, arrays by their addresses in the host's memory, which are theirs as
            long as they live.
    """

    __slots__ = (
        "arrays",
        "consts",
        "key",
        "mut_places",
        "muts",
        "ref_places",
        "refs",
        "run_time",
        "walks",
    )

    def __init__(self, decls: Sequence[Decl], walks: bool = False) -> None:
        self.walks = walks
        self.arrays = [place for place, d in enumerate(decls) if d.kind != "const"]
        of_kind: dict[str, list[tuple[int, int, Decl]]] = {"mut": [], "ref": []}
        for number, place in enumerate(self.arrays):
            of_kind[decls[place].kind].append((place, number, decls[place]))
        self.muts = of_kind["mut"]
        self.refs = of_kind["ref"]
        self.mut_places = [place for place, _, _ in self.muts]
        self.ref_places = [place for place, _, _ in self.refs]
        self.consts = [place for place, d in enumerate(decls) if d.kind == "const"]
        # Axes whose extent is run time where no Mut has an index map and none is padded.
        dyns = [d.dyn for _, _, d in self.muts]
        self.run_time: frozenset[int] = frozenset.intersection(*dyns) if dyns else frozenset()
        self.key = _key_function([d.kind for d in decls])


_PARTS = {"mut": "v[{}].key", "ref": "id(v[{}])", "const": "constant_key(v[{}])"}


def _key_function(kinds: list[str]) -> Callable[[Any, Sequence[Any]], tuple[object, ...]]:
    """One expression: a loop over the parameters would take longer than the rest of a launch."""
    parts = [_PARTS[kind].format(place) for place, kind in enumerate(kinds)]
    text = f"lambda kernel, v: (kernel, kernel.captured(), {', '.join(parts)})"
    function: Callable[[Any, Sequence[Any]], tuple[object, ...]]
    function = eval(text, {"id": id, "constant_key": constant_key})
    return function
