"""The decode benchmark end to end on a tiny model."""

import json
from collections.abc import Sequence

import numpy as np
import pytest

from models.batch import Batch
from models.kv_cache import KVCache
from models.prompt import PromptChunk
from models.transformer import Transformer
from scripts import bench_decode
from scripts.read_bandwidth import READ_BYTES
from scripts.reference import compare

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


@pytest.mark.oracle
def test_checked_against_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_decode.main([*ARGS, *FEW, "--check"]) == 0
    checked = json.loads(capsys.readouterr().out.splitlines()[-1])["checked"]
    assert checked["equal"] == checked["positions"] == 12
    assert checked["logits_error"] < 1e-4


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["no-such-preset", "--load-format", "dummy", "--device", "cpu"], "preset"),
        (["--device", "tpu"], "unknown device 'tpu'"),
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
    assert not agreement.ok
