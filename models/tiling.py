"""Tile sizes: the one place where kernels differ between kinds of device.

On the cpu a tile is as large as the work, so that a kernel is a few NumPy calls and a projection
one BLAS call. On CUDA tiles fill registers and shared memory, and there are enough of them to fill
the GPU (`cuda_tiling.py`, `hopper_tiling.py`).
"""

from models.cuda_tiling import CudaTiling, SmallTiling
from models.hopper_tiling import HopperTiling
from models.tile_sizes import (
    DecodeTiles,
    PrefillTiles,
    ProductTiles,
    SampleTiles,
    Tiling,
    chunks_of,
    fitting,
)
from tilert import Device, DType, bf16, f16

__all__ = ["CpuTiling", "tiling", "tiling_of"]


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
