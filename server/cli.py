"""The `grout` command: arguments, and one line with exit code 2 for whatever goes wrong.

Everything heavy is imported by the subcommand that needs it, so that `--help` is quick.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from server.exceptions import CommandError, is_for_people

__all__ = ["main"]

USAGE_ERROR = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 2 after an error, 130 after Ctrl-C."""
    try:
        options = _parser().parse_args(argv)
        if options.command == "serve":
            from server.configuration import doubts, resolve
            from server.console import say
            from server.serve import serve

            parser = _serve_parser()
            resolved = resolve(options, parser, os.environ)
            say("\n".join(doubts(parser, os.environ)))
            return serve(resolved)
        if options.command == "chat":
            from server.terminal import chat

            return chat(options)
        if options.command == "audit":
            from server.audit import audit

            return audit()
        if options.command == "tune":
            from server.tune import tune

            return tune(options)
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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message} (see '{self.prog} --help')")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's own, but a command itself refuses what it does not know, by its name."""
        options, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return options, rest


class _Version(argparse.Action):
    """Like argparse's own, but looks the version up only when asked."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from server.versions import version

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
    _add_tune(commands)
    commands.add_parser(
        "audit", help="show what the ownership rules do not check", allow_abbrev=False,
        description="Show every place of the serving path that the ownership rules do not check, "
        "with its reason. Exit code 1 if there is an unsafe kernel.",
    )  # fmt: skip
    return parser


def _serve_parser() -> argparse.ArgumentParser:
    """The options of `serve` by themselves, for values from elsewhere than the command line."""
    parser = _Parser(prog="grout serve", allow_abbrev=False, argument_default=argparse.SUPPRESS)
    _add_serve_options(parser)
    return parser


def _add_serve(commands: "argparse._SubParsersAction[_Parser]") -> None:
    serve = commands.add_parser(
        "serve", help="serve a model over HTTP", description="Serve a model over HTTP.",
        epilog="Every option can also be set by a variable GROUT_OPTION_NAME or in the --config "
        "file; the command line comes first, then the environment, then the file.",
        allow_abbrev=False, argument_default=argparse.SUPPRESS,
    )  # fmt: skip
    _add_serve_options(serve)


def _add_serve_options(serve: argparse.ArgumentParser) -> None:
    _add_model(serve, default=argparse.SUPPRESS)
    serve.add_argument("--config", metavar="FILE", help="options in a TOML file")
    serve.add_argument("--host", help="address to listen on (127.0.0.1)")
    serve.add_argument("--port", type=_port, help="port, 0 for any free one (8000)")
    serve.add_argument(
        "--served-model-name", nargs="+", metavar="NAME",
        help="model names that requests use, the first in answers (the model's own id)",
    )  # fmt: skip
    _add_engine_options(serve)
    _add_http_options(serve)


def _add_http_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("HTTP", argument_default=argparse.SUPPRESS)
    group.add_argument(
        "--api-key", action="append", type=_key, metavar="KEY",
        help="key that requests must send, except to / and /health; may be repeated",
    )  # fmt: skip
    group.add_argument(
        "--cors-origin", nargs="+", metavar="ORIGIN",
        help="web origins whose pages may call the server, * for any (none)",
    )  # fmt: skip
    group.add_argument("--ssl-certfile", metavar="FILE", help="certificate chain, to serve TLS")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="its private key")
    group.add_argument(
        "--max-body-bytes", type=_count, metavar="N", help="longest request body (32 MiB)"
    )
    group.add_argument(
        "--request-timeout", type=_seconds, metavar="SECONDS",
        help="longest time for an answer, waiting in the queue included (no limit)",
    )  # fmt: skip
    group.add_argument(
        "--shutdown-timeout", type=_seconds, metavar="SECONDS",
        help="time for running answers after SIGTERM (30)",
    )  # fmt: skip
    group.add_argument(
        "--log-requests", choices=("off", "summary", "text"),
        help="a JSON line a request on stderr; text adds prompts (summary)",
    )  # fmt: skip


def _add_chat(commands: "argparse._SubParsersAction[_Parser]") -> None:
    chat = commands.add_parser(
        "chat", help="chat in the terminal", allow_abbrev=False,
        description="Chat in the terminal, with a model in this process or with a server.",
        epilog="In the chat: /clear forgets the history, /exit or end of file leaves, "
        "Ctrl-C stops an answer.",
    )  # fmt: skip
    _add_model(chat)
    chat.add_argument("--url", help="use the server there, for example http://127.0.0.1:8000")
    chat.add_argument("--api-key", type=_key, help="key of that server")
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


def _add_tune(commands: "argparse._SubParsersAction[_Parser]") -> None:
    tune = commands.add_parser(
        "tune", help="find the quickest tiles on this GPU", allow_abbrev=False,
        description="Try tiles for the products of a model on this GPU, and keep the quickest on "
        "disk, where later starts find them. Ctrl-C keeps what has been found.",
        epilog="What is kept holds for this GPU, driver and version of Grout.",
    )  # fmt: skip
    tune.add_argument(
        "model", nargs="?", metavar="MODEL",
        help="a preset, such as qwen3-4b, or as for serve (Grout's default model)",
    )  # fmt: skip
    tune.add_argument("--device", metavar="DEVICE", default="auto", help="cuda or cuda:N (auto)")
    tune.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto",
        help="of the weights (auto: bfloat16)",
    )  # fmt: skip
    tune.add_argument(
        "--tokens", type=_count, nargs="+", metavar="N",
        help="numbers of tokens (those of which serve records steps)",
    )  # fmt: skip
    tune.add_argument(
        "--most", type=_count, default=8, metavar="N", help="tiles to try a product (%(default)s)"
    )
    tune.add_argument(
        "--seconds", type=_seconds, default=600.0, metavar="SECONDS",
        help="time after which no product is begun any more (%(default)g)",
    )  # fmt: skip


def _add_model(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", default=default,
        help="a folder, a .gguf file or a Hub id (Grout's default model)",
    )  # fmt: skip


ENGINE_OPTIONS = (
    "device",
    "dtype",
    "enforce_eager",
    "gpu_memory_utilization",
    "kv_cache_memory",
    "load_format",
    "max_model_len",
    "max_num_seqs",
    "max_queue",
    "prefill_chunk",
    "prefix_caching",
    "request_timeout",
    "seed",
    "step_timeout",
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
        help="context, prompt and answer together (the model's own where it fits, on the cpu "
        "4096 at most)",
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
        "--prefill-chunk", type=int, metavar="TOKENS",
        help="most prompt tokens run between two decode steps",
    )  # fmt: skip
    group.add_argument(
        "--max-queue", type=int, metavar="N",
        help="requests that may wait; more are answered with 429 (no limit)",
    )  # fmt: skip
    group.add_argument(
        "--kv-cache-memory", type=_bytes, metavar="BYTES",
        help="memory for the KV cache, such as 8GiB (what is free of the share)",
    )  # fmt: skip
    group.add_argument(
        "--prefix-caching", action=argparse.BooleanOptionalAction,
        help="keep the KV blocks of prompts for later ones that begin the same (on)",
    )  # fmt: skip
    group.add_argument(
        "--enforce-eager", action=argparse.BooleanOptionalAction,
        help="run steps op by op rather than as graphs",
    )  # fmt: skip
    group.add_argument(
        "--seed", type=int, help="makes sampling without a seed of its own repeatable"
    )
    group.add_argument(
        "--step-timeout", type=_seconds, metavar="SECONDS",
        help="time after which a step of the engine counts as hung (60 on a GPU, 600 on the CPU)",
    )  # fmt: skip


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (0..65535)")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _key(text: str) -> str:
    """A key as a header can hold it, which has no space around its value."""
    key = text.strip()
    if not key.isprintable():
        # Not shown: it is a secret.
        raise argparse.ArgumentTypeError("the key holds a control character or a line break")
    return key


def _bytes(text: str) -> int:
    number, unit = text.strip(), 1
    for power, letter in enumerate("KMGT", 1):
        for suffix in (f"{letter}iB", letter):
            if number.endswith(suffix):
                number, unit = number.removesuffix(suffix), 1024**power
    try:
        size = int(float(number) * unit)
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 8GiB")
    return size


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


if __name__ == "__main__":
    sys.exit(main())
