"""Acceptance and calibration figures, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.evaluation.metrics import compute_survival, measure
from forerun.evaluation.rollouts import Rollouts


def make_rollouts(
    accepted: list[int],
    known: list[int],
    *,
    ends: list[bool] | None = None,
    confidence: np.ndarray | None = None,
    dataset: str = "math",
) -> Rollouts:
    count = len(accepted)
    width = max(known)
    if confidence is None:
        confidence = np.full((count, width), np.nan, dtype=np.float32)
    return Rollouts(
        dataset=np.array([dataset] * count),
        num_known=np.array(known),
        num_accepted=np.array(accepted),
        ends_text=np.array(ends or [False] * count),
        confidence=confidence.astype(np.float32),
    )


def test_acceptance_length_counts_the_bonus_but_not_after_the_end_of_text() -> None:
    found = measure(make_rollouts([3, 0, 2], [3, 3, 2], ends=[False, False, True]))
    assert found.acceptance_length == pytest.approx((4 + 1 + 2) / 3)
    assert found.num_drafts == 3


def test_conditional_acceptance_is_of_drafts_that_got_that_far() -> None:
    found = measure(make_rollouts([3, 1, 0, 2], [3, 3, 3, 3]))
    assert [p.conditional for p in found.positions] == pytest.approx([3 / 4, 2 / 3, 1 / 2])
    assert [p.survival for p in found.positions] == pytest.approx([3 / 4, 2 / 4, 1 / 4])
    assert found.positions[0].predicted is None


def test_what_was_not_judged_counts_at_no_position() -> None:
    found = measure(make_rollouts([2, 1, 1], [2, 1, 3]))
    assert [p.num_judged for p in found.positions] == [3, 2, 1]
    assert [p.conditional for p in found.positions] == pytest.approx([1.0, 1 / 2, None])


def test_calibration_is_of_the_running_product() -> None:
    """Ten drafts said .8 then .5: survival .8 and .4 against 8 and 2 of 10."""
    confidence = np.tile([0.8, 0.5], (10, 1))
    accepted = [2] * 2 + [1] * 6 + [0] * 2
    found = measure(make_rollouts(accepted, [2] * 10, confidence=confidence))
    assert found.positions[0].predicted == pytest.approx(0.8)
    assert found.positions[1].predicted == pytest.approx(0.4)
    np.testing.assert_allclose(compute_survival(confidence)[0], [0.8, 0.4])
    other = measure(make_rollouts(accepted, [2] * 10), np.tile([0.8, 0.2], (10, 1)))
    # Equal predictions share bins of few drafts each: only the sum over a bin is judged.
    assert other.positions[0].auroc == pytest.approx(0.5)
