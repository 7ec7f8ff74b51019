"""How the API process reaches its engine: the contract, and the spawned process behind a pipe.

No torch in the parent: the child imports it. Tests put a scripted engine behind the same contract.
"""

from __future__ import annotations

import atexit
import multiprocessing
import signal
import threading
from multiprocessing.connection import Connection, wait
from typing import Protocol

from forerun.config import EngineConfig
from forerun.engine.messages import (
    ClientMessage,
    FailedMessage,
    LoadingMessage,
    ReadyMessage,
    StepMessage,
)

EngineMessage = LoadingMessage | ReadyMessage | FailedMessage | StepMessage

EXIT_GRACE_S = 5.0


class Transport(Protocol):
    """A started engine and the two ways to it. `send` and `receive` run on different threads."""

    def send(self, message: ClientMessage) -> None:
        """Deliver a message; raises OSError once the engine is gone."""
        ...

    def receive(self) -> EngineMessage:
        """Block for the next message; raises EOFError once the engine is gone."""
        ...

    def describe_exit(self) -> str:
        """Say in a few words how the engine ended."""
        ...

    def close(self, timeout_s: float) -> None:
        """Wait that long for the engine to end by itself, then end it."""
        ...


def run_engine_process(connection: Connection, config: EngineConfig) -> None:
    """Be the engine process, deaf to SIGTERM: only the API process decides when it ends.

    A service manager signals every process of the service; the engine must outlive that to finish
    what is running. It ends on a shutdown message or when the pipe closes.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    from forerun.transport.process import run_engine

    run_engine(connection, config)


class ProcessTransport:
    """The engine in a spawned daemon process behind a duplex pipe."""

    def __init__(self, config: EngineConfig) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, child = context.Pipe(duplex=True)
        self._process = context.Process(
            target=run_engine_process, args=(child, config), name="forerun-engine", daemon=True
        )
        self._process.start()
        child.close()  # or the end of the engine would not end our reads
        self._reaping = threading.Lock()
        atexit.register(self._process.kill)

    def send(self, message: ClientMessage) -> None:
        """Pickle and send."""
        self._connection.send(message)

    def receive(self) -> EngineMessage:
        """Block for the next message; raises EOFError once the process is gone."""
        try:
            message: EngineMessage = self._connection.recv()
        except OSError as error:
            raise EOFError from error
        return message

    def describe_exit(self) -> str:
        """Name the exit code or the signal."""
        code = self._reap(EXIT_GRACE_S)
        if code is None:
            return "the engine process closed its pipe"
        if code < 0:
            return f"the engine process was killed by {signal.Signals(-code).name}"
        return f"the engine process exited with code {code}"

    def close(self, timeout_s: float) -> None:
        """Join the process for at most `timeout_s`, then kill it."""
        if self._reap(timeout_s) is None:
            self._process.kill()
            self._reap(None)
        atexit.unregister(self._process.kill)

    def _reap(self, timeout_s: float | None) -> int | None:
        """Wait for the process to end and return its exit code; None if it still runs then.

        Two threads end an engine, the reader and `close`; of two that reap at once, one would be
        told that there is no such child and take it for one that still runs.
        """
        if not wait([self._process.sentinel], timeout_s):
            return None
        with self._reaping:
            self._process.join()
            return self._process.exitcode
