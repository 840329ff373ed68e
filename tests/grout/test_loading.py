"""The whole engine on the cpu backend with made-up weights of a tiny model."""

import asyncio
import gc
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from grout.config import EngineConfig
from grout.engine import Engine
from grout.errors import ConfigError, OutOfMemory
from grout.loading import (
    PROGRESS_SECONDS,
    _Model,
    _recommended,
    create_engine,
    default_sampling,
    paced,
)
from grout.request import SamplingParams
from models.presets import PRESETS
from models.tokenizer import Tokenizer

FIXTURES = Path(__file__).parents[1] / "fixtures"
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [[1 + n, 17, 40 + 3 * n] + [7 * n % 200 + 1] * (9 * n) for n in range(6)]


@pytest.fixture(scope="module", params=["tiny-qwen3", "tiny-llama"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    config = EngineConfig(
        model=request.param, device="cpu", load_format="dummy", seed=1, prefill_chunk=16
    )
    with create_engine(config) as engine:
        yield engine


def test_what_it_offers(engine: Engine) -> None:
    assert engine.model_id in ("tiny-qwen3", "tiny-llama")
    assert engine.max_model_len == 256
    assert engine.config.dtype == "float32"
    assert engine.eos_token_ids == (258,)
    assert engine.default_sampling == {}
    assert engine.chat_template is not None
    prompt = engine.chat_template.render([{"role": "user", "content": "Hi"}])
    assert engine.tokenizer.decode(engine.tokenizer.encode(prompt)) == "user\nHi\nassistant\n"
    stats = engine.stats()
    assert stats["pages_free"] == stats["pages_total"] > 0


def test_batched_is_the_same_as_alone(engine: Engine) -> None:
    alone = [engine.generate_sync(prompt, GREEDY) for prompt in PROMPTS]

    async def together() -> list[tuple[int, ...]]:
        async def one(prompt: list[int]) -> tuple[int, ...]:
            deltas = [delta async for delta in engine.generate(prompt, GREEDY)]
            return tuple(token for delta in deltas for token in delta.token_ids)

        return await asyncio.gather(*map(one, PROMPTS))

    assert asyncio.run(together()) == [reply.token_ids for reply in alone]
    assert all(len(reply.token_ids) == 24 for reply in alone)
    assert len({reply.token_ids for reply in alone}) > 1
    stats = engine.stats()
    assert stats["pages_free"] == stats["pages_total"]


def test_a_seed_gives_the_same_tokens_in_any_batch(engine: Engine) -> None:
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=16, ignore_eos=True)
    alone = engine.generate_sync([5, 6, 7], params).token_ids

    async def beside_others() -> tuple[int, ...]:
        async def one(prompt: list[int], params: SamplingParams) -> tuple[int, ...]:
            deltas = [delta async for delta in engine.generate(prompt, params)]
            return tuple(token for delta in deltas for token in delta.token_ids)

        others = [one(prompt, GREEDY) for prompt in PROMPTS[:3]]
        return (await asyncio.gather(*others, one([5, 6, 7], params)))[-1]

    assert asyncio.run(beside_others()) == alone
    assert engine.generate_sync([5, 6, 7], params).token_ids == alone


def test_steps_op_by_op_give_the_same_tokens(engine: Engine) -> None:
    config = EngineConfig(
        model=engine.model_id, device="cpu", load_format="dummy", seed=1, enforce_eager=True
    )
    with create_engine(config) as eager:
        prompt = PROMPTS[3]
        assert eager.generate_sync(prompt, GREEDY) == engine.generate_sync(prompt, GREEDY)


def test_progress_and_names() -> None:
    lines: list[str] = []
    config = EngineConfig(
        model="tiny-llama",
        device="cpu",
        dtype="bfloat16",
        load_format="dummy",
        served_model_name="mine",
        max_model_len=100,
        max_num_seqs=2,
    )
    with create_engine(config, lines.append) as engine:
        assert engine.model_id == "mine"
        assert engine.max_model_len == 100
        assert engine.generate_sync([1, 2], GREEDY).finish_reason == "length"
    assert lines[0] == "mine on cpu, bfloat16"
    assert any("context 100 tokens" in line for line in lines)


def test_weights_that_are_read_are_told_at_the_start_and_at_the_end() -> None:
    lines: list[str] = []
    config = EngineConfig(model=str(FIXTURES / "qwen3-tied"), device="cpu", max_model_len=64)
    with create_engine(config, lines.append):
        pass
    first, last = (line for line in lines if line.startswith("loading weights: "))
    assert re.fullmatch(r"loading weights: [\d.]+ KiB", first)
    assert re.fullmatch(rf"loading weights: 100% of {first.split(': ')[1]}, [\d.]+ GB/s", last)


def test_a_long_load_is_told_of_from_time_to_time() -> None:
    now, lines = 5.0, list[str]()
    progress = paced(lines.append, lambda: now)
    for second in range(1, 41):
        now += PROGRESS_SECONDS / 10
        progress(second * 2**30, 40 * 2**30)
    assert [line.partition(",")[0] for line in lines] == [
        f"loading weights: {share}% of 40.00 GiB" for share in (25, 50, 75, 100)
    ]
    assert {line.partition(", ")[2] for line in lines} == {"1.07 GB/s"}


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_as_before_when_a_start_is_over(enabled: bool) -> None:
    seen: list[bool] = []
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ConfigError, match="needs a preset"):
            create_engine(EngineConfig(model="no-such-model", device="cpu", load_format="dummy"))
        assert gc.isenabled() == enabled
        config = EngineConfig(model="tiny-llama", device="cpu", load_format="dummy")
        with create_engine(config, lambda _: seen.append(gc.isenabled())):
            assert gc.isenabled() == enabled
        assert seen and not any(seen)
    finally:
        (gc.enable if before else gc.disable)()


def test_what_cannot_be_loaded_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a preset"):
        create_engine(EngineConfig(model="no-such-model", device="cpu", load_format="dummy"))
    with pytest.raises(ConfigError, match="past the 256 tokens"):
        create_engine(
            EngineConfig(model="tiny-llama", device="cpu", load_format="dummy", max_model_len=999)
        )


def test_a_machine_without_room_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilert.cpu_device.CpuDevice.memory", lambda _: (2**17, 2**30))
    with pytest.raises(OutOfMemory, match="the weights need"):
        create_engine(EngineConfig(model="tiny-llama", device="cpu", load_format="dummy"))


def test_no_weights_are_made_where_the_cache_would_not_fit_behind_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tilert.cpu_device.CpuDevice.memory", lambda _: (2**20, 2**30))
    lines: list[str] = []
    with pytest.raises(OutOfMemory, match=r"the weights take 3\d\d\.\d KiB of 1\.0 MiB that cpu"):
        create_engine(
            EngineConfig(model="tiny-llama", device="cpu", load_format="dummy"), lines.append
        )
    assert lines == ["tiny-llama on cpu, float32"]


@pytest.mark.skipif(sys.platform != "linux", reason="limits a process as Linux does")
@pytest.mark.parametrize(
    "command", [["-m", "scripts.bench_decode"], ["-m", "server.cli", "serve", "--port", "0"]]
)
def test_commands_say_what_a_model_needs_and_what_there_is(command: list[str]) -> None:
    limited = (
        "import os, resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (6 * 2**30, 6 * 2**30))\n"
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    arguments = ["qwen3-4b", "--load-format", "dummy", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-c", limited, *command, *arguments],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # each of its threads reserves memory
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert re.search(
        r"error: the weights need 14\.98 GiB, but cpu has \d\.\d\d GiB to give; ", last
    )
    assert "making weights up" not in done.stderr


def test_recommended_sampling() -> None:
    assert default_sampling({"do_sample": True, "temperature": 0.6, "top_k": 20}) == {
        "temperature": 0.6,
        "top_k": 20,
    }
    assert default_sampling({"do_sample": False, "temperature": 0.6}) == {"temperature": 0.0}
    assert default_sampling({}) == {}


def test_the_default_model_is_greedy_and_others_are_as_they_say() -> None:
    shape = PRESETS["tiny-llama"]
    plain = _Model("m", shape, Tokenizer.byte_level(), None, None)
    told = replace(plain, config=replace(shape, default_sampling={"temperature": 0.3}))
    assert default_sampling(_recommended(EngineConfig(), plain)) == {"temperature": 0.0}
    assert default_sampling(_recommended(EngineConfig(), told)) == {"temperature": 0.3}
    assert default_sampling(_recommended(EngineConfig(model="m"), plain)) == {}
    assert default_sampling(_recommended(EngineConfig(load_format="dummy"), plain)) == {}
