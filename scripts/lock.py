"""Rewrite requirements/{dev,runtime}.lock from pyproject.toml with pip-tools.

Run it with the Python of the locks (3.11, Linux x86_64), in an environment with the lock extra:

    python scripts/lock.py [--upgrade]
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = Path("requirements")

COMPILE = [
    sys.executable,
    "-m",
    "piptools",
    "compile",
    "--quiet",
    "--generate-hashes",
    "--strip-extras",
    "--no-annotate",
    # Where a package came from is the installing machine's business, not the lock's.
    "--no-emit-index-url",
    "--no-emit-find-links",
    "--no-emit-trusted-host",
    "--no-emit-options",
]


def compile_lock(output: Path, arguments: list[str]) -> None:
    """Resolve pyproject.toml into `output`."""
    command = [*COMPILE, f"--output-file={output}", *arguments]
    environment = os.environ | {"CUSTOM_COMPILE_COMMAND": "python scripts/lock.py"}
    subprocess.run([*command, "pyproject.toml"], cwd=ROOT, env=environment, check=True)
    print(f"wrote {output}")


def main(arguments: list[str]) -> None:
    """Write dev.lock, then runtime.lock with the same versions."""
    dev = REQUIREMENTS / "dev.lock"
    compile_lock(dev, ["--extra=dev", *arguments])
    compile_lock(REQUIREMENTS / "runtime.lock", [f"--constraint={dev}", *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
