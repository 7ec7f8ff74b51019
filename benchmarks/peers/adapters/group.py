"""A program with everything it starts: one process group that can be paused and is always ended.

A peer whose turn it is not is stopped by SIGSTOP, so that idle spinning (vLLM's workers poll) and
background threads take nothing from the others' two cores; SIGCONT wakes it for its turn. Each
group is a session of its own: Ctrl-C reaches the driver alone, which then ends the groups.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_STOP_TIMEOUT_S = 10.0
_SHOWN_CHARS = 300


class PeerError(Exception):
    """A peer cannot be measured; the message is the reason in the table."""


class Group:
    """A running program. Output that is not read from a pipe goes to `log_path`."""

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        log_path: Path,
        environment: Mapping[str, str],
        cwd: Path | None = None,
        is_piped: bool = False,
    ) -> None:
        self.log_path = log_path
        pipe = subprocess.PIPE
        with log_path.open("wb") as log:
            try:
                self.process = subprocess.Popen(
                    [str(part) for part in command],
                    stdin=pipe if is_piped else subprocess.DEVNULL,
                    stdout=pipe if is_piped else log,
                    stderr=log,
                    env={**os.environ, **environment},
                    cwd=cwd,
                    start_new_session=True,
                )
            except OSError as error:
                raise PeerError(f"cannot start {command[0]}: {error.strerror or error}") from error

    def pause(self) -> None:
        """Take the whole group off the processors."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the group run again."""
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """Ask the whole group to end, then make it."""
        self._signal(signal.SIGTERM)
        # A paused process takes the request only once it runs.
        self._signal(signal.SIGCONT)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_STOP_TIMEOUT_S)
        finally:
            # Also after a clean end: children that outlived their leader are still in its group.
            self._signal(signal.SIGKILL)
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def explain(self, what: str) -> PeerError:
        """Return the error that says `what`, how the program stands and what it wrote last."""
        code = self.process.poll()
        state = "it still runs" if code is None else f"it ended with code {code}"
        return PeerError(f"{what} ({state}; {read_last_line(self.log_path)}); log: {self.log_path}")

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def read_last_line(path: Path) -> str:
    """Return the last line of a log that names an error, or its last line at all."""
    lines = [line.strip() for line in path.read_text("utf-8", "replace").splitlines()]
    lines = [line for line in lines if line]
    errors = [line for line in lines if "Error" in line or "error:" in line or "ERROR:" in line]
    return (errors or lines or ["it wrote nothing"])[-1][-_SHOWN_CHARS:]
