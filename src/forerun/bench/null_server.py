"""A server that generates nothing, at a fixed pace: what the client itself costs, and its ceiling.

    python -m forerun.bench.null_server --port 8900 --events-per-s 50

All streams emit on the same ticks, as an engine's steps do, or with --spread each at its own time.
Measure it with `forerun bench serve`: `sd_client_cpu_share` and `sd_dispatch_delay_median_ms`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Any

MODEL = "null"


class NullServer:
    """Answers /v1/models and streams completions of `max_tokens` tokens."""

    def __init__(self, events_per_s: float, tokens_per_event: int, *, is_spread: bool) -> None:
        self._period_s = 1 / events_per_s
        self._tokens_per_event = tokens_per_event
        self._is_spread = is_spread

    async def serve(self, port: int) -> None:
        """Listen until cancelled."""
        server = await asyncio.start_server(self._on_connection, "127.0.0.1", port)
        async with server:
            await server.serve_forever()

    async def _on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                path, body = await _read_request(reader)
                if path.endswith("completions"):
                    await self._stream(writer, body)
                else:
                    _write_json(writer, {"data": [{"id": MODEL}]})
                await writer.drain()
        writer.close()

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        if not self._is_spread:
            next_s -= next_s % self._period_s
        total = int(body.get("max_tokens", 16))
        for first in range(0, total, self._tokens_per_event):
            next_s += self._period_s
            await asyncio.sleep(next_s - loop.time())
            count = min(self._tokens_per_event, total - first)
            _write_event(writer, _build_event(count, first + count, total))
        _write_chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


async def _read_request(reader: asyncio.StreamReader) -> tuple[str, dict[str, Any]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    path = head.split(" ")[1]
    names = (line.partition(":") for line in head.split("\r\n")[1:])
    sizes = [int(value) for name, _, value in names if name.lower() == "content-length"]
    content = await reader.readexactly(sizes[0]) if sizes else b"{}"
    body: dict[str, Any] = json.loads(content or b"{}")
    return path, body


def _build_event(num_tokens: int, num_so_far: int, num_total: int) -> dict[str, Any]:
    choice = {
        "index": 0,
        "text": " null" * num_tokens,
        "delta": {"content": " null" * num_tokens},
        "token_ids": [0] * num_tokens,
        "finish_reason": "length" if num_so_far == num_total else None,
    }
    usage = {"prompt_tokens": 1, "completion_tokens": num_so_far}
    return {"id": "null-0", "model": MODEL, "choices": [choice], "usage": usage}


def _write_event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    _write_chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")


def _write_chunk(writer: asyncio.StreamWriter, content: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(content), content))


def _write_json(writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
    content = json.dumps(value).encode()
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content))


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--events-per-s", type=float, default=50.0)
    parser.add_argument("--tokens-per-event", type=int, default=1)
    parser.add_argument("--spread", action="store_true")
    args = parser.parse_args(argv)
    server = NullServer(args.events_per_s, args.tokens_per_event, is_spread=args.spread)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(server.serve(args.port))


if __name__ == "__main__":
    main()
