"""Latencies, throughput and acceptance from records. Every formula stands in docs/metrics.md.

Symbols of one request: intent a, sent s, event times c_1..c_m, tokens per event n_1..n_m, output
tokens N. All times in seconds. Only requests that ended well count; what a server does not tell is
left out of a series, never guessed. An *emission* is all events of a stream that shared one read:
they reached the reader together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from forerun.bench.records import RequestRecord


@dataclass(frozen=True, slots=True)
class Emissions:
    """The events of one request with those that shared a read merged."""

    times_s: list[float]
    num_tokens: list[int]

    @classmethod
    def of(cls, record: RequestRecord) -> Emissions | None:
        """Return them, or None if tokens per event are unknown."""
        if record.event_tokens is None:
            return None
        pairs = zip(record.event_s, record.event_tokens, strict=True)
        merged = [
            (time_s, sum(count for _, count in group))
            for time_s, group in groupby(pairs, key=lambda pair: pair[0])
        ]
        return cls([time_s for time_s, _ in merged], [count for _, count in merged])


def select_completed(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """Return the requests that ended well and produced something."""
    return [record for record in records if record.error is None and record.event_s]


def compute_ttft(record: RequestRecord) -> float:
    """c_1 - s."""
    return record.event_s[0] - record.sent_s


def compute_ttft_from_intent(record: RequestRecord) -> float:
    """c_1 - a."""
    return record.event_s[0] - record.intent_s


def compute_e2el(record: RequestRecord) -> float:
    """c_m - s."""
    return record.event_s[-1] - record.sent_s


def compute_itl_chunk(record: RequestRecord) -> list[float]:
    """c_j - c_{j-1}, one per event after the first; 0 where two events shared a read."""
    return [after - before for before, after in pairwise(record.event_s)]


def compute_itl_token(record: RequestRecord) -> list[float]:
    """(c_j - c_{j-1}) / n_j, n_j times, one group per emission after the first."""
    emissions = Emissions.of(record)
    if emissions is None:
        return []
    gaps = (after - before for before, after in pairwise(emissions.times_s))
    counts = emissions.num_tokens[1:]
    return [gap / n for gap, n in zip(gaps, counts, strict=True) for _ in range(n)]


def compute_max_gap(record: RequestRecord) -> float | None:
    """max(c_j - c_{j-1}): the longest silence after the first token."""
    return max(compute_itl_chunk(record), default=None)


def count_tokens_after_first(record: RequestRecord) -> int | None:
    """N - n_1, with n_1 the tokens of the first emission; None if unknown."""
    emissions = Emissions.of(record)
    if emissions is None or record.output_tokens is None:
        return None
    return record.output_tokens - emissions.num_tokens[0]


def compute_tpot(record: RequestRecord) -> float | None:
    """(c_m - c_1) / (N - n_1); None if no token followed the first emission."""
    count = count_tokens_after_first(record)
    return (record.event_s[-1] - record.event_s[0]) / count if count else None


def compute_tpot_vllm(record: RequestRecord) -> float | None:
    """(c_m - c_1) / (N - 1); None below two tokens."""
    if record.output_tokens is None or record.output_tokens < 2:
        return None
    return (record.event_s[-1] - record.event_s[0]) / (record.output_tokens - 1)


def compute_speed(record: RequestRecord) -> float | None:
    """1 / tpot, in tokens per second."""
    tpot_s = compute_tpot(record)
    return 1 / tpot_s if tpot_s else None


def compute_normalised_speed(record: RequestRecord) -> float | None:
    """N / (c_m - s), in tokens per second: prefill, queue and stalls included."""
    e2el_s = compute_e2el(record)
    return record.output_tokens / e2el_s if record.output_tokens and e2el_s > 0 else None


def compute_harmonic_speed(records: Sequence[RequestRecord]) -> float | None:
    """sum(N - n_1) / sum(c_m - c_1): the mean speed by token."""
    pairs = [(count_tokens_after_first(record), record) for record in records]
    num_tokens = sum(count for count, _ in pairs if count)
    decode_s = sum(record.event_s[-1] - record.event_s[0] for count, record in pairs if count)
    return num_tokens / decode_s if decode_s > 0 else None


def compute_duration(records: Sequence[RequestRecord]) -> float:
    """Last finish - first send; a failed request finishes when its failure is noticed."""
    ends = [r.event_s[-1] if r.error is None and r.event_s else r.end_s for r in records]
    return max(ends) - min(record.sent_s for record in records)


def collect_tokens(records: Iterable[RequestRecord]) -> list[tuple[float, int]]:
    """Return (time, tokens) of every event, in order of time, where tokens are known."""
    return sorted(
        pair
        for record in records
        if record.event_tokens is not None
        for pair in zip(record.event_s, record.event_tokens, strict=True)
    )


def compute_peak_throughput(
    tokens: Sequence[tuple[float, int]], start_s: float, duration_s: float
) -> float | None:
    """Most tokens per second in any of the equal buckets, each at least a second, of the run.

    Equal buckets that tile the run make the peak at least the average.
    """
    if not tokens or duration_s <= 0:
        return None
    num_buckets = max(1, int(duration_s))
    times_s = [time_s for time_s, _ in tokens]
    counts = np.histogram(
        times_s,
        bins=num_buckets,
        range=(start_s, start_s + duration_s),
        weights=[count for _, count in tokens],
    )[0]
    return float(counts.max()) * num_buckets / duration_s


def compute_max_in_flight(records: Iterable[RequestRecord]) -> int:
    """Most requests between send and end at one time."""
    changes = sorted(
        change for record in records for change in ((record.sent_s, 1), (record.end_s, -1))
    )
    return int(np.cumsum([change for _, change in changes]).max())


def compute_mean_in_flight(
    records: Iterable[RequestRecord], start_s: float, end_s: float
) -> float | None:
    """Time average of the requests in flight over a window."""
    if end_s <= start_s:
        return None
    overlap_s = sum(
        max(0.0, min(record.end_s, end_s) - max(record.sent_s, start_s)) for record in records
    )
    return overlap_s / (end_s - start_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceptance:
    """Speculation totals of requests whose server reports them; s steps, d, v, a draft tokens."""

    num_steps: int
    num_drafted: int
    num_verified: int | None
    num_accepted: int
    steps_by_accepted: list[int]
    request_lengths: list[float]

    @property
    def length(self) -> float:
        """1 + a / s, pooled over all steps."""
        return 1 + self.num_accepted / self.num_steps

    @property
    def draft_rate(self) -> float | None:
        """a / d."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    @property
    def per_position(self) -> list[float]:
        """Steps that accepted at least j draft tokens / s, for j = 1..k."""
        return [
            sum(self.steps_by_accepted[j:]) / self.num_steps
            for j in range(1, len(self.steps_by_accepted))
        ]

    @property
    def waste(self) -> float | None:
        """(v - a) / v: the share of verified draft tokens that were thrown away."""
        if not self.num_verified:
            return None
        return (self.num_verified - self.num_accepted) / self.num_verified


def compute_acceptance(records: Iterable[RequestRecord]) -> Acceptance | None:
    """Add up what servers report per request; None if no request had a verification step."""
    stats = [record.speculation for record in records if record.speculation is not None]
    stats = [entry for entry in stats if entry.get("num_spec_steps")]
    if not stats:
        return None
    verified = [entry.get("num_verified_tokens") for entry in stats]
    return Acceptance(
        num_steps=_sum(stats, "num_spec_steps"),
        num_drafted=_sum(stats, "num_draft_tokens"),
        num_verified=None if None in verified else _sum(stats, "num_verified_tokens"),
        num_accepted=_sum(stats, "num_accepted_draft_tokens"),
        steps_by_accepted=_add_lists([entry.get("acceptance_histogram") or [] for entry in stats]),
        request_lengths=[
            1 + entry["num_accepted_draft_tokens"] / entry["num_spec_steps"] for entry in stats
        ],
    )


def _sum(stats: Iterable[dict[str, Any]], key: str) -> int:
    return sum(int(entry[key]) for entry in stats)


def _add_lists(lists: Sequence[Sequence[int]]) -> list[int]:
    total = [0] * max(map(len, lists))
    for values in lists:
        for index, value in enumerate(values):
            total[index] += value
    return total
