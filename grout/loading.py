"""From a configuration to a running engine: `create_engine`."""

import gc
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import tilert
from grout.config import EngineConfig
from grout.constraint import GrammarTokens
from grout.engine import Engine
from grout.errors import ConfigError
from grout.memory import (
    check_model,
    context_limit,
    gib,
    plan_memory,
)
from grout.pages import PagePool
from grout.rehearsal import rehearsed
from grout.runner import RECORDED, Runner, bucket
from grout.scheduler import Scheduler
from models.chat_template import ChatTemplate
from models.config import ModelConfig
from models.kv_cache import kept_dtype
from models.presets import PRESETS
from models.safetensors_loader import read_config
from models.source import open_checkpoint, resolve
from models.tiling import tiling
from models.tokenizer import Tokenizer
from models.transformer import Transformer
from models.weights import Checkpoint

Progress = Callable[[str], None]

DTYPES = {"float32": tilert.f32, "bfloat16": tilert.bf16, "float16": tilert.f16}
DUMMY_PRESET = "qwen3-0.6b"
DUMMY_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# ChatML (OpenAI's "Chat Markup Language"), the form Qwen's own templates build on.
DUMMY_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LOADED_SECONDS = 0.5
"""Kernels that are not ready after so long are being compiled, in which the interpreter is idle."""
PROGRESS_SECONDS = 10.0
"""Between two lines about one load: who waits sees that it goes on, and a log stays readable."""
SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True, slots=True)
class _Model:
    """What is known of a model before its weights are read; `checkpoint` is None for a dummy."""

    id: str
    config: ModelConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    checkpoint: Checkpoint | None


def create_engine(config: EngineConfig, progress: Progress | None = None) -> Engine:
    """Open and load a model, size its KV cache, warm up, and start the engine.

    `progress` is called with lines for people. Raises `ConfigError`, `OutOfMemory`,
    `models.errors.ModelError` for files that cannot be used, and `tilert.DeviceError`.
    """
    # Collections would walk all that is made meanwhile, again and again, and none of it is garbage.
    collected = gc.isenabled()
    gc.disable()
    try:
        return _started(config, progress or _silent)
    finally:
        if collected:
            gc.enable()


def _started(config: EngineConfig, report: Progress) -> Engine:
    device = tilert.device(config.device)
    config = config.resolve(device.kind)
    dtype = DTYPES[config.dtype]
    model = _dummy(config) if config.load_format == "dummy" else _open(config, report)
    limit = context_limit(config, model.config, device.kind)
    report(f"{model.id} on {device.name}, {config.dtype}")
    free, total = device.memory()
    check_model(
        config,
        model.config,
        limit,
        kind=device.kind,
        dtype=dtype,
        free=free,
        total=total,
        where=device.name,
    )
    grammars = GrammarTokens(model.tokenizer, model.config.vocab_size, _eos(model))
    warm_up = (
        _warm_up_lengths(device.kind, config.chunk(device.kind)),
        _warm_up_sizes(device.kind, config.max_num_seqs),
        () if device.kind == "cpu" else RECORDED,
    )
    with rehearsed(config, model.config, device, dtype, limit, warm_up, report) as ready:
        _prepare_after(ready, grammars)
        transformer = _load(model, device, dtype, limit, config.seed or 0, report)
        engine = _engine(config, model, transformer, limit, grammars, report)
        report("warming up")
        engine.runner.warm_up(*warm_up)
    grammars.prepare()
    # What is there now stays: collections that walked a vocabulary would hold steps up.
    gc.collect()
    gc.freeze()
    return engine.start()


def _prepare_after(ready: threading.Event, grammars: GrammarTokens) -> None:
    """Prepare grammars, which takes seconds for a large vocabulary, beside the weights.

    Behind kernels that are only loaded: it would keep the interpreter from them.
    """

    def prepare() -> None:
        ready.wait(LOADED_SECONDS)
        grammars.prepare()

    threading.Thread(target=prepare, name="grout-grammars", daemon=True).start()


def _engine(
    config: EngineConfig,
    model: _Model,
    transformer: Transformer,
    limit: int,
    grammars: GrammarTokens,
    report: Progress,
) -> Engine:
    """The engine, with a KV cache of what memory is left."""
    device, chunk = transformer.device, config.chunk(transformer.device.kind)
    free, total = device.memory()
    plan = plan_memory(
        config,
        model.config,
        limit,
        kind=device.kind,
        dtype=transformer.dtype,
        free=free,
        total=total,
    )
    own = model.config.max_length
    shorter = f" (the model's own is {own}; see --max-model-len)" * (plan.max_model_len < own)
    report(
        f"context {plan.max_model_len} tokens{shorter}; KV cache "
        f"{plan.num_pages * transformer.page_size} tokens in "
        f"{gib(plan.num_pages * transformer.page_bytes())} of {kept_dtype(transformer.dtype).name}"
    )
    cache = transformer.new_cache(plan.num_pages, config.max_num_seqs)
    runner = Runner(
        transformer, cache, max_num_seqs=config.max_num_seqs, eager=config.enforce_eager
    )
    return Engine(
        config,
        runner,
        Scheduler(
            PagePool(plan.num_pages),
            page_size=transformer.page_size,
            max_num_seqs=config.max_num_seqs,
            prefill_chunk=chunk,
            prefix_caching=config.prefix_caching,
        ),
        model.tokenizer,
        model_id=model.id,
        max_model_len=plan.max_model_len,
        vocab_size=model.config.vocab_size,
        eos_token_ids=_eos(model),
        chat_template=model.chat_template,
        default_sampling=default_sampling(_recommended(config, model)),
        grammars=grammars,
    )


def _eos(model: _Model) -> tuple[int, ...]:
    return (*model.config.eos_token_ids, *model.tokenizer.eos_token_ids)


def _recommended(config: EngineConfig, model: _Model) -> Mapping[str, float | int | bool]:
    """The checkpoint's own settings; the default model has none, and answers best greedily."""
    own = model.config.default_sampling
    is_default = config.model is None and config.load_format != "dummy"
    return own if own or not is_default else {"do_sample": False}


def default_sampling(recommended: Mapping[str, float | int | bool]) -> dict[str, float | int]:
    """A checkpoint's recommended sampling; `do_sample: false` there means greedy."""
    sampling: dict[str, float | int] = {
        key: recommended[key] for key in SAMPLING_KEYS if key in recommended
    }
    if recommended.get("do_sample") is False:
        sampling["temperature"] = 0.0
    return sampling


def _open(config: EngineConfig, report: Progress) -> _Model:
    source = resolve(config.model, progress=report)
    checkpoint = open_checkpoint(source, progress=report)
    return _Model(
        config.served_model_name or source.id,
        checkpoint.config,
        checkpoint.tokenizer(),
        checkpoint.chat_template(),
        checkpoint,
    )


def _dummy(config: EngineConfig) -> _Model:
    """A model of a known shape; its tokenizer is the folder's, or one of bytes."""
    name = config.model or DUMMY_PRESET
    folder = Path(name).expanduser()
    tokenizer = template = None
    if name in PRESETS:
        shape = PRESETS[name]
    elif (folder / "config.json").is_file():
        shape = read_config(folder)
        if (folder / "tokenizer.json").is_file():
            tokenizer, template = Tokenizer.from_folder(folder), ChatTemplate.from_folder(folder)
    else:
        raise ConfigError(
            f"load_format dummy needs a preset ({', '.join(sorted(PRESETS))}) or a folder with a "
            f"config.json, not {name!r}"
        )
    return _Model(
        config.served_model_name or folder.name,
        shape,
        tokenizer or Tokenizer.byte_level(DUMMY_SPECIAL_TOKENS, shape.vocab_size),
        template or ChatTemplate(DUMMY_TEMPLATE),
        None,
    )


def _load(
    model: _Model,
    device: tilert.Device,
    dtype: tilert.DType,
    max_len: int,
    seed: int,
    report: Progress,
) -> Transformer:
    if model.checkpoint is None:
        report("making weights up")
        return Transformer.random(model.config, device, dtype, max_len=max_len, seed=seed)
    report(f"loading weights: {gib(model.checkpoint.nbytes)}")
    return Transformer.load(
        model.checkpoint, device, dtype, max_len=max_len, progress=paced(report)
    )


def paced(
    report: Progress, clock: Callable[[], float] = time.monotonic
) -> Callable[[int, int], None]:
    """A counter of bytes read so far and in all, that tells people how far a load has come.

    It reports every `PROGRESS_SECONDS` and at the end, with the rate since it was made. `clock`
    gives seconds.
    """
    start = told = clock()

    def progress(done: int, total: int) -> None:
        nonlocal told
        now = clock()
        if done < total and now - told < PROGRESS_SECONDS:
            return
        told = now
        rate = done / max(now - start, 1e-6)
        report(f"loading weights: {100 * done // total}% of {gib(total)}, {rate / 1e9:.2f} GB/s")

    return progress


def _warm_up_lengths(kind: str, chunk: int) -> tuple[int, ...]:
    """Tokens of prefills that between them use every recording, and the kernels of long ones.

    On the cpu only a short one: there is nothing to record, and time depends on the length.
    chunk: most tokens of a prefill.
    """
    lengths = (8,) if kind == "cpu" else (*tiling(kind).prompts, chunk)
    return tuple(sorted({min(length, chunk) for length in lengths}))


def _warm_up_sizes(kind: str, max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes to record before the first request: on a GPU all that can occur, because what
    is not compiled and recorded then makes everybody wait when it is."""
    if kind == "cpu":
        return (1,)
    return tuple(1 << power for power in range(bucket(max_num_seqs).bit_length()))


def _silent(_: str) -> None:
    return


__all__ = ["PROGRESS_SECONDS", "Progress", "create_engine", "default_sampling", "paced"]
