"""Activations of one step."""

import tilert
from models.config import ModelConfig
from models.kv_cache import kept_dtype
from models.tiling import tiling_of
from tilert import Array, Device, DType, f16, f32

__all__ = ["Scratch"]


class Scratch:
    """Memory for the activations of up to `size` tokens.

    Attributes:
        x: f32 [size, H], the residual stream: many small updates are added to it, whose rounding in
            a narrow dtype would be most of the error of the logits.
        normed: [size, H]. qkv: [size, (Hq + 2 Hkv) D]. q: [size, Hq, D], of the cache's dtype.
            attended: [size, Hq D]. hidden: [size, F]. Where it costs nothing they are less rounded:
            in decodes of up to `Tiling.wide_tokens` sequences qkv, attended and, for most F, hidden
            are f32. In prefills of up to `Tiling.pair_tokens` tokens qkv is f32, and normed,
            attended and hidden are of two terms, [size, 2, ...] (`models.kernels.terms`).
        terms: how many normed, attended and hidden have, 1 or 2.
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

        kept = kept_dtype(dtype)
        arrays: dict[str, Array] = {
            "x": empty(size, config.hidden_size, dtype=f32),
            "normed": empty(size, config.hidden_size),
            "qkv": empty(size, queries + 2 * keys),
            "q": empty(size, config.num_heads, config.head_dim, dtype=kept),
            "attended": empty(size, queries),
            "hidden": empty(size, config.intermediate_size),
        }
        widest = max(config.hidden_size, queries + 2 * keys)
        tiles = tiling_of(device, dtype)
        shares = min(tiles.share_elements, 16 * size * widest)
        self.shares = empty(shares, dtype=f32) if shares else None
        if decode:
            few = min(size, tiles.wide_tokens) if dtype != f16 else 0
            arrays["wide_attended"] = empty(few, queries, dtype=f32)
            # Where steps of 1024 are not whole, reading f32 would take longer.
            if config.intermediate_size % 1024 == 0:
                arrays["wide_hidden"] = empty(few, config.intermediate_size, dtype=f32)
        else:
            few = min(size, tiles.pair_tokens)
            arrays["wide_normed"] = empty(few, 2, config.hidden_size)
            arrays["wide_attended"] = empty(few, 2, queries)
            arrays["wide_hidden"] = empty(few, 2, config.intermediate_size)
        arrays["wide_qkv"] = empty(few, queries + 2 * keys, dtype=f32)
        # The most splits any batch up to this size takes: smaller batches split more.
        splits = tiles.decode_attention(1, config.num_kv_heads).splits
        if decode and splits > 1:
            shape = (size, splits, config.num_heads)
            arrays["acc"] = empty(*shape, config.head_dim, dtype=f32)
            arrays["best"] = empty(*shape, dtype=f32)
            arrays["total"] = empty(*shape, dtype=f32)
            half = config.head_dim // 2
            arrays["keys"] = empty(size, splits, config.num_kv_heads, 2, half, dtype=kept)
        self._bind(arrays)

    def _bind(self, arrays: dict[str, Array]) -> None:
        self._arrays = arrays
        self.size = arrays["x"].shape[0]
        self.x = arrays["x"]
        self.normed = self._widest("normed")
        self.terms = self.normed.size // self.x.size
        self.qkv = self._widest("qkv")
        self.q = arrays["q"]
        self.attended = self._widest("attended")
        self.hidden = self._widest("hidden")
        names = ("acc", "best", "total", "keys")
        self.splits = tuple(arrays[name] for name in names) if "acc" in arrays else None

    def _widest(self, name: str) -> Array:
        """The less rounded one, where there are no more tokens than it is for."""
        wide = self._arrays.get("wide_" + name)
        return self._arrays[name] if wide is None or wide.shape[0] < self.size else wide

    def head(self, size: int) -> "Scratch":
        """The memory of the first `size` tokens."""
        scratch = object.__new__(Scratch)
        scratch.shares = self.shares
        scratch._bind({name: a[: min(size, a.shape[0])] for name, a in self._arrays.items()})
        return scratch
