"""What requests ask of a step besides a draw: penalties, bias, masks, log probabilities."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tilert
from models.batch import TOP_LOGPROBS, Batch
from models.history import History
from models.kv_cache import KVCache
from models.prompt import PromptChunk
from models.sampler import sample
from models.slot import MAX_BIASES, PLAIN, Features, Slot
from models.tiling import tiling
from models.transformer import Transformer
from tests.models.kernel_support import Floats
from tests.models.test_transformer import CONFIGS, MAX_LEN
from tests.models.test_transformer import config as make_config
from tilert import Device, f32

VOCABULARY = 600
EVERYTHING = Features(draws=True, edits=True, logprobs=True)


class Rig:
    """A batch whose logits are put there by hand."""

    def __init__(self, device: Device, size: int, rows: int = 8) -> None:
        shape = make_config(vocab_size=VOCABULARY)
        self.cache = KVCache(
            shape, device, f32, num_pages=rows, page_size=64, max_seqs=rows, max_len=64
        )
        self.batch = Batch(shape, device, f32, self.cache, size)
        self.tiles = tiling(device.kind).sampling(VOCABULARY)

    @property
    def history(self) -> History:
        return self.cache.history

    def step(
        self,
        logits: NDArray[np.float32],
        features: Features | None = None,
        batch: Batch | None = None,
        decoding: bool = True,
    ) -> list[int]:
        """The ids after sampling from these logits [B, V]."""
        batch = batch or self.batch
        batch.logits.copy_from(np.ascontiguousarray(logits, np.float32))
        used = batch.features if features is None else features
        sample(batch, self.history, used, self.tiles, decoding=decoding)
        ids: list[int] = batch.ids.numpy().tolist()
        return ids

    def edited(self) -> Floats:
        """The logits as they were sampled from."""
        flat = self.batch.edits["edited"].numpy().reshape(self.batch.size, -1)
        assert (flat[:, VOCABULARY:] == -np.inf).all()
        out: Floats = flat[:, :VOCABULARY].astype(np.float64)
        return out


def draw_logits(size: int, seed: int = 0, spread: float = 3.0) -> NDArray[np.float32]:
    values = np.random.default_rng(seed).standard_normal((size, VOCABULARY)) * spread
    return values.astype(np.float32)


def edited_by_hand(x: Floats, slot: Slot, prompt: list[int], produced: list[int]) -> Floats:
    """Bias, then repetition (as transformers' processor), then OpenAI's penalties, one by one."""
    x = x.copy()
    for token, value in slot.logit_bias:
        x[token] += value
    for token in set(prompt) | set(produced):
        x[token] = (
            x[token] * slot.repetition_penalty
            if x[token] < 0
            else (x[token] / slot.repetition_penalty)
        )
    for token in set(produced):
        x[token] -= produced.count(token) * slot.frequency_penalty + slot.presence_penalty
    return x


def test_penalties_and_bias_follow_their_formulas(device: Device) -> None:
    rig = Rig(device, 5)
    prompts = [[1, 2, 3, 3, 599], [], [7, 7], [5], [4]]
    produced = [[3, 9, 9, 255, 256], [0, 599], [7], [5, 6], [8]]
    for row in range(5):
        rig.history.set(row + 1, prompts[row], produced[row])
    newest = [9, 12, 7, 6, 8]
    slots = [
        Slot(1, newest[0], 3, presence_penalty=1.5, frequency_penalty=-0.25),
        Slot(2, newest[1], 4, repetition_penalty=1.3, logit_bias=((0, 7.0), (599, -100.0))),
        Slot(3, newest[2], 4, repetition_penalty=0.5, frequency_penalty=2.0, presence_penalty=-2.0),
        Slot(4, newest[3], 4),
        Slot(5, newest[4], 4, logit_bias=((8, 2.5), (8, 1.0), (300, float("-inf")))),
    ]
    rig.batch.set(slots)
    assert rig.batch.features == Features(draws=False, edits=True)
    logits = draw_logits(5)
    ids = rig.step(logits)
    for b, slot in enumerate(slots):
        history = [*produced[b], newest[b]]
        wanted = edited_by_hand(logits[b].astype(np.float64), slot, prompts[b], history)
        np.testing.assert_allclose(rig.edited()[b], wanted, rtol=1e-5, atol=1e-5)
        assert ids[b] == int(np.argmax(wanted))
    np.testing.assert_array_equal(rig.batch.logits.numpy(), logits)


def test_each_step_counts_the_token_it_reads(device: Device) -> None:
    """Without the host: ids of one step are counted by the next, row by row."""
    rig = Rig(device, 2)
    for row in (3, 6):
        rig.history.set(row, [])
    rig.batch.set([Slot(6, 10, 0, frequency_penalty=1.0), Slot(3, 11, 0, frequency_penalty=0.5)])
    logits = draw_logits(2, seed=1)
    produced: list[list[int]] = [[], []]
    newest = [10, 11]
    for _ in range(12):
        for b in range(2):
            produced[b].append(newest[b])
        newest = rig.step(logits)
        for b, penalty in enumerate((1.0, 0.5)):
            x = logits[b] - penalty * np.bincount(produced[b], minlength=VOCABULARY)
            assert newest[b] == int(np.argmax(x))
    counts = rig.history.counts.numpy().reshape(8, -1)
    assert counts[6].sum() == counts[3].sum() == 12
    assert counts.sum() == 24


def test_history_stays_with_its_row_when_the_batch_changes(device: Device) -> None:
    rig = Rig(device, 3)
    penalised = Slot(2, 50, 0, presence_penalty=2.0)
    rig.history.set(2, [], [40, 41])
    rig.batch.set([penalised, Slot(-1, 0, 0), Slot(-1, 0, 0)])
    rig.step(np.zeros((3, VOCABULARY), np.float32))
    rig.batch.set([Slot(0, 1, 0), Slot(-1, 77, 0), replace(penalised, token=51)])
    rig.step(np.zeros((3, VOCABULARY), np.float32))
    assert np.flatnonzero(rig.edited()[2]).tolist() == [40, 41, 50, 51]
    assert not rig.edited()[:2].any()
    # Padding counts nothing; a prefill counts nothing either.
    counts = rig.history.counts.numpy().reshape(8, -1)
    assert np.flatnonzero(counts.sum(axis=1)).tolist() == [0, 2]
    rig.step(np.zeros((3, VOCABULARY), np.float32), decoding=False)
    np.testing.assert_array_equal(rig.history.counts.numpy().reshape(8, -1), counts)


def test_history_refuses_what_does_not_exist() -> None:
    history = History(2, VOCABULARY, tilert.device("cpu"))
    with pytest.raises(IndexError, match="no row 2"):
        history.set(2, [])
    with pytest.raises(IndexError, match="prompt holds token 600, outside 600 ids"):
        history.set(0, [600])
    with pytest.raises(IndexError, match="produced holds token -1"):
        history.set(0, [], [-1])


def mask_of(tokens: list[int]) -> NDArray[np.uint32]:
    words = np.zeros(-(-VOCABULARY // 32), np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << (token % 32))
    return words


def test_a_mask_allows_its_tokens_only(device: Device) -> None:
    rig = Rig(device, 3)
    allowed = [[5, 31, 32, 255, 256, 599], [0], [598]]
    slots = [
        Slot(0, 1, 0, temperature=50.0, seed=3, masked=True),
        Slot(1, 1, 0, masked=True, logit_bias=((9, 100.0),)),
        Slot(2, 1, 0),
    ]
    rig.batch.set(slots)
    for slot in (0, 1):
        rig.batch.allow({slot: mask_of(allowed[slot]).view(np.int32)})
    logits = draw_logits(3, spread=0.1)
    seen = set()
    for _ in range(60):
        ids = rig.step(logits)
        seen.add(ids[0])
        assert ids[1] == 0
        assert ids[2] == int(np.argmax(logits[2]))
    assert seen == set(allowed[0])
    rig.batch.allow({0: mask_of([17])})
    assert rig.step(logits)[0] == 17
    with pytest.raises(IndexError, match="no slot 3"):
        rig.batch.allow({3: mask_of([1])})
    with pytest.raises(ValueError, match="up to 24 32-bit words"):
        rig.batch.allow({0: np.zeros(25, np.uint32)})


def test_log_probabilities_are_those_of_the_model(device: Device) -> None:
    """Before temperature, filters and edits; ties by id; -1 past the vocabulary is not needed."""
    rig = Rig(device, 4)
    logits = draw_logits(4, seed=3)
    logits[1, [20, 300, 301, 599]] = 15
    logits[3, ::7] = -np.inf
    rig.batch.set(
        [
            Slot(0, 1, 0, temperature=2.0, top_k=5, logprobs=True, logit_bias=((4, 3.0),)),
            Slot(1, 1, 0, logprobs=True),
            Slot(2, 1, 0),
            Slot(-1, 1, 0, temperature=0.5, logprobs=True),
        ]
    )
    assert rig.batch.features == EVERYTHING
    ids = rig.step(logits)
    found = {name: array.numpy() for name, array in rig.batch.logprobs.items()}
    for b in (0, 1, 3):
        x = logits[b].astype(np.float64)
        wanted = x - x.max() - np.log(np.exp(x - x.max()).sum())
        assert found["chosen"][b] == pytest.approx(wanted[ids[b]], abs=2e-5)
        order = np.lexsort((np.arange(VOCABULARY), -x))[:TOP_LOGPROBS]
        assert found["top_ids"][b].tolist() == order.tolist()
        np.testing.assert_allclose(found["top_values"][b], wanted[order], atol=2e-5)
    assert not found["top_values"][2].any()


def test_an_edited_slot_with_a_nan_is_bad_and_alone(device: Device) -> None:
    rig = Rig(device, 3)
    slots = [Slot(b, 1, 0, presence_penalty=1.0, logprobs=True, temperature=1.0) for b in range(3)]
    rig.batch.set(slots)
    clean = rig.step(draw_logits(3))
    assert rig.batch.bad.numpy().tolist() == [0, 0, 0]
    broken = draw_logits(3)
    broken[1, 300] = np.nan
    rig.batch.set(slots)
    ids = rig.step(broken)
    assert rig.batch.bad.numpy().tolist() == [0, 1, 0]
    assert [ids[0], ids[2]] == [clean[0], clean[2]]
    rig.step(draw_logits(3))
    assert rig.batch.bad.numpy().tolist() == [0, 1, 0]
    rig.batch.set(slots)
    assert rig.batch.bad.numpy().tolist() == [0, 0, 0]


def test_features_change_nothing_for_slots_without_them(device: Device) -> None:
    """Each slot gets the same id whatever the others ask for, in batches of any size."""
    rig = Rig(device, 6)
    logits = draw_logits(6, seed=8)
    slots = [
        Slot(0, 1, 5, temperature=0.9, top_p=0.8, seed=1),
        Slot(1, 1, 5),
        Slot(2, 1, 5, temperature=1.1, top_k=50, seed=2),
        Slot(3, 1, 5, temperature=0.6, top_k=20, top_p=0.95, seed=3),
        Slot(4, 1, 5, temperature=1.0, min_p=0.1, seed=4),
        Slot(5, 1, 5, temperature=1.0, presence_penalty=0.5, logprobs=True, seed=5),
    ]
    rig.history.set(5, [1, 2])
    rig.batch.set(slots)
    together = rig.step(logits)
    single = rig.batch.head(1)
    for b, slot in enumerate(slots):
        for features in (None, EVERYTHING):
            if b == 5:
                rig.history.set(5, [1, 2])
            single.set([slot])
            assert rig.step(logits[b : b + 1], features, single) == [together[b]]


def test_what_features_slots_need() -> None:
    greedy, drawn = Slot(0, 0, 0), Slot(0, 0, 0, temperature=0.5)
    assert Features.of(greedy.needs) == Features(draws=False)
    assert Features.of(greedy.needs | drawn.needs) == PLAIN
    assert Features.of(replace(greedy, masked=True).needs).edits
    assert Features.of(replace(greedy, repetition_penalty=1.1).needs).edits
    assert Features.of(replace(greedy, logprobs=True).needs).logprobs
    assert not replace(greedy, top_k=5).filters
    assert EVERYTHING.cover(PLAIN)
    assert not PLAIN.cover(EVERYTHING)


def test_a_step_refuses_slots_that_need_more(device: Device) -> None:
    rig = Rig(device, 1)
    rig.batch.set([Slot(0, 0, 0, presence_penalty=1.0)])
    with pytest.raises(ValueError, match="the batch needs Features"):
        rig.step(draw_logits(1), PLAIN)
    with pytest.raises(ValueError, match=f"at most {MAX_BIASES} biases, got {MAX_BIASES + 1}"):
        rig.batch.set([Slot(0, 0, 0, logit_bias=((1, 1.0),) * (MAX_BIASES + 1))])


def test_recorded_steps_read_what_is_set_later(device: Device) -> None:
    """One recording with everything serves batches that use less, and the model's own steps."""
    model = Transformer.random(CONFIGS["qwen3"], device, f32, max_len=MAX_LEN)
    cache = model.new_cache(8, 2)
    cache.set_pages(0, [0, 1])
    cache.set_pages(1, [2, 3])
    batch = model.new_batch(cache, 2)
    extras: dict[str, Any] = {"frequency_penalty": 1.5, "logprobs": True, "temperature": 0.7}
    full = [Slot(0, 3, 0, seed=1, **extras), Slot(1, 4, 0)]
    less = [Slot(0, 3, 0, seed=1, temperature=0.7), Slot(1, 4, 0)]

    def run(slots: list[Slot], features: Features, graph: tilert.Graph | None) -> list[list[int]]:
        cache.history.set(0, [])
        batch.set(slots)
        seen = []
        for _ in range(6):
            if graph is None:
                model.decode(cache, batch, features)
            else:
                graph.replay()
            seen.append(batch.ids.numpy().tolist())
        return seen

    wanted = [run(full, EVERYTHING, None), run(less, PLAIN, None)]
    graph = tilert.capture(device, lambda: model.decode(cache, batch, EVERYTHING))
    assert [run(full, EVERYTHING, graph), run(less, EVERYTHING, graph)] == wanted
    graph.close()


def test_a_prefill_uses_the_slot_s_features(device: Device) -> None:
    model = Transformer.random(CONFIGS["qwen3"], device, f32, max_len=MAX_LEN)
    cache = model.new_cache(4, 1)
    cache.set_pages(0, [0])
    batch = model.new_batch(cache, 1)
    tokens = np.arange(9, dtype=np.int32)
    cache.history.set(0, tokens.tolist())
    for slot in (
        Slot(0, 0, 0),
        Slot(0, 0, 0, masked=True, logprobs=True),
        Slot(0, 0, 0, temperature=0.5),
    ):
        batch.set([slot])
        if slot.masked:
            batch.allow({0: mask_of([77])[:8]})
        model.prefill(cache, batch, [PromptChunk(tokens, 0)])
        token = int(batch.ids.numpy()[0])
        logits = batch.logits.numpy()[0].astype(np.float64)
        if slot.masked:
            assert token == 77
            wanted = logits[77] - np.log(np.exp(logits).sum())
            assert batch.logprobs["chosen"].numpy()[0] == pytest.approx(wanted, abs=1e-4)
        elif not slot.draws:
            assert token == int(np.argmax(logits))
