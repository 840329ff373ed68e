"""Tile sizes for GPUs: they fill registers and shared memory, and are enough to fill the GPU."""

from dataclasses import replace

from models.tile_sizes import (
    DecodeTiles,
    PrefillTiles,
    ProductTiles,
    SampleTiles,
    chunks_of,
)
from tilert import DType, f16

__all__ = ["MULTIPROCESSORS", "CudaTiling", "SmallTiling"]

MULTIPROCESSORS = 132
"""Of the device that sizes are chosen for, an H200."""


class CudaTiling:
    """The quickest sizes of sweeps over Qwen3's shapes on an H200, cast into rules."""

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

    programs = 2 * MULTIPROCESSORS

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
            while steps // (2 * shares) >= (16 if count * shares < MULTIPROCESSORS else 32):
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
        while columns < 128 and batch * kv_heads * 128 > MULTIPROCESSORS * columns:
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
