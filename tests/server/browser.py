"""Headless Chromium through the DevTools protocol: as much of it as tests of a page need."""

import contextlib
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import httpx
from websockets.sync.client import ClientConnection, connect

__all__ = ["CHROMIUM", "Browser", "Tab"]

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
SECONDS = 60.0
"""Longest wait for anything; what is waited for takes a moment on an idle machine."""

_FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--no-proxy-server",
    "--remote-debugging-port=0",
]


class Browser:
    """A browser with a profile of its own in `folder`; a context manager that ends it."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            [CHROMIUM, *_FLAGS, f"--user-data-dir={folder}", "about:blank"],
            stdout=self._log,
            stderr=self._log,
        )
        file = folder / "DevToolsActivePort"
        try:
            wait(lambda: file.exists() and file.read_text().count("\n"), "chromium does not start")
        except BaseException:
            self.__exit__()
            raise
        self._port = int(file.read_text().splitlines()[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    @contextlib.contextmanager
    def open(self, url: str) -> "Iterator[Tab]":
        """A new tab, everything that its page asks for recorded from the beginning."""
        new = f"http://127.0.0.1:{self._port}/json/new?about:blank"
        target = httpx.put(new, trust_env=False, timeout=SECONDS).json()
        address = target["webSocketDebuggerUrl"]
        options: Any = {"max_size": None, "ping_interval": None, "proxy": None}
        with connect(address, open_timeout=SECONDS, **options) as connection:
            tab = Tab(connection)
            tab.go(url)
            yield tab
            tab.call("Page.close")


class Tab:
    """A page under control.

    requests: URL and headers of each request. complaints: what went wrong, as the console has it:
    uncaught exceptions, refused resources, dialogs.
    """

    def __init__(self, connection: ClientConnection) -> None:
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.complaints: list[str] = []
        self._numbers = itertools.count(1)
        self._connection = connection
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def go(self, url: str) -> None:
        """Load a page, anew if it is the one that is shown."""
        self.run("window.earlier = true")
        self.call("Page.navigate", url=url)
        self.until("window.earlier === undefined && document.readyState === 'complete'")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Run a command of the protocol and return its result."""
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._connection.recv(timeout=SECONDS))
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._record(message)

    def run(self, script: str) -> Any:
        """The value of a script, once any promise it gives is kept."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until a script's value is true."""
        wait(lambda: self.run(script), script)

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def text(self, selector: str) -> str:
        """The text of an element, markup in it as it would be written."""
        return str(self.run(f"document.querySelector({json.dumps(selector)}).textContent"))

    def visible(self, selector: str) -> bool:
        return bool(self.run(f"document.querySelector({json.dumps(selector)}).checkVisibility()"))

    def type(self, selector: str, text: str) -> None:
        """Put text where the cursor is after a click on an element."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key that writes a character of its own when nothing keeps it from doing so."""
        common = {"key": key, "code": key, "modifiers": 8 if shift else 0}
        text = {"text": "\r", "windowsVirtualKeyCode": 13} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def _record(self, message: dict[str, Any]) -> None:
        params = message["params"]
        match message["method"]:
            case "Network.requestWillBeSent":
                self.requests.append((params["request"]["url"], params["request"]["headers"]))
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"]))
            case "Log.entryAdded":
                self.complaints.append(params["entry"]["text"])
            case "Page.javascriptDialogOpening":
                self.complaints.append(f"dialog: {params['message']}")


def wait(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)
