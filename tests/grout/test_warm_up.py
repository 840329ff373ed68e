"""What is recorded and compiled before the first request, so that no request waits for it."""

import re
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tilert
from grout import loading
from grout.config import EngineConfig
from grout.loading import _prepare_after, _warm_up_lengths, _warm_up_sizes
from grout.rehearsal import rehearsed
from grout.request import SamplingParams
from grout.runner import RECORDED, Runner
from models.cuda_tiling import CudaTiling
from models.presets import PRESETS
from models.prompt import PromptChunk
from models.slot import PADDING
from models.transformer import PAGE_SIZE, Transformer
from tests.grout.fakes import make_engine, model_of
from tilert import ir
from tilert.cpu_device import CpuDevice
from tilert.device import Launcher

SHAPE = PRESETS["tiny-qwen3"]


class Gpu(CpuDevice):
    """Host memory that is taken for a GPU's."""

    kind = "cuda"

    def __init__(self) -> None:
        super().__init__()
        self.compiled: list[str] = []

    def compile(self, function: ir.Function) -> Launcher:
        self.compiled.append(function.name)
        return super().compile(function)


def test_no_prefill_has_to_be_compiled_later_or_recorded_after_a_quiet_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of one prompt and of several, of any number of tokens, on a GPU."""
    chunk, max_len, rows = 700, 560, 4
    device = Gpu()
    shape = replace(PRESETS["tiny-qwen3"], num_layers=1)
    model = Transformer.random(shape, device, tilert.bf16, max_len=max_len)
    cache = model.new_cache(60, rows)
    runner = Runner(model, cache, max_num_seqs=rows)
    recordings: list[object] = []
    capture = tilert.capture

    def counted(*arguments: Any) -> tilert.Graph:
        recordings.append(arguments)
        return capture(*arguments)

    monkeypatch.setattr(tilert, "capture", counted)
    runner.warm_up(_warm_up_lengths("cuda", chunk), (), RECORDED)
    # Each size, of one prompt no longer than the model allows and of several: with one layer, to
    # compile it.
    sizes = [sum(size <= most for size in CudaTiling.prompts) for most in (640, 768)]
    # And each kind of sampling, what takes slots in, and the shortest with all layers.
    assert len(recordings) == sum(sizes) + 2 * (1 + len(RECORDED) + 1 + 1)
    made = [len(batch.prefills) for batch in (runner._prompt, runner._prompts)]
    assert made == [1, 1]
    compiled = len(device.compiled)
    assert runner.left_to_record == sum(sizes) - 2
    while runner.left_to_record:
        runner.record_ahead()
    made = [len(batch.prefills) for batch in (runner._prompt, runner._prompts)]
    assert made == sizes
    before = len(recordings), compiled
    size = -(-max_len // PAGE_SIZE)
    for row in range(2):
        cache.set_pages(row, range(row * size, (row + 1) * size))
    edges = (c for size in CudaTiling.prompts for c in (size - 1, size, size + 1) if c <= chunk)
    for count in [1, 2, 5, *edges, *range(514, 520), 550, 556, 559, 576, 640, 699, chunk]:
        if count < max_len:
            runner._prompt.set([replace(PADDING, row=0)])
            model.prefill(cache, runner._prompt, [PromptChunk(np.zeros(count, np.int32), 0)])
        slots = [replace(PADDING, row=0), replace(PADDING, row=1)]
        runner._prompts.set(slots + [PADDING] * 6)
        parts = (count - count // 2, count // 2)
        chunks = [PromptChunk(np.zeros(part, np.int32), 0) for part in parts if part]
        if len(chunks) == 2:
            model.prefill(cache, runner._prompts, chunks)
    assert (len(recordings), len(device.compiled)) == before


def rehearse(
    device: Gpu, config: EngineConfig, max_len: int, lines: list[str]
) -> tuple[Any, Any, Any]:
    """The warm-up, whose kernels have been made when this returns."""
    sizes = _warm_up_sizes("cuda", config.max_num_seqs)
    warm_up = _warm_up_lengths("cuda", config.chunk("cuda")), sizes, RECORDED
    with rehearsed(config, SHAPE, device, tilert.bf16, max_len, warm_up, lines.append) as ready:
        assert lines == []
        assert ready.wait(120)
    return warm_up


@pytest.mark.parametrize(("rows", "chunk", "max_len"), [(4, 700, 200), (1, 64, 256)])
def test_all_kernels_of_a_warm_up_are_rehearsed(rows: int, chunk: int, max_len: int) -> None:
    device = Gpu()
    config = EngineConfig(model="tiny-qwen3", max_num_seqs=rows, prefill_chunk=chunk)
    lines: list[str] = []
    warm_up = rehearse(device, config, max_len, lines)
    made = len(device.compiled)
    assert made > 20
    assert re.fullmatch(rf"{made} kernels were ready after \d+\.\d\d s", *lines)
    model = Transformer.random(SHAPE, device, tilert.bf16, max_len=max_len)
    runner = Runner(model, model.new_cache(60, rows), max_num_seqs=rows)
    runner.warm_up(*warm_up)
    while runner.left_to_record:
        runner.record_ahead()
    assert len(device.compiled) == made


def test_a_failed_rehearsal_leaves_everything_to_the_warm_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, lines = Gpu(), list[str]()
    config = EngineConfig(model="tiny-qwen3", max_num_seqs=1, prefill_chunk=64)
    with monkeypatch.context() as patch:
        patch.setattr(device, "begin_compile", fail)
        warm_up = rehearse(device, config, 256, lines)
    assert device.compiled == [] and lines[0].startswith("0 kernels")
    model = Transformer.random(SHAPE, device, tilert.bf16, max_len=256)
    Runner(model, model.new_cache(60, 1), max_num_seqs=1).warm_up(*warm_up)
    assert len(device.compiled) > 20


def test_an_error_while_weights_are_read_is_not_held_up_by_a_rehearsal() -> None:
    config, lines = EngineConfig(max_num_seqs=1, prefill_chunk=64), list[str]()
    warm_up = (64,), (1,), RECORDED
    with (
        pytest.raises(OSError, match="cut short"),
        rehearsed(config, SHAPE, Gpu(), tilert.bf16, 256, warm_up, lines.append),
    ):
        raise OSError("cut short")
    assert lines == []


def fail(*_: Any) -> Any:
    raise tilert.CompileError("no compiler")


class Grammars:
    """Stands for what takes long to prepare."""

    def __init__(self) -> None:
        self.prepared = threading.Event()

    def prepare(self) -> None:
        self.prepared.set()


def test_grammars_are_prepared_behind_kernels_unless_those_take_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "LOADED_SECONDS", 300.0)
    ready, grammars = threading.Event(), Grammars()
    _prepare_after(ready, grammars)  # type: ignore[arg-type]
    assert not grammars.prepared.wait(0.2)
    ready.set()
    assert grammars.prepared.wait(60)
    monkeypatch.setattr(loading, "LOADED_SECONDS", 0.01)
    late = Grammars()
    _prepare_after(threading.Event(), late)  # type: ignore[arg-type]
    assert late.prepared.wait(60)


@pytest.mark.usefixtures("fake_device")
def test_prefills_are_recorded_while_there_is_nothing_to_do() -> None:
    """The shortest first; one that cannot be is left to the request that needs it."""
    made = make_engine(max_model_len=40)
    recorded: list[int] = []
    done = threading.Event()

    def record(count: int) -> None:
        recorded.append(count)
        if count == 20:
            raise RuntimeError("out of memory")
        if count == 30:
            done.set()

    model_of(made).prepare = lambda count: lambda: record(count)
    made.runner.warm_up((30, 3, 20, 10), ())
    assert recorded == []
    with made.start():
        assert done.wait(60)
        reply = made.generate_sync([1, 2, 3], SamplingParams(temperature=0, max_tokens=4))
        assert len(reply.token_ids) == 4
    assert recorded == [10, 10, 20, 20, 30, 30]


@pytest.mark.usefixtures("fake_device")
def test_an_engine_settles() -> None:
    """Before that a server takes no requests, which would have to wait for a recording."""
    made = make_engine(max_model_len=40)
    recorded: list[int] = []
    may = threading.Event()

    def record(count: int) -> None:
        assert may.wait(60)
        recorded.append(count)

    model_of(made).prepare = lambda count: lambda: record(count)
    made.runner.warm_up((30, 20, 10), ())
    with made.start():
        assert not made.settle(timeout=0.1)
        may.set()
        assert made.settle()
        # The shortest is always there; the last one is complete, too.
        assert recorded == [20, 20, 30, 30]
        assert made.settle()
    assert not made.settle()


@pytest.mark.usefixtures("fake_device")
@pytest.mark.parametrize(
    ("engine", "lengths", "runs"),
    [
        # Prompts are at most 12 tokens, three pages of four, of which there are five.
        ({"max_model_len": 12, "pages": 5}, (3, 30), [[12], [3], [12, 8], [3]]),
        ({"max_model_len": 12, "pages": 9}, (30, 31), [[12], [12, 12, 7], [12, 12, 6]]),
        ({"max_model_len": 12, "max_num_seqs": 1}, (8, 30), [[12], [8]]),
        ({"max_model_len": 40}, (3, 30), [[30], [3], [30], [3]]),
    ],
)
def test_it_takes_the_rows_and_pages_that_there_are(
    engine: dict[str, int], lengths: tuple[int, ...], runs: list[list[int]]
) -> None:
    made = make_engine(**engine)  # type: ignore[arg-type]
    made.runner.warm_up(lengths, ())
    launched = [[len(chunk.tokens) for chunk in one] for one in model_of(made).launches]
    assert launched == runs
    assert model_of(made).cache.in_use == set()
