"""Random numbers by counter: known answers, the same bits on every backend, distributions."""

import math

import numpy as np
import pytest

import tilert
from tests.tilert.checks import Frame
from tilert import Const, Dyn, Mut, Ref, f32, i32, i64, u32
from tilert.backends.cpu_numbers import normal, philox_block
from tilert.language import philox, random_bits, random_normal, random_uniform

# From the tests of the authors' own implementation (Random123): counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter: tuple, key: tuple, words: tuple) -> None:
    assert tuple(int(w) for w in philox_block(key, counter)) == words


def slow(key: int, counter: int) -> list[int]:
    """The ten rounds in Python's own integers."""
    k0, k1 = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    a, b, c, d = counter & 0xFFFFFFFF, counter >> 32 & 0xFFFFFFFF, 0, 0
    for _ in range(10):
        one, two = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = two >> 32 ^ b ^ k0, two & 0xFFFFFFFF, one >> 32 ^ d ^ k1, one & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [a, b, c, d]


@tilert.kernel
def words(y: Mut[Dyn], one: Mut[Dyn], at: Ref[Dyn], seed: Const[int]):
    i = y.index[0]
    a, b, c, d = philox(seed, at[i])
    join = tilert.language.concatenate
    y.store(join((a[:, None], b[:, None], c[:, None], d[:, None]), axis=1))
    one.store(random_bits(seed, at[i]))


@pytest.mark.parametrize("dtype", [i32, u32, i64])
@pytest.mark.parametrize("seed", [0, 7, -1, 2**63 + 5, 2**64 - 1])
def test_words(device: tilert.Device, seed: int, dtype: tilert.DType) -> None:
    low, high = (-(2**62), 2**62) if dtype == i64 else (0, 2**31)
    at = np.random.default_rng(1).integers(low, high, 70)
    at[:3] = [0, 1, -1 if dtype.kind == "i" else 2**32 - 1]
    y, one = Frame(device, (70, 4), u32), Frame(device, (70,), u32)
    host = tilert.from_numpy(at.astype(dtype.numpy), device)
    words(y.piece(32, 4), one.piece(32), host, seed=seed).sync()
    # A 32-bit counter has no high word, whatever its sign.
    wide = at if dtype == i64 else at & 0xFFFFFFFF
    want = np.array([slow(seed, int(c)) for c in wide], np.uint32)
    y.check_exact(want)
    one.check_exact(want[:, 0])


@tilert.kernel
def drawn(u: Mut[Dyn], n: Mut[Dyn], seeds: Ref):
    t = u.index[0]
    u.store(random_uniform(seeds[0], t.offsets))
    n.store(random_normal(seeds[1], t.offsets))


@pytest.mark.parametrize("kind", [i32, u32, i64])
def test_uniform_and_normal_bits(device: tilert.Device, kind: tilert.DType) -> None:
    seeds = np.array([3, 2**31 - 5], kind.numpy)
    u, n = Frame(device, (3000,)), Frame(device, (3000,))
    drawn(u.piece(512), n.piece(512), tilert.from_numpy(seeds, device)).sync()
    at = np.arange(3000)
    first = philox_block((3, 0), (at, 0, 0, 0))[0]
    u.check_exact((first >> np.uint32(8)).astype(np.float64) * 2.0**-24)
    # The same bits: every operation rounds in one way.
    n.check_exact(normal(2**31 - 5, 0, at, 0))


def test_distributions() -> None:
    """Moments within five standard errors, and the share beyond each bound."""
    count = 1 << 20
    at = np.arange(count)
    z = normal(11, 0, at, 0).astype(np.float64)
    assert abs(z.mean()) < 5 / math.sqrt(count)
    assert abs((z**2).mean() - 1) < 5 * math.sqrt(2 / count)
    assert abs((z**3).mean()) < 5 * math.sqrt(15 / count)
    assert abs((z**4).mean() - 3) < 5 * math.sqrt(96 / count)
    for bound in (0.01, 0.5, 1, 2, 3, 4):
        share = math.erfc(bound / math.sqrt(2))
        assert abs((np.abs(z) > bound).mean() - share) < 5 * math.sqrt(share / count)
    u = philox_block((11, 0), (at, 0, 0, 0))[0] / 2.0**32
    assert abs(u.mean() - 0.5) < 5 / math.sqrt(12 * count)
    assert abs(np.corrcoef(z[1:], z[:-1])[0, 1]) < 5 / math.sqrt(count)


def test_normal_is_box_and_muller() -> None:
    """Against float64: the polynomials are right to the last places of f32."""
    at = np.arange(200_000)
    a, b, _, _ = philox_block((5, 6), (at, 1, 0, 0))
    u = np.maximum(a, 1).astype(np.float32).astype(np.float64) * 2.0**-32
    turn = (b >> np.uint32(8)).astype(np.float64) / 2**24
    want = np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * turn)
    got = normal(5, 6, at, 1).astype(np.float64)
    # Where the logarithm is nearly 0 its absolute error counts.
    assert np.max(np.abs(got - want) / (np.abs(want) + 1e-1)) < 3e-6


@tilert.kernel
def scalar(y: Mut, n: Ref):
    y.store(random_uniform(n[0], 5) + random_normal(7, n[0]) + random_bits(1, 2).to(f32) * 0.0)


def test_scalar_draws(device: tilert.Device) -> None:
    y = Frame(device, (1,), margin=1)
    scalar(y.piece(1), tilert.from_numpy(np.array([9], np.int32), device)).sync()
    first = philox_block((9, 0), (5, 0, 0, 0))[0]
    want = np.float32(int(first) >> 8) * np.float32(2.0**-24) + normal(7, 0, 9, 0)
    y.check_exact(want)
