"""The running speed-up over plain decoding."""

from __future__ import annotations

import pytest

from forerun.budget.speed_up import SpeedUp


def test_it_is_time_saved_over_time_taken() -> None:
    """Three tokens per request in a step that takes 1.5 plain steps: twice as fast."""
    speed_up = SpeedUp()
    assert not speed_up.is_known
    for _ in range(10):
        speed_up.observe(12, 4, plain_ms=10.0, taken_ms=15.0)
    assert speed_up.is_known
    assert speed_up.value == pytest.approx(2.0)


def test_it_holds_when_the_number_of_requests_changes() -> None:
    speed_up = SpeedUp()
    for _ in range(10):
        speed_up.observe(2, 1, plain_ms=4.0, taken_ms=5.0)
    before = speed_up.value
    speed_up.observe(32, 16, plain_ms=12.0, taken_ms=15.0)
    assert speed_up.value == pytest.approx(before)


def test_it_forgets() -> None:
    speed_up = SpeedUp()
    for _ in range(300):
        speed_up.observe(5, 1, plain_ms=4.0, taken_ms=4.0)
    for _ in range(300):
        speed_up.observe(1, 1, plain_ms=4.0, taken_ms=4.0)
    assert speed_up.value == pytest.approx(1.0, abs=0.02)


def test_it_is_never_below_plain_decoding_and_ignores_empty_steps() -> None:
    speed_up = SpeedUp()
    speed_up.observe(0, 0, plain_ms=4.0, taken_ms=4.0)
    assert not speed_up.is_known
    speed_up.observe(1, 1, plain_ms=4.0, taken_ms=9.0)
    assert speed_up.value == 1.0
