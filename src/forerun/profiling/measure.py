"""Measures a CostProfile through the Runner seam, before any request exists.

Every term is what two kinds of steps differ in: rows; the same rows by more requests; the same
requests with longer contexts; sampled instead of greedy. Everything touched is released afterwards
and no random stream moves, so output does not depend on whether a profile was taken.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from forerun.budget.costs.profile import CostProfile
from forerun.core import SamplingParams
from forerun.logs import get_logger
from forerun.plan import Runner, StepPlan
from forerun.profiling.shapes import (
    GREEDY,
    LONG_CONTEXT,
    ProfileLimits,
    Shape,
    build_draft_requests,
    build_requests,
    cut_sizes,
    grow,
    list_powers,
    list_row_counts,
    shape_step,
)

logger = get_logger(__name__)

Progress = Callable[[int, int], None]

BUDGET_S = 15.0
# Sources of a profile; one that was disturbed is not worth keeping.
MEASURED = "measured"
MEASURED_BUSY = "measured while the machine was busy"
_REQUEST_COUNTS = (4, 16, 64)
_SAMPLED_ROWS = (16, 64)
# What verification may take of the budget, so that the other terms get a turn.
_VERIFY_SHARE = 0.6
_FEWEST_SIZES = 2
# How much longer a step may take at another time, and how often a core may be taken away: alone on
# a machine it is some 30 times a second, next to a process that computes 160 to 6,000 times.
_STEADY = 1.5
_MOST_LOST_PER_S = 100

_SAMPLED = SamplingParams(temperature=1.0, max_tokens=None)
_FILTERED = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, max_tokens=None)


def count_lost_cores() -> int:
    """Return how often the system took a core away from a thread of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def measure_profile(
    runner: Runner,
    *,
    limits: ProfileLimits,
    key: Mapping[str, str],
    progress: Progress | None = None,
    budget_s: float = BUDGET_S,
    now_s: Callable[[], float] = time.perf_counter,
    count_lost: Callable[[], int] = count_lost_cores,
) -> CostProfile:
    """Time steps and drafting; past `budget_s`, with fewer repeats and sizes.

    `count_lost` says how often a core was taken away from this process so far.
    """
    stopwatch = _Stopwatch(
        runner, limits, budget_s=budget_s, now_s=now_s, progress=progress, count_lost=count_lost
    )
    verify = stopwatch.measure_verify()
    request_ms, kv_token_ms, row_token_ms = stopwatch.measure_requests()
    sampled_row_ms, filtered_row_ms = (
        stopwatch.measure_sampling(params) for params in (_SAMPLED, _FILTERED)
    )
    draft = stopwatch.measure_drafting()
    is_steady = stopwatch.check_steady(*verify[0])
    shapes, times = zip(*verify, strict=True)
    other = [
        request_ms * len(shape.rows) + kv_token_ms * shape.num_context_tokens for shape in shapes
    ]
    return CostProfile(
        verify_rows=np.array([sum(shape.rows) for shape in shapes]),
        verify_ms=np.maximum(np.subtract(times, other), 0.0),
        request_ms=request_ms,
        kv_token_ms=kv_token_ms,
        row_token_ms=row_token_ms,
        context_tokens=limits.short_context,
        sampled_row_ms=sampled_row_ms,
        filtered_row_ms=filtered_row_ms,
        draft_requests=np.array([n for n, _, _ in draft], dtype=np.int64),
        draft_first_ms=np.array([first for _, first, _ in draft]),
        draft_next_ms=np.array([further for _, _, further in draft]),
        key=key,
        source=MEASURED if is_steady else MEASURED_BUSY,
    )


def count_replays(num_rows: int) -> int:
    """Return of how many replays the median is taken."""
    return 5 if num_rows <= 128 else 3 if num_rows <= 512 else 1


class _Stopwatch:
    """Runs shapes, keeps to the budget and counts measurements for the progress bar."""

    def __init__(
        self,
        runner: Runner,
        limits: ProfileLimits,
        *,
        budget_s: float,
        now_s: Callable[[], float],
        progress: Progress | None,
        count_lost: Callable[[], int],
    ) -> None:
        self._runner = runner
        self._limits = limits
        self._now_s = now_s
        self._progress = progress
        self._budget_s = budget_s
        self._started_s = now_s()
        self._count_lost = count_lost
        self._num_lost = count_lost()
        self._num_steps = 0
        self._num_done = 0
        self._row_counts = list_row_counts(limits.max_rows)
        most = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        self._request_counts = cut_sizes(_REQUEST_COUNTS, most)
        self._draft_counts = [] if limits.max_draft_tokens == 0 else list_powers(most)
        pairs = 2 * len(self._request_counts) + 2 * len(cut_sizes(_SAMPLED_ROWS, limits.max_rows))
        self._num_points = 1 + len(self._row_counts) + 2 * (pairs + len(self._draft_counts))

    def measure_verify(self) -> list[tuple[Shape, float]]:
        """Time one step of each size, smallest first."""
        points: list[tuple[Shape, float]] = []
        for size in self._row_counts:
            if self._is_late(_VERIFY_SHARE) and len(points) >= _FEWEST_SIZES:
                break
            shape = shape_step(size, self._limits)
            points.append((shape, self._time_step(shape, share=_VERIFY_SHARE)))
        return points

    def measure_requests(self) -> tuple[float, float, float]:
        """Return ms per request, per cached token, and per later row and cached token.

        Times the same rows as few and as many requests, each with short and with long contexts.
        """
        limits = self._limits
        long = min(LONG_CONTEXT, limits.max_model_len - limits.rows_each)
        # Fewer if the pool is small: blocks that two requests read would come from the CPU's cache.
        most = max(1, limits.num_kv_blocks * limits.kv_block_size // (long + limits.kv_block_size))
        contexts, requests, rows = [], [], []
        for num_rows in self._take(cut_sizes(self._request_counts, most)):
            few = shape_step(num_rows, limits)
            many = Shape((1,) * num_rows, few.context)
            added, further = num_rows - len(few.rows), long - few.context
            few_ms, many_ms, few_long_ms, many_long_ms = map(
                self._time_step,
                (few, many, replace(few, context=long), replace(many, context=long)),
            )
            contexts.append((num_rows * further, many_long_ms - many_ms))
            requests.append((added, many_ms - few_ms, added * few.context))
            rows.append((added * further, few_long_ms - few_ms, len(few.rows) * further))
        kv_token_ms = _fit_slope(contexts)
        request_ms = _fit_slope([(n, ms - kv_token_ms * tokens) for n, ms, tokens in requests])
        row_token_ms = _fit_slope([(n, ms - kv_token_ms * tokens) for n, ms, tokens in rows])
        return request_ms, kv_token_ms, row_token_ms

    def measure_sampling(self, params: SamplingParams) -> float:
        """Return ms per row that these parameters cost beyond greedy."""
        points = []
        for num_rows in self._take(cut_sizes(_SAMPLED_ROWS, self._limits.max_rows)):
            shape = shape_step(num_rows, self._limits)
            greedy_ms = self._time_step(shape)
            points.append((num_rows, self._time_step(shape, params) - greedy_ms))
        return _fit_slope(points)

    def measure_drafting(self) -> list[tuple[int, float, float]]:
        """Return (requests, ms of the first draft token, ms of each further one)."""
        depth = self._limits.max_draft_tokens
        points: list[tuple[int, float, float]] = []
        for num_requests in self._draft_counts:
            if self._is_late() and len(points) >= _FEWEST_SIZES:
                break
            first = self._time_drafting(num_requests, 1)
            deepest = self._time_drafting(num_requests, depth) if depth > 1 else first
            points.append((num_requests, first, max(0.0, deepest - first) / max(1, depth - 1)))
        return points

    def check_steady(self, shape: Shape, ms: float) -> bool:
        """Return whether nothing else seems to have kept the processor; warn if something did.

        The first step timed must still take as long, and this process must not have lost its cores
        all the time to others.
        """
        again_ms = self._time_step(shape)
        if self._progress is not None:
            self._progress(self._num_points, self._num_points)
        num_lost = self._count_lost() - self._num_lost
        is_crowded = num_lost > _MOST_LOST_PER_S * (self._now_s() - self._started_s)
        if max(ms, again_ms) <= _STEADY * min(ms, again_ms) and not is_crowded:
            return True
        logger.warning(
            "the machine was busy with something else while steps were timed: one of %d rows took "
            "%.2f ms at first and %.2f ms at the end, and a core was taken away %d times",
            sum(shape.rows),
            ms,
            again_ms,
            num_lost,
        )
        return False

    def _is_late(self, share: float = 1.0) -> bool:
        return self._now_s() - self._started_s >= share * self._budget_s

    def _take(self, sizes: Sequence[int]) -> Iterable[int]:
        """Yield sizes while there is time, at least the first."""
        for index, size in enumerate(sizes):
            if index and self._is_late():
                return
            yield size

    def _time_step(
        self, shape: Shape, params: SamplingParams = GREEDY, *, share: float = 1.0
    ) -> float:
        requests = build_requests(shape, self._limits, params)

        def run() -> None:
            self._num_steps += 1
            for request in requests:
                request.num_draws = self._num_steps
            self._runner.execute(StepPlan(step=self._num_steps, requests=requests))

        ids = [request.request_id for request in requests]
        return self._time(run, ids, count_replays(sum(shape.rows)), share)

    def _time_drafting(self, num_requests: int, depth: int) -> float:
        requests = build_draft_requests(num_requests, depth, self._limits)

        def run() -> None:
            self._num_steps += 1
            for request in requests:
                request.num_draws = self._num_steps
                grow(request)
            self._runner.draft(requests)

        ids = [request.request_id for request in requests]
        return self._time(run, ids, count_replays(num_requests), 1.0)

    def _time(
        self, run: Callable[[], None], ids: Sequence[str], num_replays: int, share: float
    ) -> float:
        """Return the median ms of a run, the first one dropped unless time is up."""
        try:
            times = [self._time_once(run)]
            while len(times) <= num_replays and not self._is_late(share):
                times.append(self._time_once(run))
        finally:
            self._runner.release(ids)
        self._num_done += 1
        if self._progress is not None:
            self._progress(min(self._num_done, self._num_points), self._num_points)
        return statistics.median(times[1:] or times)

    def _time_once(self, run: Callable[[], None]) -> float:
        started_s = self._now_s()
        run()
        return 1000.0 * (self._now_s() - started_s)


def _fit_slope(points: Sequence[tuple[int, float]]) -> float:
    """Return the slope through the origin of (size, ms), at least 0; 0 if no size varies."""
    weight = sum(size * size for size, _ in points)
    return max(0.0, sum(size * ms for size, ms in points) / weight) if weight else 0.0
