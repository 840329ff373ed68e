"""Sampling: the exact set a filter keeps, the distribution of draws, and what they depend on."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import tilert
from models import kernels
from tests.models.kernel_support import Floats, poisoned, put
from tilert import Device, f32, i32

Ints = NDArray[np.int64]

# (length of a chunk, chunks a program, chunks a step, thresholds a round): rows of one chunk and of
# several, a ragged end, searches of one step and of more.
WAYS = [(64, 1, 1, 3), (16, 2, 2, 3), (16, 3, 1, 7), (8, 7, 8, 4)]
Way = tuple[int, int, int, int]


@dataclass(frozen=True)
class Settings:
    """Of one slot."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def sample(
    device: Device,
    logits: NDArray[np.float32],
    chosen: list[Settings],
    seeds: list[int],
    positions: NDArray[np.int32] | None = None,
    rows: NDArray[np.int32] | None = None,
    way: Way = WAYS[0],
) -> tuple[Ints, Ints]:
    """Ids and positions after one step of a batch; logits [B, V]."""
    ids, places, _, _ = sample_all(device, logits, chosen, seeds, positions, rows, way)
    return ids, places


def sample_all(
    device: Device,
    logits: NDArray[np.float32],
    chosen: list[Settings],
    seeds: list[int],
    positions: NDArray[np.int32] | None = None,
    rows: NDArray[np.int32] | None = None,
    way: Way = WAYS[0],
) -> tuple[Ints, Ints, Floats, Ints]:
    """As `sample`; also the lowest logits kept, and which slots had a NaN."""
    count, vocabulary = logits.shape
    length, side, group, fan = way
    chunks = -(-vocabulary // length)
    positions = np.zeros(count, np.int32) if positions is None else positions
    rows = np.arange(count, dtype=np.int32) if rows is None else rows
    padded = np.full((count, chunks * length), -np.inf, np.float32)
    padded[:, :vocabulary] = logits
    x = put(padded.reshape(count, chunks, length), device)
    shape, piece = (count, chunks), (1, side)
    best, score = (poisoned(shape, f32, device) for _ in range(2))
    index, broken, rank, order, token = (poisoned(shape, i32, device) for _ in range(5))
    lowest = poisoned((count,), f32, device)
    ids = poisoned((count,), i32, device)
    places = put(positions, device)
    bad = tilert.zeros((count,), i32, device)
    temperature = put(np.array([s.temperature for s in chosen], np.float32), device)
    wanted = [s.temperature > 0 and (s.top_k > 0 or s.top_p < 1) for s in chosen]
    filters = put(np.array(wanted, np.int32), device)
    words = [(seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF) for seed in seeds]
    kernels.chunk_best(
        best.partition(*piece), index.partition(*piece), broken.partition(*piece), x
    ).run()
    kernels.rank_chunks(rank.partition(*piece), best, filters).run()
    kernels.order_chunks(order.partition(*piece), rank, filters).run()
    kernels.threshold(
        lowest.partition(1),
        x,
        best,
        order,
        temperature,
        put(np.array([s.top_k for s in chosen], np.int32), device),
        put(np.array([s.top_p for s in chosen], np.float32), device),
        filters,
        group=group,
        fan=fan,
    ).run()
    kernels.draw(
        score.partition(*piece),
        token.partition(*piece),
        x,
        best,
        index,
        lowest,
        places,
        temperature,
        put(np.array([s.min_p for s in chosen], np.float32), device),
        put(np.array(words, np.uint32), device),
    ).run()
    kernels.pick(
        ids.partition(1),
        places.partition(1),
        bad.partition(1),
        score,
        token,
        broken,
        put(rows, device),
    ).run()
    return (
        ids.numpy().astype(np.int64),
        places.numpy().astype(np.int64),
        lowest.numpy().astype(np.float64),
        bad.numpy().astype(np.int64),
    )


def repeated(
    device: Device,
    logits: NDArray[np.float32],
    chosen: Settings,
    count: int,
    way: Way = WAYS[0],
) -> Ints:
    """Draws of `count` slots that differ in their seed alone; logits [V]."""
    rows = np.broadcast_to(logits, (count, len(logits))).copy()
    ids, _ = sample(device, rows, [chosen] * count, list(range(count)), way=way)
    return ids


def probabilities(logits: NDArray[np.float32], chosen: Settings) -> Floats:
    """What each token's probability is after the filters, by sorting, in float64."""
    x = logits.astype(np.float64) / chosen.temperature
    kept = np.ones(len(x), bool)
    if 0 < chosen.top_k < len(x):
        kept &= x >= np.sort(x)[-chosen.top_k]
    p = np.where(kept, np.exp(x - x.max()), 0)
    p /= p.sum()
    if chosen.top_p < 1:
        above = np.array([p[x > value].sum() for value in x])
        kept &= (above < chosen.top_p) | (x == x.max())
    kept &= p >= chosen.min_p * p.max()
    p = np.where(kept, p, 0)
    normed: Floats = p / p.sum()
    return normed


def test_greedy_takes_the_first_of_equal_logits(device: Device) -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((6, 50)).astype(np.float32)
    logits[0, [30, 7, 45]] = 9
    logits[1, 49] = 9
    logits[2] = 0
    logits[3] = -np.inf
    logits[4, 0] = np.inf
    logits[5] = -np.float32(3e38)
    greedy = [Settings(temperature=0, top_k=3, top_p=0.1, min_p=0.9)] * 6
    for way in WAYS:
        ids, places = sample(device, logits, greedy, [0] * 6, way=way)
        assert ids.tolist() == [7, 49, 0, 0, 0, 0]
        assert places.tolist() == [1] * 6


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "chosen",
    [
        Settings(),
        Settings(temperature=0.5),
        Settings(temperature=3.0),
        Settings(top_k=5),
        Settings(top_k=1),
        Settings(top_p=0.7),
        Settings(min_p=0.2),
        Settings(temperature=1.5, top_k=10, top_p=0.8, min_p=0.1),
    ],
    ids=str,
)
def test_draws_follow_the_filtered_distribution(device: Device, chosen: Settings, way: Way) -> None:
    """Pearson's chi-square over the tokens that are kept; no other token is ever drawn."""
    logits = np.random.default_rng(5).standard_normal(50).astype(np.float32) * 2
    expected = probabilities(logits, chosen)
    count = 1500
    drawn = np.bincount(repeated(device, logits, chosen, count, way), minlength=50)
    assert drawn[expected == 0].sum() == 0
    likely = expected * count >= 5
    rest = ~likely & (expected > 0)
    found = np.append(drawn[likely], drawn[rest].sum())
    wanted = np.append(expected[likely], expected[rest].sum()) * count
    found, wanted = found[wanted > 0], wanted[wanted > 0]
    freedom = max(len(wanted) - 1, 1)
    statistic = float(((found - wanted) ** 2 / wanted).sum())
    # Mean and deviation of the chi-square distribution are freedom and sqrt(2 freedom).
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)


def kept_tokens(device: Device, logits: NDArray[np.float32], chosen: Settings) -> set[int]:
    """Every token that one of 300 seeds draws."""
    return set(repeated(device, logits, chosen, 300).tolist())


def test_top_k_keeps_all_that_tie_with_the_last(device: Device) -> None:
    logits = np.array([0, 1, 1, 1, 2, 0.5, -3, 1], np.float32)
    assert kept_tokens(device, logits, Settings(top_k=1)) == {4}
    assert kept_tokens(device, logits, Settings(top_k=2)) == {1, 2, 3, 4, 7}
    assert kept_tokens(device, logits, Settings(top_k=6)) == {1, 2, 3, 4, 5, 7}
    assert kept_tokens(device, logits, Settings(temperature=9, top_k=8)) == set(range(8))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_threshold_is_exact_to_the_last_bit(device: Device, way: Way, sign: float) -> None:
    """The search ends at the key itself, not at a neighbour."""
    top = np.float32(sign * 1.5)
    logits = np.array([top, np.nextafter(top, np.float32(-9)), -3, -3], np.float32)
    for chosen in (Settings(top_k=1), Settings(top_p=0.3)):
        assert set(repeated(device, logits, chosen, 40, way).tolist()) == {0}


def test_zeros_of_both_signs_tie(device: Device) -> None:
    logits = np.array([0.0, -0.0, -1, 0.0, -0.0], np.float32)
    assert kept_tokens(device, logits, Settings(top_k=1)) == {0, 1, 3, 4}


def test_top_p_keeps_the_token_that_reaches_it(device: Device) -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1])).astype(np.float32)
    assert kept_tokens(device, logits, Settings(top_p=0.39)) == {0}
    assert kept_tokens(device, logits, Settings(top_p=0.41)) == {0, 1}
    assert kept_tokens(device, logits, Settings(top_p=0.71)) == {0, 1, 2}
    assert kept_tokens(device, logits, Settings(top_p=0.95)) == {0, 1, 2, 3}
    assert kept_tokens(device, logits, Settings(top_p=1e-30)) == {0}
    assert kept_tokens(device, logits, Settings(top_p=0.0)) == {0}


def test_top_p_counts_only_what_top_k_kept(device: Device) -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1])).astype(np.float32)
    # Of the first two, 4/7 = 0.57 is the first one's share.
    assert kept_tokens(device, logits, Settings(top_k=2, top_p=0.55)) == {0}
    assert kept_tokens(device, logits, Settings(top_k=2, top_p=0.6)) == {0, 1}


def test_min_p_is_relative_to_the_likeliest(device: Device) -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1])).astype(np.float32)
    assert kept_tokens(device, logits, Settings(min_p=0.74)) == {0, 1}
    assert kept_tokens(device, logits, Settings(min_p=0.26)) == {0, 1, 2}
    assert kept_tokens(device, logits, Settings(min_p=1.0)) == {0}


def test_tiny_temperature_is_greedy(device: Device) -> None:
    logits = np.random.default_rng(1).standard_normal(50).astype(np.float32)
    for temperature in (1e-6, 1e-30, 1e-44):
        drawn = repeated(device, logits, Settings(temperature=temperature), 8)
        assert set(drawn.tolist()) == {int(np.argmax(logits))}


@pytest.mark.parametrize("way", WAYS)
def test_broken_logits_give_some_token(device: Device, way: Way) -> None:
    """NaN and infinities neither hang nor lead outside the vocabulary; numbers beat NaN."""
    logits = np.full((4, 50), np.nan, np.float32)
    logits[1, 20] = 1
    logits[2] = -np.inf
    logits[3, [3, 9]] = np.inf
    for chosen in (Settings(), Settings(top_k=5, top_p=0.5, min_p=0.1), Settings(temperature=0)):
        ids, _ = sample(device, logits, [chosen] * 4, [1, 2, 3, 4], way=way)
        assert ((ids >= 0) & (ids < 50)).all()
        assert ids[1] == 20
        assert ids[3] in (3, 9)


def test_a_draw_depends_on_seed_and_position_alone(device: Device) -> None:
    rng = np.random.default_rng(2)
    one = rng.standard_normal(300).astype(np.float32)
    chosen = Settings(temperature=1.2, top_k=100, top_p=0.95)
    seeds, places = [5, 2**40 + 5, 5, 6, -1], np.array([3, 3, 4, 3, 3], np.int32)
    rows = np.broadcast_to(one, (5, 300)).copy()
    together, _ = sample(device, rows, [chosen] * 5, seeds, places)
    for slot, (seed, place) in enumerate(zip(seeds, places, strict=True)):
        company = rng.standard_normal((3, 300)).astype(np.float32)
        company[1] = one
        others = [Settings(temperature=0), chosen, Settings(top_k=2)]
        at = np.array([9, place, 9], np.int32)
        ids, _ = sample(device, company, others, [7, seed, 8], at)
        assert ids[1] == together[slot]
    # Other seeds (also beyond 32 bits) and positions draw otherwise: over many positions, some.
    many = np.arange(40, dtype=np.int32)
    rows = np.broadcast_to(one, (40, 300)).copy()
    streams = [
        sample(device, rows, [chosen] * 40, [seed] * 40, many)[0].tolist()
        for seed in (5, 6, 2**40 + 5, -1)
    ]
    assert len({tuple(stream) for stream in streams}) == 4
    assert len(set(streams[0])) > 10


def test_padding_slots_stay_where_they_are(device: Device) -> None:
    logits = np.zeros((3, 8), np.float32)
    rows, places = np.array([2, -1, 0], np.int32), np.array([5, 6, 7], np.int32)
    _, after = sample(device, logits, [Settings()] * 3, [0, 0, 0], places, rows)
    assert after.tolist() == [6, 6, 8]


def lowest_kept(logits: NDArray[np.float32], chosen: Settings) -> float:
    """The least logit that top-k and then top-p keep, by sorting, in float64."""
    kept = probabilities(logits, replace(chosen, min_p=0.0)) > 0
    least: float = logits[kept].min()
    return least


@pytest.mark.parametrize("spread", [0.1, 1.0, 6.0])
@pytest.mark.parametrize("way", [(64, 4, 4, 3), (256, 4, 2, 3), (16, 64, 32, 7)], ids=str)
def test_the_filters_keep_exactly_what_sorting_keeps(
    device: Device, way: Way, spread: float
) -> None:
    """Rows flat and peaked, on both sides of zero; searches of one step and of many."""
    rng = np.random.default_rng(7)
    chosen = [
        Settings(temperature, top_k, top_p)
        for temperature in (0.3, 2.0)
        for top_k in (0, 1, 20, 300)
        for top_p in (0.1, 0.95, 1.0)
        if top_k or top_p < 1
    ]
    logits = (rng.standard_normal((len(chosen), 2000)) * spread).astype(np.float32)
    logits += rng.choice(np.array([-20, 0, 20], np.float32), (len(chosen), 1))
    _, _, found, _ = sample_all(device, logits, chosen, [0] * len(chosen), way=way)
    for row, one, least in zip(logits, chosen, found, strict=True):
        wanted = lowest_kept(row, one)
        # Where sums in f32 and f64 fall on different sides of top_p, a neighbour is right too.
        between = (row >= min(wanted, least)) & (row < max(wanted, least))
        assert between.sum() <= (1 if 0 < one.top_p < 1 else 0), one


def test_ties_beyond_a_step_are_kept(device: Device) -> None:
    """Hundreds of chunks share their maximum, more than top-k or a step asks for."""
    logits = np.zeros((2, 4000), np.float32)
    logits[:, 1234] = 1
    chosen = [Settings(top_k=5), Settings(temperature=1.0, top_p=0.5)]
    _, _, lowest, _ = sample_all(device, logits, chosen, [1, 2], way=(16, 4, 4, 3))
    assert ((lowest > -1) & (lowest <= 0)).all()
    first = np.zeros((1, 4000), np.float32)
    drawn = {
        int(sample(device, first, [Settings(top_k=1)], [seed], way=(16, 4, 4, 3))[0][0])
        for seed in range(30)
    }
    assert len(drawn) > 20


@pytest.mark.parametrize("way", WAYS)
def test_only_the_slot_with_a_nan_is_bad(device: Device, way: Way) -> None:
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((4, 50)).astype(np.float32)
    chosen = [Settings(), Settings(temperature=0), Settings(top_k=3), Settings(top_p=0.5)]
    clean, _, _, none = sample_all(device, logits, chosen, [1, 2, 3, 4], way=way)
    assert none.tolist() == [0, 0, 0, 0]
    for slot, place in ((0, 0), (1, 49), (2, 17), (3, 30)):
        broken = logits.copy()
        broken[slot, place] = np.nan
        ids, _, _, bad = sample_all(device, broken, chosen, [1, 2, 3, 4], way=way)
        assert bad.tolist() == [int(i == slot) for i in range(4)]
        others = np.arange(4) != slot
        assert ids[others].tolist() == clean[others].tolist()


@pytest.mark.parametrize("way", WAYS)
def test_forbidden_tokens_are_never_drawn(device: Device, way: Way) -> None:
    """-inf is no token, whatever the temperature and however few are left."""
    logits = np.full(50, -np.inf, np.float32)
    logits[[3, 41]] = -5, -3000
    for chosen in (Settings(temperature=1e9), Settings(top_k=40), Settings(top_p=0.9999)):
        assert set(repeated(device, logits, chosen, 60, way).tolist()) <= {3, 41}
    hot = set(repeated(device, logits, Settings(temperature=1e9), 60, way).tolist())
    assert hot == {3, 41}


def test_ways_agree(device: Device) -> None:
    """Block size and thresholds a round change neither the set nor the draw."""
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal((40, 50)) * 3).astype(np.float32)
    chosen = [
        Settings(rng.uniform(0.5, 2), int(rng.integers(0, 60)), rng.uniform(0.3, 1.1), 0.01)
        for _ in range(40)
    ]
    first = sample(device, logits, chosen, list(range(40)), way=WAYS[0])[0]
    for way in WAYS[1:]:
        assert (
            sample(device, logits, chosen, list(range(40)), way=way)[0].tolist() == first.tolist()
        )


@settings(deadline=None, max_examples=60)
@given(
    logits=st.lists(st.integers(-6, 6), min_size=2, max_size=20),
    chosen=st.builds(
        Settings,
        temperature=st.sampled_from([0.3, 1.0, 4.0]),
        top_k=st.integers(0, 22),
        top_p=st.sampled_from([0.05, 0.31, 0.77, 0.999, 1.0]),
        min_p=st.sampled_from([0.0, 0.011, 0.3]),
    ),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_draws_lie_in_the_kept_set(logits: list[int], chosen: Settings, seed: int) -> None:
    """Integer logits tie often, and the levels are no sum of their masses."""
    x = np.array(logits, np.float32)
    rows = np.broadcast_to(x, (4, len(x))).copy()
    ids, _ = sample(tilert.device("cpu"), rows, [chosen] * 4, [seed + i for i in range(4)])
    assert (probabilities(x, chosen)[ids] > 0).all()
    greedy = replace(chosen, temperature=0.0)
    ids, _ = sample(tilert.device("cpu"), rows[:1], [greedy], [seed])
    assert ids[0] == int(np.argmax(x))
