"""Tile kernels of the transformer, one operation a file."""

from models.kernels.decode_attention import (
    decode_attention,
    decode_attention_split,
    merge_splits,
)
from models.kernels.embedding import embedding
from models.kernels.gate_up import gate_up_silu, norm_gate_up_silu
from models.kernels.linear import (
    add_shares,
    linear,
    linear_residual,
    linear_shares,
    norm_linear,
)
from models.kernels.logit_edits import count_tokens, edit_logits
from models.kernels.logprobs import chunk_mass, logprobs
from models.kernels.prefill_attention import prefill_attention
from models.kernels.random import fill_normal
from models.kernels.rms_norm import rms_norm
from models.kernels.rope_append import qk_norm_rope_append
from models.kernels.sampling import chunk_best, draw, order_chunks, pick, rank_chunks
from models.kernels.seating import seat
from models.kernels.threshold import threshold

__all__ = [
    "add_shares",
    "chunk_best",
    "chunk_mass",
    "count_tokens",
    "decode_attention",
    "decode_attention_split",
    "draw",
    "edit_logits",
    "embedding",
    "fill_normal",
    "gate_up_silu",
    "linear",
    "linear_residual",
    "linear_shares",
    "logprobs",
    "merge_splits",
    "norm_gate_up_silu",
    "norm_linear",
    "order_chunks",
    "pick",
    "prefill_attention",
    "qk_norm_rope_append",
    "rank_chunks",
    "rms_norm",
    "seat",
    "threshold",
]
