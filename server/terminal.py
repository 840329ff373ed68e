"""`grout chat`: a conversation in the terminal."""

import argparse
import contextlib
import sys
import time
from typing import Any

from server.answering import Answering, LocalAnswering, RemoteAnswering
from server.exceptions import CommandError, ServerError
from server.opening import engine_options, open_engine
from server.origin import check_origin
from server.pieces import Piece

__all__ = ["chat"]

SOFT_SWITCHES = ("/no_think", "/think")
"""Words that mean something to Qwen3 itself."""

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def chat(options: argparse.Namespace) -> int:
    """Chat until /exit or end of file; returns the exit code."""
    settings: dict[str, Any] = {}
    if options.temperature is not None:
        settings["temperature"] = options.temperature
    if options.max_tokens is not None:
        settings["max_tokens"] = options.max_tokens
    if options.no_think:
        settings["chat_template_kwargs"] = {"enable_thinking": False}
    with contextlib.closing(_answering(options, settings)) as answering:
        Conversation(answering, options.system).run()
    return 0


def _answering(options: argparse.Namespace, settings: dict[str, Any]) -> Answering:
    if options.url is not None:
        given = sorted(engine_options(options))
        if given:
            flag = "--" + given[0].replace("_", "-")
            raise CommandError(f"{flag} is of a model in this process; it cannot go with --url")
        return RemoteAnswering(options.url, options.model, options.api_key, settings)
    if options.api_key is not None:
        raise CommandError("--api-key is of a server; give its --url as well")
    check_origin()
    return LocalAnswering(open_engine(options, max_num_seqs=1), settings)


class Conversation:
    """The messages so far, and the loop that adds to them."""

    def __init__(self, answering: Answering, system: str | None) -> None:
        self._answering = answering
        self._start = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._start)
        self._screen = Screen()

    def run(self) -> None:
        """Ask and answer until the user leaves."""
        print(f"{self._answering.name}: /clear forgets, /exit leaves, Ctrl-C stops an answer")
        while (text := self._screen.ask()) is not None:
            if text == "/exit":
                return
            if text == "/clear":
                self._messages = list(self._start)
            elif text.startswith("/") and " " not in text and text not in SOFT_SWITCHES:
                print(f"there is no command {text}; there are /clear and /exit")
            elif text:
                self._turn(text)

    def _turn(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
        self._screen.begin()
        try:
            tokens = self._answering.answer(self._messages, self._screen.show)
        except KeyboardInterrupt:
            self._screen.end("stopped")
        except ServerError as error:
            self._screen.end(f"error: {error}")
            self._messages.pop()
            return
        else:
            self._screen.end(self._screen.rate(tokens))
        self._messages.append({"role": "assistant", "content": self._screen.content})


class Screen:
    """What one answer looks like: reasoning dimmed on a terminal, then content, then a note."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if self._is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (gives input() editing and a history)
        self.begin()

    def ask(self) -> str | None:
        """Return the next line of the user, "" after Ctrl-C, None at the end of file."""
        try:
            return input("> " if self._is_terminal else "").strip()
        except KeyboardInterrupt:
            print("\n/exit or Ctrl-D leaves")
            return ""
        except EOFError:
            return None

    def begin(self) -> None:
        """Start an answer's clock and text."""
        self.content = ""
        self._kind = "content"
        self._asked = time.monotonic()
        self._first = self._last = 0.0

    def show(self, piece: Piece) -> None:
        """Print a piece as it arrives."""
        self._last = time.monotonic()
        self._first = self._first or self._last
        if piece.kind != self._kind:
            self._switch(piece.kind)
        if piece.kind == "content":
            self.content += piece.text
        print(piece.text, end="", flush=True)

    def end(self, note: str) -> None:
        """Close the answer with a note in brackets."""
        self._switch("content") if self._kind != "content" else print()
        print(f"{self._dim()}[{note}]{self._plain()}", flush=True)

    def rate(self, tokens: int) -> str:
        """Return how fast the answer came: the first token waits for the prompt, so it is apart."""
        seconds = self._last - self._first
        speed = f"{(tokens - 1) / seconds:.1f} tok/s, " if tokens > 1 and seconds > 0 else ""
        wait = (self._first or time.monotonic()) - self._asked
        return f"{tokens} tokens, {speed}first after {wait:.2f} s"

    def _switch(self, kind: str) -> None:
        if self._kind == "reasoning":
            print(self._plain())
        else:
            print(self._dim(), end="")
        self._kind = kind

    def _dim(self) -> str:
        return DIM if self._is_terminal else ""

    def _plain(self) -> str:
        return PLAIN if self._is_terminal else ""
