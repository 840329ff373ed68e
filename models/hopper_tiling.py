"""Tile sizes for sm_90a: its schedules, and what they cost."""

import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple

from models.cuda_tiling import MULTIPROCESSORS, CudaTiling
from models.tile_sizes import PrefillTiles, ProductTiles
from tilert import DType, f16

__all__ = ["HopperTiling", "ProductTime", "TileCost", "quickest", "time_of"]


@dataclass(frozen=True)
class TileCost:
    """Of a pipelined tile: microseconds of a wave of programs, and of each of its steps."""

    rows: int
    columns: int
    depth: int
    wave: float
    step: float


class HopperTiling(CudaTiling):
    """Sizes for sm_90a and 16-bit weights, where products of more than a few tokens are pipelined.

    There one program runs on each multiprocessor at a time. A product takes as many waves as it has
    tiles for all of them, and the last wave takes as long as a full one; or as long as memory needs
    for its operands. The tile is the one with which that is shortest.
    """

    wide_tokens = 1
    """What blocks share the steps of takes 16-bit operands."""

    few_tokens = 4
    """Up to here tiles of 64 rows are too empty."""

    pair_tokens = 32
    """Half of the rows of the smallest tiles: the other half is for second terms."""

    thin_rows, fused_rows, most_rows = 8, 16, 64
    """Up to so many tokens, and from so many bytes of weights on, a tile has rows for all of them,
    and its columns are read at the rate of memory: by warps, by warps where the norm is fused, and
    by a warpgroup."""
    thin_bytes = 20e6
    thin_columns, thin_step = 76, 40 << 10
    """At most so many columns of a tile; most bytes of weights of a step."""
    few_columns, shared_columns = 240, 32
    """At most so many columns of a warpgroup's tile, and half of one that two blocks share, unless
    it has more rows."""
    wide_rows, wide_bytes, wide_tiles, least_tiles = 32, 30e6, 56, 52
    """With more rows than these, and up to so many bytes of weights, two blocks share fewer and
    wider tiles, where at least so many are left: each reads all of the left operand, which is a
    fortieth of the weights."""
    gated_bytes = 110e6
    """Up to so many bytes of two products in one kernel, a tile has half as many columns: the work
    behind the first one's products is hidden behind the second one's weights."""

    product_costs: tuple[TileCost, ...] = (
        TileCost(64, 32, 128, 0.01, 0.315),
        TileCost(64, 48, 128, 0.19, 0.37),
        TileCost(64, 64, 64, 0.64, 0.225),
        TileCost(64, 64, 128, 0.7, 0.407),
        TileCost(64, 96, 64, 1.65, 0.239),
        TileCost(64, 128, 64, 2.79, 0.217),
        TileCost(64, 256, 64, 5.6, 0.339),
        TileCost(128, 64, 64, 1.08, 0.243),
        TileCost(128, 80, 64, 1.81, 0.263),
        TileCost(128, 96, 64, 2.26, 0.293),
        TileCost(128, 112, 64, 3.25, 0.323),
        TileCost(128, 128, 64, 2.66, 0.35),
        TileCost(128, 160, 64, 2.77, 0.445),
        TileCost(128, 192, 64, 2.89, 0.516),
        TileCost(128, 224, 64, 3.52, 0.601),
        TileCost(128, 256, 64, 4.89, 0.682),
        TileCost(256, 64, 64, 1.97, 0.479),
        TileCost(256, 80, 64, 2.5, 0.51),
        TileCost(256, 96, 64, 2.16, 0.589),
        TileCost(256, 128, 64, 4.65, 0.689),
        TileCost(256, 160, 64, 5.53, 0.881),
    )
    """Fitted to an H200's times at 4 to 16384 tokens of the projections of Qwen3 0.6B, 4B and 32B
    and of squares (`scripts/tune_products.py`, docs/benchmarks/README.md): the choices take 2 %
    longer than the best tile of each shape, on average."""

    gate_up_costs: tuple[TileCost, ...] = (
        TileCost(64, 32, 64, 0.0, 0.315),
        TileCost(64, 32, 128, 0.74, 0.529),
        TileCost(64, 64, 64, 1.81, 0.284),
        TileCost(64, 96, 64, 0.02, 0.615),
        TileCost(64, 128, 64, 2.94, 0.455),
        TileCost(128, 48, 64, 2.14, 0.353),
        TileCost(128, 64, 64, 2.31, 0.434),
        TileCost(128, 80, 64, 4.78, 0.503),
        TileCost(128, 96, 64, 3.64, 0.649),
        TileCost(128, 112, 64, 6.62, 0.697),
        TileCost(128, 128, 64, 3.82, 0.834),
        TileCost(128, 144, 64, 8.25, 0.92),
        TileCost(128, 152, 64, 9.52, 0.949),
        TileCost(128, 160, 64, 6.92, 1.038),
        TileCost(256, 64, 64, 3.88, 0.851),
        TileCost(256, 80, 64, 6.48, 1.041),
    )
    """The same for two products in one kernel, from 192 tokens on."""

    bandwidth, gate_up_bandwidth = 4.2e6, 3.6e6
    """Bytes of operands a microsecond."""

    def product(self, tokens: int, outputs: int, inputs: int) -> ProductTiles:
        if self._is_few(tokens, outputs * inputs):
            thin = tokens <= self.thin_rows and not self._shares_steps(tokens, outputs, inputs)
            return (self._thin if thin else self._few)(tokens, outputs, inputs, 1)
        if tokens <= self.few_tokens:
            return super().product(tokens, outputs, inputs)
        return quickest(self.product_costs, (1, 2, 4, 8), self.bandwidth, tokens, outputs, inputs)

    def gate_up(self, tokens: int, outputs: int, inputs: int) -> ProductTiles:
        if self._is_few(tokens, 2 * outputs * inputs):
            few = self._thin if tokens <= self.fused_rows else self._few
            return few(tokens, outputs, inputs, 2)
        if tokens <= self.few_tokens:
            return super().gate_up(tokens, outputs, inputs)
        # Twice the weights, as if memory had half the bandwidth.
        return quickest(
            self.gate_up_costs, (1,), self.gate_up_bandwidth / 2, tokens, outputs, inputs
        )

    def _is_few(self, tokens: int, weights: int) -> bool:
        return 1 < tokens <= self.most_rows and 2 * weights >= self.thin_bytes

    def fuses_norm(self, tokens: int, weights: int, dtype: DType) -> bool:
        few = tokens <= self.fused_rows and self._is_few(tokens, weights) and dtype != f16
        return few or super().fuses_norm(tokens, weights, dtype)

    def _shares_steps(self, tokens: int, outputs: int, inputs: int) -> bool:
        """Whether two blocks share the steps of a warpgroup's tile."""
        columns = max(_warpgroup_rows(tokens), self.shared_columns)
        return outputs < inputs and outputs <= MULTIPROCESSORS * columns

    def _thin(self, tokens: int, outputs: int, inputs: int, products: int) -> ProductTiles:
        """Columns of which whole waves of programs have about all: multiprocessors read at the same
        rate, however few of them do. Steps of few rows are deep, for there are fewer of them.

        Args:
            products: weights of one tile.
        """
        waves = -(-outputs * products // (MULTIPROCESSORS * self.thin_columns))
        columns = -(-outputs // (MULTIPROCESSORS * waves))
        # Four rows leave room for f32 that is not rounded.
        rows, weights = 4 if tokens <= 4 else -(-tokens // 8) * 8, products * columns
        depth = 512
        while 2 * depth * weights > self.thin_step:
            depth //= 2
        return ProductTiles(rows, columns, depth)

    def _few(self, tokens: int, outputs: int, inputs: int, products: int) -> ProductTiles:
        """As `_thin`, for a warpgroup, which takes whole 8 columns. Where the left operand is more
        than so few are themselves, twice as many are a tile, of which two blocks have half of the
        steps each (`tilert.codegen.cluster`).

        Args:
            products: weights of one tile.
        """
        weights = 2 * products * outputs * inputs
        halves = 2 if products > 1 and weights <= self.gated_bytes else 1
        waves = -(-outputs * products * halves // (MULTIPROCESSORS * self.few_columns))
        shares = self._shares_steps(tokens, outputs, inputs)
        columns = _eights(outputs, MULTIPROCESSORS * waves // (2 if shares else 1))
        if shares and tokens > self.wide_rows and weights <= self.wide_bytes:
            wide = _eights(outputs, self.wide_tiles)
            columns = wide if -(-outputs // wide) >= self.least_tiles else columns
        depth = 128 if products * columns <= 80 else 64
        return ProductTiles(_warpgroup_rows(tokens), columns, depth)

    def prefill_attention(
        self, tokens: int, page_size: int, sequences: int, dim: int
    ) -> PrefillTiles:
        tiles = super().prefill_attention(tokens, page_size, sequences, dim)
        # Heads that the schedule of attention takes: with 128 keys a step, the work between its
        # products takes the least time a key.
        return PrefillTiles(tiles.rows, max(1, 128 // page_size)) if dim in (64, 128) else tiles


def _eights(outputs: int, tiles: int) -> int:
    """Columns of at most so many tiles, whole 8."""
    return -(-outputs // (8 * tiles)) * 8


def _warpgroup_rows(tokens: int) -> int:
    """Rows of a warpgroup's tile of few tokens."""
    return -(-tokens // 16) * 16


LAUNCH, SHARE_BANDWIDTH = 2.0, 2e6
"""Of shares: microseconds of one more kernel, bytes of partial sums a microsecond."""
EXPOSED = 0.1
"""Share of the shorter of copies and products that the longer one does not hide."""


class ProductTime(NamedTuple):
    """Microseconds of products, as if their operands were there, and of adding up their shares."""

    products: float
    sums: float


def time_of(tile: TileCost, shares: int, tokens: int, outputs: int, inputs: int) -> ProductTime:
    """How long a product takes by its cost."""
    programs = -(-tokens // tile.rows) * -(-outputs // tile.columns) * shares
    waves, steps = -(-programs // MULTIPROCESSORS), -(-inputs // tile.depth)
    products = waves * (tile.wave + tile.step * -(-steps // shares))
    sums = LAUNCH + 8 * shares * tokens * outputs / SHARE_BANDWIDTH if shares > 1 else 0.0
    return ProductTime(products, sums)


@functools.lru_cache(maxsize=4096)
def quickest(
    costs: tuple[TileCost, ...],
    shares: tuple[int, ...],
    bandwidth: float,
    tokens: int,
    outputs: int,
    inputs: int,
) -> ProductTiles:
    """The tile and the shares by which a product takes the least time.

    Kept, since prompts that are not recorded ask for each layer anew.
    """
    memory = 2 * (tokens * (inputs + outputs) + outputs * inputs) / bandwidth

    def time(choice: tuple[TileCost, int]) -> float:
        products, sums = time_of(*choice, tokens, outputs, inputs)
        return sums + max(products, memory) + EXPOSED * min(products, memory)

    # Rows past the last token are work for nothing.
    fitting = [tile for tile in costs if tile.rows < tokens + 64]
    tile, count = min(itertools.product(fitting, shares), key=time)
    return ProductTiles(tile.rows, tile.columns, tile.depth, count)
