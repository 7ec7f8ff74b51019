"""A server of an arm as a process group: started on a free port, awaited, ended with all it made.

The command is split like a shell would but not run by one. The server leads a session of its own,
so that ending it ends its engine processes too, even those that outlived it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType

import httpx

from forerun.errors import ConfigError

_POLL_S = 0.1
_STOP_TIMEOUT_S = 30.0
_REQUEST_TIMEOUT_S = 5.0


class Server:
    """A context manager around one server process; raises ConfigError if it does not get ready."""

    def __init__(self, command: str, log_path: Path, ready_timeout_s: float) -> None:
        self._command = command
        self._log_path = log_path
        self._ready_timeout_s = ready_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self.base_url = ""

    def __enter__(self) -> Server:
        port = find_free_port()
        self.base_url = f"http://127.0.0.1:{port}"
        arguments = shlex.split(self._command.replace("{port}", str(port)))
        with self._log_path.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                reason = error.strerror or error
                raise ConfigError(f"cannot start {arguments[0]!r}: {reason}.") from error
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def exit_code(self) -> int | None:
        """How the process ended, or None while it runs."""
        return None if self._process is None else self._process.poll()

    def stop(self) -> None:
        """Ask the whole group to end, then make it."""
        process = self._process
        if process is None:
            return
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT_S)
        # Also after a clean end: children that outlived their leader are still in its group.
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()

    def _wait_ready(self) -> None:
        deadline_s = time.monotonic() + self._ready_timeout_s
        while not is_ready(self.base_url):
            if self.exit_code is not None:
                raise ConfigError(
                    f"the server ended with code {self.exit_code} before it was ready "
                    f"({self._read_last_line()}); its log is {self._log_path}."
                )
            if time.monotonic() > deadline_s:
                raise ConfigError(
                    f"the server was not ready after {self._ready_timeout_s:g} s; its log is "
                    f"{self._log_path}, and --server-ready-timeout allows more."
                )
            time.sleep(_POLL_S)

    def _read_last_line(self) -> str:
        lines = self._log_path.read_text("utf-8", "replace").strip().splitlines()
        return lines[-1][-200:] if lines else "it wrote nothing"


def find_free_port() -> int:
    """Return a port nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def is_ready(base_url: str) -> bool:
    """Whether a server lists its models and, where it reports its health, calls itself well."""
    try:
        models = httpx.get(f"{base_url}/v1/models", timeout=_REQUEST_TIMEOUT_S)
        health = httpx.get(f"{base_url}/health", timeout=_REQUEST_TIMEOUT_S)
    except httpx.HTTPError:
        return False
    # A server that wants a key answers 401; that is ready enough.
    return models.status_code in (200, 401) and health.status_code < 500


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
