"""The change detector: silent while predictions hold, quick when they do not."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.budget.confidence.change_detector import ChangeDetector


@pytest.mark.parametrize("probability", [0.02, 0.3, 0.9, 0.99])
def test_true_predictions_seldom_raise_an_alarm(probability: float) -> None:
    rng = np.random.default_rng(0)
    detector = ChangeDetector()
    num_alarms = 0
    for _ in range(10_000):
        accepted = rng.random(3) < probability
        num_alarms += detector.observe(np.full(3, probability), accepted) > 0
    assert num_alarms <= 3


def test_a_small_error_is_no_change_however_many_outcomes_show_it() -> None:
    rng = np.random.default_rng(0)
    detector = ChangeDetector()
    for _ in range(200):
        assert detector.observe(np.full(500, 0.5), rng.random(500) < 0.6) == 0


@pytest.mark.parametrize(
    ("probability", "acceptance", "limit"), [(0.9, 0.0, 6), (0.001, 1.0, 3), (0.5, 1.0, 15)]
)
def test_a_jump_is_noticed_and_dated(probability: float, acceptance: float, limit: int) -> None:
    """At most `limit` outcomes after the jump; what is reported as new is little more than that."""
    rng = np.random.default_rng(1)
    detector = ChangeDetector()
    for _ in range(500):
        detector.observe(np.array([probability]), rng.random(1) < probability)
    for count in range(1, limit + 1):
        num_changed = detector.observe(np.array([probability]), rng.random(1) < acceptance)
        if num_changed:
            assert count <= num_changed <= count + 10
            return
    pytest.fail(f"no alarm within {limit} outcomes")
