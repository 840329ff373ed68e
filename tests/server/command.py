"""The `grout` command in a process of its own, with a fake engine where one is asked for."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).parents[2]

# The command with `create_engine` replaced; FAKE holds the settings of the fake.
# SIGINT: a shell that runs the tests in the background has it ignored, which is inherited.
FAKE_COMMAND = """
import json, os, signal, sys, grout
signal.signal(signal.SIGINT, signal.default_int_handler)
from tests.server.fakes import FakeEngine
def create_engine(config, progress=None):
    progress(f"asked for {config}")
    return FakeEngine(**json.loads(os.environ["FAKE"]))
grout.create_engine = create_engine
from server.cli import main
sys.exit(main(sys.argv[1:]))
"""


def start(
    *arguments: str,
    fake: dict[str, object] | None = None,
    code: str = FAKE_COMMAND,
    stdout: int | TextIO = subprocess.PIPE,
    stderr: int | TextIO = subprocess.PIPE,
) -> "subprocess.Popen[str]":
    command = ["-m", "server.cli"] if fake is None else ["-c", code]
    return subprocess.Popen(
        [sys.executable, *command, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "FAKE": json.dumps(fake)},
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        text=True,
    )


def run(
    *arguments: str, fake: dict[str, object] | None = None, stdin: str = ""
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command."""
    with start(*arguments, fake=fake) as process:
        out, err = process.communicate(stdin, timeout=60)
    return process.returncode, out, err
