"""The steady window: where it opens and closes, and when it is refused."""

from __future__ import annotations

import pytest

from forerun.bench.metrics import compute_peak_throughput
from forerun.bench.records import RequestRecord
from forerun.bench.window import SteadyWindow, compute_trend_p_value, find_steady_window


def make_record(start_s: float, times_s: list[float]) -> RequestRecord:
    return RequestRecord(
        request_id=f"r{start_s}",
        category="all",
        max_tokens=8,
        intent_s=start_s,
        ready_s=start_s,
        sent_s=start_s,
        end_s=times_s[-1],
        event_s=times_s,
        event_tokens=[2] * len(times_s),
        output_tokens=2 * len(times_s),
        token_source="token_ids",
    )


def make_waves(num_waves: int, period_s: float = 1.0) -> list[RequestRecord]:
    """Return two places that answer in turns: four events of two tokens per request."""
    return [
        make_record(start_s, [start_s + period_s * (i + 1) / 4 for i in range(4)])
        for wave in range(num_waves)
        for start_s in (wave * period_s, wave * period_s + period_s / 8)
    ]


def test_the_window_spans_full_places_and_counts_its_tokens() -> None:
    window = find_steady_window(make_waves(10), 2)
    assert isinstance(window, SteadyWindow)
    # The second first token comes at 0.125 + 0.25, the last request is sent at 9.125.
    assert (window.start_s, window.end_s) == (0.375, 9.125)
    # 72 tokens per place until 9.0, plus 2 at 9.125, less 2 at 0.25 and 2 at 0.375 itself.
    assert window.num_tokens == 2 * 72 + 2 - 2 - 2 - 2
    assert window.refusal is None
    assert window.throughput == pytest.approx(140 / 8.75)


def test_few_waves_are_refused() -> None:
    window = find_steady_window(make_waves(4), 2)
    assert isinstance(window, SteadyWindow)
    assert window.throughput is None
    assert window.refusal == "4.0 waves of requests; at least 5 are needed"


def test_a_trend_is_refused() -> None:
    start_s = 0.0
    records = []
    for wave in range(40):
        period_s = 0.5 * 1.05**wave
        records += [
            make_record(
                start_s + shift, [start_s + shift + period_s * (i + 1) / 4 for i in range(4)]
            )
            for shift in (0.0, period_s / 8)
        ]
        start_s += period_s
    window = find_steady_window(records, 2)
    assert isinstance(window, SteadyWindow)
    assert window.throughput is None
    assert "trend inside the window" in str(window.refusal)


def test_there_is_no_window_without_places_or_tokens() -> None:
    assert "needs --max-concurrency" in str(find_steady_window(make_waves(10), None))
    assert find_steady_window(make_waves(1), 4) == "fewer requests than places"
    silent = make_waves(10)
    silent[0].event_tokens = None
    assert "does not tell" in str(find_steady_window(silent, 2))


def test_the_trend_test_agrees_with_tables() -> None:
    # n = 10, S = 45 (monotone): Var = 125, Z = 44 / sqrt(125) = 3.935, p = 8.3e-5.
    assert compute_trend_p_value(list(range(10))) == pytest.approx(8.3e-5, rel=0.02)
    assert compute_trend_p_value([5.0] * 10) == 1.0
    assert compute_trend_p_value([1, 2] * 10) > 0.3


@pytest.mark.parametrize("duration_s", [0.4, 1.0, 1.5, 1.99, 7.3])
def test_peak_throughput_is_never_below_the_average(duration_s: float) -> None:
    tokens = [(0.0, 3), (duration_s, 5)]
    peak = compute_peak_throughput(tokens, 0.0, duration_s)
    assert peak is not None
    assert peak >= 8 / duration_s
