"""Names and files that cannot be read: refused in one line that names the file once."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from models import LoadError, open_checkpoint, resolve
from models.files import is_file
from tests.models.builders import qwen3_config
from tests.models.refusal import MakeFolder, load, refusal


@pytest.mark.parametrize(
    "name", ["a" * 300, "/" + "a/" * 3000, "./" + "b" * 256, "~nosuchuser/x", "o/" + "n" * 300,
             "a\x00b", "new\nline"],
)  # fmt: skip
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(LoadError) as caught:
        resolve(name, progress=lambda message: None)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["../x", "..", "", "a/b", 5, None, ["x"], "n" * 300, "a\x00b"])
def test_shard_names(make_folder: MakeFolder, name: Any) -> None:
    folder = make_folder(qwen3_config(), shards=2)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    refusal(lambda: open_checkpoint(folder), str(folder))


SPECIAL = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
           "model.safetensors", "model.safetensors.index.json"]  # fmt: skip


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("kind", ["FIFO", "device", "folder"])
def test_only_regular_files_are_read(make_folder: MakeFolder, name: str, kind: str) -> None:
    folder = make_folder(qwen3_config(), shards=2 if "index" in name else 1)
    file = folder / name
    file.unlink()
    if kind == "FIFO":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        file.mkdir()
    message = refusal(lambda: load(folder), f"/{name}")
    assert message.endswith(f"{name}: this is a {kind}, not a regular file")


@pytest.mark.timeout(20)
def test_other_places_for_special_files(make_folder: MakeFolder, tmp_path: Path) -> None:
    folder = make_folder(qwen3_config(), shards=2)
    shard = folder / "model-00001-of-00002.safetensors"
    shard.unlink()
    os.mkfifo(shard)
    assert "is a FIFO" in refusal(lambda: open_checkpoint(folder), shard.name)
    for number, make in enumerate((os.mkfifo, os.mkdir)):
        path = tmp_path / f"x{number}.gguf"
        make(path)
        refusal(lambda path=path: open_checkpoint(str(path)), path.name)  # type: ignore[misc]


def test_unreadable_file_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stat(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    file = tmp_path / "config.json"
    monkeypatch.setattr(Path, "stat", stat)
    message = refusal(lambda: is_file(file), "config.json")
    assert message == f"{file}: Permission denied"
