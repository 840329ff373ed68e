import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from models import LoadError, expected_shapes, open_checkpoint
from tests.models.builders import canonical, hf_tensors, llama_config, qwen3_config, write_index

MakeFolder = Callable[..., Path]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_loads_every_tensor(make_folder: MakeFolder, shards: int, dtype: Any) -> None:
    config = qwen3_config()
    tensors = hf_tensors(config, dtype)
    checkpoint = open_checkpoint(make_folder(config, tensors, shards))
    loaded = list(checkpoint.tensors())
    expected = canonical(tensors)
    assert len(loaded) == len(expected)
    assert {name: array.shape for name, array in loaded} == expected_shapes(checkpoint.config)
    for name, array in loaded:
        assert array.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(array, expected[name])
    assert checkpoint.nbytes == sum(array.nbytes for _, array in loaded)
    assert checkpoint.id == "tiny-model"


def test_tensors_can_be_iterated_again(make_folder: MakeFolder) -> None:
    checkpoint = open_checkpoint(make_folder(llama_config(), shards=2))
    assert [name for name, _ in checkpoint.tensors()] == [name for name, _ in checkpoint.tensors()]


def test_files_agree_with_each_other(make_folder: MakeFolder) -> None:
    checkpoint = open_checkpoint(make_folder(qwen3_config()))
    assert checkpoint.config.eos_token_ids == (263, 261)
    assert checkpoint.config.default_sampling == {"temperature": 0.6, "top_k": 20}
    template = checkpoint.chat_template()
    assert template is not None
    prompt = template.render([{"role": "user", "content": "hello"}])
    assert prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    tokenizer = checkpoint.tokenizer()
    assert tokenizer.decode(tokenizer.encode(prompt), skip_special_tokens=False) == prompt


def test_tied_head_is_ignored(make_folder: MakeFolder) -> None:
    config = llama_config()
    tensors = hf_tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 1
    names = [name for name, _ in open_checkpoint(make_folder(config, tensors)).tensors()]
    assert "head" not in names and "embed" in names


def test_rotary_buffers_are_ignored(make_folder: MakeFolder) -> None:
    config = llama_config()
    tensors = hf_tensors(config)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors[name] = np.zeros(8, np.float32)
    open_checkpoint(make_folder(config, tensors))


def test_untied_without_head(make_folder: MakeFolder) -> None:
    config = qwen3_config()
    tensors = hf_tensors(config)
    del tensors["lm_head.weight"]
    with pytest.raises(LoadError, match=r"lm_head\.weight is missing.*tie_word_embeddings"):
        open_checkpoint(make_folder(config, tensors))


def test_missing_tensor(make_folder: MakeFolder) -> None:
    config = qwen3_config()
    tensors = hf_tensors(config)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(LoadError, match=r"missing tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        open_checkpoint(make_folder(config, tensors))


def test_extra_tensor(make_folder: MakeFolder) -> None:
    config = qwen3_config()
    tensors = hf_tensors(config)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
    with pytest.raises(LoadError, match=r"unexpected tensor model\.layers\.0.*q_proj\.bias"):
        open_checkpoint(make_folder(config, tensors))


def test_qk_norm_of_llama_is_extra(make_folder: MakeFolder) -> None:
    config = llama_config()
    tensors = hf_tensors(config)
    tensors["model.layers.0.self_attn.q_norm.weight"] = np.zeros(16, np.float32)
    with pytest.raises(LoadError, match=r"unexpected tensor .*q_norm\.weight"):
        open_checkpoint(make_folder(config, tensors))


def test_more_layers_than_configured(make_folder: MakeFolder) -> None:
    tensors = hf_tensors(qwen3_config(num_hidden_layers=3))
    with pytest.raises(LoadError, match=r"unexpected tensors model\.layers\.2.*and 6 more"):
        open_checkpoint(make_folder(qwen3_config(), tensors))


def test_wrong_shape_names_both(make_folder: MakeFolder) -> None:
    config = qwen3_config()
    tensors = hf_tensors(config)
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((64, 32), np.float32)
    message = r"k_proj\.weight has shape \[64, 32\], but the configuration needs \[32, 32\]"
    with pytest.raises(LoadError, match=message):
        open_checkpoint(make_folder(config, tensors))


@pytest.mark.parametrize(("dtype", "name"), [(np.int8, "I8"), (np.float64, "F64")])
def test_unsupported_dtype(make_folder: MakeFolder, dtype: Any, name: str) -> None:
    config = qwen3_config()
    tensors = hf_tensors(config)
    tensors["model.norm.weight"] = np.zeros(32, dtype)
    with pytest.raises(LoadError, match=rf"model\.norm\.weight has type {name}"):
        open_checkpoint(make_folder(config, tensors))


def test_missing_shard(make_folder: MakeFolder) -> None:
    folder = make_folder(qwen3_config(), shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(LoadError, match=r"model-00002-of-00003\.safetensors is missing"):
        open_checkpoint(folder)


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
@pytest.mark.parametrize("shards", [1, 2])
def test_truncated_file(make_folder: MakeFolder, keep: int, shards: int) -> None:
    folder = make_folder(qwen3_config(), shards=shards)
    file = sorted(folder.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(LoadError, match=rf"{file.name}: truncated or not a safetensors file"):
        open_checkpoint(folder)


def test_file_cut_short_after_opening(make_folder: MakeFolder) -> None:
    folder = make_folder(qwen3_config())
    checkpoint = open_checkpoint(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(LoadError, match=r"model\.safetensors: the file was cut short"):
        _ = [np.asarray(tensor) for _, tensor in checkpoint.tensors()]


def test_lfs_pointer(make_folder: MakeFolder) -> None:
    folder = make_folder(qwen3_config())
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(LoadError, match="Git LFS pointer"):
        open_checkpoint(folder)


def test_index_and_shard_disagree(make_folder: MakeFolder) -> None:
    folder = make_folder(qwen3_config(), shards=2)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.extra.weight"] = "model-00001-of-00002.safetensors"
    file.write_text(json.dumps(index))
    with pytest.raises(LoadError, match=r"model-00001.*model\.extra\.weight is missing"):
        open_checkpoint(folder)


def test_index_may_not_leave_the_folder(make_folder: MakeFolder) -> None:
    folder = make_folder(qwen3_config(), shards=2)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": "../model.safetensors"}})
    )
    with pytest.raises(LoadError, match="not the name of a file in the same folder"):
        open_checkpoint(folder)


def test_tensor_in_two_shards(make_folder: MakeFolder) -> None:
    config = qwen3_config()
    folder = make_folder(config, shards=2)
    tensors = hf_tensors(config)
    write_index(folder, [tensors, {"model.norm.weight": tensors["model.norm.weight"]}])
    with pytest.raises(LoadError, match=r"model\.norm\.weight is also in model-00001"):
        open_checkpoint(folder)


def test_single_file_of_another_name(make_folder: MakeFolder) -> None:
    folder = make_folder(qwen3_config())
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert open_checkpoint(folder).nbytes > 0
    save_file({"x": np.zeros(1, np.float32)}, folder / "other.safetensors")
    with pytest.raises(
        LoadError, match=r"2 safetensors files, but no model\.safetensors\.index\.json"
    ):
        open_checkpoint(folder)


def test_no_weights(make_folder: MakeFolder) -> None:
    folder = make_folder(qwen3_config())
    (folder / "model.safetensors").unlink()
    with pytest.raises(LoadError, match=r"neither model\.safetensors nor"):
        open_checkpoint(folder)


def test_missing_config(make_folder: MakeFolder) -> None:
    folder = make_folder(qwen3_config())
    (folder / "config.json").unlink()
    with pytest.raises(LoadError, match=r"config\.json is missing"):
        open_checkpoint(folder)


@pytest.mark.parametrize("text", ["{", "[1]", "\x00"])
def test_unreadable_config(make_folder: MakeFolder, text: str) -> None:
    folder = make_folder(qwen3_config())
    (folder / "config.json").write_text(text)
    with pytest.raises(LoadError, match=r"config\.json"):
        open_checkpoint(folder)


def test_config_errors_name_the_file(make_folder: MakeFolder) -> None:
    folder = make_folder(qwen3_config())
    (folder / "config.json").write_text(json.dumps(qwen3_config(architectures=["GPT2LMHeadModel"])))
    with pytest.raises(LoadError, match=r"config\.json: architecture 'GPT2LMHeadModel'"):
        open_checkpoint(folder)


def test_unreadable_tokenizer(make_folder: MakeFolder) -> None:
    folder = make_folder(qwen3_config())
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(LoadError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        open_checkpoint(folder).tokenizer()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(LoadError, match=r"tokenizer\.json is missing"):
        open_checkpoint(folder).tokenizer()
