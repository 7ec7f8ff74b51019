"""A peer as a long-lived worker that answers JSON lines; see workers/lines.py for the protocol."""

from __future__ import annotations

import json
import select
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.adapters.base import Measurement, Work
from benchmarks.peers.adapters.group import Group, PeerError
from benchmarks.peers.rates import RateError, compute_decode_rate, compute_prefill_rate

_ROOT = Path(__file__).parents[3]
_READY_TIMEOUT_S = 900.0
_ANSWER_TIMEOUT_S = 1800.0
_WARM_UP_TOKENS = 4


class WorkerAdapter:
    """Drives `python -m MODULE ARGUMENTS`; raises PeerError if it does not get ready."""

    def __init__(
        self,
        python: Path | str,
        module: str,
        arguments: Sequence[object],
        *,
        log_path: Path,
        environment: Mapping[str, str],
    ) -> None:
        self._group = Group(
            [str(python), "-m", f"benchmarks.peers.workers.{module}", *map(str, arguments)],
            log_path=log_path,
            environment=environment,
            cwd=_ROOT,
            is_piped=True,
        )
        try:
            self.facts: dict[str, Any] = self._read(_READY_TIMEOUT_S)
        except BaseException:
            self.stop()
            raise
        self._group.pause()

    def measure(self, work: Work) -> Measurement:
        """Warm up with a few tokens of one prompt, then measure."""
        self._group.resume()
        try:
            warm_up = work.prompts[0][: work.row.prompt_tokens]
            self._ask({"prompts": [warm_up], "max_tokens": _WARM_UP_TOKENS})
            return self._measure_batches(work) if work.row.is_served else self._measure_steps(work)
        except RateError as error:
            raise PeerError(str(error)) from error
        finally:
            self._group.pause()

    def stop(self) -> None:
        """End the worker and what it started."""
        self._group.stop()

    def _measure_steps(self, work: Work) -> Measurement:
        row = work.row
        steps = self._ask({"prompts": work.prompts, "max_tokens": row.max_tokens})["steps"]
        if row.kind == "prefill":
            return Measurement(compute_prefill_rate(steps, row.num_streams, row.prompt_tokens))
        return Measurement(compute_decode_rate(steps, row.num_streams))

    def _measure_batches(self, work: Work) -> Measurement:
        reply = self._ask(
            {
                "prompts": work.prompts,
                "max_tokens": work.row.max_tokens,
                "num_streams": work.row.num_streams,
            }
        )
        return Measurement(reply["num_tokens"] / reply["elapsed_s"], reply["num_tokens"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        stdin = self._group.process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError as error:
            raise self._group.explain("the worker is gone") from error
        reply = self._read(_ANSWER_TIMEOUT_S)
        if "error" in reply:
            raise PeerError(reply["error"])
        return reply

    def _read(self, timeout_s: float) -> dict[str, Any]:
        """Return the next line; answers are whole lines, one at a time."""
        stdout = self._group.process.stdout
        assert stdout is not None
        ready, _, _ = select.select([stdout], [], [], timeout_s)
        if not ready:
            raise self._group.explain(f"no answer after {timeout_s:g} s")
        line = stdout.readline()
        if not line:
            raise self._group.explain("the worker gave no answer")
        value: dict[str, Any] = json.loads(line)
        return value
