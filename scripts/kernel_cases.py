"""What `bench_kernels` measures: cases, what they cost at least, and the variants of each."""

from dataclasses import asdict, dataclass
from typing import Any

__all__ = [
    "COMPILED", "GROUPS", "NONE", "PEER", "PEERS", "RESIDUAL", "Case", "Variant", "case_of",
    "cases", "variant_of",
]  # fmt: skip

PEER, COMPILED = "peer", "compiled"
PEERS = (PEER, COMPILED)
"""The peer's library, and what its compiler makes of its Python."""


@dataclass(frozen=True)
class Case:
    """One shape of one kernel.

    Attributes:
        group: which kernel; a key of `GROUPS`.
        sizes: by name, in the order of the label.
        dtype: of the inputs, as tilert calls it.
    """

    group: str
    name: str
    sizes: tuple[tuple[str, int], ...]
    dtype: str = "bf16"

    def __getitem__(self, size: str) -> int:
        return dict(self.sizes)[size]

    @property
    def label(self) -> str:
        """For people."""
        sizes = "x".join(str(n) for _, n in self.sizes)
        return f"{self.name} {sizes}" + (f" {self.dtype}" if self.group == "streaming" else "")

    @property
    def flops(self) -> int:
        """Multiplications and additions, of causal attention those of the triangle."""
        match self.group:
            case "gemm" | "skinny":
                return 2 * self["m"] * self["n"] * self["k"]
            case "gated":
                return 4 * self["m"] * self["n"] * self["k"]
            case "prefill":
                t = self["tokens"]
                return 4 * self["heads"] * self["dim"] * (t * (t + 1) // 2)
            case "decode":
                return 4 * self["batch"] * self["heads"] * self["dim"] * self["context"]
            case _:
                return self["rows"] * self["columns"]

    @property
    def nbytes(self) -> int:
        """Bytes that must be read and written at least."""
        size = 4 if self.dtype == "f32" else 2
        match self.group:
            case "gemm" | "skinny":
                m, n, k = self["m"], self["n"], self["k"]
                return size * (m * k + n * k + m * n)
            case "gated":
                m, n, k = self["m"], self["n"], self["k"]
                return size * (m * k + 2 * n * k + m * n)
            case "prefill":
                rows = 2 * self["heads"] + 2 * self["kv_heads"]
                return size * self["tokens"] * rows * self["dim"]
            case "decode":
                kv = 2 * self["kv_heads"] * self["context"]
                return size * self["batch"] * self["dim"] * (kv + 2 * self["heads"])
            case _:
                passes = {"add": 3, "copy": 2, "swiglu": 3, "rms_norm": 2}[self.name]
                return size * passes * self["rows"] * self["columns"]


@dataclass(frozen=True)
class Variant:
    """One way to run a case.

    Attributes:
        name: of `PEERS`, "ours" as the engine runs it, "plain" without schedules of one target, or
            "residual".
        schedules: what TILERT_SCHEDULES is.
        tile: tile sizes, where they are not those of `models.tiling`.
    """

    name: str
    schedules: str = ""
    tile: tuple[int, ...] = ()


NONE = "none"
"""For `Variant.schedules`: the schedule of every target alone."""
_PEER = Variant(PEER)
_COMPILED = Variant(COMPILED)
_OURS = Variant("ours")
_PLAIN = Variant("plain", NONE)
RESIDUAL = Variant("residual")
"""Ours as the layers run what ends in the residual stream: products are added to it."""
_ENDS = ("o", "down")


def _product(group: str, name: str, m: int, n: int, k: int) -> Case:
    return Case(group, name, (("m", m), ("n", n), ("k", k)))


PROJECTIONS = {
    "4B qkv": (6144, 2560),
    "4B o": (2560, 4096),
    "4B gate+up": (19456, 2560),
    "4B down": (2560, 9728),
    "32B qkv": (10240, 5120),
    "32B o": (5120, 8192),
    "32B gate+up": (51200, 5120),
    "32B down": (5120, 25600),
}
"""Outputs and inputs of the projections of Qwen3."""


def _gemm() -> list[Case]:
    # In order of interest: a run that is cut short has seen the squares and the 4B shapes.
    squares = [_product("gemm", "square", n, n, n) for n in (4096, 8192, 2048, 16384)]
    return squares + [
        _product("gemm", name, tokens, *sizes)
        for tokens in (2048, 512, 8192)
        for name, sizes in PROJECTIONS.items()
    ]


GATED = {"4B": (9728, 2560), "32B": (25600, 5120)}
"""Outputs and inputs of the first half of Qwen3's feed-forward layers."""


def _gated() -> list[Case]:
    return [
        _product("gated", name, tokens, *sizes)
        for tokens in (2048, 512, 8192)
        for name, sizes in GATED.items()
    ]


def _skinny() -> list[Case]:
    return [
        _product("skinny", name, tokens, *sizes)
        for name, sizes in PROJECTIONS.items()
        for tokens in (1, 2, 4, 8, 16, 32, 64)
    ]


def _streaming() -> list[Case]:
    def rows(name: str, count: int, columns: int, dtype: str) -> Case:
        return Case("streaming", name, (("rows", count), ("columns", columns)), dtype)

    return [
        *(rows(name, 1 << (power - 12), 4096, dtype)
          for power in (30, 28, 26, 24)
          for dtype in ("bf16", "f32")
          for name in ("copy", "add", "swiglu", "rms_norm")),
        # A model's width, from a prompt's chunk to what fills the memory.
        *(rows("rms_norm", count, 2560, "bf16") for count in (1 << 18, 1 << 16, 1 << 12)),
    ]  # fmt: skip


def _prefill() -> list[Case]:
    return [
        Case("prefill", "causal", (("tokens", tokens), ("heads", heads), ("kv_heads", 8),
                                   ("dim", 128)))
        for heads in (32, 64)
        for tokens in (512, 1024, 2048, 4096, 8192, 16384)
    ]  # fmt: skip


def _decode() -> list[Case]:
    return [
        Case("decode", "paged", (("batch", batch), ("context", context), ("heads", 32),
                                 ("kv_heads", 8), ("dim", 128)))
        for batch, context in ((1, 1024), (1, 4096), (1, 32768), (16, 4096), (64, 4096))
    ]  # fmt: skip


GROUPS = {
    "gemm": _gemm,
    "gated": _gated,
    "skinny": _skinny,
    "streaming": _streaming,
    "prefill": _prefill,
    "decode": _decode,
}

_SCHEDULED = ("gemm", "gated", "skinny", "prefill")
"""What has schedules of single targets."""
_FUSED = ("swiglu", "rms_norm")
"""What the peer's compiler makes one kernel of, where its library has several or a slower one."""


def cases(group: str) -> list[tuple[Case, list[Variant]]]:
    """The cases of a group, each with its variants: the peers, then ours."""
    ours = [_OURS, _PLAIN] if group in _SCHEDULED else [_OURS]
    return [
        (case, [_PEER, *([_COMPILED] if case.name in _FUSED else []), *ours,
                *([RESIDUAL] if group == "skinny" and case.name.endswith(_ENDS) else [])])
        for case in GROUPS[group]()
    ]  # fmt: skip


def case_of(values: dict[str, Any]) -> Case:
    """A case from what `asdict` and JSON made of it."""
    sizes = tuple((str(name), int(n)) for name, n in values["sizes"])
    return Case(values["group"], values["name"], sizes, values["dtype"])


def variant_of(values: dict[str, Any]) -> Variant:
    """A variant from what `asdict` and JSON made of it."""
    return Variant(values["name"], values["schedules"], tuple(values["tile"]))


def step(case: Case, variant: Variant) -> dict[str, Any]:
    """A case and a variant for JSON."""
    return {"case": asdict(case), "variant": asdict(variant)}
