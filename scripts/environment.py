"""Create or refresh .venv at the root of the checkout, for `scripts/test` and `scripts/serve`.

    python3 scripts/environment.py {runtime,dev,oracle}

`runtime` is what serving needs, `dev` adds linters and tests, `oracle` adds torch and transformers.
A group that is already installed from the same inputs is left alone: its stamp file inside .venv
holds a hash of everything the installation was made from. Uses the standard library only.
"""

import argparse
import hashlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MINIMUM_PYTHON = (3, 11)
# The releases the committed fixtures were made with.
ORACLE_PACKAGES = ("torch==2.13.0", "transformers==5.24.0")
GROUPS = ("runtime", "dev", "oracle")
ATTEMPTS = 3


class SetupError(Exception):
    """The environment could not be made; the message says why and what to do."""


def locked_platform() -> bool:
    """Whether the lock files apply here: they hold packages that have no wheels elsewhere."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")


def lock_file(group: str) -> Path:
    """The lock that `group` installs from; the oracle packages come on top of dev."""
    return ROOT / "requirements" / f"{'runtime' if group == 'runtime' else 'dev'}.lock"


def fingerprint(group: str) -> str:
    """Hash of all that decides what installing `group` gives."""
    digest = hashlib.sha256()
    for part in (str(ROOT), platform.python_version(), *ORACLE_PACKAGES):
        digest.update(part.encode() + b"\0")
    for path in (ROOT / "pyproject.toml", lock_file(group)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def groups_that_cover(group: str) -> Sequence[str]:
    """`group` and the larger groups that contain it."""
    return GROUPS[GROUPS.index(group) :]


class Environment:
    """The virtual environment at `directory` and the stamps of what was installed into it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        windows = os.name == "nt"
        self.python = directory / ("Scripts/python.exe" if windows else "bin/python")

    def has(self, group: str) -> bool:
        """Whether `group` is installed from the present inputs, alone or within a larger group."""
        return self.works() and any(
            stamp.is_file() and stamp.read_text() == fingerprint(larger)
            for larger in groups_that_cover(group)
            for stamp in [self._stamp(larger)]
        )

    def works(self) -> bool:
        """Whether the environment's interpreter starts and is the version running this script."""
        if not self.python.exists():
            return False
        probe = [str(self.python), "-c", "import platform; print(platform.python_version())"]
        answer = subprocess.run(probe, capture_output=True, text=True, check=False)
        return answer.returncode == 0 and answer.stdout.strip() == platform.python_version()

    def install(self, group: str) -> None:
        """Create the environment where needed and install `group` into it."""
        if not self.works():
            say(f"creating {self.directory} with Python {platform.python_version()}")
            run([sys.executable, "-m", "venv", "--clear", str(self.directory)])
        for installed in GROUPS:
            self._stamp(installed).unlink(missing_ok=True)
        say(f"installing the {group} packages; the first time takes a few minutes")
        if locked_platform():
            self._pip("--require-hashes", "--requirement", str(lock_file(group)))
            self._pip("--no-deps", "--editable", str(ROOT))
        else:
            extra = "" if group == "runtime" else "[dev]"
            self._pip("--editable", f"{ROOT}{extra}")
        if group == "oracle":
            # One at a time: transformers must find the chosen torch in place. Compiling the whole
            # of both to bytecode takes longer than the tests that import a part.
            for package in ORACLE_PACKAGES:
                self._pip("--no-compile", package)
        self._stamp(group).write_text(fingerprint(group))

    def _stamp(self, group: str) -> Path:
        return self.directory / f"grout-{group}.stamp"

    def _pip(self, *arguments: str) -> None:
        quiet = [] if sys.stdout.isatty() else ["-qq"]
        command = [str(self.python), "-m", "pip", "install", *quiet, "--retries=5", *arguments]
        for attempt in range(1, ATTEMPTS + 1):
            status = subprocess.run(command, check=False).returncode
            if status == 0:
                return
            if attempt < ATTEMPTS:
                say(f"pip exited with {status}; trying again in {10 * attempt} s")
                time.sleep(10 * attempt)
        raise SetupError(
            f"pip could not install {' '.join(arguments)} after {ATTEMPTS} attempts. "
            "Its messages are above; check the network and the package index, then run this again."
        )


def run(command: Sequence[str]) -> None:
    """Run `command`, raising SetupError if it fails."""
    status = subprocess.run(command, check=False).returncode
    if status != 0:
        raise SetupError(f"`{' '.join(command)}` exited with {status}; its messages are above.")


def say(message: str) -> None:
    """Tell the person waiting what is being done."""
    print(f"environment: {message}", flush=True)


def main() -> int:
    """Bring the group named on the command line up to date; returns the exit status."""
    parser = argparse.ArgumentParser(description="Create or refresh .venv.")
    parser.add_argument("group", choices=GROUPS, help="what to install")
    group = parser.parse_args().group
    if sys.version_info < MINIMUM_PYTHON:
        found = platform.python_version()
        print(f"environment: Python 3.11 or later is needed; this is {found}", file=sys.stderr)
        return 1
    environment = Environment(ROOT / ".venv")
    try:
        if environment.has(group):
            say(f"{environment.directory} is up to date")
        else:
            environment.install(group)
    except SetupError as error:
        print(f"environment: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
