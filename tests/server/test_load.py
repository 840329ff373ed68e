"""Many unruly clients at once: nothing is lost, nothing stays behind."""

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

import grout
from grout.config import PREFILL_CHUNK
from grout.readback import Readback
from grout.runner import Runner
from grout.scheduler import Chunk
from models.tiling import CpuTiling
from scripts import load_test
from scripts.bench_http_overhead import free_port
from scripts.bench_serving import first_model
from scripts.load_fill import Fill
from scripts.load_state import State, metrics_probe
from scripts.load_test import faults
from scripts.serving_client import Client, Endpoint
from tests.server.fakes import Live
from tests.server.tiny import SHAPE, open_tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model without weights."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"max_position_embeddings": 512}))
    return tmp_path


@pytest.fixture
def real(folder: Path) -> Iterator[Live[grout.Engine]]:
    sizes = {"max_model_len": 512, "max_num_seqs": 8, "kv_cache_memory": 2**22}
    with open_tiny(folder, **sizes) as engine, Live(engine) as live:
        yield live


def test_a_short_crowd(real: Live[grout.Engine]) -> None:
    async def probe() -> State:
        stats = real.engine.stats()
        return {name: float(stats[name]) for name in ("running", "waiting", "pages_free")}

    result, samples = asyncio.run(
        load_test.run(real.url, seconds=3, streams=12, max_new=8, seed=1, timeout=60, probe=probe)
    )
    assert faults(result, allowed=0, equal=True, watched="memory") == []
    # With this seed the first things that the twelve do are of each kind.
    assert result["outcomes"].keys() >= {"streamed", "plain", "dropped", "refused"}
    assert result["state"]["before"]["running"] == 0
    assert sum(result["outcomes"].values()) == result["requests"] >= 12
    assert sum(result["sent"].values()) == result["requests"]
    assert samples[-1].requests <= result["requests"]
    assert max(sample.state["running"] for sample in samples) > 0


async def fill(url: str, seconds: float) -> tuple[State | None, State | None]:
    """The state before and after."""
    client = Client(Endpoint("server", url, None), 60)
    probe = metrics_probe(client)
    before = await probe()
    model = await first_model(client)
    await (await Fill.begin(client, model, ("completions",), seconds, 0)).run(probe)
    after = await probe()
    await client.close()
    return before, after


def test_what_takes_memory_once_is_met_before(
    real: Live[grout.Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All padded sizes of prefills, of one prompt and of several, and of decodes; all pages."""
    prefill, padded = Runner.prefill, CpuTiling().padded_prompt
    sizes: dict[bool, set[int]] = {True: set(), False: set()}

    def noted(runner: Runner, chunks: Sequence[Chunk]) -> Readback:
        count = sum(chunk.stop - chunk.start for chunk in chunks)
        sizes[len(chunks) > 1].add(padded(count))
        return prefill(runner, chunks)

    monkeypatch.setattr(Runner, "prefill", noted)
    idle = {"running": 0, "waiting": 0, "free_rows": 8, "kv_used": 0}
    before, after = asyncio.run(fill(real.url, 0))
    assert before == after == idle | {"kv_touched": 0}
    before, after = asyncio.run(fill(real.url, 600))
    assert before == idle | {"kv_touched": 0}
    assert after == idle | {"kv_touched": 1}
    chunk = PREFILL_CHUNK["cpu"]
    assert sizes[False] >= {padded(count) for count in range(1, chunk + 1)}
    assert sizes[True] >= {padded(count) for count in range(2, chunk + 1)}
    assert set(real.engine.runner._lanes) == {1, 2, 4, 8}


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("trace", [False, True])
def test_a_crowd_of_64_on_a_process(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], trace: bool
) -> None:
    # Enough requests for a slope: a traced server answers several times fewer.
    seconds, warm_up = ("45", "15") if trace else ("12", "6")
    port = free_port()
    serve = f"{sys.executable} -m server.cli serve {folder} --load-format dummy --device cpu"
    argv = ["--start", f"{serve} --port {port} --max-num-seqs 16 --kv-cache-memory 8MiB"]
    argv += ["--url", f"http://127.0.0.1:{port}", "--seconds", seconds]
    argv += ["--max-new", "16", "--equal"]
    argv += ["--json", str(tmp_path / "r.json"), "--svg", str(tmp_path / "r.svg")]
    # How flat memory is shows on a quiet machine alone, and in more time than a test has.
    argv += ["--warm-up", warm_up, "--kb-per-request", "200", *["--trace"] * trace]
    status = load_test.main(argv)
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert status == 0, out
    assert json.loads((tmp_path / "r.json").read_text()) == result
    assert result["state"]["before"]["free_rows"] == 16
    assert result["state"]["before"]["kv_touched"] == 1
    assert result["filling"] == 0
    assert result["memory"]["requests"] > 0
    assert (result["heap"] is not None) == trace
    assert len(ElementTree.parse(tmp_path / "r.svg").findall(".//{*}polyline")) == 4


def result(**changes: object) -> dict[str, object]:
    good: dict[str, object] = {
        "requests": 3,
        "losses": {},
        "outcomes": {"streamed": 3},
        "state": {"before": {}, "after": {}, "differs": {}},
        "same_after": True,
        "memory": slope(1, 2),
        "heap": None,
        "memory_mb": [1, 2, 1],
        "filling": 0.0,
        "unequal_answers": 0,
    }
    return good | changes


def slope(kb: float, margin: float) -> dict[str, float]:
    return {"kb_per_request": kb, "margin": margin, "requests": 100}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"outcomes": {"streamed": 2, "lost": 1}, "losses": {"stream: cut": 1}}, "1 lost: stream"),
        ({"outcomes": {"refused": 3}}, "no stream came to its end"),
        ({"requests": 5}, "2 requests have no outcome"),
        (
            {"state": {"differs": {"kv_used": [0.0, 0.5]}}},
            "kv_used was 0.0 before and is 0.5 after",
        ),
        ({"same_after": False}, "another answer"),
        ({"memory": slope(5.1, 0.1)}, "memory grew by 5.1 ± 0.1 KB a request over 100"),
        # What cannot be ruled out is not shown to be well.
        ({"memory": slope(-1, 7)}, "perhaps by more than the 5 allowed"),
        ({"memory": slope(-9, 1)}, None),
        ({"memory": None}, "too short to tell"),
        ({"memory": None, "memory_mb": None}, None),
        ({"unequal_answers": 1}, "different answers"),
    ],
)
def test_faults(changes: dict[str, object], message: str | None) -> None:
    found = faults(result(**changes), allowed=5, equal=True, watched="memory")
    assert len(found) == (message is not None)
    assert message is None or message in found[0]


def test_a_cache_that_fills_is_named() -> None:
    grown = result(memory=slope(90, 1), filling=0.25)
    _, hint = faults(grown, allowed=5, equal=True, watched="memory")
    assert "25.0% was used for the first time" in hint
    assert faults(grown | {"heap": slope(0, 1)}, allowed=5, equal=True, watched="heap") == []
