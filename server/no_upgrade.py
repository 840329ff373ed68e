"""Upgrades to other protocols, which are ignored: a request that offers one is a request.

RFC 9110, section 7.8. httptools takes all that follows such a head for the other protocol's: the
body would be lost, or run as the next request.
"""

from typing import Any

import httptools

__all__ = ["without_upgrades"]


def without_upgrades(protocol: Any) -> Any:
    """Return the protocol class, ignoring upgrades where it is made of httptools' callbacks."""
    if not hasattr(protocol, "on_headers_complete"):
        return protocol

    class Plain(protocol):  # type: ignore[misc]  # which class it is is known when it runs
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.parser: Any = _Parser(self.parser, self)

        def on_headers_complete(self) -> None:
            if not self.parser.should_upgrade():
                super().on_headers_complete()
            elif self.parser.get_method() == b"CONNECT":
                raise ValueError("this is no proxy")  # which is a 400, and closes

        def on_message_complete(self) -> None:
            if not self.parser.should_upgrade():
                super().on_message_complete()

    return Plain


class _Parser:
    """A parser that goes on after a head with an upgrade as if that had not been there."""

    def __init__(self, parser: Any, protocol: Any) -> None:
        self._parser = parser
        self._protocol = protocol

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def feed_data(self, data: bytes) -> None:
        rest = memoryview(data)
        while True:
            try:
                self._parser.feed_data(rest)
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
                self._parser.feed_data(self._head())
            else:
                return

    def _head(self) -> bytes:
        """The head just read, without its Upgrade."""
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (method, self._protocol.url, version)]
        headers = self._protocol.headers
        lines += [b"%s: %s" % (name, value) for name, value in headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])
