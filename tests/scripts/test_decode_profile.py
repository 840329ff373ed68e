"""A profile of a decode step, on host memory that is taken for a GPU's."""

import itertools
import json
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest

import tilert
from models.presets import PRESETS
from models.transformer import Transformer
from scripts import decode_profile
from scripts.decode_profile import Part, Profile, profile
from scripts.decode_report import profile_table, profiles_svg
from scripts.reference import greedy, our_logits
from tilert.cpu_device import CpuDevice

SHAPE = replace(PRESETS["tiny-qwen3"], num_layers=3)
PROMPT = np.arange(2, 72, dtype=np.int32)


@pytest.fixture(autouse=True)
def short_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several turns each; how exact times are does not matter here."""
    monkeypatch.setattr(decode_profile, "GRAPH_NODES", 8)


class Gpu(CpuDevice):
    """Host memory that is taken for a GPU's."""

    kind = "cuda"


def test_every_launch_of_a_step_is_timed_and_counted() -> None:
    model = Transformer.random(SHAPE, Gpu(), tilert.bf16, max_len=256)
    found = profile(model, PROMPT)
    parts = {part.label.split()[0]: part for part in found.parts if part.count == 3}
    # Per layer the ops of docs/architecture.md; linear_residual has two shapes.
    assert set(parts) == {
        "norm_linear", "decode_attention_split", "merge_splits", "linear_residual",
        "norm_gate_up_silu",
    }  # fmt: skip
    assert sum(part.count for part in found.parts if part.count == 3) == 6 * 3
    assert {part.count for part in found.parts} == {1, 3}
    assert all(part.seconds > 0 for part in found.parts)
    config, item = model.config, 2
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    weights = width * config.hidden_size * item
    # Weights, the residual stream, the gain, and what is written, in 16 or 32 bits.
    written = parts["norm_linear"].nbytes - weights - config.hidden_size * (4 + item)
    assert written in (width * item, width * 4)
    # 71 tokens, of which the newest is not from the cache, and what all splits find.
    kv = 2 * config.num_kv_heads * config.head_dim * item * (len(PROMPT) + 1)
    shares = 16 * config.num_heads * (config.head_dim + 2) * 4
    shares += 16 * config.num_kv_heads * config.head_dim * item
    assert parts["decode_attention_split"].nbytes == kv + shares
    assert found.context == 71
    assert sum(p.count * p.nbytes for p in found.parts) > model.weight_bytes


def test_it_leaves_what_follows_as_it_was() -> None:
    model = Transformer.random(SHAPE, Gpu(), tilert.f32, max_len=256)
    before = [token for token, _ in itertools.islice(greedy(model, PROMPT, recorded=True), 8)]
    profile(model, PROMPT)
    after = [token for token, _ in itertools.islice(greedy(model, PROMPT, recorded=True), 8)]
    assert after == before


def test_the_cpu_has_no_events_to_time_with() -> None:
    model = Transformer.random(SHAPE, tilert.device("cpu"), tilert.f32, max_len=256)
    with pytest.raises(tilert.DeviceError, match="times kernels on a GPU"):
        profile(model, PROMPT)


def test_arithmetic() -> None:
    parts = (Part("big 2 x 3", 10, 8e-6, 20_000_000), Part("small <1>", 1, 1e-6, 0))
    assert parts[0].floor(4e12) == pytest.approx(5e-6)
    assert parts[0].lost(4e12) == pytest.approx(30e-6)
    found = Profile(19, parts, 75e-6, 2).json(4e12)
    assert (found["sum_us"], found["floor_us"], found["step_us"]) == (81.0, 50.0, 75.0)
    table = profile_table(found).splitlines()
    assert table[2] == "| big 2 x 3 | 10 | 8.00 | 20.000 | 5.00 | 62% | 80.0 |"
    assert table[-2] == "| together | | | | 50.0 | 62% | 81.0 |"
    assert table[-1] == "| in one graph | | | | 50.0 | 67% | 75.0 |"
    svg = profiles_svg([{"model": "m & n", "device": "a GPU", "profile": found}])
    root = ET.fromstring(svg)
    texts = [t.text for t in root.iter() if t.text]
    assert "m & n, context 19: 75 us a step, of which its bytes need 50" in texts
    assert "1 x small <1>" in texts
    bars = [float(e.attrib["width"]) for e in root.iter() if e.tag.endswith("rect")][3:]
    # Bytes, then the rest, of the longest against an axis to 100 us.
    assert bars[:2] == [pytest.approx(210), pytest.approx(126)]
    json.dumps(found)


@pytest.mark.parametrize("recorded", [True, False])
def test_greedy_steps_on_the_device_are_those_with_ids_from_the_host(recorded: bool) -> None:
    model = Transformer.random(SHAPE, tilert.device("cpu"), tilert.f32, max_len=256)
    steps = list(itertools.islice(greedy(model, PROMPT, recorded), 6))
    ids = np.array([token for token, _ in steps], np.int32)
    assert np.array_equal(our_logits(model, PROMPT, ids), np.stack([row for _, row in steps]))
    wrong = ids.copy()
    wrong[2] += 1
    with pytest.raises(RuntimeError, match="token 2 is"):
        our_logits(model, PROMPT, wrong)
