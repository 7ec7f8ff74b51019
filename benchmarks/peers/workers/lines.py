"""The line protocol of workers: one JSON request a line on stdin, one JSON answer a line on stdout.

The first line a worker writes says that it is ready, with facts about itself. Whatever libraries
print goes to stderr, and so to the worker's log. A request that fails is answered with its error;
the end of stdin ends the worker.

A generation is answered with its steps, lists of cumulative counts from which the driver computes
rates: [seconds since the start, tokens so far, streams that have a token, streams that are done].
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

Steps = list[tuple[float, int, int, int]]


class StepClock:
    """Counts what each step brought; `max_tokens` is how many end a stream."""

    def __init__(self, num_streams: int, max_tokens: int) -> None:
        self._counts = [0] * num_streams
        self._max_tokens = max_tokens
        self._started_s = time.perf_counter()
        self.steps: Steps = []

    def add(self, stream: int, num_tokens: int) -> None:
        """Count tokens of a stream in the current step."""
        self._counts[stream] += num_tokens

    def tick(self) -> None:
        """End the current step."""
        now_s = time.perf_counter() - self._started_s
        started = sum(count > 0 for count in self._counts)
        done = sum(count >= self._max_tokens for count in self._counts)
        self.steps.append((now_s, sum(self._counts), started, done))


def serve_lines(
    facts: dict[str, Any], answer: Callable[[dict[str, Any]], dict[str, Any]], answers: Any
) -> None:
    """Answer requests until stdin ends."""
    _write(answers, facts)
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except Exception as error:  # noqa: BLE001 - told to the driver, which decides
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        _write(answers, reply)


def claim_stdout() -> Any:
    """Return a stream for answers; from now on everything else printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _write(answers: Any, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()
