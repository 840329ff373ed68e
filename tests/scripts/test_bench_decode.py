"""The decode benchmark end to end on a tiny model."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from grout import EngineConfig
from grout.engine import Engine
from models.batch import Batch
from models.kv_cache import KVCache
from models.prompt import PromptChunk
from models.transformer import Transformer
from scripts import bench_decode, decode_profile
from scripts.read_bandwidth import READ_BYTES
from scripts.reference import compare
from tilert.cpu_device import CpuDevice
from tilert.device import standing_in

ARGS = ["tiny-qwen3", "--load-format", "dummy", "--device", "cpu", "--new", "12"]
FEW = ["--prompt", "9", "--warmup", "0", "--repeats", "2"]


@pytest.fixture(autouse=True)
def small_bandwidth_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(READ_BYTES, "cpu", 1 << 26)


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_decode.main(ARGS + FEW) == 0
    out = capsys.readouterr().out.splitlines()
    result = json.loads(out[-1])
    assert (result["model"], result["dtype"], result["checked"]) == ("tiny-qwen3", "float32", None)
    assert (result["prompt"], result["new"], result["repeats"]) == (9, 12, 2)
    assert result["tok_s"] == pytest.approx(1e3 / result["ms_per_token"], rel=1e-3)
    assert result["ttft_ms"] > 0
    share = result["bytes_per_token"] * result["tok_s"] / (result["read_bandwidth_gb_s"] * 1e9)
    assert result["bandwidth_share"] == pytest.approx(share, rel=0.05, abs=1e-4)
    assert any(line.startswith("decode") and line.endswith("tok/s") for line in out)


def test_every_run_prefills_its_whole_prompt(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefilled: list[int] = []
    prefill = Transformer.prefill

    def counted(
        self: Transformer, cache: KVCache, batch: Batch, chunks: Sequence[PromptChunk]
    ) -> None:
        prefilled.append(sum(len(chunk.tokens) for chunk in chunks))
        prefill(self, cache, batch, chunks)

    monkeypatch.setattr(Transformer, "prefill", counted)
    assert bench_decode.main([*ARGS, "--prompt", "150", "--warmup", "1", "--repeats", "2"]) == 0
    assert prefilled.count(150) == 3


def test_a_check_needs_what_it_compares_with(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_decode, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        bench_decode.main([*ARGS, "--check"])
    assert "--check needs torch and transformers: pip install" in capsys.readouterr().err


def test_every_model_prompt_and_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[str | None] = []
    create = bench_decode.create_engine

    def counted(config: EngineConfig, *args: Any) -> Engine:
        engines.append(config.model)
        return create(config, *args)

    monkeypatch.setattr(bench_decode, "create_engine", counted)
    argv = ["tiny-qwen3", "tiny-llama", "--load-format", "dummy", "--device", "cpu"]
    argv += ["--prompt", "3", "70", "--new", "4", "9", "--warmup", "0", "--repeats", "1"]
    assert bench_decode.main([*argv, "--out", str(tmp_path / "new")]) == 0
    out = capsys.readouterr().out.splitlines()
    results = [json.loads(line) for line in out if line.startswith("{")]
    assert results.pop() == {"figures": 8, "ok": True}
    assert [(r["model"], r["prompt"], r["new"]) for r in results] == list(
        itertools.product(("tiny-qwen3", "tiny-llama"), (3, 70), (4, 9))
    )
    assert engines == ["tiny-qwen3", "tiny-llama"]
    lines = (tmp_path / "new" / "decode.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == results
    table = (tmp_path / "new" / "decode.md").read_text()
    assert table.count("| tiny-qwen3 |") == 4 and "| tiny-llama | 70 / 9 |" in table
    assert not (tmp_path / "new" / "decode.svg").exists()


class Gpu(CpuDevice):
    """Host memory that is taken for a GPU's."""

    kind = "cuda"

    def __init__(self) -> None:
        super().__init__()
        self.name = "cuda:0"


def test_profiles_are_part_of_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(READ_BYTES, "cuda", 1 << 26)
    monkeypatch.setattr(decode_profile, "GRAPH_NODES", 8)
    argv = ["tiny-qwen3", "--load-format", "dummy", "--device", "cuda", "--profile"]
    argv += ["--prompt", "5", "--new", "3", "4", "--warmup", "0", "--repeats", "1"]
    with standing_in(Gpu()):
        assert bench_decode.main([*argv, "--out", str(tmp_path)]) == 0
    results = [json.loads(line) for line in (tmp_path / "decode.jsonl").read_text().splitlines()]
    # One a prompt: it does not depend on how many tokens follow.
    assert ["profile" in result for result in results] == [True, False]
    assert results[0]["profile"]["context"] == 6
    assert "| in one graph |" in capsys.readouterr().out
    assert (tmp_path / "decode.md").read_text().count("## tiny-qwen3, context 6") == 1
    svg = ElementTree.parse(tmp_path / "decode.svg").getroot()
    assert any("context 6" in (text.text or "") for text in svg.iter())


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checked_against_transformers(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*ARGS, *FEW, "--dtype", dtype, "--check", "--positions", "20"]
    assert bench_decode.main(argv) == 0
    out = capsys.readouterr().out
    checked = json.loads(out.splitlines()[-1])["checked"]
    assert checked["equal"] + checked["ties"] == checked["eager_equal"] == 20
    assert checked["positions"] == 20
    if dtype == "float32":
        assert checked["logits_error"] < 1e-5 and checked["peer"] is None
        return
    # Beside the same in transformers' own bfloat16, which rounds in more places.
    assert 1e-3 < checked["mean_error"] <= checked["logits_error"] < checked["peer_error"] < 2e-2
    assert "of transformers bf16" in out


def test_what_a_check_finds_wrong_is_no_success(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = {
        "reference": "by hand", "positions": 12, "equal": 12, "ties": 0, "wrong": 0,
        "logits_error": 1e-3, "mean_error": 1e-3, "eager_equal": 12, "peer": None,
    }  # fmt: skip
    peer = {"peer": "transformers bf16", "peer_error": 2e-3, "peer_mean": 1e-3, "peer_wrong": 1}
    monkeypatch.setattr(bench_decode, "find_spec", lambda name: name)
    for change, status in (
        ({}, 0),
        ({"wrong": 1}, 1),
        ({"logits_error": 2.1e-2}, 1),
        ({"wrong": 1} | peer, 0),
        ({"wrong": 2} | peer, 1),
        ({"eager_equal": 11}, 1),
    ):
        found = good | change
        monkeypatch.setattr(bench_decode, "check", lambda *_, found=found: found)
        assert bench_decode.main([*ARGS, *FEW, "--check", "--positions", "12"]) == status
    assert "11 of 12 tokens the same" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["no-such-preset", "--load-format", "dummy", "--device", "cpu"], "preset"),
        (["--device", "tpu"], "unknown device 'tpu'"),
        ([*ARGS, "--profile"], "--profile times kernels on a GPU; cpu is none"),
    ],
)
def test_errors_are_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_decode.main(argv) == 2
    err = capsys.readouterr().err.splitlines()
    assert err[-1].startswith("bench_decode: error: ")
    assert message in err[-1]


def test_compare_tells_ties_from_wrong_tokens() -> None:
    reference = np.array([[1.0, 0.0, 0.996], [1.0, 0.0, 0.9], [0.0, 2.0, 1.0]], np.float32)
    reply = np.array([2, 2, 1], np.int32)
    agreement = compare(reference * np.float32(1.01), reply, reference, "by hand")
    assert (agreement["equal"], agreement["ties"], agreement["wrong"]) == (1, 1, 1)
    assert agreement["logits_error"] == pytest.approx(0.01, rel=1e-3)
