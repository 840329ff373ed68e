import math
from dataclasses import replace

import numpy as np
import pytest

from models import PRESETS, RopeConfig, rope_tables
from models.rope import attention_factor, inverse_frequencies

QWEN = PRESETS["qwen3-4b"]


def plain(theta: float, dim: int) -> list[float]:
    return [1.0 / theta ** (2 * j / dim) for j in range(dim // 2)]


def test_default_tables() -> None:
    cos, sin = rope_tables(QWEN, 300)
    assert cos.shape == sin.shape == (300, 64)
    assert cos.dtype == sin.dtype == np.float32
    assert np.all(cos[0] == 1.0) and np.all(sin[0] == 0.0)
    for position, pair in [(1, 0), (299, 0), (299, 31), (17, 63)]:
        angle = position / 1e6 ** (2 * pair / 128)
        assert cos[position, pair] == np.float32(math.cos(angle))
        assert sin[position, pair] == np.float32(math.sin(angle))


def test_far_positions_do_not_lose_precision() -> None:
    cos, _ = rope_tables(QWEN, 200_001)
    assert cos[200_000, 1] == np.float32(math.cos(200_000 / 1e6 ** (2 / 128)))


def test_no_positions() -> None:
    cos, sin = rope_tables(QWEN, 0)
    assert cos.shape == sin.shape == (0, 64)


def test_linear_divides_frequencies() -> None:
    config = replace(QWEN, rope=RopeConfig(theta=1e4, type="linear", factor=4.0))
    expected = [value / 4.0 for value in plain(1e4, 128)]
    np.testing.assert_allclose(inverse_frequencies(config), expected, rtol=1e-14)


def test_llama3_bands() -> None:
    rope = RopeConfig(
        theta=5e5,
        type="llama3",
        factor=8.0,
        original_max_position_embeddings=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    found = inverse_frequencies(replace(QWEN, rope=rope))
    kept = blended = divided = 0
    for value, base in zip(found, plain(5e5, 128), strict=True):
        wavelength = 2 * math.pi / base
        if wavelength < 8192 / 4.0:
            kept += 1
            assert value == pytest.approx(base, rel=1e-14)
        elif wavelength > 8192 / 1.0:
            divided += 1
            assert value == pytest.approx(base / 8.0, rel=1e-14)
        else:
            blended += 1
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            assert value == pytest.approx((1 - smooth) * base / 8.0 + smooth * base, rel=1e-14)
    # Llama 3.1's own split of its 64 pairs.
    assert (kept, blended, divided) == (29, 6, 29)


def test_yarn_ramp() -> None:
    # dim 64, base 1e7, 262144 positions: the ramp's ends are floor(14.24) and ceil(21.12).
    config = replace(QWEN, head_dim=64)
    rope = RopeConfig(theta=1e7, type="yarn", factor=4.0, original_max_position_embeddings=262144)
    found = inverse_frequencies(replace(config, rope=rope))
    base = plain(1e7, 64)
    np.testing.assert_allclose(found[:15], base[:15], rtol=1e-14)
    np.testing.assert_allclose(found[22:], [value / 4 for value in base[22:]], rtol=1e-14)
    for pair in range(15, 22):
        ramp = (pair - 14) / 8
        expected = base[pair] / 4 * ramp + base[pair] * (1 - ramp)
        assert found[pair] == pytest.approx(expected, rel=1e-14)


def test_yarn_without_truncation() -> None:
    rope = RopeConfig(
        theta=1e7,
        type="yarn",
        factor=4.0,
        original_max_position_embeddings=262144,
        truncate=False,
    )
    found = inverse_frequencies(replace(QWEN, head_dim=64, rope=rope))
    low = 64 * math.log(262144 / (32 * 2 * math.pi)) / (2 * math.log(1e7))
    high = 64 * math.log(262144 / (1 * 2 * math.pi)) / (2 * math.log(1e7))
    ramp = (18 - low) / (high - low)
    base = plain(1e7, 64)[18]
    assert found[18] == pytest.approx(base / 4 * ramp + base * (1 - ramp), rel=1e-14)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 1.138629436111989),
        ({"attention_factor": 1.25}, 1.25),
        ({"mscale": 1.0}, 1.138629436111989),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, 1.138629436111989 / 1.0693147180559945),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_yarn_attention_factor(changes: dict[str, float], expected: float) -> None:
    rope = RopeConfig(type="yarn", factor=4.0, original_max_position_embeddings=32768)
    rope = replace(rope, **changes)
    assert attention_factor(rope) == pytest.approx(expected, rel=1e-15)
    cos, _ = rope_tables(replace(QWEN, rope=rope), 1)
    assert np.all(cos == np.float32(expected))


def test_attention_factor_is_one_otherwise() -> None:
    assert attention_factor(RopeConfig(type="linear", factor=8.0)) == 1.0


def test_frequency_divisors() -> None:
    config = PRESETS["tiny-llama"]
    divisors = tuple(float(number) for number in range(1, 9))
    rope = replace(config.rope, freq_divisors=divisors)
    found = inverse_frequencies(replace(config, rope=rope))
    expected = [value / by for value, by in zip(plain(1e4, 16), divisors, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-14)
