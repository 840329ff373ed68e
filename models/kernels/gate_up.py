"""The first half of the gated feed-forward layer: silu(x @ gate.T) * (x @ up.T)."""

# mypy: disable-error-code="type-arg, assignment"

import tilert
from models.kernels.activations import silu
from models.kernels.terms import both, empty_sums, joined, rows_of
from tilert import Const, Dyn, Mut, Ref, f32
from tilert.language import mma, rsqrt, sum, tiles, zeros

__all__ = ["gate_up_silu", "norm_gate_up_silu"]


@tilert.kernel
def gate_up_silu(y: Mut[Dyn], x: Ref[Dyn], w: Ref, bk: Const[int], terms: Const[int] = 1) -> None:
    """y = silu(x @ w[0].T) * (x @ w[1].T), accumulated in f32.

    y: [T, F] in pieces (bm, bn), or [T, 2, F], of two terms, in pieces (bm, 2, bn). x: [T, K], or
    [T terms, K] as in `linear`. w: [2, F, K], gate then up. bk: columns of K a step.
    """
    m, n = y.index[0], y.index[-1]
    size, columns = y.shape[0], y.shape[-1]
    rows = rows_of(m, size, terms)
    gate = empty_sums(size, columns, terms)
    up = empty_sums(size, columns, terms)
    for k in tiles(x, axis=1, size=bk):
        v = x[rows, k]
        gate = mma(v, w[0, n, k].T, gate)
        up = mma(v, w[1, n, k].T, up)
    hidden = silu(joined(gate, terms)) * joined(up, terms)
    y.store(hidden if y.shape[2:] == () else both(hidden, y.dtype))


@tilert.kernel
def norm_gate_up_silu(
    y: Mut[Dyn], x: Ref[Dyn], gain: Ref, w: Ref, eps: Const[float], bk: Const[int]
) -> None:
    """As `gate_up_silu` of RMSNorm(x), the norm applied as in `norm_linear`; gain: [K]."""
    m, n = y.index
    gate = zeros(y.shape, f32)
    up = zeros(y.shape, f32)
    squares = zeros((y.shape[0],), f32)
    for k in tiles(x, axis=1, size=bk):
        v = x[m, k].to(f32)
        squares = squares + sum(v * v, axis=1)
        scaled = v * gain[k][None, :].to(f32)
        if y.shape[0] > 4:
            rounded = scaled.to(w.dtype)
            gate = mma(rounded, w[0, n, k].T, gate)
            up = mma(rounded, w[1, n, k].T, up)
        else:
            gate = mma(scaled, w[0, n, k].to(f32).T, gate)
            up = mma(scaled, w[1, n, k].to(f32).T, up)
    scale = rsqrt(squares / x.shape[1] + eps)[:, None]
    y.store(silu(gate * scale) * (up * scale))
