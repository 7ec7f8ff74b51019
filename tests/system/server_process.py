"""The real server as a subprocess: start it, read what it says, signal it, see it gone.

Everything waits with a bound and fails with the server's own log. `wait_until` asks again and again
because another process's state can only be asked for.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import httpx

START_TIMEOUT_S = 120.0
TIMEOUT_S = 240.0
_PAUSE_S = 0.05
_URL = re.compile(r"ready in .* at (http://\S+)")
_METRIC = re.compile(
    r"^(\w+:\w+)\{(?:finished_reason=\"(\w+)\",)?model_name=\"[^\"]*\"\} (\S+)$", re.MULTILINE
)
_GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
)
_CACHE_IS_WHOLE = "idle: the cache is whole"


def build_environment(**extra: str) -> dict[str, str]:
    """Return this process's environment with one thread per process and `extra`."""
    return os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | extra


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Return once the condition holds; fail with `what` when it takes too long."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"gave up waiting: {what}"
        time.sleep(_PAUSE_S)


class ServerProcess:
    """`python -m forerun serve` on a free port. A context manager that leaves nothing running."""

    def __init__(self, *options: str) -> None:
        self._command = [sys.executable, "-m", "forerun", "serve", "--port", "0", *options]
        self._lines: list[str] = []

    def __enter__(self) -> ServerProcess:
        env = build_environment(FORERUN_LOG_LEVEL="DEBUG")
        self._process = subprocess.Popen(
            self._command, env=env, stderr=subprocess.PIPE, text=True, encoding="utf-8"
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self._wait_ready()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self._end()

    @property
    def log(self) -> str:
        """What the server wrote to stderr so far."""
        return "".join(self._lines)

    @property
    def has_engine(self) -> bool:
        """Whether the engine process exists."""
        try:
            os.kill(self.engine_pid, 0)
        except ProcessLookupError:
            return False
        return True

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Return the exit code once the server has ended."""
        return self._process.wait(TIMEOUT_S)

    def metrics(self) -> dict[str, float]:
        """Return every metric by name; samples that differ in `finished_reason` by both."""
        text = self.http.get("/metrics").text
        return {
            name + (f"/{reason}" if reason else ""): float(value)
            for name, reason, value in _METRIC.findall(text)
        }

    def wait_idle(self) -> None:
        """Wait until nothing runs, waits or holds blocks, and the engine found its cache whole."""
        wait_until(self._is_idle, "the gauges to return to zero")
        num_checks = self.log.count(_CACHE_IS_WHOLE)
        # The engine checks once per idle time, so end the one it is in.
        body = {"prompt": "a", "max_tokens": 1}
        self.http.post("/v1/completions", json=body).raise_for_status()
        wait_until(lambda: self._has_checked_or_died(num_checks), "the engine to check its cache")
        assert self.http.get("/health").status_code == 200, self.log
        assert self._is_idle()

    def _wait_ready(self) -> None:
        wait_until(self._has_started, "the server to listen", START_TIMEOUT_S)
        found = _URL.search(self.log)
        assert found is not None, f"the server did not start:\n{self.log}"
        self.url = found.group(1)
        self.http = httpx.Client(base_url=self.url, timeout=TIMEOUT_S)
        assert self.http.get("/ready").json() == {"status": "ready"}
        self.engine_pid: int = self.http.get("/server_info").json()["engine_pid"]

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join()

    def _is_idle(self) -> bool:
        assert self.has_engine, self.log
        values = self.metrics()
        return all(values[name] == 0 for name in _GAUGES)

    def _has_checked_or_died(self, num_checks: int) -> bool:
        return self.log.count(_CACHE_IS_WHOLE) > num_checks or not self.has_engine

    def _has_started(self) -> bool:
        return _URL.search(self.log) is not None or self._process.poll() is not None

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            self._lines.extend(stream)
