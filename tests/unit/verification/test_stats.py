"""Speculation counts, worked out by hand."""

from __future__ import annotations

import pytest

from forerun.verification.stats import SpecStats


def make_stats(*steps: tuple[int, int, int]) -> SpecStats:
    stats = SpecStats()
    for drafted, verified, accepted in steps:
        stats.record(num_drafted=drafted, num_verified=verified, num_accepted=accepted)
    return stats


def test_counts_of_three_steps() -> None:
    stats = make_stats((3, 3, 1), (3, 2, 2), (3, 0, 0))
    assert (stats.num_spec_steps, stats.num_draft_tokens) == (2, 9)
    assert (stats.num_verified_tokens, stats.num_accepted_tokens) == (5, 3)
    assert stats.verified_per_position == [2, 2, 1]
    assert stats.accepted_per_position == [2, 1, 0]
    assert stats.acceptance_histogram == {3: [0, 1, 0, 0], 2: [0, 0, 1]}


def test_measures_divide_totals() -> None:
    stats = make_stats((3, 3, 1), (3, 2, 2), (3, 0, 0))
    assert stats.acceptance_length == pytest.approx(1 + 3 / 2)
    assert stats.acceptance_rate == pytest.approx(3 / 5)
    assert stats.draft_yield == pytest.approx(3 / 9)
    assert stats.survival_per_position == [1.0, 0.5, 0.0]


def test_measures_are_absent_before_the_first_draft() -> None:
    stats = SpecStats()
    assert stats.acceptance_length is None
    assert stats.acceptance_rate is None
    assert stats.draft_yield is None
    assert stats.survival_per_position == []


def test_merging_equals_recording_everything_in_one() -> None:
    left, right = make_stats((2, 2, 1), (1, 1, 1)), make_stats((4, 4, 3), (2, 1, 0))
    left.merge(right)
    assert left == make_stats((2, 2, 1), (1, 1, 1), (4, 4, 3), (2, 1, 0))


def test_impossible_counts_are_refused() -> None:
    with pytest.raises(AssertionError):
        SpecStats().record(num_drafted=1, num_verified=2, num_accepted=0)
