"""Which module may import what: server -> grout -> models -> tilert, and nothing upwards."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# From the lowest layer up: a package imports itself and those before it.
LAYERS = ("tilert", "models", "grout", "server")
WEB = {"fastapi", "starlette", "uvicorn"}
GPU = {"cuda", "nvidia"}
GPU_MODULES = {"tilert/driver.py", "tilert/nvrtc.py"}
TILERT_MAY_USE = {"numpy", "ml_dtypes", "threadpoolctl"} | GPU
# Distributions whose import name is not their own name with underscores.
IMPORT_NAMES = {
    "cuda-python": "cuda",
    "nvidia-cuda-nvrtc": "nvidia",
    "nvidia-cuda-runtime": "nvidia",
}

# Starlette is what FastAPI is made of and pydantic_core what pydantic is: each pins the other.
INSEPARABLE = {"starlette", "pydantic_core"}


def declared_imports() -> set[str]:
    """Import names of the runtime dependencies and of their inseparable halves."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[^A-Za-z0-9_.-]", entry)[0] for entry in project["dependencies"]]
    return {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in names} | INSEPARABLE


def imported_modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of each import, dynamic ones by literal name included.

    Relative imports stay within their package and are left out.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield node.lineno, module
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ) if not module.startswith("."):
                yield node.lineno, module


def violations(source: str, path: str, declared: set[str]) -> list[str]:
    """Broken layer rules in the module at `path` (relative to the root, with /), one line each."""
    layer = path.split("/")[0]
    below = set(LAYERS[: LAYERS.index(layer) + 1])
    found = []
    for line, module in imported_modules(ast.parse(source)):
        top = module.split(".")[0]
        if top in sys.stdlib_module_names or top in below:
            continue
        if top in LAYERS:
            problem = f"{layer} must not import {top}, which is above it"
        elif top not in declared:
            problem = f"{top} is not a runtime dependency of pyproject.toml"
        elif top in GPU and path not in GPU_MODULES:
            problem = f"only {' and '.join(sorted(GPU_MODULES))} import {top}"
        elif top in WEB and layer != "server":
            problem = f"only server imports {top}"
        elif layer == "tilert" and top not in TILERT_MAY_USE:
            problem = f"tilert imports numpy, ml_dtypes and cuda alone, not {top}"
        else:
            continue
        found.append(f"{path}:{line}: {problem}")
    return found


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_down(layer: str) -> None:
    declared = declared_imports()
    paths = sorted((ROOT / layer).rglob("*.py"))
    assert paths, f"{layer} has no modules"
    found = [
        problem
        for path in paths
        for problem in violations(path.read_text(), path.relative_to(ROOT).as_posix(), declared)
    ]
    assert not found, "\n".join(found)


def test_oracles_and_kernel_libraries_are_not_dependencies() -> None:
    assert declared_imports().isdisjoint({"torch", "triton", "cutlass", "transformers"})


@pytest.mark.parametrize(
    ("path", "source", "problem"),
    [
        ("tilert/array.py", "import models.config", "tilert must not import models"),
        ("models/rope.py", "from grout.engine import Engine", "models must not import grout"),
        ("grout/engine.py", "import server", "grout must not import server"),
        ("tilert/array.py", "from cuda.bindings import driver", "only tilert/driver.py and"),
        ("models/a.py", "import cuda.bindings.driver", "only tilert/driver.py and"),
        ("grout/engine.py", "import fastapi", "only server imports fastapi"),
        ("models/a.py", "def f():\n    import torch", "torch is not a runtime dependency"),
        ("tilert/a.py", "import tokenizers", "tilert imports numpy, ml_dtypes and cuda alone"),
        (
            "models/a.py",
            "import importlib\nimportlib.import_module('triton.language')",
            "triton is not a runtime dependency",
        ),
    ],
)
def test_a_broken_rule_is_found(path: str, source: str, problem: str) -> None:
    line = source.count("\n") + 1
    [found] = violations(source, path, declared_imports())
    assert found.startswith(f"{path}:{line}: {problem}")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("tilert/driver.py", "from cuda.bindings import driver\nimport numpy, ml_dtypes, ctypes"),
        ("models/a.py", "import tilert.language\nfrom . import config\nfrom ..x import y"),
        ("server/app.py", "import tilert, models, grout\nfrom starlette.responses import Response"),
    ],
)
def test_a_kept_rule_passes(path: str, source: str) -> None:
    assert violations(source, path, declared_imports()) == []
