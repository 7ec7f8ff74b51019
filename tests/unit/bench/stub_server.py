"""A real HTTP server in a thread, as well-behaved or fussy as a test wants it."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from unit.bench.scripted_server import make_event


class StubServer:
    """A context manager; `bodies` are the JSON bodies of the completions it was asked for."""

    def __init__(
        self,
        *,
        models: list[str] | None = None,
        models_status: int = 200,
        refused_fields: tuple[str, ...] = (),
        fails_after: int | None = None,
        can_reset: bool = False,
        server_info: bytes | None = None,
    ) -> None:
        self.models = ["m"] if models is None else models
        self.models_status = models_status
        self.refused_fields = refused_fields
        self.fails_after = fails_after
        self.can_reset = can_reset
        self.server_info = server_info
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []

    def __enter__(self) -> StubServer:
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._make_handler())
        self.base_url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """Return status and content of a POST."""
        if path == "/reset_prefix_cache":
            return (200 if self.can_reset else 404), b"{}"
        self.bodies.append(body)
        given = set(body) | set(body.get("stream_options", {}))
        unknown = given.intersection(self.refused_fields)
        if unknown:
            return 400, json.dumps({"error": {"message": f"unknown {min(unknown)}"}}).encode()
        if self.fails_after is not None and len(self.bodies) > self.fails_after:
            return 500, b"out of order"
        usage = {"prompt_tokens": 3, "completion_tokens": 2}
        return 200, make_event(2, finish_reason="stop", usage=usage) + b"data: [DONE]\n\n"

    def _make_handler(stub) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if self.path == "/server_info":
                    info = stub.server_info
                    self._reply(404 if info is None else 200, info or b"{}")
                    return
                listing = {"data": [{"id": name} for name in stub.models]}
                self._reply(stub.models_status, json.dumps(listing).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
                stub.paths.append(self.path)
                stub.headers.append(dict(self.headers))
                self._reply(*stub.answer(self.path, body))

            def _reply(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                """Stay quiet."""

        return Handler
