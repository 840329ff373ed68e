"""The model on a device: what one decode step and one prefill chunk run, op by op."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

import tilert
from models import kernels
from models.batch import Batch
from models.config import ModelConfig
from models.kv_cache import KVCache, page_bytes
from models.parameters import LayerParameters, Parameters, Progress
from models.prompt import Prompt, PromptChunk
from models.rope import rope_tables
from models.sampler import sample, score
from models.scratch import Scratch
from models.slot import PLAIN, Features, Slot
from models.tile_sizes import ProductTiles
from models.weights import Checkpoint
from models.winners import tuned_tiling
from tilert import Array, Device, DType, IndexMap

__all__ = ["PAGE_SIZE", "Transformer"]

PAGE_SIZE = 64
"""Positions a KV page: also the key tile of attention on CUDA."""


class Transformer:
    """Weights, position tables and the steps over them.

    Steps only enqueue work on the device's stream. Callers run them one after the other.

    Attributes:
        max_len: positions that the rotary tables cover.
        page_size: positions of a page of its caches.
    """

    def __init__(self, parameters: Parameters, *, max_len: int) -> None:
        self.parameters = parameters
        self.config: ModelConfig = parameters.config
        self.device: Device = parameters.device
        self.dtype: DType = parameters.dtype
        self.max_len = max_len
        self.page_size = PAGE_SIZE
        self._tiling = tuned_tiling(self.device, self.dtype)
        cos, sin = rope_tables(self.config, max_len)
        self._cos = tilert.from_numpy(cos, self.device)
        self._sin = tilert.from_numpy(sin, self.device)
        self._scratch: Scratch | None = None
        # f32[T, H], the residual stream that the last prefill's tokens left.
        self._hidden: Array | None = None

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        device: Device,
        dtype: DType,
        *,
        max_len: int,
        progress: Progress | None = None,
    ) -> "Transformer":
        """Read a checkpoint; `progress` gets bytes read so far and in all.

        Raises:
            LoadError: if the checkpoint does not fit its configuration.
            tilert.DeviceError: if the device's memory is too small.
        """
        return cls(Parameters.load(checkpoint, device, dtype, progress), max_len=max_len)

    @classmethod
    def random(
        cls, config: ModelConfig, device: Device, dtype: DType, *, max_len: int, seed: int = 0
    ) -> "Transformer":
        """Make weights up on the device."""
        return cls(Parameters.random(config, device, dtype, seed), max_len=max_len)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that decoding one token reads."""
        return self.parameters.bytes_per_token

    def page_bytes(self) -> int:
        """Bytes of one KV page over all layers."""
        return page_bytes(self.config, self.dtype, self.page_size)

    def new_cache(self, num_pages: int, max_seqs: int) -> KVCache:
        """A cache of `num_pages` pages for `max_seqs` sequences of up to `max_len` tokens.

        Raises:
            tilert.DeviceError: if the device's memory is too small.
        """
        return KVCache(
            self.config,
            self.device,
            self.dtype,
            num_pages=num_pages,
            page_size=self.page_size,
            max_seqs=max_seqs,
            max_len=self.max_len,
        )

    def new_batch(self, cache: KVCache, size: int) -> Batch:
        """Device state for steps of `size` sequences on `cache`."""
        return Batch(self.config, self.device, self.dtype, cache, size)

    def decode(self, cache: KVCache, batch: Batch, features: Features = PLAIN) -> None:
        """One step for every slot; only runs ops, so it can be captured.

        Reads ids and positions, appends keys and values at positions, leaves logits, samples into
        ids, and moves positions up by one where the slot has a row.

        Raises:
            ValueError: if the slots need more of the sampler than `features`.
        """
        self.decode_layers(cache, batch)
        self.decode_sample(cache, batch, features)

    def decode_layers(self, cache: KVCache, batch: Batch) -> None:
        """The part of `decode` before the logits, for which masks need not be known yet."""
        scratch, index = batch.scratch, batch.index
        index.update(batch.positions)
        self._embed(scratch.x, batch.ids)
        for number, layer in enumerate(self.parameters.layers):
            self._project(scratch.qkv, scratch.x, layer.input_norm, layer.qkv, scratch)
            self._decode_attention(cache, number, layer, batch)
            self._residual(scratch.attended, layer.o, scratch)
            self._feed_forward(scratch, layer)

    def decode_sample(self, cache: KVCache, batch: Batch, features: Features = PLAIN) -> None:
        """The rest of `decode`: logits and the next ids."""
        self._sample(cache, batch.scratch.x, batch, features, decoding=True)

    def prefill(self, cache: KVCache, batch: Batch, chunks: Sequence[PromptChunk]) -> None:
        """Run chunk i in the row that slot i of `batch` names; further slots are padding.

        Leaves the logits of each chunk's last token in `batch.logits`, the ids sampled from them in
        `batch.ids`, and the positions those go to in `batch.positions`.

        Raises:
            ValueError: if there are no chunks, their slots have no rows or others have, or tokens
                are missing or go beyond the row's pages or `max_len`.
        """
        self._check_prefill(cache, batch, chunks)
        last = np.zeros(batch.size, np.int32)
        last[: len(chunks)] = [chunk.stop - 1 for chunk in chunks]
        batch.positions.copy_from(last)
        rows = batch.rows[: len(chunks)].tolist()
        count = sum(len(chunk.tokens) for chunk in chunks)
        # Recordings with draws serve greedy slots too.
        features = replace(batch.features, draws=True)
        size = self._tiling.recorded_prompt(count)
        if size is None:
            prompt = Prompt(self._tiling.padded_prompt(count), batch.size, self.device)
            prompt.set(cache, rows, chunks)
            scratch = self._prefill_scratch(prompt.size)
            self._prefill_layers(cache, batch, prompt, scratch)
            self._prefill_sample(cache, batch, features)
            self._hidden = scratch.x[:count]
            return
        if size not in batch.prefills:
            self._record_prefill(cache, batch, Prompt(size, batch.size, self.device))
        if features not in batch.prefill_samplings:
            work = partial(self._prefill_sample, cache, batch, features)
            batch.prefill_samplings[features] = tilert.capture(self.device, work)
        prompt, scratch, layers = batch.prefills[size]
        prompt.set(cache, rows, chunks)
        layers.replay()
        batch.prefill_samplings[features].replay()
        self._hidden = scratch.x[:count]

    def prepare_prefill(
        self, cache: KVCache, batch: Batch, count: int
    ) -> Callable[[], None] | None:
        """Compile what `prefill` of so many tokens runs before the logits; gives what records it.

        Of the largest first: others work in its memory. None, and nothing is done, where a prefill
        of so many tokens is not recorded.
        """
        size = self._tiling.recorded_prompt(count)
        if size is None:
            return None
        prompt, scratch = Prompt(size, batch.size, self.device), self._prefill_scratch(size)
        # All layers run the same kernels.
        one = partial(self._prefill_layers, cache, batch, prompt, scratch, 1)
        tilert.capture(self.device, one).close()
        return partial(self._record_prefill, cache, batch, prompt)

    def _record_prefill(self, cache: KVCache, batch: Batch, prompt: Prompt) -> None:
        """Record the layers of a prefill with these inputs, unless those of its size are."""
        if prompt.size not in batch.prefills:
            scratch = self._prefill_scratch(prompt.size)
            work = partial(self._prefill_layers, cache, batch, prompt, scratch)
            batch.prefills[prompt.size] = prompt, scratch, tilert.capture(self.device, work)

    def _prefill_layers(
        self,
        cache: KVCache,
        batch: Batch,
        prompt: Prompt,
        scratch: Scratch,
        layers: int | None = None,
    ) -> None:
        """The ops of a prefill before the logits, of all layers or the first ones."""
        self._embed(scratch.x, prompt.ids)
        for number, layer in enumerate(self.parameters.layers[:layers]):
            self._project(scratch.qkv, scratch.x, layer.input_norm, layer.qkv, scratch)
            self._queries(cache, number, layer, scratch, prompt.positions, prompt.index)
            self._prefill_attention(cache, number, scratch, batch.index.rows, prompt)
            self._residual(scratch.attended, layer.o, scratch)
            self._feed_forward(scratch, layer)
        last = batch.scratch.x
        kernels.embedding(last.partition(1, last.shape[1]), prompt.last, scratch.x).run()

    def _prefill_sample(self, cache: KVCache, batch: Batch, features: Features) -> None:
        """The rest of a prefill: logits and the next id of each chunk's last token."""
        self._sample(cache, batch.scratch.x, batch, features, decoding=False)

    def score(self, batch: Batch, first: int, targets: Sequence[int]) -> None:
        """Log probabilities of tokens of the prompt chunk that the last prefill ran.

        Leaves in `batch.logprobs` how likely targets[i] and other ids were after the chunk's token
        number first + i. The batch's slots are overwritten.

        Raises:
            ValueError: if there are more targets than slots, or the last prefill had not as many
                tokens.
        """
        if len(targets) > batch.size:
            raise ValueError(f"a batch of {batch.size} slots cannot score {len(targets)} tokens")
        hidden = self._hidden
        if hidden is None or not 0 <= first <= hidden.shape[0] - len(targets):
            raise ValueError(f"the last prefill has no tokens {first}..{first + len(targets) - 1}")
        slots = [
            Slot(row=-1, token=int(token), position=first + place, logprobs=True)
            for place, token in enumerate(targets)
        ]
        batch.set(slots + [Slot(row=-1, token=0, position=first)] * (batch.size - len(slots)))
        x = batch.scratch.x
        kernels.embedding(x.partition(1, x.shape[1]), batch.positions, hidden).run()
        self._project_logits(x, batch)
        score(batch, self._tiling.sampling(self.config.vocab_size))

    def _check_prefill(self, cache: KVCache, batch: Batch, chunks: Sequence[PromptChunk]) -> None:
        rows = batch.rows
        if not chunks or (rows[: len(chunks)] < 0).any() or (rows[len(chunks) :] >= 0).any():
            raise ValueError(
                "prefill takes a batch whose first slots are set to rows of the cache, one for each"
                f" chunk; got rows {rows.tolist()} for {len(chunks)} chunks"
            )
        for row, chunk in zip(rows[: len(chunks)].tolist(), chunks, strict=True):
            if not len(chunk.tokens) or chunk.start < 0:
                raise ValueError(
                    "a chunk has at least one token, from position 0 on; got"
                    f" {len(chunk.tokens)} from {chunk.start} on"
                )
            room = len(cache.table.pages(row)) * cache.page_size
            if chunk.stop > min(room, self.max_len):
                raise ValueError(
                    f"tokens {chunk.start}..{chunk.stop - 1} do not fit: row {row} has pages for"
                    f" {room} positions, the model's tables cover {self.max_len}"
                )

    def _prefill_scratch(self, count: int) -> Scratch:
        """Kept between chunks, and replaced by a larger one where a chunk needs it."""
        if self._scratch is None or self._scratch.size < count:
            size = max(PAGE_SIZE, 1 << (count - 1).bit_length())
            self._scratch = Scratch(self.config, self.device, self.dtype, size, decode=False)
        return self._scratch.head(count)

    # -- parts of a step -----------------------------------------------------------------------

    def _embed(self, x: Array, ids: Array) -> None:
        tokens = self._tiling.tokens(x.shape[0])
        kernels.embedding(x.partition(tokens, x.shape[1]), ids, self.parameters.embed).run()

    def _normed(self, x: Array, gain: Array, out: Array) -> Array:
        tile = out.partition(self._tiling.tokens(x.shape[0]), *out.shape[1:])
        kernels.rms_norm(tile, x, gain, eps=self.config.rms_norm_eps).run()
        return out

    def _fuses_norm(self, w: Array, scratch: Scratch) -> bool:
        fuses = self._tiling.fuses_norm(scratch.size, w.size, self.dtype)
        return fuses and scratch.terms == 1

    def _project(self, y: Array, x: Array, gain: Array, w: Array, scratch: Scratch) -> None:
        """y = RMSNorm(x) @ w.T; `scratch` has memory for the norm and for partial sums."""
        if self._fuses_norm(w, scratch):
            tiles = self._tiling.product(y.shape[0], *w.shape)
            out = y.partition(tiles.rows, tiles.columns)
            eps = self.config.rms_norm_eps
            kernels.norm_linear(out, x, gain, w, eps=eps, bk=tiles.depth).run()
        else:
            normed = self._normed(x, gain, scratch.normed)
            self._multiply(y, normed, w, scratch, residual=False)

    def _residual(self, y: Array, w: Array, scratch: Scratch) -> None:
        """Residual stream += y @ w.T."""
        self._multiply(scratch.x, y, w, scratch, residual=True)

    def _multiply(self, y: Array, x: Array, w: Array, scratch: Scratch, residual: bool) -> None:
        """y (+)= x @ w.T; x may be of two terms."""
        x = x.reshape(-1, w.shape[1])
        tiles = self._tiling.product(x.shape[0], *w.shape)
        terms = x.shape[0] // y.shape[0]
        if not self._in_shares(y, x, w, scratch, tiles, residual):
            kernel = kernels.linear_residual if residual else kernels.linear
            out = y.partition(tiles.rows // terms, tiles.columns)
            kernel(out, x, w, bk=tiles.depth, terms=terms).run()

    def _in_shares(
        self, y: Array, x: Array, w: Array, scratch: Scratch, tiles: ProductTiles, residual: bool
    ) -> bool:
        """Run y (+)= x @ w.T in shares if `tiles` asks for it and there is memory for the sums."""
        tokens, outputs = y.shape
        size = tokens * tiles.shares * outputs
        if tiles.shares == 1 or scratch.shares is None or size > scratch.shares.shape[0]:
            return False
        shares = scratch.shares[:size].reshape(tokens, tiles.shares, outputs)
        steps, terms = -(-x.shape[1] // tiles.depth), x.shape[0] // tokens
        kernels.linear_shares(
            shares.partition(tiles.rows // terms, 1, tiles.columns),
            x,
            w,
            bk=tiles.depth,
            count=-(-steps // tiles.shares),
            terms=terms,
        ).run()
        kernels.add_shares(y.partition(1, min(outputs, 1024)), shares, residual=residual).run()
        return True

    def _feed_forward(self, scratch: Scratch, layer: LayerParameters) -> None:
        x, y, w, terms = scratch.x, scratch.hidden, layer.gate_up, scratch.terms
        tiles = self._tiling.gate_up(x.shape[0] * terms, *w.shape[1:])
        out = y.partition(tiles.rows // terms, *y.shape[1:-1], tiles.columns)
        if self._fuses_norm(w, scratch):
            eps = self.config.rms_norm_eps
            kernels.norm_gate_up_silu(out, x, layer.post_norm, w, eps=eps, bk=tiles.depth).run()
        else:
            normed = self._normed(x, layer.post_norm, scratch.normed).reshape(-1, x.shape[1])
            kernels.gate_up_silu(out, normed, w, bk=tiles.depth, terms=terms).run()
        self._residual(y, layer.down, scratch)

    def _queries(
        self,
        cache: KVCache,
        number: int,
        layer: LayerParameters,
        scratch: Scratch,
        positions: Array,
        index: IndexMap,
    ) -> None:
        """Projected queries into scratch, keys and values into the cache."""
        config = self.config
        heads, keys, dim = config.num_heads, config.num_kv_heads, config.head_dim
        q = scratch.q.reshape(-1, heads, 2, dim // 2)
        k_lo, k_hi, v = cache.slots(number)
        kernels.qk_norm_rope_append(
            q[:, :, 0].partition(1, heads, dim // 2),
            q[:, :, 1].partition(1, heads, dim // 2),
            k_lo.partition_at(index, 1, keys, dim // 2),
            k_hi.partition_at(index, 1, keys, dim // 2),
            v.partition_at(index, 1, keys, dim),
            scratch.qkv.reshape(-1, heads + 2 * keys, 2, dim // 2),
            layer.q_norm,
            layer.k_norm,
            self._cos,
            self._sin,
            positions,
            eps=config.rms_norm_eps,
            norm=config.qk_norm,
        ).run()

    def _decode_attention(
        self, cache: KVCache, number: int, layer: LayerParameters, batch: Batch
    ) -> None:
        """From projections to attention outputs, keys and values into the cache."""
        config, scratch, index = self.config, batch.scratch, batch.index
        tiles = self._tiling.decode_attention(batch.size, config.num_kv_heads)
        heads, keys, dim = config.num_heads, config.num_kv_heads, config.head_dim
        group = heads // keys * tiles.heads
        out = scratch.attended.reshape(scratch.q.shape)
        pages = (*cache.pages(number), cache.table.table, index.rows, batch.positions)
        consts = {"scale": 1 / math.sqrt(dim), "heads": tiles.heads, "pages": tiles.pages}
        if tiles.splits == 1 or scratch.splits is None:
            self._queries(cache, number, layer, scratch, batch.positions, index)
            piece = out.partition(1, group, dim)
            kernels.decode_attention(piece, scratch.q, *pages, **consts).run()
            return
        qkv = scratch.qkv.reshape(-1, heads + 2 * keys, 2, dim // 2)
        acc, best, total, new = (part[:, : tiles.splits] for part in scratch.splits)
        values = qkv[:, heads + keys :].reshape(-1, keys, dim)
        kernels.decode_attention_split(
            acc.partition(1, 1, group, dim),
            best.partition(1, 1, group),
            total.partition(1, 1, group),
            new[:, :, :, 0].partition(1, 1, tiles.heads, dim // 2),
            new[:, :, :, 1].partition(1, 1, tiles.heads, dim // 2),
            qkv[:, :heads],
            qkv[:, heads : heads + keys],
            values,
            *pages,
            layer.q_norm,
            layer.k_norm,
            self._cos,
            self._sin,
            **consts,
            eps=config.rms_norm_eps,
            norm=config.qk_norm,
        ).run()
        k, v = cache.places(number)
        part = min(dim, tiles.columns)
        kernels.merge_splits(
            out.partition(1, heads // keys, part),
            k.partition_at(index, 1, 1, part),
            v.partition_at(index, 1, 1, part),
            acc,
            best,
            total,
            new.reshape(*new.shape[:3], dim),
            values,
        ).run()

    def _prefill_attention(
        self, cache: KVCache, number: int, scratch: Scratch, rows: Array, prompt: Prompt
    ) -> None:
        config = self.config
        tiles = self._tiling.prefill_attention(
            scratch.size, cache.page_size, rows.shape[0], config.head_dim
        )
        terms = scratch.attended.shape[1:-1]
        out = scratch.attended.reshape(scratch.size, *terms, *scratch.q.shape[1:])
        kernels.prefill_attention(
            out.partition(tiles.rows, *terms, 1, config.head_dim),
            scratch.q,
            *cache.pages(number),
            cache.table.table,
            rows,
            prompt.slots,
            prompt.begins,
            prompt.starts,
            scale=1 / math.sqrt(config.head_dim),
            pages=tiles.pages,
        ).run()

    def _sample(
        self, cache: KVCache, x: Array, batch: Batch, features: Features, *, decoding: bool
    ) -> None:
        """Logits and the next id of each slot from its last token's residual stream."""
        self._project_logits(x, batch)
        tiles = self._tiling.sampling(self.config.vocab_size)
        sample(batch, cache.history, features, tiles, decoding=decoding)

    def _project_logits(self, x: Array, batch: Batch) -> None:
        parameters = self.parameters
        self._project(batch.logits, x, parameters.norm, parameters.head, batch.scratch)
