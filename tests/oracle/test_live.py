"""Our models against transformers itself, on checkpoints made in the test from other seeds."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import models
import tilert
from models.tokenizer import Tokenizer
from tests.oracle.harness import Session, relative_error

if TYPE_CHECKING:
    from scripts.make_fixtures import Reference

pytestmark = pytest.mark.oracle

SEEDS = (101, 102)
NAMES = ("llama", "llama3-rope", "qwen3-tied", "qwen3-untied", "qwen3-yarn")
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 6.0,
        "original_max_position_embeddings": 100,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    "yarn-tuned": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 1.25,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
}


def make(
    folder: Path, name: str, seed: int, rope: dict[str, Any] | None = None, **settings: Any
) -> "Reference":
    """Write the fixture `name` with other weights (and RoPE, and settings); its reference."""
    from scripts.make_fixtures import FIXTURES, Reference, write_checkpoint

    [fixture] = [fixture for fixture in FIXTURES if fixture.name == name]
    fixture = dataclasses.replace(
        fixture,
        seed=seed,
        rope=fixture.rope if rope is None else rope,
        settings=fixture.settings | settings,
    )
    write_checkpoint(fixture, folder)
    return Reference(folder)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens(name: str, seed: int, tmp_path: Path) -> None:
    reference = make(tmp_path, name, seed)
    generator = np.random.default_rng(seed)
    prompt = reference.prompt(generator, 45)
    expected = reference.logits(prompt)
    session = Session(tmp_path, tilert.device("cpu"), tilert.f32)

    assert relative_error(session.prefill(prompt), expected[-1]) < 1e-4
    rows = [session.prefill(prompt[:20])]
    rows += [session.decode(int(prompt[at]), at) for at in range(20, len(prompt))]
    assert relative_error(np.stack(rows), expected[19:]) < 1e-4

    decided = reference.decided_prompt(generator)
    tokens = session.greedy(decided["greedy_prompt"], len(decided["greedy_tokens"]))
    assert tokens == decided["greedy_tokens"].tolist()


@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (5, 5)], ids=str)
def test_other_head_counts(heads: tuple[int, int], tmp_path: Path) -> None:
    queries, keys = heads
    reference = make(
        tmp_path,
        "qwen3-untied",
        7,
        hidden_size=80,
        num_attention_heads=queries,
        num_key_value_heads=keys,
    )
    prompt = reference.prompt(np.random.default_rng(7), 30)
    session = Session(tmp_path, tilert.device("cpu"), tilert.f32)
    assert relative_error(session.prefill(prompt), reference.logits(prompt)[-1]) < 1e-4


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("kind", ROPES)
def test_rope_tables(kind: str, head_dim: int, tmp_path: Path) -> None:
    reference = make(
        tmp_path,
        "qwen3-untied",
        8,
        rope=ROPES[kind] | {"rope_theta": 1e6},
        head_dim=head_dim,
        max_position_embeddings=256,
    )
    length = 300
    expected = reference.rope(length)
    actual = models.rope_tables(models.open_checkpoint(str(tmp_path)).config, length)
    for ours, theirs in zip(actual, (expected["rope_cos"], expected["rope_sin"]), strict=True):
        # transformers multiplies position and frequency in float32: position * 2^-24 of error.
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=length * 2.0**-23)


@pytest.mark.parametrize("kind", ROPES)
def test_logits_of_scaled_rope(kind: str, tmp_path: Path) -> None:
    reference = make(tmp_path, "llama", 9, rope=ROPES[kind], max_position_embeddings=256)
    prompt = reference.prompt(np.random.default_rng(9), 90)
    session = Session(tmp_path, tilert.device("cpu"), tilert.f32)
    assert relative_error(session.prefill(prompt), reference.logits(prompt)[-1]) < 1e-4


@pytest.mark.parametrize("name", ["llama", "qwen3-tied"])
def test_tokenizer_and_template(name: str, tmp_path: Path) -> None:
    reference = make(tmp_path, name, 10)
    tokenizer = Tokenizer.from_folder(tmp_path)
    template = models.open_checkpoint(str(tmp_path)).chat_template()
    assert template is not None
    for case in reference.encodings():
        assert tokenizer.encode(case["text"]) == case["ids"]
    for case in reference.chat(bos=name == "llama"):
        arguments = {"add_generation_prompt": False} | case["kwargs"]
        assert template.render(case["messages"], **arguments) == case["text"]
