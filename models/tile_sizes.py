"""Tile sizes: what kernels are told of how they are cut, and who says it."""

from dataclasses import dataclass
from typing import Protocol

from tilert import DType
from tilert.limits import MAX_TILE

__all__ = [
    "CHUNK",
    "DecodeTiles",
    "PrefillTiles",
    "ProductTiles",
    "SampleTiles",
    "Tiling",
    "chunks_of",
    "fitting",
]


@dataclass(frozen=True)
class ProductTiles:
    """Of x @ w.T: `rows` of x by `columns` (rows of w) a program, `depth` columns of K a step.

    shares: programs that share the columns of K of one tile.
    """

    rows: int
    columns: int
    depth: int
    shares: int = 1


@dataclass(frozen=True)
class DecodeTiles:
    """Of decode attention: KV heads a program, pages a step, programs a sequence; and columns of a
    KV head's outputs a program that merges their shares."""

    heads: int
    pages: int
    splits: int
    columns: int = 32


@dataclass(frozen=True)
class PrefillTiles:
    """Of prefill attention: `rows` of queries a program, pages of keys a step."""

    rows: int
    pages: int


CHUNK = 256
"""Logits of a chunk, which the sampler takes or leaves as a whole."""


def chunks_of(vocabulary: int) -> int:
    """Chunks that hold a row of logits."""
    return -(-vocabulary // CHUNK)


@dataclass(frozen=True)
class SampleTiles:
    """Of sampling: `chunks` a program where they are worked on side by side, `group` chunks a step
    where one program searches a row, which tries `fan` thresholds together."""

    chunks: int
    group: int
    fan: int


class Tiling(Protocol):
    """Sizes for one kind of device."""

    fill: int
    """Elements of a program that generates random weights."""

    share_elements: int
    """Most elements of the partial sums of a product in shares."""

    prompts: tuple[int, ...]
    """Sizes of recorded prefills, rising."""

    pair_tokens: int
    """Up to so many tokens of a prefill, what is multiplied has two terms (`kernels.terms`)."""

    wide_tokens: int
    """Up to so many tokens of a decode, activations are f32 between kernels: it costs nothing."""

    def tokens(self, count: int) -> int:
        """Tokens a program of kernels that work token by token."""

    def product(self, tokens: int, outputs: int, inputs: int) -> ProductTiles:
        """For a projection of `inputs` to `outputs` values."""

    def gate_up(self, tokens: int, outputs: int, inputs: int) -> ProductTiles:
        """For the two products of a gated layer in one kernel; never in shares."""

    def fuses_norm(self, tokens: int, weights: int, dtype: DType) -> bool:
        """Whether RMSNorm is recomputed in each program of a projection, of so many weights, or
        done before it."""

    def decode_attention(self, batch: int, kv_heads: int) -> DecodeTiles:
        """For one new token of each of `batch` sequences."""

    def prefill_attention(
        self, tokens: int, page_size: int, sequences: int, dim: int
    ) -> PrefillTiles:
        """For `tokens` new tokens of up to `sequences` sequences, heads of `dim`."""

    def recorded_prompt(self, count: int) -> int | None:
        """Size of the recorded prefill that takes `count` tokens, None where none does."""

    def padded_prompt(self, count: int) -> int:
        """How many tokens `count` of them are run as where no recorded prefill takes them."""

    def sampling(self, vocabulary: int) -> SampleTiles:
        """For rows of `vocabulary` logits."""


def fitting(count: int, each: int) -> int:
    """`count` halved until so many times `each` elements are a tile."""
    while count * each > MAX_TILE:
        count = -(-count // 2)
    return count
