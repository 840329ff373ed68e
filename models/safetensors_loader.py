"""Checkpoints in Hugging Face form: a folder with config.json and safetensors files."""

import json
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from models.chat_template import ChatTemplate
from models.config import ModelConfig
from models.errors import ConfigError, LoadError
from models.files import is_file, read_json, reason, shown
from models.stored import FileTensor, OpenFile, Stored
from models.tokenizer import Tokenizer
from models.weights import Shape, check_layer_count, check_tensors, check_vocabulary

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
_LAYER_NAMES = {
    "input_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "post_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


@dataclass(frozen=True)
class _Entry:
    """Where a tensor lies."""

    shape: Shape
    dtype: np.dtype[Any]
    file: Path
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsCheckpoint:
    """A folder in the layout of `save_pretrained`; see `models.weights.Checkpoint`.

    Raises LoadError on opening, naming the file or tensor: config.json missing or unsupported, a
    shard missing or truncated, a tensor missing, unexpected, of the wrong shape or of a type other
    than BF16, F16 and F32. Only headers are read until `tensors` is called.
    """

    def __init__(self, folder: Path, model_id: str | None = None) -> None:
        self.id = model_id or folder.resolve().name
        self.config = read_config(folder)
        self._folder = folder
        self._entries = _read_headers(folder, self.config)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self._entries.values())

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        """See `Checkpoint`."""
        opened: OpenFile | None = None
        for name, entry in self._entries.items():
            if opened is None or opened.path != entry.file:
                opened = OpenFile(entry.file)
            yield name, FileTensor(entry.shape, entry.dtype, opened, entry.offset)

    def tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer.from_folder(self._folder)
        where, sized = self._folder / "tokenizer.json", self._folder / "config.json"
        check_vocabulary(self.config, tokenizer, str(where), str(sized))
        return tokenizer

    def chat_template(self) -> ChatTemplate | None:
        return ChatTemplate.from_folder(self._folder)


def read_config(folder: Path) -> ModelConfig:
    """Reads config.json and, if present, generation_config.json. Raises ConfigError."""
    file = folder / "config.json"
    if not is_file(file, ConfigError):
        raise ConfigError(f"{file} is missing: this is not a model folder that can be loaded")
    generation = folder / "generation_config.json"
    return ModelConfig.from_hf(
        read_json(file, ConfigError),
        read_json(generation, ConfigError) if is_file(generation, ConfigError) else None,
        where=str(file),
        generation_where=str(generation),
    )


def _read_headers(folder: Path, config: ModelConfig) -> dict[str, _Entry]:
    """The model's tensors by canonical name, in the order of the files and offsets."""
    headers = {file: _header(file) for file in _shards(folder)}
    where = _described(folder, headers)
    check_layer_count(config, sum(map(len, headers.values())), where)
    canonical = {stored: name for name, stored in _hf_names(config).items()}
    found: dict[str, _Entry] = {}
    unknown: list[str] = []
    for file, header in headers.items():
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            if _ignored(name, config):
                continue
            if name not in canonical:
                unknown.append(f"{name} (in {file.name})")
                continue
            if canonical[name] in found:
                first = found[canonical[name]].file.name
                raise LoadError(f"{file}: tensor {name} is also in {first}")
            if entry["dtype"] not in _DTYPES:
                raise LoadError(
                    f"{file}: tensor {name} has type {entry['dtype']}; "
                    f"supported are {', '.join(_DTYPES)}"
                )
            found[canonical[name]] = _Entry(
                tuple(entry["shape"]),
                _DTYPES[entry["dtype"]],
                file,
                entry["data_offsets"][0],
            )
    shapes = {name: stored.shape for name, stored in found.items()}
    check_tensors(config, shapes, unknown, _hf_names(config), where)
    return found


def _described(folder: Path, shards: Collection[Path]) -> str:
    """The folder, and the shards in it that its index leaves out, for what is missing."""
    left_out = [file.name for file in sorted(folder.glob("*.safetensors")) if file not in shards]
    if not left_out or folder / SINGLE in shards:
        return str(folder)
    return f"{folder} (without {', '.join(left_out[:3])}, which {INDEX} does not list)"


def _hf_names(config: ModelConfig) -> dict[str, str]:
    names = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight"}
    names["head"] = "lm_head.weight"
    for layer in range(config.num_layers):
        for name, stored in _LAYER_NAMES.items():
            names[f"layers.{layer}.{name}"] = f"model.layers.{layer}.{stored}.weight"
    return names


def _ignored(name: str, config: ModelConfig) -> bool:
    """Tensors that old exports carry and that hold nothing of their own."""
    tied_copy = name == "lm_head.weight" and config.tie_word_embeddings
    return tied_copy or name.endswith("rotary_emb.inv_freq")


def _shards(folder: Path) -> list[Path]:
    single, index = folder / SINGLE, folder / INDEX
    if is_file(single):
        return [single]
    if is_file(index):
        return _indexed_shards(index)
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return others
    if others:
        raise LoadError(f"{folder}: {len(others)} safetensors files, but no {INDEX}")
    raise LoadError(f"{folder}: there is neither {SINGLE} nor {INDEX}")


def _indexed_shards(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise LoadError(f"{index}: there is no weight_map")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".."):
            raise LoadError(f"{index}: {shown(name)} is not the name of a file in the same folder")
    names = sorted(set(weight_map.values()))
    for name in names:
        if not is_file(index.parent / name):
            raise LoadError(f"{index.parent / name} is missing; {index.name} names it as a shard")
    held = {name: _header(index.parent / name).keys() for name in names}
    for tensor, name in weight_map.items():
        if tensor not in held[name]:
            raise LoadError(
                f"{index.parent / name}: tensor {tensor} is missing; {index.name} says it is there"
            )
    return [index.parent / name for name in names]


def _header(file: Path) -> dict[str, dict[str, Any]]:
    """Tensor name -> {dtype, shape, data_offsets}, the offsets counted from the file's start.

    The layout is 8 bytes of little-endian length, that many bytes of JSON, then the data
    (safetensors README, "Format"). The library validates it; reading the offsets here as well
    is what allows views of the mapped file where the library would copy.
    """
    if not is_file(file):
        raise LoadError(f"{file} is missing")
    try:
        with safe_open(file, framework="np"):
            pass
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(length))
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{file}: {_why_unreadable(file, error)}") from None
    header.pop("__metadata__", None)
    for entry in header.values():
        entry["data_offsets"] = [offset + 8 + length for offset in entry["data_offsets"]]
    return header


def _why_unreadable(file: Path, error: Exception) -> str:
    try:
        with file.open("rb") as stream:
            if stream.read(30).startswith(b"version https://git-lfs"):
                return "this is a Git LFS pointer, not the weights; run `git lfs pull`"
    except OSError:
        pass
    return f"truncated or not a safetensors file ({reason(error)})"
