"""HTTP/1.1 over asyncio, as little of it as a load generator needs, stamped at the socket read.

Every read gets one time stamp before anything looks at its bytes. Framing is undone at once, the
rest (events, JSON) later and elsewhere, so that work on one stream does not delay the stamp of
another. All connections share one read buffer: asyncio's default allocates 256 KiB per read, which
cost more than everything else here together.

An exchange never raises: what went wrong is in `Reply.error`, beside all that had arrived by then.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, cast
from urllib.parse import urlsplit

Clock = Callable[[], float]

CLOSED = "the server closed the connection"
_BUFFER_BYTES = 1 << 16


@dataclass(slots=True, kw_only=True)
class Reply:
    """What came back so far. `pieces` holds the body as it was read: (time of the read, bytes)."""

    sent_s: float
    end_s: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    error: str | None = None

    def read_body(self) -> bytes:
        """Return the body as far as it has arrived."""
        return b"".join(data for _, data in self.pieces)


class Body(Protocol):
    """Undoes the framing of one body."""

    is_done: bool
    ends_by_closing: bool

    def feed(self, data: bytes) -> bytes:
        """Return the content in `data`; raises ValueError if it breaks the framing."""
        ...


class ChunkedBody:
    """Transfer-Encoding: chunked. Trailers are skipped."""

    ends_by_closing = False

    def __init__(self) -> None:
        self.is_done = False
        self._rest = b""
        self._num_left = 0
        self._is_ending = False

    def feed(self, data: bytes) -> bytes:
        """Return the content in `data`."""
        if not self._rest and not self._num_left:
            # Nearly always a read is exactly one chunk: an event.
            end = data.find(b"\r\n")
            if end > 0 and data[:end].isalnum() and data.endswith(b"\r\n", end + 2):
                size = int(data[:end], 16)
                if size and len(data) == end + size + 4:
                    return data[end + 2 : -2]
        data = self._rest + data if self._rest else data
        self._rest = b""
        content = []
        pos = 0
        while not self.is_done and pos < len(data):
            if self._num_left:
                content.append(data[pos : pos + self._num_left])
                pos += len(content[-1])
                self._num_left -= len(content[-1])
                continue
            end = data.find(b"\r\n", pos)
            if end < 0:
                self._rest = data[pos:]
                break
            self._on_line(data[pos:end])
            pos = end + 2
        return b"".join(content)

    def _on_line(self, line: bytes) -> None:
        """Take a size, the blank line that ends a chunk or the body, or a trailer."""
        if not line:
            self.is_done = self._is_ending
        elif not self._is_ending:
            self._num_left = int(line.partition(b";")[0], 16)
            self._is_ending = self._num_left == 0


class SizedBody:
    """Content-Length, or without it everything until the server closes the connection."""

    def __init__(self, size: int | None) -> None:
        self._num_left = size
        self.ends_by_closing = size is None
        self.is_done = size == 0

    def feed(self, data: bytes) -> bytes:
        """Return the content in `data`."""
        if self._num_left is None:
            return data
        content = data[: self._num_left]
        self._num_left -= len(content)
        self.is_done = self._num_left == 0
        return content


class Connection(asyncio.BufferedProtocol):
    """One connection, one exchange at a time."""

    def __init__(self, clock: Clock, buffer: memoryview) -> None:
        self._clock = clock
        self._buffer = buffer
        self._transport: asyncio.Transport | None = None
        self._head = b""
        self._body: Body | None = None
        self._reply: Reply | None = None
        self._done: asyncio.Future[None] | None = None
        self.is_reusable = True

    def start(self, request: bytes) -> tuple[Reply, asyncio.Future[None]]:
        """Send a request; the future is done when the reply is whole or lost."""
        assert self._transport is not None
        self._head, self._body = b"", None
        self._done = asyncio.get_running_loop().create_future()
        sent_s = self._clock()
        self._transport.write(request)
        self._reply = Reply(sent_s=sent_s, end_s=sent_s)
        return self._reply, self._done

    def close(self) -> None:
        """Drop the connection."""
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    def expire(self, timeout_s: float) -> None:
        """Give the exchange up."""
        self._finish(f"no end after {timeout_s:g} s")
        self.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep what writes."""
        self._transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Lend the shared buffer; it is emptied before any other connection reads."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Stamp a read, then sort its bytes."""
        now_s = self._clock()
        data = self._buffer[:nbytes].tobytes()
        reply = self._reply
        if reply is None or self._done is None or self._done.done():
            self.close()  # bytes nobody asked for
            return
        reply.end_s = now_s
        try:
            self._on_data(reply, data)
        except ValueError as error:
            self.close()
            self._finish(f"the server sent malformed HTTP ({error})")

    def connection_lost(self, exc: Exception | None) -> None:
        """End the exchange: where the body has no length, this is how it ends."""
        self.is_reusable = False
        is_whole = exc is None and self._body is not None and self._body.ends_by_closing
        self._finish(None if is_whole else CLOSED)

    def _on_data(self, reply: Reply, data: bytes) -> None:
        if self._body is None:
            self._head += data
            head, mark, data = self._head.partition(b"\r\n\r\n")
            if not mark:
                return
            self._on_head(reply, head.decode("latin-1"))
            if self._body is None:  # an interim reply, such as 100 Continue
                self._head = b""
                self._on_data(reply, data)
                return
        content = self._body.feed(data)
        if content:
            reply.pieces.append((reply.end_s, content))
        if self._body.is_done:
            self._finish(None)

    def _on_head(self, reply: Reply, head: str) -> None:
        status_line, *lines = head.split("\r\n")
        reply.status = int(status_line.split(" ")[1])
        pairs = (line.partition(":") for line in lines)
        reply.headers = {name.lower(): value.strip() for name, _, value in pairs}
        if reply.status < 200:
            return
        length = reply.headers.get("content-length")
        if "chunked" in reply.headers.get("transfer-encoding", "").lower():
            self._body = ChunkedBody()
        else:
            self._body = SizedBody(None if length is None else int(length))
        if reply.headers.get("connection", "").lower() == "close":
            self.is_reusable = False

    def _finish(self, error: str | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is not None and self._reply is not None:
            self._reply.error = error
            self._reply.end_s = self._clock()
        self._done.set_result(None)


class ConnectionPool:
    """Opens connections to one server and keeps those that may serve again."""

    def __init__(self, base_url: str, clock: Clock) -> None:
        parts = urlsplit(base_url)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname or ""
        self._port = parts.port or (80 if self._tls is None else 443)
        self._clock = clock
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._idle: list[Connection] = []

    async def exchange(self, request: bytes, timeout_s: float) -> Reply:
        """Send a request and return its reply, whole or not."""
        reply = None
        while self._idle and reply is None:
            connection = self._idle.pop()
            if connection.is_reusable:
                reply = await self._run(connection, request, timeout_s)
                if reply.error == CLOSED and reply.status == 0:
                    reply = None  # the server had closed it meanwhile: try another
        if reply is not None:
            return reply
        try:
            connection = await self._open()
        except OSError as error:
            now_s = self._clock()
            return Reply(sent_s=now_s, end_s=now_s, error=f"cannot connect: {error}")
        return await self._run(connection, request, timeout_s)

    def close(self) -> None:
        """Drop all idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _open(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: Connection(self._clock, self._buffer), self._host, self._port, ssl=self._tls
        )
        return connection

    async def _run(self, connection: Connection, request: bytes, timeout_s: float) -> Reply:
        reply, done = connection.start(request)
        # Far cheaper than asyncio.wait, which matters when many requests end at once.
        expiry = asyncio.get_running_loop().call_later(timeout_s, connection.expire, timeout_s)
        try:
            await done
        except asyncio.CancelledError:
            connection.close()
            raise
        finally:
            expiry.cancel()
        if connection.is_reusable and reply.error is None:
            self._idle.append(connection)
        return reply
