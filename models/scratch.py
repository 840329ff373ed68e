"""Activations of one step."""

import tilert
from models.config import ModelConfig
from models.tiling import tiling
from tilert import Array, Device, DType, f32

__all__ = ["Scratch"]


class Scratch:
    """Memory for the activations of up to `size` tokens.

    Attributes:
        x: f32 [size, H], the residual stream: many small updates are added to it, whose rounding in
            a narrow dtype would be most of the error of the logits. normed: [size, H].
        qkv: [size, (Hq + 2 Hkv) D]. q: [size, Hq, D]. attended: [size, Hq D]. For decodes of one or
            two sequences, whose products are no work for tensor cores, qkv and attended are f32:
            there it costs nothing.
        hidden: [size, F].
        shares: f32 [n], partial sums of products in shares; None where there are none.
        splits: of split decode attention, f32 [size, S, Hq, D], [size, S, Hq] and [size, S, Hq]
            (acc, best and total of its kernel), and new keys [size, S, Hkv, 2, D/2]; None where it
            does not split.
    """

    def __init__(
        self, config: ModelConfig, device: Device, dtype: DType, size: int, decode: bool = True
    ) -> None:
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

        def empty(*shape: int, dtype: DType = dtype) -> Array:
            return tilert.empty(shape, dtype, device)

        arrays: dict[str, Array] = {
            "x": empty(size, config.hidden_size, dtype=f32),
            "normed": empty(size, config.hidden_size),
            "qkv": empty(size, queries + 2 * keys),
            "q": empty(size, config.num_heads, config.head_dim),
            "attended": empty(size, queries),
            "hidden": empty(size, config.intermediate_size),
        }
        widest = max(config.hidden_size, queries + 2 * keys)
        shares = min(tiling(device.kind).share_elements, 16 * size * widest)
        self.shares = empty(shares, dtype=f32) if shares else None
        few, tiles = 0, tiling(device.kind)
        while decode and few < size and tiles.fuses_norm(few + 1, 0, dtype):
            few += 1
        if few:
            arrays["wide_qkv"] = empty(few, queries + 2 * keys, dtype=f32)
            arrays["wide_attended"] = empty(few, queries, dtype=f32)
        # The most splits any batch up to this size takes: smaller batches split more.
        splits = tiling(device.kind).decode_attention(1, config.num_kv_heads).splits
        if decode and splits > 1:
            shape = (size, splits, config.num_heads)
            arrays["acc"] = empty(*shape, config.head_dim, dtype=f32)
            arrays["best"] = empty(*shape, dtype=f32)
            arrays["total"] = empty(*shape, dtype=f32)
            half = config.head_dim // 2
            arrays["keys"] = empty(size, splits, config.num_kv_heads, 2, half)
        self._bind(arrays)

    def _bind(self, arrays: dict[str, Array]) -> None:
        self._arrays = arrays
        self.size = arrays["x"].shape[0]
        self.x = arrays["x"]
        self.normed = arrays["normed"]
        few = arrays["wide_qkv"].shape[0] if "wide_qkv" in arrays else 0
        wide = "wide_" if self.size <= few else ""
        self.qkv = arrays[wide + "qkv"]
        self.q = arrays["q"]
        self.attended = arrays[wide + "attended"]
        self.hidden = arrays["hidden"]
        names = ("acc", "best", "total", "keys")
        self.splits = tuple(arrays[name] for name in names) if "acc" in arrays else None

    def head(self, size: int) -> "Scratch":
        """The memory of the first `size` tokens."""
        scratch = object.__new__(Scratch)
        scratch.shares = self.shares
        scratch._bind({name: a[: min(size, a.shape[0])] for name, a in self._arrays.items()})
        return scratch
