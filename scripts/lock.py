"""Rewrite requirements/{dev,runtime}.lock from pyproject.toml with pip-tools.

Run it with the Python of the locks (3.11, Linux x86_64), in an environment with the lock extra:

    python scripts/lock.py [--upgrade]
"""

import os
import subprocess
import sys
from importlib.util import find_spec
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
    """Resolve pyproject.toml into `output`.

    Raises:
        subprocess.CalledProcessError: if pip-tools cannot; it has said why on stderr.
    """
    command = [*COMPILE, f"--output-file={output}", *arguments]
    environment = os.environ | {"CUSTOM_COMPILE_COMMAND": "python scripts/lock.py"}
    subprocess.run([*command, "pyproject.toml"], cwd=ROOT, env=environment, check=True)
    print(f"wrote {output}")


def main(arguments: list[str]) -> int:
    """Write dev.lock, then runtime.lock with the same versions; 2 where pip-tools cannot."""
    if find_spec("piptools") is None:
        print(
            "lock: error: locks are made by pip-tools, which is not installed here; install it "
            "with `pip install pip-tools`",
            file=sys.stderr,
        )
        return 2
    dev = REQUIREMENTS / "dev.lock"
    try:
        compile_lock(dev, ["--extra=dev", *arguments])
        compile_lock(REQUIREMENTS / "runtime.lock", [f"--constraint={dev}", *arguments])
    except subprocess.CalledProcessError as error:
        print(f"lock: error: pip-tools ended with status {error.returncode}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
