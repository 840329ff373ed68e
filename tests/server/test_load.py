"""Many unruly clients at once: nothing is lost, nothing stays behind."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import grout
from scripts import load_test
from scripts.bench_http_overhead import free_port
from scripts.load_test import State, faults, memory
from tests.server.fakes import Live

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "vocab_size": 320,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model without weights."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return tmp_path


@pytest.fixture
def real(folder: Path) -> Iterator[Live[grout.Engine]]:
    config = grout.EngineConfig(
        str(folder), device="cpu", load_format="dummy", seed=1, max_num_seqs=8
    )
    with grout.create_engine(config) as engine, Live(engine) as live:
        yield live


def test_a_short_crowd(real: Live[grout.Engine]) -> None:
    async def probe() -> State:
        stats = real.engine.stats()
        return {name: float(stats[name]) for name in ("running", "waiting", "pages_free")}

    result = asyncio.run(
        load_test.run(real.url, seconds=3, streams=12, max_new=8, timeout=60, probe=probe)
    )
    assert faults(result, growth_mb=1e9, equal=True) == []
    assert result["outcomes"].keys() >= {"streamed", "plain", "dropped", "refused"}
    assert result["state"]["before"]["running"] == 0
    assert sum(result["outcomes"].values()) == result["requests"] > 12


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_crowd_of_64_on_a_process(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    serve = f"{sys.executable} -m server.cli serve {folder} --load-format dummy --device cpu"
    # A small cache: a large one is not touched, and so not resident, before it has once been used.
    argv = ["--start", f"{serve} --port {port} --max-num-seqs 16 --kv-cache-memory 24MiB"]
    argv += ["--url", f"http://127.0.0.1:{port}", "--seconds", "40", "--max-new", "16", "--equal"]
    status = load_test.main(argv)
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert status == 0, out
    assert result["state"]["before"]["running"] == 0
    assert result["rss_mb"]["growth"] < 64


def result(**changes: object) -> dict[str, object]:
    good: dict[str, object] = {
        "losses": {},
        "outcomes": {"streamed": 3},
        "state": {"before": {}, "after": {}, "differs": {}},
        "same_after": True,
        "rss_mb": {"growth": 1.0},
        "unequal_answers": 0,
    }
    return good | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"losses": {"stream: cut": 2}}, "2 lost: stream: cut"),
        ({"outcomes": {"refused": 3}}, "no stream came to its end"),
        (
            {"state": {"differs": {"kv_used": [0.0, 0.5]}}},
            "kv_used was 0.0 before and is 0.5 after",
        ),
        ({"same_after": False}, "another answer"),
        ({"rss_mb": {"growth": 65.0}}, "memory grew by 65.0 MB"),
        ({"unequal_answers": 1}, "different answers"),
    ],
)
def test_faults(changes: dict[str, object], message: str | None) -> None:
    found = faults(result(**changes), growth_mb=64, equal=True)
    assert len(found) == (message is not None)
    assert message is None or message in found[0]


def test_growth_leaves_the_start_out() -> None:
    sizes = [50, 100, 200, 200, 200, 200, 210, 210]
    grown = memory([(float(i), size * 10**6) for i, size in enumerate(sizes)])
    assert grown == {"start": 50.0, "most": 210.0, "end": 210.0, "growth": 10.0}
