"""Our models against what transformers computed from the same checkpoints (tests/fixtures).

Needs neither torch nor transformers: scripts/make_fixtures.py keeps their answers by each model.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import models
import tilert
from models.tokenizer import Tokenizer
from tests.oracle.harness import Session, relative_error

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
NAMES = ("llama", "llama3-rope", "qwen3-tied", "qwen3-untied", "qwen3-yarn")
# Largest relative error of a logit: float32 rounding, and that of weights, activations and cache in
# 8 and 11 bits of mantissa.
TOLERANCE = {tilert.f32: 1e-4, tilert.bf16: 6e-2, tilert.f16: 8e-3}


@dataclass(frozen=True)
class Fixture:
    """A checkpoint folder and the answers in it."""

    folder: Path
    arrays: dict[str, NDArray[Any]]
    cases: dict[str, list[dict[str, Any]]]

    def prompt(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """(ids, logits after each of them) of a prompt: 0 is short, 2 is long."""
        return self.arrays[f"prompt_{number}"], self.arrays[f"logits_{number}"]


@pytest.fixture(params=NAMES)
def fixture(request: pytest.FixtureRequest) -> Fixture:
    folder = FIXTURES / request.param
    with np.load(folder / "expected.npz") as stored:
        arrays = dict(stored)
    cases = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    return Fixture(folder, arrays, cases)


def test_every_fixture_is_tested() -> None:
    assert sorted(path.name for path in FIXTURES.iterdir() if path.is_dir()) == sorted(NAMES)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_prefill_logits(fixture: Fixture, device: tilert.Device, number: int) -> None:
    prompt, expected = fixture.prompt(number)
    session = Session(fixture.folder, device, tilert.f32)
    for length in sorted({1, len(prompt) // 2 + 1, len(prompt)}):
        error = relative_error(session.prefill(prompt[:length]), expected[length - 1])
        assert error < TOLERANCE[tilert.f32], f"after {length} tokens"


@pytest.mark.parametrize("sizes", [[1, 16, 53], [32, 32, 6], [3, 3, 64]])
def test_chunked_prefill_logits(fixture: Fixture, device: tilert.Device, sizes: list[int]) -> None:
    prompt, expected = fixture.prompt(2)
    assert sum(sizes) == len(prompt)
    session = Session(fixture.folder, device, tilert.f32)
    actual = session.chunks(prompt, sizes)
    assert relative_error(actual, expected[np.cumsum(sizes) - 1]) < TOLERANCE[tilert.f32]


def test_decode_logits(fixture: Fixture, device: tilert.Device) -> None:
    prompt, expected = fixture.prompt(2)
    session = Session(fixture.folder, device, tilert.f32)
    rows = [session.prefill(prompt[:2])]
    rows += [session.decode(int(prompt[at]), at) for at in range(2, len(prompt))]
    assert relative_error(np.stack(rows), expected[1:]) < TOLERANCE[tilert.f32]


@pytest.mark.parametrize("dtype", [tilert.bf16, tilert.f16], ids=["bfloat16", "float16"])
def test_logits_in_half_precision(
    fixture: Fixture, device: tilert.Device, dtype: tilert.DType
) -> None:
    prompt, expected = fixture.prompt(2)
    session = Session(fixture.folder, device, dtype)
    rows = [session.prefill(prompt[:-3])]
    rows += [session.decode(int(prompt[at]), at) for at in range(len(prompt) - 3, len(prompt))]
    assert relative_error(np.stack(rows), expected[-4:]) < TOLERANCE[dtype]


def test_greedy_tokens(fixture: Fixture, device: tilert.Device) -> None:
    expected = fixture.arrays["greedy_tokens"].tolist()
    session = Session(fixture.folder, device, tilert.f32)
    assert session.greedy(fixture.arrays["greedy_prompt"], len(expected)) == expected


def test_rope_tables(fixture: Fixture) -> None:
    config = models.open_checkpoint(str(fixture.folder)).config
    expected = fixture.arrays["rope_cos"], fixture.arrays["rope_sin"]
    actual = models.rope_tables(config, len(expected[0]))
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == np.float32
        # transformers multiplies position and frequency in float32: position * 2^-24 of error.
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=len(theirs) * 2.0**-23)


def other_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """config.json with its RoPE keys as transformers 5 writes them if they are old, and back."""
    config = dict(config)
    if "rope_parameters" in config:
        rope = dict(config.pop("rope_parameters"))
        theta = rope.pop("rope_theta")
        scaling = None if rope["rope_type"] == "default" else rope
        return config | {"rope_theta": theta, "rope_scaling": scaling}
    rope = config.pop("rope_scaling") or {"rope_type": "default"}
    return config | {"rope_parameters": rope | {"rope_theta": config.pop("rope_theta")}}


def test_both_spellings_of_rope_give_identical_logits(fixture: Fixture, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(fixture.folder, copy)
    config = json.loads((copy / "config.json").read_text())
    respelt = other_spelling(config)
    assert ("rope_parameters" in respelt) != ("rope_parameters" in config)
    (copy / "config.json").write_text(json.dumps(respelt))

    prompt, _ = fixture.prompt(1)
    device = tilert.device("cpu")
    original, other = (
        Session(folder, device, tilert.f32).prefill(prompt) for folder in (fixture.folder, copy)
    )
    np.testing.assert_array_equal(original, other)


def test_tokenizer_ids(fixture: Fixture) -> None:
    tokenizer = Tokenizer.from_folder(fixture.folder)
    for case in fixture.cases["encode"]:
        text = case["text"]
        assert tokenizer.encode(text) == case["ids"], text
        with_special = tokenizer.encode(text, add_special_tokens=True)
        assert with_special == case["ids_with_special_tokens"], text
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == text


def test_chat_template_text(fixture: Fixture) -> None:
    template = models.open_checkpoint(str(fixture.folder)).chat_template()
    assert template is not None
    for case in fixture.cases["chat"]:
        arguments = {"add_generation_prompt": False} | case["kwargs"]
        assert template.render(case["messages"], **arguments) == case["text"]
