"""Every malformed JSON file of a folder is refused at load, in one line that names it once."""

import json
import re
from typing import Any

import pytest
import tokenizers

from models import ConfigError, open_checkpoint
from tests.models.builders import backend, llama_config, qwen3_config
from tests.models.refusal import INF, NAN, MakeFolder, MakeGGUF, load, refusal, rewrite

# generation_config.json

SAMPLING = {
    "temperature": [-1, -0.1, NAN, INF, 1e308, "hot", True, [1]],
    "top_p": [0, 1.5, -1, NAN, INF, "all", False],
    "min_p": [2, -0.1, NAN, "x"],
    "top_k": [NAN, INF, -2, -100, 1.5, "x", True, 2**40],
    "do_sample": ["yes", 1, 0],
    "eos_token_id": [-1, "x", [1, "x"], True, 1.5],
    "bos_token_id": [-1, {}],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, bad in SAMPLING.items() for value in bad]
)
def test_generation_config(make_folder: MakeFolder, key: str, value: Any) -> None:
    folder = make_folder(qwen3_config())
    rewrite(folder / "generation_config.json", **{key: value})
    message = refusal(lambda: open_checkpoint(folder), "generation_config.json", ConfigError)
    assert re.search(rf"generation_config\.json: {key} must be .*, not ", message)
    assert message.count("config.json") == 1


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 0}, {"top_k": 0}),
        ({"top_k": 20.0}, {"top_k": 20}),
        ({"top_p": 1, "min_p": 0}, {"top_p": 1.0, "min_p": 0.0}),
        ({"do_sample": False, "top_p": None}, {"do_sample": False}),
    ],
)
def test_sampling_that_is_fine(
    make_folder: MakeFolder, given: dict[str, Any], kept: dict[str, Any]
) -> None:
    folder = make_folder(qwen3_config())
    (folder / "generation_config.json").write_text(json.dumps(given))
    assert open_checkpoint(folder).config.default_sampling == kept


# config.json

SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FIELDS: list[tuple[str, list[Any]]] = [
    *((key, [0, -4, True, "4", 1.5, NAN, INF, 2**31, [4], {}]) for key in SIZES),
    ("num_hidden_layers", [10**8, 10_001]),
    ("architectures", [5, "LlamaForCausalLM", [5], {"a": 1}, [["LlamaForCausalLM"]]]),
    ("layer_types", [5, "full_attention", [5], [["full_attention"]], {"a": 1}]),
    ("max_window_layers", ["x", -1, 1.5, True, NAN]),
    ("sliding_window", ["x", -1, True]),
    ("use_sliding_window", ["no", 0, 1]),
    ("tie_word_embeddings", ["false", 0, 1]),
    ("attention_bias", ["false", 1]),
    ("mlp_bias", [1]),
    ("hidden_act", [5, ["silu"]]),
    ("partial_rotary_factor", ["x", NAN]),
    ("rms_norm_eps", [0, -1e-6, NAN, INF, "x", True, 2.0]),
    ("rope_theta", [0, -5, 1, NAN, INF, 1e308, "x", True]),
    ("rope_scaling", [5, "yarn", [1], False]),
    ("eos_token_id", [-1, "x", True]),
    ("bos_token_id", [-1, [-1]]),
]


@pytest.mark.parametrize(("key", "value"), [(key, bad) for key, some in FIELDS for bad in some])
def test_config_fields(make_folder: MakeFolder, key: str, value: Any) -> None:
    folder = make_folder(qwen3_config(max_window_layers=2))
    rewrite(folder / "config.json", **{key: value})
    message = refusal(lambda: open_checkpoint(folder), "config.json", ConfigError)
    assert re.search(rf"/config\.json: {key} must be .*, not ", message)


@pytest.mark.parametrize("key", ["architectures", "layer_types", "head_dim"])
def test_null_is_absent(make_folder: MakeFolder, key: str) -> None:
    config = qwen3_config(hidden_size=64)
    folder = make_folder(config)
    rewrite(folder / "config.json", **{key: None})
    assert open_checkpoint(folder).config.head_dim == 16


@pytest.mark.parametrize("section", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("base", "changes", "named"),
    [
        (YARN, {"factor": INF}, "factor"),
        (YARN, {"factor": 1e308}, "factor"),
        (YARN, {"factor": NAN}, "factor"),
        (YARN, {"factor": 0}, "factor"),
        (YARN, {"factor": "x"}, "factor"),
        (YARN, {"factor": ..., "original_max_position_embeddings": ...}, "factor is missing"),
        (YARN, {"factor": 1e6, "original_max_position_embeddings": 40000}, "beyond 2147483647"),
        (YARN, {"original_max_position_embeddings": 0}, "original_max_position_embeddings"),
        (YARN, {"original_max_position_embeddings": -4}, "original_max_position_embeddings"),
        (YARN, {"beta_fast": -1}, "beta_fast"),
        (YARN, {"beta_fast": "x"}, "beta_fast"),
        (YARN, {"beta_fast": 0.5}, "beta_fast"),
        (YARN, {"beta_slow": NAN}, "beta_slow"),
        (YARN, {"beta_slow": 1e-308}, "beta_slow"),
        (YARN, {"beta_fast": 1e9}, "beta_fast"),
        (YARN, {"truncate": "no"}, "truncate"),
        (YARN, {"attention_factor": 0}, "attention_factor"),
        (YARN, {"attention_factor": INF}, "attention_factor"),
        (YARN, {"mscale": -1}, "mscale"),
        (YARN, {"mscale_all_dim": "x"}, "mscale_all_dim"),
        (YARN, {"rope_theta": 1}, "rope_theta"),
        (YARN, {"rope_type": 5}, "rope_type"),
        (YARN, {"rope_type": ["yarn"]}, "rope_type"),
        (LLAMA3, {"original_max_position_embeddings": 0}, "original_max_position_embeddings"),
        (LLAMA3, {"low_freq_factor": NAN}, "low_freq_factor"),
        (LLAMA3, {"high_freq_factor": INF}, "high_freq_factor"),
        (LLAMA3, {"low_freq_factor": 4.0}, "low_freq_factor"),
        (LLAMA3, {"factor": ...}, "factor is missing"),
    ],
)
def test_rope(
    make_folder: MakeFolder,
    section: str,
    base: dict[str, Any],
    changes: dict[str, Any],
    named: str,
) -> None:
    values = {key: value for key, value in (base | changes).items() if value is not ...}
    folder = make_folder(qwen3_config())
    rewrite(folder / "config.json", **{section: values})
    message = refusal(lambda: open_checkpoint(folder), "config.json", ConfigError)
    assert f"/config.json: {section}: " in message and named in message


def test_outer_original_length_comes_first(make_folder: MakeFolder) -> None:
    folder = make_folder(qwen3_config(rope_scaling=YARN, original_max_position_embeddings=64))
    assert open_checkpoint(folder).config.rope.original_max_position_embeddings == 64


def test_more_layers_than_tensors(make_folder: MakeFolder, make_gguf: MakeGGUF) -> None:
    folder = make_folder(qwen3_config())
    rewrite(folder / "config.json", num_hidden_layers=9999)
    message = refusal(lambda: open_checkpoint(folder), str(folder))
    assert "9999 layers, but there are only 25 tensors" in message
    path = make_gguf(llama_config(), metadata={"llama.block_count": 9999})
    assert "9999 layers" in refusal(lambda: open_checkpoint(path), "tiny.gguf")


JSON_FILES = ["config.json", "generation_config.json", "tokenizer_config.json"]


@pytest.mark.parametrize("name", [*JSON_FILES, "tokenizer.json"])
@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b"", b"5", b"\xef\xbb\xbf{}", b"{]"]
)
def test_unreadable_json(make_folder: MakeFolder, name: str, content: bytes) -> None:
    folder = make_folder(qwen3_config())
    (folder / name).write_bytes(content)
    refusal(lambda: load(folder), f"/{name}")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tokenizer_config.json", {"eos_token": "\ud800"}),
        ("tokenizer_config.json", {"chat_template": "a\udfffb"}),
        ("tokenizer_config.json", {"unknown": [{"\ud800": 1}]}),
        ("config.json", {"model_type": "qwen3\ud800"}),
    ],
)
def test_lone_surrogates(make_folder: MakeFolder, name: str, changes: dict[str, Any]) -> None:
    folder = make_folder(qwen3_config())
    rewrite(folder / name, **changes)
    assert "lone surrogate" in refusal(lambda: open_checkpoint(folder).tokenizer(), name)


def test_whole_surrogate_pairs_are_text(make_folder: MakeFolder) -> None:
    folder = make_folder(qwen3_config())
    rewrite(folder / "tokenizer_config.json", unknown="🙂")
    assert "\\ud83d" in (folder / "tokenizer_config.json").read_text()
    open_checkpoint(folder).tokenizer()


@pytest.mark.parametrize(
    "changes",
    [{"add_bos_token": "x"}, {"bos_token": 5}, {"eos_token": {"content": 5}}, {"eos_token": [1]}],
)
def test_tokenizer_config(make_folder: MakeFolder, changes: dict[str, Any]) -> None:
    folder = make_folder(qwen3_config())
    rewrite(folder / "tokenizer_config.json", **changes)
    message = refusal(open_checkpoint(folder).tokenizer, "tokenizer_config.json")
    assert next(iter(changes)) in message


# tokenizer.json


def template(*special: str, ids: list[int] | None = None) -> dict[str, Any]:
    known = {"<s>": {"id": "<s>", "ids": ids, "tokens": ["<s>"]}} if ids else {}
    pieces: list[dict[str, Any]] = [
        {"SpecialToken": {"id": name, "type_id": 0}} for name in special
    ]
    pieces.append({"Sequence": {"id": "A", "type_id": 0}})
    return {"type": "TemplateProcessing", "single": pieces, "pair": [], "special_tokens": known}


def bpe(**changes: Any) -> dict[str, Any]:
    model: dict[str, Any] = json.loads(backend().to_str())["model"]
    return model | changes


LETTERS = {chr(97 + number): number for number in range(26)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "Precompiled"),
        ({"post_processor": template("<s>")}, "fails: no entry found"),
        ({"post_processor": template("<s>", ids=[99999])}, "token id 99999"),
        ({"model": bpe(continuing_subword_prefix="##", merges=[])}, "continuing_subword_prefix"),
        ({"model": bpe(continuing_subword_prefix="##")}, "slice index"),
        ({"model": bpe(end_of_word_suffix="</w>", merges=[])}, "end_of_word_suffix '</w>'"),
        ({"model": bpe(vocab=LETTERS, merges=[], unk_token="zzz")}, "zzz"),
        ({"model": {"type": "WordLevel", "vocab": LETTERS, "unk_token": "a"}}, "'WordLevel'"),
        ({"model": {"type": "WordPiece", "vocab": LETTERS, "unk_token": "a",
                    "continuing_subword_prefix": "##", "max_input_chars_per_word": 9}},
         "'WordPiece'"),
        ({"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 0}}, "'Unigram'"),
        ({"pre_tokenizer": None}, "pre-tokenizer is of another kind"),
        ({"pre_tokenizer": {"type": "WhitespaceSplit"}}, "pre-tokenizer is of another kind"),
        ({"decoder": {"type": "Fuse"}}, "decoder is of another kind"),
        ({"model": bpe(vocab={"a": -1})}, "cannot be read as a tokenizer"),
    ],
)  # fmt: skip
def test_tokenizers(make_folder: MakeFolder, changes: dict[str, Any], message: str) -> None:
    folder = make_folder(qwen3_config())
    rewrite(folder / "tokenizer.json", **changes)
    assert message in refusal(open_checkpoint(folder).tokenizer, "tokenizer.json")


@pytest.mark.parametrize("number", [288, 2**31, 2**32 - 1])
def test_ids_beyond_the_embedding(make_folder: MakeFolder, number: int) -> None:
    folder = make_folder(qwen3_config())
    model = bpe()
    model["vocab"]["zzz"] = number
    rewrite(folder / "tokenizer.json", model=model)
    message = refusal(open_checkpoint(folder).tokenizer, "tokenizer.json")
    assert f"reach {number}, but {folder}/config.json has a vocabulary of 288" in message


def test_other_exceptions_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    from models import Tokenizer

    class Interrupting:
        def encode_batch_fast(self, *args: object, **kwargs: object) -> None:
            raise KeyboardInterrupt

    tokenizer = Tokenizer(backend())
    monkeypatch.setattr(tokenizer, "_backend", Interrupting())
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("a")


def test_the_package_encodes_batches_alike() -> None:
    package: tokenizers.Tokenizer = backend()
    for text in ("", "hello hello", "<|im_start|>é!\n"):
        assert package.encode_batch_fast([text])[0].ids == package.encode(text).ids
