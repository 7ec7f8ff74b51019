"""From what a peer reports to tokens per second. Pure arithmetic, no peer, no clock.

A step is (seconds since the start, tokens so far, streams that have a token, streams that are
done), all counts cumulative; see `workers/lines.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

Step = Sequence[float]


class RateError(ValueError):
    """What was reported supports no rate; the message says why."""


def compute_decode_rate(steps: Sequence[Step], num_streams: int) -> float:
    """Return tokens / s from the step that gives the last stream its first token to the first end.

    The step in which the first stream ends still serves every stream, so it counts.
    """
    starts = [step for step in steps if step[2] == num_streams]
    ends = [step for step in steps if step[3] > 0]
    if not starts or not ends or ends[0][0] <= starts[0][0]:
        raise RateError(f"there is no time in which all {num_streams} streams decode")
    (start_s, start_tokens), (end_s, end_tokens) = starts[0][:2], ends[0][:2]
    return (end_tokens - start_tokens) / (end_s - start_s)


def compute_prefill_rate(steps: Sequence[Step], num_streams: int, prompt_tokens: int) -> float:
    """Return prompt tokens / s until every stream has its first token."""
    starts = [step for step in steps if step[2] == num_streams]
    if not starts or starts[0][0] <= 0:
        raise RateError(f"not all of {num_streams} streams began")
    return num_streams * prompt_tokens / starts[0][0]


def merge_streams(event_times: Iterable[Sequence[float]], *, start_s: float = 0.0) -> list[Step]:
    """Return the steps of streams that report one token per event."""
    streams = [list(times) for times in event_times]
    firsts = sorted(times[0] for times in streams if times)
    lasts = sorted(times[-1] for times in streams if times)
    moments = sorted(time for times in streams for time in times)
    return [
        (
            moment - start_s,
            count,
            sum(first <= moment for first in firsts),
            sum(last <= moment for last in lasts),
        )
        for count, moment in enumerate(moments, 1)
    ]


def read_batched_bench(output: str) -> tuple[float, float]:
    """Return llama-batched-bench's own (prefill, decode) tokens / s of its one JSON line."""
    for line in output.splitlines():
        if line.startswith("{"):
            result: dict[str, Any] = json.loads(line)
            return float(result["speed_pp"]), float(result["speed_tg"])
    raise RateError("llama-batched-bench printed no result")
