"""Timed steps of given shapes (vLLM's `bench forward`) to a CostProfile.

A case such as `verify=16*4@4096:3` is one time for 16 requests of 4 rows each at context 4096,
followed by 3 draft tokens. Whatever two cases differ in alone prices that difference; a term that
no two cases tell apart is 0 and stays part of the verification it was timed with. Cases
that are no verification are refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from forerun.budget.costs.profile import CostProfile
from forerun.errors import ConfigError
from forerun.logs import get_logger

logger = get_logger(__name__)

_CASE = re.compile(r"verify=(\d+)\*(\d+)@(\d+)(?::(\d+))?")


@dataclass(frozen=True, slots=True)
class _Timed:
    num_requests: int
    rows_each: int
    context: int
    depth: int
    ms: float

    @property
    def num_rows(self) -> int:
        return self.num_requests * self.rows_each


def _read_case(item: Mapping[str, Any]) -> _Timed:
    text, ms = item["case"], float(item["median_us"]) / 1000.0
    match = _CASE.fullmatch(text) if isinstance(text, str) else None
    if match is None or int(match[1]) * int(match[2]) == 0:
        raise ConfigError(
            f"case {text!r} is no timed verification; cases look like verify=16*4@4096:3 (16 "
            "requests of 4 rows at context 4096, then 3 drafts). Time such cases alone."
        )
    if not 0 <= ms < math.inf:
        raise ValueError(f"median_us of {text} is {item['median_us']}")
    requests, rows, context, drafts = (int(group or 0) for group in match.groups())
    return _Timed(requests, rows, context, drafts, ms)


def fit_timed_shapes(items: Sequence[Mapping[str, Any]], source: str) -> CostProfile:
    """Return the profile of items with a `case` and its `median_us`.

    Raises ConfigError for a case of another kind and ValueError for a time that is none.
    """
    timed = [_read_case(item) for item in items]
    timed, drafting = _split_drafting(timed)
    kv_token_ms = _fit_slope(
        timed,
        same=lambda t: (t.num_requests, t.rows_each),
        size=lambda t: t.num_requests * t.context,
    )
    timed = [replace(t, ms=t.ms - kv_token_ms * t.num_requests * t.context) for t in timed]
    request_ms = _fit_slope(timed, same=lambda t: t.num_rows, size=lambda t: t.num_requests)
    by_rows: dict[int, list[float]] = {}
    for t in timed:
        by_rows.setdefault(t.num_rows, []).append(t.ms - request_ms * t.num_requests)
    rows = sorted(by_rows)
    ms = [max(0.0, float(np.median(by_rows[size]))) for size in rows]
    if rows[0] > 1:
        rows, ms = [1, *rows], [ms[0], *ms]
    requests = sorted(drafting)
    if requests and requests[0] > 1:
        drafting[1] = drafting[requests[0]]
        requests.insert(0, 1)
    return CostProfile(
        verify_rows=np.array(rows),
        verify_ms=np.array(ms),
        request_ms=request_ms,
        kv_token_ms=kv_token_ms,
        sampled_row_ms=0.0,
        filtered_row_ms=0.0,
        draft_requests=np.array(requests, dtype=np.int64),
        draft_first_ms=np.array([drafting[n][0] for n in requests]),
        draft_next_ms=np.array([drafting[n][1] for n in requests]),
        key={},
        source=source,
    )


def _fit_slope(
    timed: Sequence[_Timed],
    *,
    same: Callable[[_Timed], Hashable],
    size: Callable[[_Timed], float],
) -> float:
    """Return the median slope over a size of all pairs that are the same otherwise, at least 0."""
    slopes = [
        (b.ms - a.ms) / (size(b) - size(a))
        for a, b in combinations(timed, 2)
        if same(a) == same(b) and size(a) != size(b)
    ]
    return max(0.0, float(np.median(slopes))) if slopes else 0.0


def _split_drafting(
    timed: Sequence[_Timed],
) -> tuple[list[_Timed], dict[int, tuple[float, float]]]:
    """Return the verifications alone, and (first, next) drafting ms by requests.

    Shapes timed at several depths tell the drafter from the target; its cost is taken out of all
    other shapes of as many requests.
    """
    groups: dict[tuple[int, int, int], dict[int, float]] = {}
    for t in timed:
        groups.setdefault((t.num_requests, t.rows_each, t.context), {})[t.depth] = t.ms
    found: dict[int, list[tuple[float, float]]] = {}
    for (num_requests, _, _), by_depth in groups.items():
        if len(by_depth) > 1:
            found.setdefault(num_requests, []).append(_fit_depths(by_depth))
    drafting = {n: tuple(np.median(costs, axis=0).tolist()) for n, costs in found.items()}
    alone = []
    unpriced = 0
    for t in timed:
        first, further = drafting.get(t.num_requests, (0.0, 0.0))
        unpriced += t.depth > 0 and t.num_requests not in drafting
        cost = first + (t.depth - 1) * further if t.depth else 0.0
        alone.append(replace(t, ms=t.ms - cost))
    if unpriced:
        logger.warning(
            "%d timed shapes draft at a single depth: their drafting counts as verification. "
            "Time the same shapes without drafts as well.",
            unpriced,
        )
    return alone, {n: (first, further) for n, (first, further) in drafting.items()}


def _fit_depths(by_depth: dict[int, float]) -> tuple[float, float]:
    """Return (first, next) drafting ms from the times of one shape at two depths or more."""
    depths = sorted(by_depth)
    drafting = [depth for depth in depths if depth > 0]
    shallow, deep = drafting[0], drafting[-1]
    if deep > shallow:
        further = max(0.0, (by_depth[deep] - by_depth[shallow]) / (deep - shallow))
    else:
        further = max(0.0, (by_depth[deep] - by_depth[0]) / deep)
    if 0 not in by_depth:
        return further, further
    return max(0.0, by_depth[shallow] - by_depth[0] - (shallow - 1) * further), further
