"""The steady window of a closed-loop run: all places busy, neither ramp nor drain.

It opens with the c-th first token and closes with the last send, so the choice does not depend on
the numbers inside. It is refused, with the reason, if the run is shorter than five waves or if the
rate of tokens has a trend inside (Mann-Kendall test on equal buckets).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.bench.metrics import collect_tokens
from forerun.bench.records import RequestRecord

MIN_WAVES = 5
NUM_BUCKETS = 20
TREND_ALPHA = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class SteadyWindow:
    """Start and end in seconds, the tokens emitted inside, and why it may not be used."""

    start_s: float
    end_s: float
    num_tokens: int
    refusal: str | None

    @property
    def throughput(self) -> float | None:
        """Tokens per second inside, or None if refused."""
        if self.refusal is not None:
            return None
        return self.num_tokens / (self.end_s - self.start_s)


def find_steady_window(
    records: Sequence[RequestRecord], max_concurrency: int | None
) -> SteadyWindow | str:
    """Return the window, or why there is none."""
    if max_concurrency is None:
        return "a steady window needs --max-concurrency and an unlimited request rate"
    first_tokens_s = sorted(record.event_s[0] for record in records if record.event_s)
    if len(first_tokens_s) < max_concurrency:
        return "fewer requests than places"
    if any(record.event_tokens is None for record in records if record.event_s):
        return "the server does not tell tokens per event"
    start_s = first_tokens_s[max_concurrency - 1]
    end_s = max(record.sent_s for record in records)
    if end_s <= start_s:
        return "the last request was sent before every place had its first token"
    tokens = [pair for pair in collect_tokens(records) if start_s < pair[0] <= end_s]
    refusal = _check_waves(len(records), max_concurrency)
    return SteadyWindow(
        start_s=start_s,
        end_s=end_s,
        num_tokens=sum(count for _, count in tokens),
        refusal=refusal or _check_trend(tokens, start_s, end_s),
    )


def _check_waves(num_requests: int, max_concurrency: int) -> str | None:
    waves = num_requests / max_concurrency
    if waves >= MIN_WAVES:
        return None
    return f"{waves:.1f} waves of requests; at least {MIN_WAVES} are needed"


def _check_trend(tokens: Sequence[tuple[float, int]], start_s: float, end_s: float) -> str | None:
    counts = np.histogram(
        [time_s for time_s, _ in tokens],
        bins=NUM_BUCKETS,
        range=(start_s, end_s),
        weights=[count for _, count in tokens],
    )[0]
    p_value = compute_trend_p_value(counts.tolist())
    if p_value >= TREND_ALPHA:
        return None
    return f"the token rate has a trend inside the window (Mann-Kendall p = {p_value:.4f})"


def compute_trend_p_value(values: Sequence[float]) -> float:
    """Return the two-sided p-value of the Mann-Kendall test, normal approximation with ties.

    S = sum over i < j of sign(x_j - x_i); Z = (S - sign(S)) / sqrt(Var S).
    """
    n = len(values)
    array = np.asarray(values, dtype=float)
    s = float(np.sign(array[None, :] - array[:, None])[np.triu_indices(n, 1)].sum())
    ties = sum(t * (t - 1) * (2 * t + 5) for t in Counter(values).values())
    variance = (n * (n - 1) * (2 * n + 5) - ties) / 18
    if variance <= 0:
        return 1.0
    z = (abs(s) - 1) / math.sqrt(variance) if s else 0.0
    return math.erfc(z / math.sqrt(2))
