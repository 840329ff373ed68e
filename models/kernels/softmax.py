"""Online softmax, shared by the attention kernels."""

from typing import Any

import tilert
from tilert import f32
from tilert.language import exp2, max, maximum, mma, sum, zeros

__all__ = ["MASKED", "UNSEEN", "online", "online_raw", "scores"]

LOG2_E = 1.4426950408889634
MASKED = float("-inf")
UNSEEN = -1e30
"""Start of the running maximum: below every score, yet finite, so that -inf - max is no NaN."""


@tilert.inline
def scores(q: Any, k: Any, scale: Any) -> Any:
    """q [M, D] by k [N, D] -> f32[M, N], scaled, in units of log 2."""
    return mma(q, k.T, zeros((q.shape[0], k.shape[0]), f32)) * (scale * LOG2_E)


@tilert.inline
def online(x: Any, v: Any, best: Any, total: Any, acc: Any) -> Any:
    """One step: scores x [M, N] in units of log 2, v [N, D] -> new best, total [M], acc [M, D].

    Milakov and Gimelshein 2018 (arXiv:1805.02867).
    """
    top = maximum(best, max(x, axis=1))
    weights = exp2(x - top[:, None])
    fade = exp2(best - top)
    total = total * fade + sum(weights, axis=1)
    acc = mma(weights.to(v.dtype), v, acc * fade[:, None])
    return top, total, acc


@tilert.inline
def online_raw(x: Any, v: Any, best: Any, total: Any, acc: Any, scale: Any) -> Any:
    """As `online`, with scores and `best` before their scaling by `scale` > 0: that is one fused
    multiply-add a score, where scaling it first would be another multiplication."""
    unit = scale * LOG2_E
    top = maximum(best, max(x, axis=1))
    weights = exp2(x * unit - (top * unit)[:, None])
    fade = exp2((best - top) * unit)
    total = total * fade + sum(weights, axis=1)
    acc = mma(weights.to(v.dtype), v, acc * fade[:, None])
    return top, total, acc
