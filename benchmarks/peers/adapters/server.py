"""A peer as an OpenAI-compatible server, measured by Forerun's own client.

`KeptServer` starts once and is paused between its turns (vLLM needs minutes to start);
`FreshServer` starts for each measurement, with flags that fit its number of streams (llama-server
divides its memory by a fixed number of places).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.peers.adapters.base import Measurement, Work
from benchmarks.peers.adapters.group import Group, PeerError

from forerun.bench.paired.server import find_free_port, is_ready
from forerun.bench.results.checks import OK
from forerun.bench.run import Outcome, Watcher, measure
from forerun.errors import ConfigError

_READY_TIMEOUT_S = 900.0
_POLL_S = 0.2

Command = Sequence[str | Path]


class RunningServer:
    """A server on a free port, awaited; raises PeerError if it does not get ready."""

    def __init__(
        self,
        build_command: Callable[[int], Command],
        *,
        log_path: Path,
        environment: Mapping[str, str],
    ) -> None:
        port = find_free_port()
        self.base_url = f"http://127.0.0.1:{port}"
        self.group = Group(build_command(port), log_path=log_path, environment=environment)
        try:
            self._wait_ready()
        except BaseException:
            self.group.stop()
            raise

    def _wait_ready(self) -> None:
        deadline_s = time.monotonic() + _READY_TIMEOUT_S
        while not is_ready(self.base_url):
            if self.group.process.poll() is not None:
                raise self.group.explain("the server did not start")
            if time.monotonic() > deadline_s:
                raise self.group.explain(f"the server was not ready after {_READY_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)


class KeptServer:
    """One server for all measurements."""

    def __init__(
        self,
        build_command: Callable[[int], Command],
        *,
        log_path: Path,
        environment: Mapping[str, str],
        facts: dict[str, Any],
    ) -> None:
        self.facts = facts
        self._server = RunningServer(build_command, log_path=log_path, environment=environment)
        self._server.group.pause()

    def measure(self, work: Work) -> Measurement:
        """Send the prompts and read the throughput."""
        self._server.group.resume()
        try:
            return read_throughput(run_client(self._server.base_url, work))
        finally:
            self._server.group.pause()

    def stop(self) -> None:
        """End the server."""
        self._server.group.stop()


class FreshServer:
    """A server per measurement; `build_command` gets the port and the work."""

    def __init__(
        self,
        build_command: Callable[[int, Work], Command],
        *,
        log_path: Path,
        environment: Mapping[str, str],
        facts: dict[str, Any],
    ) -> None:
        self.facts = facts
        self._build_command = build_command
        self._log_path = log_path
        self._environment = environment

    def measure(self, work: Work) -> Measurement:
        """Start, send the prompts, stop, and read the throughput."""
        return read_throughput(self.run(work))

    def run(self, work: Work) -> Outcome:
        """Start, send the prompts, stop, and return what the client saw."""
        server = RunningServer(
            lambda port: self._build_command(port, work),
            log_path=self._log_path,
            environment=self._environment,
        )
        try:
            return run_client(server.base_url, work)
        finally:
            server.group.stop()

    def stop(self) -> None:
        """Nothing runs between measurements."""


def run_client(base_url: str, work: Work) -> Outcome:
    """Send the work to a server; raises PeerError unless every request ended well."""
    watcher = Watcher(note=_ignore, on_finished=lambda _done, _total: None)
    try:
        outcome = measure(replace(work.bench, base_url=base_url), watcher)
    except ConfigError as error:
        raise PeerError(str(error)) from error
    if outcome.is_interrupted:
        raise KeyboardInterrupt
    verdict = outcome.result["sd_gates"]["all_completed"]
    if verdict != OK:
        raise PeerError(verdict)
    return outcome


def read_throughput(outcome: Outcome) -> Measurement:
    """Return output tokens per second over the whole run; raises PeerError if not known."""
    rate = outcome.result["output_throughput"]
    if rate is None:
        raise PeerError("the server does not say how many tokens its answers have")
    return Measurement(rate, outcome.result["total_output_tokens"])


def _ignore(_text: str) -> None:
    """Take notes nobody wants: the bar says whose turn it is."""
