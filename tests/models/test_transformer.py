"""Steps of a small random model: decode, prefill, chunks, batches, padding, sampling, capture."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tilert
from models.batch import Batch, Slot
from models.config import ModelConfig, RopeConfig
from models.errors import LoadError
from models.kv_cache import KVCache
from models.prompt import PromptChunk
from models.rope import rope_tables
from models.stored import Held, Stored
from models.transformer import Transformer
from models.weights import expected_shapes
from tests.models.kernel_support import Floats
from tilert import Device, DType, bf16, f32

VOCABULARY = 131
MAX_LEN = 200
PAGES = 12


def config(**changes: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "architecture": "qwen3",
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "intermediate_size": 96,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-6,
        "rope": RopeConfig(),
        "max_position_embeddings": MAX_LEN,
        "tie_word_embeddings": True,
        "qk_norm": True,
    }
    return ModelConfig(**(fields | changes))


CONFIGS = {
    "qwen3": config(),
    "llama": config(
        architecture="llama",
        hidden_size=72,
        num_heads=9,
        num_kv_heads=3,
        head_dim=16,
        tie_word_embeddings=False,
        qk_norm=False,
    ),
}


@dataclass
class Weights:
    """A checkpoint in memory."""

    config: ModelConfig
    arrays: dict[str, NDArray[Any]]
    id: str = "in memory"

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        for name, array in self.arrays.items():
            yield name, Held(array.shape, array.dtype, partial(np.asarray, array))

    def tokenizer(self) -> Any:
        raise NotImplementedError

    def chat_template(self) -> None:
        return None


def weights_of(shape: ModelConfig, seed: int = 0) -> Weights:
    """Normal matrices with outputs of about the size of their inputs, and norms near 1."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, NDArray[Any]] = {}
    for name, extents in expected_shapes(shape).items():
        values = rng.standard_normal(extents)
        values = 1 + 0.2 * values if name.endswith("norm") else values * extents[-1] ** -0.5
        arrays[name] = values.astype(np.float32)
    return Weights(shape, arrays)


def norm(x: Floats, gain: NDArray[Any], eps: float) -> Floats:
    normed: Floats = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * gain
    return normed


def reference(weights: Weights, tokens: NDArray[np.int32]) -> Floats:
    """Logits after each token in float64, from the weights as they are stored."""
    c, w = weights.config, {k: v.astype(np.float64) for k, v in weights.arrays.items()}
    count, dim, group = len(tokens), c.head_dim, c.num_heads // c.num_kv_heads
    cos, sin = (t.astype(np.float64)[:, None] for t in rope_tables(c, count))

    def rotate(x: Floats) -> Floats:
        lo, hi = np.split(x, 2, axis=-1)
        return np.concatenate([lo * cos - hi * sin, hi * cos + lo * sin], axis=-1)

    x = w["embed"][tokens]
    for i in range(c.num_layers):
        p = f"layers.{i}."
        h = norm(x, w[p + "input_norm"], c.rms_norm_eps)
        q, k, v = ((h @ w[p + name].T).reshape(count, -1, dim) for name in "qkv")
        if c.qk_norm:
            q = norm(q, w[p + "q_norm"], c.rms_norm_eps)
            k = norm(k, w[p + "k_norm"], c.rms_norm_eps)
        q, k, v = rotate(q), np.repeat(rotate(k), group, 1), np.repeat(v, group, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim)
        scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
        weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weight /= weight.sum(axis=-1, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", weight, v).reshape(count, -1)
        x = x + attended @ w[p + "o"].T
        h = norm(x, w[p + "post_norm"], c.rms_norm_eps)
        gate = h @ w[p + "gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w[p + "up"].T)) @ w[p + "down"].T
    head = w["embed" if c.tie_word_embeddings else "head"]
    logits: Floats = norm(x, w["norm"], c.rms_norm_eps) @ head.T
    return logits


class Rig:
    """A model with a cache of four rows, each on its own pages, in no order."""

    ROWS = ((3, 9, 0, 5), (7, 1, 10, 4), (2,), (6, 11, 8))

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.cache: KVCache = model.new_cache(PAGES, len(self.ROWS))
        for row, pages in enumerate(self.ROWS):
            self.cache.set_pages(row, pages)
        self.single = model.new_batch(self.cache, 1)

    def prefill(self, tokens: NDArray[np.int32], start: int = 0, **slot: Any) -> Floats:
        """Logits after the last token."""
        self.single.set([Slot(**({"row": 1, "token": 0, "position": start} | slot))])
        self.model.prefill(self.cache, self.single, [PromptChunk(tokens, start)])
        assert self.single.positions.numpy().tolist() == [start + len(tokens)]
        logits = logits_of(self.single)
        return logits[0]

    def decode(self, batch: Batch, slots: list[Slot]) -> Floats:
        batch.set(slots)
        self.model.decode(self.cache, batch)
        return logits_of(batch)


def logits_of(batch: Batch) -> Floats:
    logits: Floats = batch.logits.numpy().astype(np.float64)
    return logits


def error(actual: Floats, expected: Floats) -> float:
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


@pytest.fixture(params=sorted(CONFIGS))
def weights(request: pytest.FixtureRequest) -> Weights:
    return weights_of(CONFIGS[request.param])


@pytest.fixture
def rig(device: Device, weights: Weights) -> Rig:
    return Rig(Transformer.load(weights, device, f32, max_len=MAX_LEN))


@pytest.fixture
def tokens() -> NDArray[np.int32]:
    return np.random.default_rng(9).integers(0, VOCABULARY, 150).astype(np.int32)


@pytest.mark.parametrize(("dtype", "limit"), [(f32, 1e-5), (bf16, 5e-2)], ids=str)
def test_prefill_and_decode_give_the_model_s_logits(
    device: Device, weights: Weights, tokens: NDArray[np.int32], dtype: DType, limit: float
) -> None:
    rig = Rig(Transformer.load(weights, device, dtype, max_len=MAX_LEN))
    expected = reference(weights, tokens)
    for count in (1, 2, 63, 64, 65, 150):
        assert error(rig.prefill(tokens[:count]), expected[count - 1]) < limit
    rig.prefill(tokens[:60])
    batch = rig.model.new_batch(rig.cache, 1)
    for at in range(60, 70):
        logits = rig.decode(batch, [Slot(row=1, token=int(tokens[at]), position=at)])
        assert error(logits[0], expected[at]) < limit


def test_chunked_prefill_gives_what_one_prefill_gives(rig: Rig, tokens: NDArray[np.int32]) -> None:
    whole = rig.prefill(tokens)
    for sizes in ([1, 149], [64, 64, 22], [50, 1, 1, 98]):
        start = 0
        for size in sizes:
            logits = rig.prefill(tokens[start : start + size], start)
            start += size
        assert error(logits, whole) < 1e-5


@pytest.mark.parametrize("recorded", [None, 160], ids=["exact", "padded"])
def test_several_prompts_in_one_prefill(
    rig: Rig, tokens: NDArray[np.int32], recorded: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, rows = (70, 1, 50), (0, 3, 1)
    alone = [rig.prefill(tokens[:n], row=row) for n, row in zip(lengths, rows, strict=True)]
    expected = snapshot(rig.cache)
    # The second chunk goes on where an earlier one ended.
    rig.prefill(tokens[:20], row=1)
    starts = (0, 0, 20)
    batch = rig.model.new_batch(rig.cache, 4)
    padding = Slot(row=-1, token=0, position=0)
    monkeypatch.setattr(type(rig.model._tiling), "recorded_prompt", lambda *_: recorded)
    for _ in range(2):  # recorded, then replayed
        batch.set([*(Slot(row=row, token=0, position=0) for row in rows), padding])
        chunks = [
            PromptChunk(tokens[start:n], start) for start, n in zip(starts, lengths, strict=True)
        ]
        rig.model.prefill(rig.cache, batch, chunks)
        for logits, one in zip(logits_of(batch), alone, strict=False):
            assert error(logits, one) < 1e-5
        assert batch.ids.numpy()[:3].tolist() == [int(np.argmax(one)) for one in alone]
        assert batch.positions.numpy()[:3].tolist() == list(lengths)
        for old, new in zip(expected, snapshot(rig.cache), strict=True):
            np.testing.assert_allclose(new, old, rtol=0, atol=1e-4)
    batch.set([*(Slot(r, int(tokens[n]), n) for r, n in zip(rows, lengths, strict=True)), padding])
    rig.model.decode(rig.cache, batch)
    for logits, n, row in zip(logits_of(batch), lengths, rows, strict=False):
        assert error(logits, rig.prefill(tokens[: n + 1], row=row)) < 1e-5


def test_scores_of_a_prompt(rig: Rig, weights: Weights, tokens: NDArray[np.int32]) -> None:
    expected = reference(weights, tokens)
    expected -= np.log(np.exp(expected).sum(axis=1, keepdims=True))
    rig.prefill(tokens[:30])
    rig.prefill(tokens[30:100], 30)
    batch = rig.model.new_batch(rig.cache, 8)
    for first, count in ((0, 8), (8, 8), (65, 5), (30, 1)):
        following = tokens[31 + first : 31 + first + count]
        rig.model.score(batch, first, following)
        found = {name: array.numpy()[:count] for name, array in batch.logprobs.items()}
        rows = expected[30 + first : 30 + first + count]
        chosen = rows[np.arange(count), following]
        np.testing.assert_allclose(found["chosen"], chosen, rtol=0, atol=1e-4)
        best = np.sort(rows, axis=1)[:, ::-1][:, : found["top_values"].shape[1]]
        np.testing.assert_allclose(found["top_values"], best, rtol=0, atol=1e-4)
        assert found["top_ids"][:, 0].tolist() == rows.argmax(axis=1).tolist()
    with pytest.raises(ValueError, match="8 slots cannot score 9 tokens"):
        rig.model.score(batch, 0, tokens[:9])
    with pytest.raises(ValueError, match=r"has no tokens 70\.\.70"):
        rig.model.score(batch, 70, tokens[:1])


def test_decode_from_the_first_token_on(rig: Rig, tokens: NDArray[np.int32]) -> None:
    """A sequence that was never prefilled, its ids and positions kept on the device."""
    batch = rig.model.new_batch(rig.cache, 1)
    batch.set([Slot(row=3, token=int(tokens[0]), position=0)])
    seen = [int(tokens[0])]
    for _ in range(8):
        rig.model.decode(rig.cache, batch)
        logits = logits_of(batch)[0]
        seen.append(int(batch.ids.numpy()[0]))
        assert seen[-1] == int(np.argmax(logits))
    assert batch.positions.numpy().tolist() == [8]
    assert error(rig.prefill(np.array(seen[:-1], np.int32)), logits) < 1e-5


def test_company_does_not_change_a_sequence(rig: Rig, tokens: NDArray[np.int32]) -> None:
    lengths = (70, 131, 5, 64)
    alone = []
    single = rig.model.new_batch(rig.cache, 1)
    slots = []
    for row, length in enumerate(lengths):
        rig.prefill(tokens[:length], row=row)
        slot = Slot(row, int(tokens[length]), length, temperature=0.8, top_p=0.9, seed=row)
        slots.append(slot)
        alone.append(rig.decode(single, [slot])[0])
        alone_id = int(single.ids.numpy()[0])
        assert 0 <= alone_id < VOCABULARY
    batch = rig.model.new_batch(rig.cache, 6)
    order = [2, 0, 3, 1]
    padding = Slot(row=-1, token=0, position=0)
    logits = rig.decode(batch, [slots[0 + i] for i in order] + [padding, padding])
    for place, row in enumerate(order):
        assert error(logits[place], alone[row]) < 1e-5
    assert batch.positions.numpy().tolist() == [lengths[i] + 1 for i in order] + [0, 0]


def test_a_head_shares_the_memory_of_its_batch(rig: Rig, tokens: NDArray[np.int32]) -> None:
    batch = rig.model.new_batch(rig.cache, 4)
    head = batch.head(2)
    rig.prefill(tokens[:9], row=0)
    slots = [Slot(0, int(tokens[9]), 9), Slot(-1, 0, 0)]
    logits = rig.decode(head, slots)
    np.testing.assert_array_equal(logits_of(batch)[:2], logits)
    assert batch.ids.numpy()[0] == head.ids.numpy()[0] == int(np.argmax(logits[0]))
    assert error(logits[0], rig.prefill(tokens[:10])) < 1e-5


def snapshot(cache: KVCache) -> list[NDArray[Any]]:
    return [array.numpy() for layer in range(2) for array in cache.pages(layer)]


def test_padding_slots_write_nothing(rig: Rig, tokens: NDArray[np.int32]) -> None:
    rig.prefill(tokens[:100])
    before = snapshot(rig.cache)
    batch = rig.model.new_batch(rig.cache, 3)
    rig.decode(batch, [Slot(row=-1, token=5, position=at) for at in (0, 40, 99)])
    for old, new in zip(before, snapshot(rig.cache), strict=True):
        np.testing.assert_array_equal(old, new)
    assert batch.positions.numpy().tolist() == [0, 40, 99]


def test_a_step_writes_only_its_rows_slots(rig: Rig, tokens: NDArray[np.int32]) -> None:
    before = snapshot(rig.cache)
    rig.prefill(tokens[:70], row=3)
    batch = rig.model.new_batch(rig.cache, 1)
    rig.decode(batch, [Slot(row=3, token=1, position=70)])
    own = np.zeros((PAGES, rig.cache.page_size), bool)
    own[6] = True
    own[11, :7] = True
    for old, new in zip(before, snapshot(rig.cache), strict=True):
        changed = (old != new).any(axis=(2, 3))
        np.testing.assert_array_equal(changed, own)


def test_a_captured_step_repeats(rig: Rig, tokens: NDArray[np.int32]) -> None:
    rig.prefill(tokens[:66], row=0)
    rig.prefill(tokens[:20], row=1)
    slots = [
        Slot(0, int(tokens[66]), 66, temperature=1.0, seed=3),
        Slot(1, int(tokens[20]), 20),
        Slot(-1, 0, 0),
    ]
    batch = rig.model.new_batch(rig.cache, 3)
    batch.set(slots)
    eager = []
    for _ in range(5):
        rig.model.decode(rig.cache, batch)
        eager.append(batch.ids.numpy()[:2].tolist())
    graph = tilert.capture(rig.model.device, lambda: rig.model.decode(rig.cache, batch))
    batch.set(slots)
    replayed = []
    for _ in range(5):
        graph.replay()
        replayed.append(batch.ids.numpy()[:2].tolist())
    graph.close()
    assert replayed == eager


def test_prefill_samples_like_decode(rig: Rig, tokens: NDArray[np.int32]) -> None:
    """The same prefix, seed and position give the same token on either path."""
    batch = rig.model.new_batch(rig.cache, 1)
    for seed in range(6):
        sampling = {"temperature": 1.5, "seed": seed}
        rig.prefill(tokens[:31], row=0, **sampling)
        first = int(rig.single.ids.numpy()[0])
        rig.prefill(tokens[:30], row=1)
        batch.set([Slot(1, int(tokens[30]), 30, temperature=1.5, seed=seed)])
        rig.model.decode(rig.cache, batch)
        assert int(batch.ids.numpy()[0]) == first


def test_random_weights_depend_on_the_seed(device: Device, tokens: NDArray[np.int32]) -> None:
    shape = CONFIGS["qwen3"]
    logits = [
        Rig(Transformer.random(shape, device, f32, max_len=MAX_LEN, seed=seed)).prefill(tokens)
        for seed in (0, 0, 1)
    ]
    assert np.isfinite(logits).all()
    np.testing.assert_array_equal(logits[0], logits[1])
    assert error(logits[2], logits[0]) > 0.1


def test_progress_and_sizes(device: Device, weights: Weights) -> None:
    seen: list[tuple[int, int]] = []
    model = Transformer.load(
        weights,
        device,
        bf16,
        max_len=MAX_LEN,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (weights.nbytes, weights.nbytes)
    assert seen == sorted(seen)
    c = weights.config
    assert model.page_bytes() == 2 * 2 * c.num_layers * 64 * c.num_kv_heads * c.head_dim
    untied = 0 if c.tie_word_embeddings else (c.vocab_size - 1) * c.hidden_size
    assert model.weight_bytes == 2 * (weights.nbytes // 4 - untied)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers.1.k": None}, r"in memory: tensor layers\.1\.k is missing"),
        ({"norm": (65,)}, r"tensor norm of shape \[65\] does not fit"),
        ({"extra": (3,)}, r"tensor extra of shape \[3\] does not fit"),
    ],
)
def test_a_checkpoint_that_does_not_fit(
    change: dict[str, tuple[int, ...] | None], message: str
) -> None:
    weights = weights_of(CONFIGS["qwen3"])
    for name, extents in change.items():
        if extents is None:
            del weights.arrays[name]
        else:
            weights.arrays[name] = np.zeros(extents, np.float32)
    with pytest.raises(LoadError, match=message):
        Transformer.load(weights, tilert.device("cpu"), f32, max_len=MAX_LEN)


def test_prefill_refuses_what_has_no_room() -> None:
    model = Transformer.random(CONFIGS["qwen3"], tilert.device("cpu"), f32, max_len=MAX_LEN)
    rig = Rig(model)
    with pytest.raises(ValueError, match="at least one token"):
        rig.prefill(np.zeros(0, np.int32))
    with pytest.raises(ValueError, match="row 2 has pages for 64 positions"):
        rig.prefill(np.zeros(65, np.int32), row=2)
    with pytest.raises(ValueError, match="tables cover 200"):
        rig.prefill(np.zeros(1, np.int32), start=200)
    with pytest.raises(ValueError, match=r"got rows \[-1\] for 1 chunks"):
        rig.prefill(np.zeros(1, np.int32), row=-1)
    with pytest.raises(ValueError, match=r"got rows \[-1\] for 0 chunks"):
        rig.model.prefill(rig.cache, rig.single, [])
    two = model.new_batch(rig.cache, 2)
    two.set([Slot(1, 0, 0), Slot(2, 0, 0)])
    with pytest.raises(ValueError, match=r"got rows \[1, 2\] for 1 chunks"):
        rig.model.prefill(rig.cache, two, [PromptChunk(np.zeros(1, np.int32), 0)])
    with pytest.raises(ValueError, match="row 2 has pages for 64 positions"):
        rig.model.prefill(rig.cache, two, [PromptChunk(np.zeros(n, np.int32), 0) for n in (1, 65)])
    with pytest.raises(ValueError, match="a batch of 1 slots got 2"):
        rig.single.set([Slot(0, 0, 0), Slot(1, 0, 0)])
    with pytest.raises(tilert.OwnershipError, match="O7 indexed pieces: row 1 occurs twice"):
        model.new_batch(rig.cache, 2).set([Slot(1, 0, 0), Slot(1, 0, 1)])
    with pytest.raises(tilert.OwnershipError, match="page 7 belongs to row 1"):
        rig.cache.set_pages(0, [7])
