"""RMSNorm over the last axis."""

# mypy: disable-error-code="type-arg"

import tilert
from tilert import Const, Dyn, Mut, Ref, f32
from tilert.language import mean, rsqrt

__all__ = ["rms_norm"]


@tilert.kernel
def rms_norm(y: Mut[Dyn], x: Ref[Dyn], gain: Ref, eps: Const[float]) -> None:
    """y = x / sqrt(mean(x^2) + eps) * gain, computed in f32.

    y, x: [T, H], y in pieces (bt, H). gain: [H].
    """
    t, h = y.index
    v = x[t, h].to(f32)
    scale = rsqrt(mean(v * v, axis=1, keepdims=True) + eps)
    y.store(v * scale * gain[h][None, :].to(f32))
