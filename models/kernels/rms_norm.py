"""RMSNorm over the last axis."""

# mypy: disable-error-code="type-arg"

import tilert
from models.kernels.terms import both
from tilert import Const, Dyn, Mut, Ref, f32
from tilert.language import mean, rsqrt

__all__ = ["rms_norm"]


@tilert.kernel
def rms_norm(y: Mut[Dyn], x: Ref[Dyn], gain: Ref, eps: Const[float]) -> None:
    """y = x / sqrt(mean(x^2) + eps) * gain, computed in f32.

    y, x: [T, H], y in pieces (bt, H). gain: [H]. y may be of two terms
    (`terms`), in pieces (bt, 2, H).
    """
    t = y.index[0]
    v = x[t, :].to(f32)
    scale = rsqrt(mean(v * v, axis=1, keepdims=True) + eps)
    normed = v * scale * gain[:][None, :].to(f32)
    y.store(normed if y.shape[2:] == () else both(normed, y.dtype))
