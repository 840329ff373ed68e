"""The `grout` command: arguments, and one line with exit code 2 for whatever goes wrong.

Everything heavy is imported by the subcommand that needs it, so that `--help` is quick.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from server.exceptions import CommandError, is_for_people

__all__ = ["main"]

DISTRIBUTION = "grout-llm"
USAGE_ERROR = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 2 after an error, 130 after Ctrl-C."""
    try:
        options = _parser().parse_args(argv)
        if options.command == "serve":
            from server.serve import serve

            return serve(options)
        if options.command == "chat":
            from server.terminal import chat

            return chat(options)
        from server.info import info

        return info(options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return 0
    except Exception as error:
        if not is_for_people(error):
            raise
        print(f"grout: error: {' '.join(str(error).split())}", file=sys.stderr)
        return USAGE_ERROR


def version() -> str:
    """Return the installed version, or "unknown" when run from a source tree."""
    from importlib import metadata

    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message} (see '{self.prog} --help')")


class _Version(argparse.Action):
    """Like argparse's own, but looks the version up only when asked."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print(f"grout {version()}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="grout",
        description="Serve Qwen3 over an OpenAI-compatible HTTP API.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_serve(commands)
    _add_chat(commands)
    _add_info(commands)
    return parser


def _add_serve(commands: "argparse._SubParsersAction[_Parser]") -> None:
    serve = commands.add_parser(
        "serve", help="serve a model over HTTP", description="Serve a model over HTTP.",
        allow_abbrev=False,
    )  # fmt: skip
    _add_model(serve)
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    serve.add_argument(
        "--port", type=_port, default=8000, help="port, 0 for any free one (%(default)s)"
    )
    serve.add_argument("--api-key", help="key that requests must send, except to /health")
    _add_engine_options(serve)
    serve.add_argument(
        "--served-model-name",
        default=argparse.SUPPRESS,
        metavar="NAME",
        help="model name that requests use (the model's own id)",
    )


def _add_chat(commands: "argparse._SubParsersAction[_Parser]") -> None:
    chat = commands.add_parser(
        "chat", help="chat in the terminal", allow_abbrev=False,
        description="Chat in the terminal, with a model in this process or with a server.",
        epilog="In the chat: /clear forgets the history, /exit or end of file leaves, "
        "Ctrl-C stops an answer.",
    )  # fmt: skip
    _add_model(chat)
    chat.add_argument("--url", help="use the server there, for example http://127.0.0.1:8000")
    chat.add_argument("--api-key", help="key of that server")
    chat.add_argument("--system", metavar="TEXT", help="system message")
    chat.add_argument("--temperature", type=float, help="0 (greedy) to 2 (the model's own)")
    chat.add_argument("--max-tokens", type=int, help="most tokens of an answer (no limit)")
    chat.add_argument(
        "--no-think", action="store_true", help="ask the template to turn reasoning off"
    )
    _add_engine_options(chat)


def _add_info(commands: "argparse._SubParsersAction[_Parser]") -> None:
    info = commands.add_parser(
        "info", help="show devices, versions and folders", allow_abbrev=False,
        description="Show the devices, versions, cache folders and what would be served.",
    )  # fmt: skip
    _add_model(info)
    info.add_argument("--json", action="store_true", help="print JSON")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL",
        help="a folder, a .gguf file or a Hub id (Grout's default model)",
    )  # fmt: skip


ENGINE_OPTIONS = (
    "device",
    "dtype",
    "gpu_memory_utilization",
    "load_format",
    "max_model_len",
    "max_num_seqs",
    "seed",
    "served_model_name",
)
"""Fields of `EngineConfig` that are options of the command; absent ones keep its defaults."""


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine", argument_default=argparse.SUPPRESS)
    group.add_argument("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N (auto)")
    group.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16"),
        help="of weights and KV cache (auto: bfloat16 on a GPU, float32 on the CPU)",
    )  # fmt: skip
    group.add_argument(
        "--max-model-len", type=int, metavar="TOKENS",
        help="context, prompt and answer together (the model's own where it fits)",
    )  # fmt: skip
    group.add_argument(
        "--max-num-seqs", type=int, metavar="N", help="requests that are decoded at once"
    )
    group.add_argument(
        "--load-format", choices=("auto", "dummy"), help="dummy: random weights, for measuring"
    )
    group.add_argument(
        "--gpu-memory-utilization", type=float, metavar="SHARE",
        help="share of the GPU's memory to use, in (0, 1]",
    )  # fmt: skip
    group.add_argument(
        "--seed", type=int, help="makes sampling without a seed of its own repeatable"
    )


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (0..65535)")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
