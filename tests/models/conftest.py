"""Fixtures that write tiny checkpoints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.models.builders import (
    TEMPLATE,
    Tensors,
    add,
    backend,
    canonical,
    gguf_metadata,
    gguf_name,
    hf_tensors,
    interleave,
    write_index,
)


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes a Hugging Face folder from a config and tensors and returns its path."""

    def make(config: dict[str, Any], tensors: Tensors | None = None, shards: int = 1) -> Path:
        folder = tmp_path / "tiny-model"
        folder.mkdir(exist_ok=True)
        tensors = hf_tensors(config) if tensors is None else tensors
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "generation_config.json").write_text(
            json.dumps({"eos_token_id": [263, 261], "temperature": 0.6, "top_k": 20})
        )
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"eos_token": "<|im_end|>", "bos_token": None, "chat_template": TEMPLATE})
        )
        backend().save(str(folder / "tokenizer.json"))
        if shards == 1:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        else:
            names = list(tensors)
            parts = [{n: tensors[n] for n in names[i::shards]} for i in range(shards)]
            write_index(folder, parts)
        return folder

    return make


@pytest.fixture
def make_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Writes a GGUF file the way llama.cpp's converter does and returns its path.

    `tensors` are canonical float32 arrays; `types` maps canonical names to ggml types (F32
    otherwise), `metadata` adds to or (value None) removes from the usual keys.
    """

    def make(
        config: dict[str, Any],
        tensors: Tensors | None = None,
        types: dict[str, gguf.GGMLQuantizationType] | None = None,
        metadata: dict[str, Any] | None = None,
        extra: Tensors | None = None,
    ) -> Path:
        path = tmp_path / "tiny.gguf"
        arch = config["model_type"]
        tensors = canonical(hf_tensors(config, np.float32)) if tensors is None else tensors
        writer = gguf.GGUFWriter(str(path), arch)
        for key, value in (gguf_metadata(config) | (metadata or {})).items():
            add(writer, key, value)
        for name, array in tensors.items():
            last = name.rpartition(".")[2]
            if arch == "llama" and last in ("q", "k"):
                which = "num_attention_heads" if last == "q" else "num_key_value_heads"
                array = interleave(array, config[which])
            kind = (types or {}).get(name, gguf.GGMLQuantizationType.F32)
            if kind == gguf.GGMLQuantizationType.F32:
                writer.add_tensor(gguf_name(name), array)
            else:
                writer.add_tensor(gguf_name(name), gguf.quantize(array, kind), raw_dtype=kind)
        for name, array in (extra or {}).items():
            writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make
