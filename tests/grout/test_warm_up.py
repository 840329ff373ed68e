"""What is recorded and compiled before the first request, so that no request waits for it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tilert
from grout.loading import _warm_up_lengths
from grout.runner import RECORDED, Runner
from models.presets import PRESETS
from models.prompt import PromptChunk
from models.slot import PADDING
from models.tiling import CudaTiling
from models.transformer import PAGE_SIZE, Transformer
from tests.grout.fakes import make_engine, model_of
from tilert import ir
from tilert.cpu_device import CpuDevice
from tilert.device import Launcher


class Gpu(CpuDevice):
    """Host memory that is taken for a GPU's."""

    kind = "cuda"

    def __init__(self) -> None:
        super().__init__()
        self.compiled: list[str] = []

    def compile(self, function: ir.Function) -> Launcher:
        self.compiled.append(function.name)
        return super().compile(function)


def test_no_prefill_has_to_be_recorded_or_compiled_later(monkeypatch: pytest.MonkeyPatch) -> None:
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
    before = len(recordings), len(device.compiled)
    # Each size, of one prompt no longer than the model allows and of several.
    sizes = [sum(size <= most for size in CudaTiling.prompts) for most in (640, 768)]
    # And each kind of sampling, and what takes slots in.
    assert before[0] == sum(sizes) + 2 * (1 + len(RECORDED) + 1)
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
