"""A server that does exactly what a script says, on a clock that only the script moves.

Server and client share one event loop. Before each step the server waits until the client has sent
every request it can, then sets the clock, writes, and waits until the client has read. So every
stamp the client takes is a time out of the script, and nothing sleeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from forerun.bench.client.endpoint import Endpoint
from forerun.bench.client.load import Load, LoadGenerator
from forerun.bench.records import RequestRecord
from forerun.bench.workload import Row

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def make_event(tokens: int | None = None, **fields: Any) -> bytes:
    """Return an event of a text completion; with `tokens`, one that carries their ids."""
    choice: dict[str, Any] = {"index": 0, "text": "x" * (tokens or 1), "finish_reason": None}
    if tokens is not None:
        choice["token_ids"] = list(range(tokens))
    choice |= {key: fields.pop(key) for key in ("finish_reason", "text") if key in fields}
    return as_event({"choices": [choice], **fields})


def as_event(value: Any) -> bytes:
    """Return any value as a server-sent event."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def as_chunk(content: bytes) -> bytes:
    """Return content as one chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(content), content)


@dataclass
class Script:
    """What one request gets: (seconds after its arrival, bytes). Empty bytes hang up."""

    steps: list[tuple[float, bytes]] = field(default_factory=list)

    @classmethod
    def of_events(cls, *steps: tuple[float, bytes], ends: bool = True) -> Script:
        """Return a well-formed stream; the last step also ends it unless told otherwise."""
        written = [(delay_s, as_chunk(events)) for delay_s, events in steps]
        written[0] = (written[0][0], HEAD + written[0][1])
        if ends:
            written[-1] = (written[-1][0], written[-1][1] + as_chunk(b"data: [DONE]\n\n") + END)
        return cls(written)


class VirtualClock:
    """A clock that stands still until it is set, and tells how often it was read."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_reads = 0
        self._was_read = asyncio.Event()

    def __call__(self) -> float:
        self.num_reads += 1
        self._was_read.set()
        return self.now_s

    async def wait_read_after(self, count: int) -> None:
        while self.num_reads <= count:
            self._was_read.clear()
            await self._was_read.wait()

    async def sleep(self, delay_s: float) -> None:
        """Pass time at once."""
        self.now_s += delay_s
        await asyncio.sleep(0)


class ScriptedServer:
    """Plays one script per request, in order of arrival."""

    def __init__(self, scripts: Iterable[Script], clock: VirtualClock, concurrency: int) -> None:
        self._scripts = list(scripts)
        self._clock = clock
        self._concurrency = concurrency
        self._num_arrived = 0
        self._num_finished = 0
        self._arrived = asyncio.Event()
        self._timeline: list[tuple[float, int, bytes, bool, asyncio.StreamWriter]] = []
        self.bodies: list[dict[str, Any]] = []

    async def start(self) -> tuple[asyncio.Server, str]:
        server = await asyncio.start_server(self._on_connection, "127.0.0.1", 0)
        return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def play(self) -> None:
        """Run the timeline to its end."""
        while self._num_finished < len(self._scripts):
            await self._wait_arrivals()
            time_s, _, content, is_last, writer = heapq.heappop(self._timeline)
            self._clock.now_s = time_s
            count = self._clock.num_reads
            if content:
                writer.write(content)
            else:
                writer.transport.abort()
            await self._clock.wait_read_after(count)
            self._num_finished += is_last

    async def _wait_arrivals(self) -> None:
        expected = min(len(self._scripts), self._num_finished + self._concurrency)
        while self._num_arrived < expected:
            self._arrived.clear()
            await self._arrived.wait()

    async def _on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().partition(b"content-length:")[2].split()[0])
                self.bodies.append(json.loads(await reader.readexactly(size)))
                self._schedule(writer)
        writer.close()

    def _schedule(self, writer: asyncio.StreamWriter) -> None:
        steps = self._scripts[self._num_arrived].steps
        for index, (delay_s, content) in enumerate(steps):
            order = 1000 * self._num_arrived + index
            is_last = index == len(steps) - 1
            time_s = self._clock.now_s + delay_s
            heapq.heappush(self._timeline, (time_s, order, content, is_last, writer))
        self._num_arrived += 1
        self._arrived.set()


def make_rows(count: int, max_tokens: int = 8) -> list[Row]:
    """Return rows r0, r1, ..."""
    return [
        Row(row_id=f"r{index}", category="all", prompt=f"prompt {index}", max_tokens=max_tokens)
        for index in range(count)
    ]


def make_endpoint(base_url: str = "http://server") -> Endpoint:
    """Return an endpoint that asks for nothing special."""
    return Endpoint(base_url=base_url, backend="openai", model="m", headers={}, fields={})


def play_scripts(
    scripts: list[Script], concurrency: int, arrivals_s: list[float] | None = None
) -> list[RequestRecord]:
    """Run a load against scripts and return the records in order of their rows."""

    async def play() -> list[RequestRecord]:
        clock = VirtualClock()
        server = ScriptedServer(scripts, clock, concurrency)
        listener, base_url = await server.start()
        records: list[RequestRecord] = []
        load = Load(max_concurrency=concurrency, arrivals_s=arrivals_s)
        generator = LoadGenerator(
            make_endpoint(base_url), load, records.append, clock=clock, sleep=clock.sleep
        )
        async with listener:
            await asyncio.gather(server.play(), generator.run(make_rows(len(scripts))))
        return sorted(records, key=lambda record: record.request_id)

    return asyncio.run(play())
