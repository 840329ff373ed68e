"""Tile sizes: the one place where kernels differ between kinds of device.

On the cpu a tile is as large as the work, so that a kernel is a few NumPy calls and a projection
one BLAS call. On CUDA tiles fill registers and shared memory, and there are enough of them to fill
the GPU.
"""

import functools
import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from tilert import Device, DType, bf16, f16
from tilert.limits import MAX_TILE

__all__ = [
    "CHUNK",
    "CpuTiling",
    "CudaTiling",
    "DecodeTiles",
    "HopperTiling",
    "PrefillTiles",
    "ProductTiles",
    "ProductTime",
    "SampleTiles",
    "SmallTiling",
    "TileCost",
    "Tiling",
    "chunks_of",
    "quickest",
    "tiling",
    "tiling_of",
    "time_of",
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


class CpuTiling:
    """The whole of everything, as far as a tile goes."""

    fill = 1 << 16
    share_elements = 0
    prompts: tuple[int, ...] = ()
    pair_tokens = 0
    wide_tokens = 1
    key_width = 256
    """Most keys of a step of prefill attention: more scores leave the second-level cache."""

    def tokens(self, count: int) -> int:
        return count

    def product(self, tokens: int, outputs: int, inputs: int) -> ProductTiles:
        # A large head is too much for a tile. Programs along columns alone are one product.
        columns = fitting(outputs, inputs)
        return ProductTiles(fitting(tokens, max(inputs, columns)), columns, inputs)

    def gate_up(self, tokens: int, outputs: int, inputs: int) -> ProductTiles:
        return self.product(tokens, outputs, inputs)

    def fuses_norm(self, tokens: int, weights: int, dtype: DType) -> bool:
        return tokens == 1 and dtype != f16

    def decode_attention(self, batch: int, kv_heads: int) -> DecodeTiles:
        # One page: more would be gathered, which copies them.
        return DecodeTiles(heads=1, pages=1, splits=1)

    def prefill_attention(
        self, tokens: int, page_size: int, sequences: int, dim: int
    ) -> PrefillTiles:
        if sequences > 1:
            # Every sequence with a token in a program meets all of its rows.
            return PrefillTiles(rows=min(tokens, 64), pages=1)
        width = min(tokens, self.key_width)
        return PrefillTiles(rows=tokens, pages=-(-width // page_size))

    def recorded_prompt(self, count: int) -> int | None:
        return None

    def padded_prompt(self, count: int) -> int:
        # Each size has kernels of its own, compiled and kept: at most an eighth is padding.
        step = 1 << max(count.bit_length() - 4, 0)
        return -(-count // step) * step

    def sampling(self, vocabulary: int) -> SampleTiles:
        return SampleTiles(chunks=chunks_of(vocabulary), group=32, fan=3)


class CudaTiling:
    """Sizes for about 132 multiprocessors: the quickest of sweeps over Qwen3's shapes on an H200,
    cast into rules."""

    fill = 2048
    share_elements = 1 << 24
    pair_tokens = 0
    gemv_tokens = wide_tokens = 2
    """Up to this many tokens a projection is a matrix-vector product bound by reading weights."""

    prompts: tuple[int, ...] = (
        *(16, 32, 48, 64, 96, 128, 192, 256, 384, 512),
        *(640, 768, 896, 1024, 1280, 1536, 1792, 2048),
        *(2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192),
    )
    """Sizes of recorded prefills, of which those up to a chunk are made: at most a third of a short
    one is padding, and a fifth of a long one."""

    multiprocessors = 132
    programs = 264
    """Two programs a multiprocessor."""

    def tokens(self, count: int) -> int:
        return 1

    def product(self, tokens: int, outputs: int, inputs: int) -> ProductTiles:
        if tokens <= self.gemv_tokens:
            return self._matvec(tokens, outputs, inputs)
        steps = -(-inputs // 64)
        shares = 1
        if tokens > 128:
            # Long sums are worth sharing even where the tiles fill the device.
            count = -(-tokens // 128) * -(-outputs // 128)
            while steps // (2 * shares) >= (16 if count * shares < self.multiprocessors else 32):
                shares *= 2
            return ProductTiles(128, 128, 64, shares)
        rows = min(64, max(16, 1 << (tokens - 1).bit_length()))
        count = -(-tokens // rows) * -(-outputs // 64)
        # Every program needs a few steps to fill its pipeline.
        while count * shares < self.programs and steps // (2 * shares) >= 8:
            shares *= 2
        return ProductTiles(rows, 64, 64, shares)

    def gate_up(self, tokens: int, outputs: int, inputs: int) -> ProductTiles:
        if tokens == 1:
            return ProductTiles(1, 2 if inputs <= 4000 else 1, self._matvec_depth(inputs))
        if tokens <= self.gemv_tokens:
            return self._matvec(tokens, outputs, inputs)
        if tokens > 64:
            return ProductTiles(128, 64, 64)
        return ProductTiles(max(16, 1 << (tokens - 1).bit_length()), 64, 128)

    def _matvec(self, tokens: int, outputs: int, inputs: int) -> ProductTiles:
        """Programs that have their weights under way at once; larger ones, which read the input
        less often, where there are few weights and still enough programs for all multiprocessors.
        """
        if tokens > 1:
            return ProductTiles(tokens, 4, 512)
        most, elements = (16, 41_000) if outputs * inputs <= 25_000_000 else (4, 20_000)
        columns = 1
        while (
            2 * columns <= most
            and 2 * columns * inputs <= elements
            and outputs // (2 * columns) >= 384
        ):
            columns *= 2
        return ProductTiles(1, columns, self._matvec_depth(inputs) if columns < 16 else 512)

    def _matvec_depth(self, inputs: int) -> int:
        """Of a step of one token: the deepest of which all are whole."""
        return 1024 if inputs % 1024 == 0 else 512

    def fuses_norm(self, tokens: int, weights: int, dtype: DType) -> bool:
        # x * gain before its scaling may leave the range of f16.
        return tokens <= self.gemv_tokens and dtype != f16

    def decode_attention(self, batch: int, kv_heads: int) -> DecodeTiles:
        splits = 1
        while splits < 16 and batch * kv_heads * splits < self.programs // 2:
            splits *= 2
        # A program a multiprocessor, of heads of 128: what comes first is latency.
        columns = 16
        while columns < 128 and batch * kv_heads * 128 > self.multiprocessors * columns:
            columns *= 2
        return DecodeTiles(heads=1, pages=1, splits=splits, columns=columns)

    def prefill_attention(
        self, tokens: int, page_size: int, sequences: int, dim: int
    ) -> PrefillTiles:
        return PrefillTiles(rows=64 if tokens <= 64 else 128, pages=1)

    def recorded_prompt(self, count: int) -> int | None:
        # At 1024 tokens the ops of a layer still take longer to launch than to run.
        return next((size for size in self.prompts if size >= count), None)

    def padded_prompt(self, count: int) -> int:
        return count

    def sampling(self, vocabulary: int) -> SampleTiles:
        # 8192 logits a step are 16 a thread of the largest program: more thresholds would spill.
        return SampleTiles(chunks=min(4, chunks_of(vocabulary)), group=32, fan=3)


class SmallTiling(CudaTiling):
    """Sizes for blocks with less than 100 KiB of shared memory, as on sm_89 and sm_120a."""

    def gate_up(self, tokens: int, outputs: int, inputs: int) -> ProductTiles:
        tiles = super().gate_up(tokens, outputs, inputs)
        return replace(tiles, depth=64) if tiles.rows == 64 else tiles

    def prefill_attention(
        self, tokens: int, page_size: int, sequences: int, dim: int
    ) -> PrefillTiles:
        return PrefillTiles(rows=64, pages=1)


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
        waves = -(-outputs * products // (MULTIPROCESSORS * self.few_columns))
        programs = MULTIPROCESSORS * waves
        if self._shares_steps(tokens, outputs, inputs):
            programs //= 2
        columns = -(-outputs // (8 * programs)) * 8
        depth = 128 if products * columns <= 80 else 64
        return ProductTiles(_warpgroup_rows(tokens), columns, depth)

    def prefill_attention(
        self, tokens: int, page_size: int, sequences: int, dim: int
    ) -> PrefillTiles:
        tiles = super().prefill_attention(tokens, page_size, sequences, dim)
        # Heads that the schedule of attention takes: with 128 keys a step, the work between its
        # products takes the least time a key.
        return PrefillTiles(tiles.rows, max(1, 128 // page_size)) if dim in (64, 128) else tiles


def _warpgroup_rows(tokens: int) -> int:
    """Rows of a warpgroup's tile of few tokens."""
    return -(-tokens // 16) * 16


MULTIPROCESSORS = 132
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


SMALL_SHARED_BYTES = 100 << 10
"""Of a block: tiles for more are too large there."""


def tiling(
    device_kind: str,
    arch: str | None = None,
    dtype: DType | None = None,
    shared_bytes: int | None = None,
) -> Tiling:
    """The tile sizes for devices of a kind, "cpu" or "cuda".

    Args:
        arch: of a GPU, such as "sm_90a".
        dtype: of the weights.
        shared_bytes: most shared memory of a block.
    """
    if device_kind == "cpu":
        return CpuTiling()
    if shared_bytes is not None and shared_bytes < SMALL_SHARED_BYTES:
        return SmallTiling()
    return HopperTiling() if arch == "sm_90a" and dtype in (bf16, f16) else CudaTiling()


def tiling_of(device: Device, dtype: DType) -> Tiling:
    """The tile sizes for a device and weights of a type."""
    return tiling(device.kind, device.arch, dtype, device.shared_bytes)
