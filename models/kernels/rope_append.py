"""Between the projection of queries, keys and values and attention: norm, rotation, KV append."""

# mypy: disable-error-code="type-arg"

from typing import Any

import tilert
from tilert import Const, Dyn, Mut, Ref, f16, f32
from tilert.language import maximum, minimum, rsqrt, span, sum

__all__ = ["kept", "qk_norm_rope_append"]


LARGEST = 65504.0
"""Of f16."""


@tilert.inline
def kept(x: Any, dtype: Any) -> Any:
    """Values as the cache holds them: what is beyond f16 is its largest, for attention would make
    NaN of infinities."""
    if dtype == f16:
        return minimum(maximum(x.to(f32), -LARGEST), LARGEST).to(dtype)
    return x.to(dtype)


@tilert.inline
def rotated(
    qkv: Any, t: Any, heads: Any, gain: Any, cos: Any, sin: Any, eps: Any, norm: Any
) -> Any:
    """Both halves of some heads of one token, normed where `norm` and rotated; f32."""
    lo = qkv[t, heads, 0, :].to(f32)
    hi = qkv[t, heads, 1, :].to(f32)
    if norm:
        squares = sum(lo * lo + hi * hi, axis=1)
        scale = rsqrt(squares / (2 * lo.shape[1]) + eps)[:, None]
        lo = lo * scale * gain[0, :][None, :].to(f32)
        hi = hi * scale * gain[1, :][None, :].to(f32)
    return lo * cos - hi * sin, hi * cos + lo * sin


@tilert.kernel
def qk_norm_rope_append(
    q_lo: Mut[Dyn],
    q_hi: Mut[Dyn],
    k_lo: Mut[Dyn],
    k_hi: Mut[Dyn],
    v: Mut[Dyn],
    qkv: Ref[Dyn],
    q_gain: Ref,
    k_gain: Ref,
    cos: Ref[Dyn],
    sin: Ref[Dyn],
    positions: Ref[Dyn],
    eps: Const[float],
    norm: Const[bool],
) -> None:
    """Queries, and keys and values at their place in the cache, from one projection's output.

    Heads are cut in halves because RoPE (rotate-half) pairs element i with i + D/2.

    q_lo, q_hi: [T, Hq, D/2], halves of the queries, in pieces (1, Hq, D/2).
    k_lo, k_hi: [slots, Hkv, D/2] and v: [slots, Hkv, D], of the cache, placed by an index map of
    length T (O7). qkv: [T, Hq + 2 Hkv, 2, D/2]. q_gain, k_gain: [2, D/2], read if `norm`.
    cos, sin: f32[positions, D/2]. positions: i32[T].
    """
    t = q_lo.index[0].number
    queries, keys = q_lo.shape[1], k_lo.shape[1]
    position = positions[t]
    c = cos[position, :][None, :]
    s = sin[position, :][None, :]
    lo, hi = rotated(qkv, t, span(0, queries), q_gain, c, s, eps, norm)
    q_lo.store(kept(lo, q_lo.dtype).reshape(q_lo.shape))
    q_hi.store(kept(hi, q_hi.dtype).reshape(q_hi.shape))
    lo, hi = rotated(qkv, t, span(queries, keys), k_gain, c, s, eps, norm)
    k_lo.store(kept(lo, k_lo.dtype).reshape(k_lo.shape))
    k_hi.store(kept(hi, k_hi.dtype).reshape(k_hi.shape))
    value = qkv[t, span(queries + keys, keys), :, :]
    v.store(kept(value, v.dtype).reshape(v.shape))
