"""One HTTP/1.1 request on a connection of its own, with the answer's body as it arrives.

Knows: sockets, TLS, framing (httptools). Must not know: what is said. Light on purpose: the client of a load shares
the machine with the server it measures.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

import httptools

from pinnate.core.errors import ConfigError

_READ_BYTES = 1 << 16


class Origin(NamedTuple):
    host: str
    port: int
    tls: ssl.SSLContext | None  # made once: reading the certificates takes longer than a request
    prefix: str  # path before /v1, without a slash at its end


def parse_base_url(url: str) -> Origin:
    """`http://host:port`, with or without /v1 at its end.

    Raises:
        ConfigError: it is not such a URL.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"--base-url {url!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"--base-url {url!r}: not a URL such as http://127.0.0.1:8000")
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Origin(host, port or (443 if tls else 80), tls, prefix)


class Response:
    """An answer as it arrives. The methods named on_* are called by the parser."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._has_status = self._complete = False
        self._until_close = True  # neither a length nor chunks: the connection's end is the body's end
        self.status = 0

    async def read_head(self) -> None:
        """
        Raises:
            ConnectionError: the connection ended before the head did.
        """
        while not self._has_status:
            await self._feed()

    async def read_part(self) -> bytes:
        """What has arrived of the body; empty at its end.

        Raises:
            ConnectionError: the connection ended before the body did.
        """
        while not self._parts and not self._complete:
            await self._feed()
        part = b"".join(self._parts)
        self._parts.clear()
        return part

    async def read_all(self) -> bytes:
        whole = b""
        while part := await self.read_part():
            whole += part
        return whole

    async def _feed(self) -> None:
        data = await self._reader.read(_READ_BYTES)
        if not data:
            if self._has_status and self._until_close:
                self._complete = True
                return
            raise ConnectionResetError("the server closed the connection before the answer was complete")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise ConnectionError(f"the answer is not HTTP/1.1: {error}") from None

    def on_header(self, name: bytes, value: bytes) -> None:  # noqa: ARG002
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._until_close = False

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._has_status = True

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        self._complete = True


@contextlib.asynccontextmanager
async def open_response(
    origin: Origin, method: str, path: str, *, headers: Mapping[str, str], body: bytes = b""
) -> AsyncIterator[Response]:
    """Connects, sends, reads the head; closes the connection at the end.

    Raises:
        OSError: the server cannot be reached, or left before it had answered.
    """
    reader, writer = await asyncio.open_connection(origin.host, origin.port, ssl=origin.tls)
    try:
        shown = f"[{origin.host}]" if ":" in origin.host else origin.host
        lines = [
            f"{method} {origin.prefix}{path} HTTP/1.1",
            f"Host: {shown}:{origin.port}",
            "Connection: close",
            f"Content-Length: {len(body)}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        response = Response(reader)
        await response.read_head()
        yield response
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
