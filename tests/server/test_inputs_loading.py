"""Model folders of every form, from files to answers; and one that is not complete."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import grout
from tests.server.command import run
from tests.server.fakes import Live
from tests.server.scripted import END, OTHER_END, marker, write_model

FIXTURES = Path(__file__).parents[1] / "fixtures"
CHAT = "/v1/chat/completions"
Change = Callable[[Path], None]


@contextmanager
def serving(folder: Path) -> Iterator[httpx.Client]:
    config = grout.EngineConfig(str(folder), device="cpu", max_num_seqs=2)
    with (
        grout.create_engine(config) as engine,
        Live(engine) as live,
        httpx.Client(base_url=live.url, timeout=60, trust_env=False) as http,
    ):
        yield http


def edit(file: Path, **changes: Any) -> None:
    """Change keys of a JSON file; `...` removes one."""
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


def logprobs(http: httpx.Client) -> list[dict[str, float]]:
    """The likeliest tokens of a greedy reply, with numbers that any change of the model changes."""
    body = {"prompt": [7, 80, 33, 7, 120, 9], "temperature": 0, "max_tokens": 8, "logprobs": 8}
    answer = http.post("/v1/completions", json=body).json()
    tops: list[dict[str, float]] = answer["choices"][0]["logprobs"]["top_logprobs"]
    assert len(tops) >= 3
    assert len({value for top in tops for value in top.values()}) > 10
    return tops


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a committed model folder, to be changed."""

    def make(name: str) -> Path:
        folder = tmp_path / f"copy-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(FIXTURES / name, folder)
        return folder

    return make


def give_head(folder: Path) -> None:
    """Write the tied head out, as some savers do."""
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def other_rope(folder: Path) -> None:
    """From `rope_parameters` alone to `rope_theta` with `rope_scaling`, or back."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    given = config.get("rope_parameters")
    if given is None:
        new = {"rope_theta": config["rope_theta"], **config["rope_scaling"]}
        edit(file, rope_parameters=new, rope_theta=..., rope_scaling=...)
    else:
        assert not config.keys() & {"rope_theta", "rope_scaling"}
        scaling = {key: value for key, value in given.items() if key != "rope_theta"}
        old = None if scaling == {"rope_type": "default"} else scaling
        edit(file, rope_parameters=..., rope_theta=given["rope_theta"], rope_scaling=old)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qwen3-tied", give_head),
        ("qwen3-tied", other_rope),
        ("qwen3-yarn", other_rope),
        ("llama3-rope", other_rope),
    ],
)
def test_two_forms_of_one_model(copy: Callable[[str], Path], name: str, change: Change) -> None:
    plain, other = copy(name), copy(name)
    change(other)
    with serving(plain) as http:
        want = logprobs(http)
    with serving(other) as http:
        assert logprobs(http) == want


def test_the_rope_of_a_config_counts(copy: Callable[[str], Path]) -> None:
    """Else the forms above would be equal because none of them is read."""
    plain, other = copy("qwen3-tied"), copy("qwen3-tied")
    edit(other / "config.json", rope_parameters={"rope_theta": 100.0, "rope_type": "default"})
    with serving(plain) as http:
        want = logprobs(http)
    with serving(other) as http:
        assert logprobs(http) != want


def scripted(folder: Path) -> Path:
    folder.mkdir()
    write_model(folder, {"one": [b"one", END], "other": [b"other", OTHER_END]})
    return folder


TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("template", "with_tools"),
    [
        ("jinja", "D"),
        ("string", "D"),
        ("named", "T"),
        ("only default", "D"),
        ("jinja before string", "D"),
        ("more files", "T"),
    ],
)
def test_where_the_template_comes_from(tmp_path: Path, template: str, with_tools: str) -> None:
    folder = scripted(tmp_path / "m")
    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    # Tools are taken where a template shows them.
    default, tools = (
        letter + "{{ messages[0].content }}{% if tools and false %}{% endif %}" for letter in "DT"
    )
    named = [{"name": "tool_use", "template": tools}, {"name": "rag", "template": "R"}]
    file.unlink()
    if "jinja" in template or template == "more files":
        file.write_text(default)
    if template == "more files":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(tools)
    if template == "jinja before string":
        edit(config, chat_template="S")
    elif template == "string":
        edit(config, chat_template=default)
    elif template in ("named", "only default"):
        entries = named if template == "named" else []
        edit(config, chat_template=[*entries, {"name": "default", "template": default}])
    ask = {"messages": [{"role": "user", "content": marker("one")}]}
    with serving(folder) as http:
        for more, letter in (({}, "D"), ({"tools": TOOLS}, with_tools)):
            tokens = http.post("/tokenize", json={**ask, **more}).json()["tokens"]
            prompt = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
            assert prompt == f"{letter}<|one|>"
            answer = http.post(CHAT, json={**ask, **more}).json()
            assert answer["choices"][0]["message"]["content"] == "one"
            assert answer["usage"]["prompt_tokens"] == len(tokens)


@pytest.mark.parametrize(
    ("of_config", "of_generation", "ends"),
    [
        (0, [0, 1], {"one", "other"}),
        ([1], 0, {"one", "other"}),
        (0, ..., {"one"}),
        ([0, 1], ..., {"one", "other"}),
    ],
)
def test_a_reply_ends_at_either_end_of_sequence(
    tmp_path: Path, of_config: Any, of_generation: Any, ends: set[str]
) -> None:
    folder = scripted(tmp_path / "m")
    ids = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]

    def chosen(which: Any) -> Any:
        return [ids[i] for i in which] if isinstance(which, list) else ids[which]

    edit(folder / "config.json", eos_token_id=chosen(of_config))
    given = ... if of_generation is ... else chosen(of_generation)
    edit(folder / "generation_config.json", eos_token_id=given)
    with serving(folder) as http:
        for name in ("one", "other"):
            ask = {"messages": [{"role": "user", "content": marker(name)}], "max_tokens": 9}
            answer = http.post(CHAT, json=ask).json()
            assert answer["choices"][0]["message"]["content"] == name
            # Past an end that is not one, this model comes to the other with one more token.
            assert answer["usage"]["completion_tokens"] == (2 if name in ends else 3)
            on = http.post(CHAT, json={**ask, "ignore_eos": True}).json()
            assert on["usage"]["completion_tokens"] == 9
            stop = {"stop_token_ids": ids, "ignore_eos": True}
            held = http.post(CHAT, json={**ask, **stop}).json()
            assert held["usage"]["completion_tokens"] == 2
            assert held["choices"][0]["finish_reason"] == "stop"


def in_shards(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    listed = {}
    for i in range(3):
        file = f"model-0000{i + 1}-of-00003.safetensors"
        part = {name: np.ascontiguousarray(tensors[name]) for name in names[i::3]}
        save_file(part, folder / file, metadata={"format": "pt"})
        listed |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": listed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def drop_file(folder: Path) -> str:
    (folder / "model-00002-of-00003.safetensors").unlink()
    return "model-00002-of-00003.safetensors is missing"


def drop_from_list(folder: Path) -> str:
    file = folder / "model.safetensors.index.json"
    listed = json.loads(file.read_text())["weight_map"]
    kept = {name: shard for name, shard in listed.items() if "00002" not in shard}
    edit(file, weight_map=kept)
    return "model-00002-of-00003.safetensors"


@pytest.mark.parametrize("drop", [drop_file, drop_from_list])
def test_a_server_does_not_start_without_a_shard(
    copy: Callable[[str], Path], drop: Callable[[Path], str]
) -> None:
    folder = copy("qwen3-tied")
    in_shards(folder)
    with serving(folder) as http:
        assert http.get("/health").status_code == 200
    says = drop(folder)
    code, out, err = run("serve", str(folder), "--device", "cpu", "--port", "0")
    assert code == 2
    assert says in err
    assert "Traceback" not in err
    assert out == ""
