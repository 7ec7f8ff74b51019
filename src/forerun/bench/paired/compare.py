"""Ratios between arms, block by block, with their spread and an interval.

For each load and metric: r_b = arm / first arm within block b; the median and range of r_b; and the
95 % t interval of the mean of log r_b, as a ratio. Blocks are independent, requests are not, so
the number of blocks is what the interval rests on.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

CONFIDENCE = 0.95
METRICS = (
    "output_throughput",
    "sd_output_throughput_steady",
    "sd_interactivity_p50",
    "sd_ttft_median_ms",
    "sd_itl_chunk_p99_ms",
    "sd_al_pooled",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedRun:
    """One cell: an arm under a load in a block. With an `error` it supports no comparison."""

    arm: str
    load: str
    block: int
    order: int
    error: str | None = None
    values: dict[str, float] = field(default_factory=dict)
    failed_gates: dict[str, str] = field(default_factory=dict)


def compare_runs(runs: Sequence[PairedRun], arms: Sequence[str]) -> list[dict[str, Any]]:
    """Return one entry per load, metric and arm after the first, where a block has both."""
    return [
        _describe(load, metric, arm, pairs)
        for load in dict.fromkeys(run.load for run in runs)
        for metric in METRICS
        for arm in arms[1:]
        if (pairs := list(_pair(runs, load, metric, (arms[0], arm))))
    ]


def _pair(
    runs: Sequence[PairedRun], load: str, metric: str, arms: tuple[str, str]
) -> Iterator[tuple[float, float]]:
    """Yield (first arm, arm) of every block that measured both."""
    values = {
        (run.block, run.arm): run.values[metric]
        for run in runs
        if run.load == load and run.error is None and run.values.get(metric, 0) > 0
    }
    for block in sorted({block for block, _ in values}):
        if (block, arms[0]) in values and (block, arms[1]) in values:
            yield values[block, arms[0]], values[block, arms[1]]


def _describe(
    load: str, metric: str, arm: str, pairs: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    ratios = [value / baseline for baseline, value in pairs]
    low, high = compute_ratio_interval(ratios)
    return {
        "load": load,
        "metric": metric,
        "arm": arm,
        "baseline_median": statistics.median(baseline for baseline, _ in pairs),
        "arm_median": statistics.median(value for _, value in pairs),
        "ratios": ratios,
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "ratio_low": low,
        "ratio_high": high,
    }


def compute_ratio_interval(ratios: Sequence[float]) -> tuple[float | None, float | None]:
    """Return exp(mean(log r) +- t * sd(log r) / sqrt(n)); unknown below two blocks."""
    n = len(ratios)
    if n < 2:
        return None, None
    from scipy.special import stdtrit

    logs = [math.log(ratio) for ratio in ratios]
    t = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2))
    half = t * statistics.stdev(logs) / math.sqrt(n)
    mean = statistics.fmean(logs)
    return math.exp(mean - half), math.exp(mean + half)
