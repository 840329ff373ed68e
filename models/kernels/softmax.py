"""Online softmax, shared by the attention kernels."""

from typing import Any

import tilert
from tilert import f32
from tilert.language import broadcast_to, exp2, full, max, maximum, mma, sum, where, zeros

__all__ = ["MASKED", "UNSEEN", "begin", "online", "online_raw", "scores"]

LOG2_E = 1.4426950408889634
MASKED = float("-inf")
UNSEEN = -1e30
"""Start of the running maximum: below every score, yet finite, so that -inf - max is no NaN."""


@tilert.inline
def scores(q: Any, k: Any, scale: Any) -> Any:
    """q [M, D] by k [N, D] -> f32[M, N], scaled, in units of log 2."""
    return mma(q, k.T, zeros((q.shape[0], k.shape[0]), f32)) * (scale * LOG2_E)


@tilert.inline
def begin(q: Any, k: Any, v: Any, seen: Any, scale: Any) -> Any:
    """The state best, total [M], acc [M, D] after one key where it is `seen`, a scalar, or before
    any: halves of queries and of the key, [M, D/2] each, v f32 [M, D]; or [1, ...] of the key."""
    rows = q[0].shape[0]
    x = q[0].to(f32) * k[0].to(f32) + q[1].to(f32) * k[1].to(f32)
    best = where(seen, sum(x, axis=1) * (scale * LOG2_E), UNSEEN)
    total = full((rows,), where(seen, 1.0, 0.0), f32)
    return best, total, broadcast_to(where(seen, v, 0.0), (rows, v.shape[1]))


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
