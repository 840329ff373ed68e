"""Rotary position embedding tables, computed in float64 and rounded once to float32."""

import math

import numpy as np
from numpy.typing import NDArray

from models.config import ModelConfig, RopeConfig


def rope_tables(
    config: ModelConfig, length: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns (cos, sin), each float32 [length, head_dim / 2], for positions 0..length-1.

    Column j is the angle `position * inverse_frequencies[j]` and rotates the pair of elements
    (j, j + head_dim/2) of a head ("rotate half"). YaRN's attention factor is folded into both
    tables, which scales the attention scores by its square.
    """
    angles = np.outer(np.arange(length, dtype=np.float64), inverse_frequencies(config))
    scale = attention_factor(config.rope)
    return (
        (np.cos(angles) * scale).astype(np.float32),
        (np.sin(angles) * scale).astype(np.float32),
    )


def inverse_frequencies(config: ModelConfig) -> NDArray[np.float64]:
    """Radians a position for each pair of a head: float64 [head_dim / 2].

    default: theta^(-2j/d), Su et al. 2021, "RoFormer" (arXiv:2104.09864), section 3.2.2.
    linear:  divided by `factor`; Chen et al. 2023, "Position Interpolation" (arXiv:2306.15595).
    llama3 and yarn: see `_llama3` and `_yarn`.
    """
    rope, dim = config.rope, config.head_dim
    inverse = rope.theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if rope.type == "linear":
        inverse = inverse / rope.factor
    elif rope.type == "llama3":
        inverse = _llama3(rope, inverse)
    elif rope.type == "yarn":
        inverse = _yarn(rope, dim, inverse)
    if rope.freq_divisors:
        inverse = inverse / np.asarray(rope.freq_divisors, dtype=np.float64)
    return inverse


def attention_factor(rope: RopeConfig) -> float:
    """The factor on cos and sin: 1 but for YaRN.

    YaRN: 0.1 ln(factor) + 1, equation 22 of Peng et al. 2023 (arXiv:2309.00071), unless the
    checkpoint gives `attention_factor`, or both `mscale` and `mscale_all_dim` (a ratio of two such
    terms), as in transformers `modeling_rope_utils._compute_yarn_parameters`.
    """
    if rope.type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def _llama3(rope: RopeConfig, inverse: NDArray[np.float64]) -> NDArray[np.float64]:
    """Long wavelengths are divided by `factor`, short ones kept, with a linear blend between.

    `apply_scaling` of Meta's llama-models (Llama 3.1), and transformers
    `modeling_rope_utils._compute_llama3_parameters`.
    """
    turns = rope.original_max_position_embeddings * inverse / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    keep = np.clip((turns - rope.low_freq_factor) / span, 0.0, 1.0)
    blended: NDArray[np.float64] = inverse * (keep + (1.0 - keep) / rope.factor)
    return blended


def _yarn(rope: RopeConfig, dim: int, inverse: NDArray[np.float64]) -> NDArray[np.float64]:
    """NTK-by-parts interpolation: Peng et al. 2023 (arXiv:2309.00071), section 3.2.

    The ramp runs over pair numbers, between the pairs that turn `beta_fast` and `beta_slow` times
    in the original context (transformers `_compute_yarn_parameters`, `find_correction_range`).
    """

    def pair_turning(turns: float) -> float:
        length = rope.original_max_position_embeddings
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # transformers' guard against a ramp of no width
    ramp = np.clip((np.arange(dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    blended: NDArray[np.float64] = inverse * (1.0 - ramp + ramp / rope.factor)
    return blended
