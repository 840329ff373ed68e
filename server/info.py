"""`grout info`: what this machine has and what would be served on it."""

import argparse
import json
import platform
from importlib import metadata
from typing import Any

import huggingface_hub.constants

import tilert
from grout.config import EngineConfig
from models import default_model
from server.origin import check_origin
from server.versions import version
from tilert import entries

__all__ = ["collect", "info"]

# The packages that a report of a problem needs the versions of.
SHOWN = ("cuda-bindings", "cuda-core", "cuda-python", "fastapi", "huggingface-hub", "jinja2",
         "ml-dtypes", "numpy", "nvidia-cuda-nvrtc", "safetensors", "tokenizers",
         "uvicorn")  # fmt: skip


def info(options: argparse.Namespace) -> int:
    """Print the facts, as JSON or as lines; returns the exit code."""
    facts = collect(options.model)
    if options.json:
        print(json.dumps(facts, indent=2))
        return 0
    print(f"grout {facts['grout']} in {facts['folder']}, {facts['platform']}")
    for device in facts["devices"]:
        details = ", ".join(f"{key} {value}" for key, value in device.items() if key != "device")
        print(f"{device['device']:10} {details}")
    if facts["no_cuda"]:
        print(f"{'cuda':10} none: {facts['no_cuda']}")
    versions = (f"{name} {number or 'missing'}" for name, number in facts["versions"].items())
    print(f"{'versions':10} {', '.join(versions)}")
    for name, folder in facts["caches"].items():
        print(f"{name:10} {folder}")
    print(f"{'model':10} {' '.join(facts['model'].values())}")
    return 0


def collect(model: str | None) -> dict[str, Any]:
    """Return the facts as JSON-ready values; looks at devices, loads nothing."""
    home = check_origin()
    devices, no_cuda = _devices()
    best = devices[min(1, len(devices) - 1)]  # the first GPU, as "auto" chooses
    return {
        "grout": version(),
        "folder": str(home),
        "platform": f"Python {platform.python_version()} on {platform.platform()}",
        "devices": devices,
        "no_cuda": no_cuda,
        "versions": _versions(),
        "caches": {
            "hub": huggingface_hub.constants.HF_HUB_CACHE,
            "grout": str(default_model.cache_folder()),
            "kernels": str(entries.folder()),
        },
        "model": {
            "id": model or default_model.HUB_ID,
            "device": best["device"],
            "dtype": EngineConfig().resolve(best["kind"]).dtype,
        },
    }


def _devices() -> tuple[list[dict[str, Any]], str | None]:
    """The cpu and every GPU, and why there is no GPU if there is none."""
    found = [{"device": "cpu", **_plain(tilert.device("cpu"))}]
    while True:
        name = f"cuda:{len(found) - 1}"
        try:
            found.append({"device": name, **_plain(tilert.device(name))})
        except tilert.DeviceError as error:
            return found, str(error) if len(found) == 1 else None


def _plain(device: tilert.Device) -> dict[str, Any]:
    """What `device` says of itself, in types that JSON has."""
    free, total = device.memory()
    facts = {key: value for key, value in device.info().items() if value is not None}
    facts |= {"free_bytes": free, "total_bytes": total}
    return {
        key: value if isinstance(value, str | int | float) else str(value)
        for key, value in facts.items()
    }


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in SHOWN:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found
