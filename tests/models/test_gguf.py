import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from models import LoadError, expected_shapes, open_checkpoint
from models.gguf_loader import rotate_half_order
from tests.models.builders import (
    canonical,
    hf_tensors,
    interleave,
    llama_config,
    qwen3_config,
)

MakeGGUF = Callable[..., Path]
CONFIGS = {"llama": llama_config, "qwen3": qwen3_config}


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_loads_every_tensor(make_gguf: MakeGGUF, architecture: str) -> None:
    config = CONFIGS[architecture]()
    expected = canonical(hf_tensors(config, np.float32))
    checkpoint = open_checkpoint(make_gguf(config, expected))
    loaded = dict(checkpoint.tensors())
    assert {name: array.shape for name, array in loaded.items()} == expected_shapes(
        checkpoint.config
    )
    for name, array in loaded.items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    assert checkpoint.nbytes == sum(array.nbytes for array in loaded.values())
    assert checkpoint.id == "tiny"


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_config(make_gguf: MakeGGUF, architecture: str) -> None:
    config = open_checkpoint(make_gguf(CONFIGS[architecture]())).config
    assert config.architecture == architecture
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 4, 2)
    assert (config.head_dim, config.intermediate_size, config.vocab_size) == (16, 48, 288)
    assert config.rms_norm_eps == 1e-6
    assert config.rope.theta == 1e6 and config.rope.type == "default"
    assert config.max_position_embeddings == 128
    assert config.tie_word_embeddings is (architecture == "llama")
    assert config.qk_norm is (architecture == "qwen3")
    assert config.eos_token_ids == (263, 261)
    assert config.bos_token_id == 261


# Half of a quantisation step is bounded by absmax / (2 * levels) a block; F16 by its mantissa.
@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [
        (Type.F16, 2e-3),
        (Type.BF16, 2e-2),
        (Type.Q8_0, 0.02),
        (Type.Q5_0, 0.2),
        (Type.Q5_1, 0.2),
        (Type.Q4_0, 0.4),
        (Type.Q4_1, 0.4),
    ],
)
def test_quantised_types(make_gguf: MakeGGUF, kind: Type, tolerance: float) -> None:
    config = llama_config()
    tensors = canonical(hf_tensors(config, np.float32))
    names = ("layers.0.q", "layers.1.k", "layers.0.gate", "embed")
    path = make_gguf(config, tensors, types=dict.fromkeys(names, kind))
    loaded = dict(open_checkpoint(path).tensors())
    for name in names:
        native = {Type.F16: "float16", Type.BF16: "bfloat16"}
        assert loaded[name].dtype.name == native.get(kind, "float32")
        found = np.asarray(loaded[name]).astype(np.float32)
        np.testing.assert_allclose(found, tensors[name], atol=tolerance, rtol=0)
        exact = gguf.dequantize(gguf.quantize(tensors[name], kind), kind)
        np.testing.assert_array_equal(found, exact)


def test_k_quants(make_gguf: MakeGGUF) -> None:
    # The gguf package cannot quantise to Q4_K: known bytes go in, its own dequantisation comes out.
    config = qwen3_config(hidden_size=256, num_hidden_layers=1)
    path = make_gguf(config)
    rows = np.random.default_rng(1).integers(0, 60, (48, 144), np.uint8)
    writer = gguf.GGUFWriter(str(path.with_name("k.gguf")), "qwen3")
    reader = gguf.GGUFReader(str(path))
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            sub = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub)
    for tensor in reader.tensors:
        if tensor.name == "blk.0.ffn_gate.weight":
            writer.add_tensor(tensor.name, rows, raw_dtype=Type.Q4_K)
        else:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    loaded = dict(open_checkpoint(path.with_name("k.gguf")).tensors())
    np.testing.assert_array_equal(loaded["layers.0.gate"], gguf.dequantize(rows, Type.Q4_K))


@pytest.mark.parametrize(("heads", "dim"), [(1, 2), (3, 16), (4, 64)])
def test_rotate_half_order_undoes_interleaving(heads: int, dim: int) -> None:
    rows = np.arange(heads * dim * 2).reshape(heads * dim, 2)
    mixed = interleave(rows, heads)
    np.testing.assert_array_equal(mixed[rotate_half_order(heads, dim)], rows)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"llama.rope.scaling.type": "none"}, {"type": "default"}),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"type": "linear", "factor": 4.0},
        ),
        ({"llama.rope.scaling.factor": 4.0}, {"type": "linear", "factor": 4.0}),
        ({"llama.rope.scale_linear": 2.0}, {"type": "linear", "factor": 2.0}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
            },
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.attn_factor": 0.5,
            },
            {"attention_factor": 0.5 * 1.138629436111989},
        ),
    ],
)
def test_rope_scaling(
    make_gguf: MakeGGUF, metadata: dict[str, Any], expected: dict[str, Any]
) -> None:
    rope = open_checkpoint(make_gguf(llama_config(), metadata=metadata)).config.rope
    assert {name: getattr(rope, name) for name in expected} == pytest.approx(expected)


def test_rope_divisors(make_gguf: MakeGGUF) -> None:
    divisors = np.array([1, 1, 2, 4, 8, 8, 8, 8], np.float32)
    path = make_gguf(llama_config(), extra={"rope_freqs.weight": divisors})
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.rope.freq_divisors == (1, 1, 2, 4, 8, 8, 8, 8)
    assert "rope_freqs.weight" not in dict(checkpoint.tensors())
    path = make_gguf(llama_config(), extra={"rope_freqs.weight": divisors[:3]})
    with pytest.raises(LoadError, match="3 frequency divisors, but head_dim 16 needs 8"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "mamba"}, r"tiny\.gguf: architecture 'mamba'"),
        ({"llama.block_count": None}, r"tiny\.gguf: llama\.block_count is missing"),
        ({"llama.expert_count": 8}, r"llama\.expert_count is 8"),
        ({"llama.attention.key_length": 24}, "head_dim is 24"),
        ({"llama.rope.dimension_count": 8}, r"llama\.rope\.dimension_count is 8"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope'"),
        ({"llama.feed_forward_length": [48, 48]}, "differs between layers"),
    ],
)
def test_refusals(make_gguf: MakeGGUF, metadata: dict[str, Any], message: str) -> None:
    config = llama_config()
    path = make_gguf(config, metadata={k: v for k, v in metadata.items() if "general" not in k})
    if "general.architecture" in metadata:
        path.write_bytes(path.read_bytes().replace(b"llama", b"mamba"))
    with pytest.raises(LoadError, match=message):
        open_checkpoint(path)


def test_missing_and_extra_tensors(make_gguf: MakeGGUF) -> None:
    config = llama_config()
    tensors = canonical(hf_tensors(config, np.float32))
    path = make_gguf(config, extra={"blk.0.attn_q.bias": np.zeros(64, np.float32)})
    with pytest.raises(LoadError, match=r"tiny\.gguf: unexpected tensor blk\.0\.attn_q\.bias"):
        open_checkpoint(path)
    del tensors["layers.1.down"]
    path = make_gguf(config, tensors)
    with pytest.raises(LoadError, match=r"missing tensor blk\.1\.ffn_down\.weight"):
        open_checkpoint(path)


def test_wrong_shape(make_gguf: MakeGGUF) -> None:
    config = qwen3_config()
    tensors = canonical(hf_tensors(config, np.float32))
    tensors["layers.0.o"] = np.zeros((16, 64), np.float32)
    with pytest.raises(LoadError, match=r"blk\.0\.attn_output\.weight has shape \[16, 64\].*32"):
        open_checkpoint(make_gguf(config, tensors))


def test_type_without_dequantisation(make_gguf: MakeGGUF) -> None:
    config = qwen3_config()
    tensors = canonical(hf_tensors(config, np.float32))
    tensors["norm"] = np.zeros(32, np.int32)
    with pytest.raises(LoadError, match=r"output_norm\.weight has type I32"):
        open_checkpoint(make_gguf(config, tensors))


@pytest.mark.parametrize("keep", [0, 3, 4, 10, 24, 100, 2000, 5000, -1, -20000])
def test_truncated(make_gguf: MakeGGUF, keep: int) -> None:
    path = make_gguf(llama_config())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(LoadError, match=r"tiny\.gguf"):
        open_checkpoint(path)


def test_other_files_and_versions(make_gguf: MakeGGUF) -> None:
    path = make_gguf(llama_config())
    data = path.read_bytes()
    path.write_bytes(b"PK\x03\x04" + data[4:])
    with pytest.raises(LoadError, match="not a GGUF file"):
        open_checkpoint(path)
    path.write_bytes(data[:4] + b"\x01" + data[5:])
    with pytest.raises(LoadError, match="version 1 is not supported"):
        open_checkpoint(path)
    path.write_bytes(data[:4] + b"\x00\x00\x00\x03" + data[8:])
    with pytest.raises(LoadError, match="big-endian"):
        open_checkpoint(path)


@pytest.mark.parametrize("position", range(24, 400, 7))
def test_damage_is_never_a_crash(make_gguf: MakeGGUF, position: int) -> None:
    path = make_gguf(llama_config())
    data = bytearray(path.read_bytes())
    data[position : position + 8] = b"\xff" * 8
    path.write_bytes(data)
    with contextlib.suppress(LoadError):  # any other exception fails the test
        open_checkpoint(path)


def test_gguf_and_folder_agree(make_gguf: MakeGGUF, make_folder: Callable[..., Path]) -> None:
    config = llama_config()
    tensors = hf_tensors(config, np.float32)
    folder = open_checkpoint(make_folder(config, tensors))
    single = open_checkpoint(make_gguf(config, canonical(tensors)))
    theirs = dict(single.tensors())
    for name, array in folder.tensors():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)
    prompt = [{"role": "user", "content": "hello ¡mundo! 你好 🙂"}]
    texts = []
    for checkpoint in (folder, single):
        template = checkpoint.chat_template()
        assert template is not None
        texts.append(template.render(prompt))
        tokenizer = checkpoint.tokenizer()
        texts.append(tokenizer.encode(texts[0]))
    assert texts[:2] == texts[2:]
