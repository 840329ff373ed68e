"""A small asyncio client for OpenAI-compatible servers, made for measuring them.

It reads HTTP/1.1 itself: a general client spends some 100 us of Python on a streamed chunk, so that
at 10,000 chunks a second one would measure the client.
"""

import asyncio
import contextlib
import json
import re
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

NAMED_URL = re.compile(r"(?:(?P<name>[^=/:]+)=)?(?P<url>https?://.+)")
READ_BYTES = 1 << 18


class ClientError(Exception):
    """A server cannot be reached, or does not speak HTTP/1.1 with JSON."""


@dataclass(frozen=True)
class Endpoint:
    """A server: name in reports, URL without `/v1`, and key to send, if any."""

    name: str
    url: str
    api_key: str | None = None

    @classmethod
    def parse(cls, text: str, api_key: str | None = None) -> Self:
        """Read `name=http://host:port` or the URL alone. Raises ValueError."""
        match = NAMED_URL.fullmatch(text)
        if match is None or not urlsplit(match["url"]).hostname:
            raise ValueError(f"{text!r} is not NAME=http://HOST:PORT")
        url = match["url"].rstrip("/").removesuffix("/v1")
        return cls(match["name"] or urlsplit(url).netloc, url, api_key)


@dataclass
class Response:
    """Status, lower-case headers, and, once read, the body."""

    status: int
    headers: dict[str, str]
    body: bytes = b""

    def json(self) -> Any:
        """The body's JSON value. Raises `ClientError`."""
        try:
            return json.loads(self.body)
        except ValueError:
            raise ClientError(f"the answer is not JSON: {self.body[:80]!r}") from None

    def problem(self) -> str:
        """What the body of an error says, and what to do about it where that is known."""
        try:
            text = str(json.loads(self.body)["error"]["message"])
        except (ValueError, LookupError, TypeError):
            text = self.body[:200].decode("utf-8", "replace")
        return f"{text} (--api-key gives a key)" if self.status in (401, 403) else text


@dataclass
class Connection:
    """One open HTTP/1.1 connection; `reusable` while a further request may be sent on it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    fresh: bool = True
    reusable: bool = False
    _rest: bytearray = field(default_factory=bytearray)

    def drop(self) -> None:
        """Close at once, as a client does that is killed."""
        self.writer.transport.abort()

    async def head(self) -> Response:
        """Read the status line and headers of an answer."""
        while (end := self._rest.find(b"\r\n\r\n")) < 0:
            await self._more()
        lines = bytes(self._rest[:end]).decode("latin-1").split("\r\n")
        del self._rest[: end + 4]
        parts = lines[0].split(" ", 2)
        if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdecimal():
            raise ClientError(f"not an HTTP/1.1 answer: {lines[0][:80]!r}")
        pairs = (line.partition(":") for line in lines[1:])
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        return Response(int(parts[1]), headers)

    async def blocks(self, response: Response) -> AsyncIterator[bytes]:
        """The body, piece by piece as it arrives."""
        keep = response.headers.get("connection", "").lower() != "close"
        if "chunked" in response.headers.get("transfer-encoding", "").lower():
            while (block := await self._chunks()) is not None:
                yield block
        elif "content-length" in response.headers:
            left = int(response.headers["content-length"])
            while left:
                if not self._rest:
                    await self._more()
                block = bytes(self._rest[:left])
                del self._rest[:left]
                left -= len(block)
                yield block
        else:
            keep = False
            while block := bytes(self._rest) or await self.reader.read(READ_BYTES):
                self._rest.clear()
                yield block
        self.reusable = keep

    async def _chunks(self) -> bytes | None:
        """All chunks that are here, at least one; None at the last one, of size 0."""
        out = b""
        while True:
            line = self._rest.find(b"\r\n")
            if line >= 0:
                size = int(self._rest[:line].partition(b";")[0], 16)
                end = line + 2 + size
                if len(self._rest) >= end + 2:
                    if size == 0:
                        if out:
                            return out
                        del self._rest[: end + 2]
                        return None
                    out += self._rest[line + 2 : end]
                    del self._rest[: end + 2]
                    continue
            if out:
                return out
            await self._more()

    async def _more(self) -> None:
        data = await self.reader.read(READ_BYTES)
        if not data:
            raise ClientError("the server closed the connection before its answer was complete")
        self._rest += data


@dataclass
class Client:
    """Connections to one endpoint: as many as there are requests at once, kept for further ones."""

    endpoint: Endpoint
    timeout: float = 600.0
    _idle: list[Connection] = field(default_factory=list)

    def __post_init__(self) -> None:
        parts = urlsplit(self.endpoint.url)
        self._host = parts.hostname or ""
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._path = parts.path
        key = self.endpoint.api_key
        self._fixed = f"Host: {parts.netloc}\r\nAccept: */*\r\n" + (
            f"Authorization: Bearer {key}\r\n" if key else ""
        )

    async def connect(self) -> Connection:
        """A new connection. Raises `ClientError` where none can be made."""
        try:
            streams = await asyncio.open_connection(
                self._host, self._port, ssl=self._tls, limit=READ_BYTES
            )
        except OSError as error:
            raise ClientError(
                f"cannot connect to {self.endpoint.url}: {error.strerror or error}"
            ) from None
        return Connection(*streams)

    def message(self, method: str, path: str, body: Any = None) -> bytes:
        """The bytes of a request; `body` is sent as JSON, bytes as they are."""
        data = b""
        if body is not None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = "Content-Type: application/json\r\n" if body is not None else ""
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._fixed}{kind}"
        return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data

    @contextlib.asynccontextmanager
    async def open(
        self, method: str, path: str, body: Any = None
    ) -> AsyncIterator[tuple[Response, Connection]]:
        """Send a request and yield its answer's head; leaving early drops the connection."""
        message = self.message(method, path, body)
        connection, response = await self._send(message)
        try:
            yield response, connection
        finally:
            if connection.reusable:
                connection.fresh = connection.reusable = False
                self._idle.append(connection)
            else:
                connection.drop()

    async def request(self, method: str, path: str, body: Any = None) -> Response:
        """A whole answer. Raises `ClientError`, also when it takes longer than `timeout`."""
        try:
            async with asyncio.timeout(self.timeout), self.open(method, path, body) as opened:
                response, connection = opened
                response.body = b"".join([block async for block in connection.blocks(response)])
        except TimeoutError:
            raise ClientError(f"no answer within {self.timeout:g} s") from None
        except OSError as error:
            raise ClientError(f"the connection broke: {error}") from None
        return response

    async def close(self) -> None:
        """Drop the idle connections."""
        for connection in self._idle:
            connection.drop()
        self._idle.clear()
        # A transport lets go of its socket in the loop's next turn.
        await asyncio.sleep(0)

    async def _send(self, message: bytes) -> tuple[Connection, Response]:
        while True:
            connection = await self._take()
            try:
                connection.writer.write(message)
                await connection.writer.drain()
                return connection, await connection.head()
            except (ClientError, OSError):
                connection.drop()
                # A server may close an idle connection just as it is used again.
                if connection.fresh:
                    raise
            except BaseException:
                connection.drop()
                raise

    async def _take(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if not (connection.reader.at_eof() or connection.writer.is_closing()):
                return connection
            connection.drop()
        return await self.connect()


@dataclass
class Reply:
    """One streamed answer; times are `time.perf_counter()` seconds.

    arrivals: one for each chunk that stands for tokens; a chat's first chunk, which holds the role
    alone, and a last one with the finish_reason alone are none. end: of the last chunk with
    choices. error: why the request counts as failed. The token counts are the server's `usage`.
    """

    start: float = 0.0
    end: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    status: int = 0
    done: bool = False
    usage_seen: bool = False
    error: str | None = None

    def problem(self, wanted: int | None) -> str | None:
        """What is wrong with a finished stream; wanted: tokens it must have, if known."""
        if self.error is not None:
            return self.error
        if not self.done:
            return "the stream ended without [DONE]"
        if not self.usage_seen:
            return "the stream had no usage (stream_options.include_usage)"
        if wanted is not None and self.completion_tokens != wanted:
            return f"usage says {self.completion_tokens} tokens, {wanted} were asked for"
        if len(self.arrivals) > self.completion_tokens:
            return (
                f"{len(self.arrivals)} chunks of tokens came, "
                f"usage says {self.completion_tokens} tokens"
            )
        if self.finish_reason is None:
            return "no finish_reason was sent"
        return None


async def ask(client: Client, path: str, body: dict[str, Any]) -> Reply:
    """Stream one answer; whatever goes wrong is in `Reply.error`, nothing is raised."""
    reply = Reply(start=time.perf_counter())
    try:
        async with asyncio.timeout(client.timeout), client.open("POST", path, body) as opened:
            response, connection = opened
            reply.status = response.status
            if response.status == 200:
                async for event, now in events(connection, response):
                    _take_event(reply, event, now)
            else:
                blocks = connection.blocks(response)
                response.body = b"".join([block async for block in blocks])
                reply.error = f"HTTP {response.status}: {response.problem()}"
    except TimeoutError:
        reply.error = f"no complete answer within {client.timeout:g} s"
    # The last three are what JSON of another form than OpenAI's leads to.
    except (ClientError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reply.error = f"{type(error).__name__}: {error}"
    reply.end = reply.end or time.perf_counter()
    return reply


async def events(connection: Connection, response: Response) -> AsyncIterator[tuple[bytes, float]]:
    """The data of each server-sent event with the time it arrived."""
    rest = b""
    async for block in connection.blocks(response):
        now = time.perf_counter()
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip(), now


def _take_event(reply: Reply, data: bytes, now: float) -> None:
    if data == b"[DONE]":
        reply.done = True
        return
    event = json.loads(data)
    if not isinstance(event, dict):
        raise ClientError(f"an event is no JSON object: {data[:80]!r}")
    # Servers differ in what they leave out and what they send as null.
    if (error := event.get("error")) is not None:
        message = error.get("message", error) if isinstance(error, dict) else error
        reply.error = f"error event: {message}"
        return
    if usage := event.get("usage"):
        reply.usage_seen = True
        reply.prompt_tokens = usage["prompt_tokens"]
        reply.completion_tokens = usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        reply.cached_tokens = details.get("cached_tokens") or 0
    for choice in event["choices"] or ():
        finish, text, role_only = _read_choice(choice)
        reply.end = now
        reply.text += text
        if text or not (finish or role_only):
            reply.arrivals.append(now)
        reply.finish_reason = finish or reply.finish_reason


def _read_choice(choice: dict[str, Any]) -> tuple[str | None, str, bool]:
    """(finish reason, text of whatever kind, whether it only opens a chat's message)."""
    finish = choice.get("finish_reason")
    if "text" in choice:
        return finish, str(choice["text"] or ""), False
    delta = choice["delta"] or {}
    text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        text += function.get("arguments") or function.get("name") or ""
    return finish, str(text), "role" in delta
