"""Temperatures of a checkpoint, live calibration counters, and the figures of calibration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.budget.confidence.calibration import (
    NUM_BINS,
    TEMPERATURES_FILE,
    CalibrationStats,
    ConfidenceTemperatures,
    compute_auroc,
    compute_brier,
    compute_ece,
)
from forerun.errors import ConfigError

GREEDY = np.zeros(1, dtype=np.int8)
SURVIVALS = st.sampled_from([0.0, 0.05, 0.1, 0.35, 0.7, 0.99, 1.0])


def load(folder: Path, content: Any, num_positions: int = 3) -> ConfidenceTemperatures | None:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / TEMPERATURES_FILE).write_text(text)
    return ConfidenceTemperatures.load(folder, num_positions)


def test_a_checkpoint_without_temperatures_has_none(tmp_path: Path) -> None:
    assert ConfidenceTemperatures.load(tmp_path, 7) is None


def test_temperatures_divide_the_logit_by_position_and_verifier(tmp_path: Path) -> None:
    content = {
        "num_positions": 3,
        "greedy": [1.0, 2.0, 0.5],
        "coupled": [3, 1, 1],
        "dataset": "mixed",
        "num_samples": 4000,
        "ece_before": 0.06,
        "ece_after": 0.01,
    }
    temperatures = load(tmp_path, content)
    assert temperatures is not None
    assert temperatures.provenance["num_samples"] == 4000
    confidence = np.full((3, 3), 0.8, dtype=np.float32)
    logit = np.log(4.0)
    divisors = np.array([[1.0, 2.0, 0.5], [1.0, 1.0, 1.0], [3.0, 1.0, 1.0]])
    expected = 1.0 / (1.0 + np.exp(-logit / divisors))
    tempered = temperatures.apply(confidence, np.array([0, 1, 2], dtype=np.int8))
    assert tempered.dtype == np.float32
    np.testing.assert_allclose(tempered, expected, rtol=1e-5)


def test_offsets_are_added_to_the_tempered_log_odds(tmp_path: Path) -> None:
    content = {"greedy": [1.0, 2.0, 0.5], "offsets": {"greedy": [-1.0, 0.0, 2.0]}}
    temperatures = load(tmp_path, content)
    assert temperatures is not None
    tempered = temperatures.apply(np.full((1, 3), 0.8, dtype=np.float32), GREEDY)
    log_odds = np.log(4.0) / np.array([1.0, 2.0, 0.5]) + np.array([-1.0, 0.0, 2.0])
    np.testing.assert_allclose(tempered[0], 1.0 / (1.0 + np.exp(-log_odds)), rtol=1e-5)


def test_of_more_positions_the_first_ones_count(tmp_path: Path) -> None:
    content = {"num_positions": 4, "greedy": [1, 2, 3, 4], "offsets": {"greedy": [0, 1, 2, 3]}}
    temperatures = load(tmp_path, content, num_positions=2)
    assert temperatures is not None
    assert temperatures.values[0].tolist() == [1, 2]
    assert temperatures.offsets[0].tolist() == [0, 1]


def test_certainty_stays_certain_and_nan_stays_nan() -> None:
    temperatures = ConfidenceTemperatures.from_mapping(
        {"greedy": [2.0, 2.0, 2.0, 0.001]}, 4, source="test"
    )
    tempered = temperatures.apply(np.array([[0.0, 1.0, np.nan, 0.4]]), GREEDY)
    np.testing.assert_array_equal(tempered[0, :2], [0.0, 1.0])
    assert np.isnan(tempered[0, 2])
    assert tempered[0, 3] == 0.0


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "not valid JSON"),
        ([1, 2, 3], "must be an object with the keys greedy"),
        ({"greedi": [1, 1, 1]}, "unknown key 'greedi'; did you mean 'greedy'"),
        ({"greedy": [1, 1]}, "greedy has 2 temperatures, but the drafter runs with 3"),
        ({"greedy": 1.0}, "greedy must be a list of 3 numbers, got 1.0"),
        ({"coupled": [1, 0, 1]}, "coupled: temperature 1 must be a positive number, got 0"),
        ({"standard": [1, 1, -2]}, "standard: temperature 2 must be a positive number, got -2"),
        ({"greedy": [True, 1, 1]}, "temperature 0 must be a positive number, got True"),
        ({"greedy": ["1", 1, 1]}, "temperature 0 must be a positive number, got '1'"),
        ('{"greedy": [1, 1, NaN]}', "temperature 2 must be a positive number, got nan"),
        ({"offsets": [1, 1, 1]}, "offsets must be an object with the keys greedy"),
        ({"offsets": {"greedi": [1, 1, 1]}}, "unknown key 'greedi'; did you mean 'greedy'"),
        ({"offsets": {"greedy": [1, 1]}}, "offsets of greedy has 2 offsets, but the drafter"),
        ({"offsets": {"coupled": [1, None, 1]}}, "offset 1 must be a number, got None"),
        ({"num_positions": 2}, "made for num_positions 2, but the drafter runs with 3"),
        ({"num_positions": "5"}, "made for num_positions '5', but the drafter runs with 3"),
        ({"num_positions": 5, "greedy": [1, 1, 1]}, "greedy has 3 temperatures"),
    ],
)
def test_a_bad_file_says_what_is_wrong(tmp_path: Path, content: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        load(tmp_path, content)
    assert TEMPERATURES_FILE in str(caught.value)


@st.composite
def draw_steps(draw: st.DrawFn) -> list[tuple[list[list[float]], list[int], list[int]]]:
    steps = []
    for _ in range(draw(st.integers(1, 4))):
        num_requests = draw(st.integers(0, 4))
        width = draw(st.integers(0, 5))
        row = st.lists(SURVIVALS, min_size=width, max_size=width)
        survival = draw(st.lists(row, min_size=num_requests, max_size=num_requests))
        verified = [draw(st.integers(0, width)) for _ in range(num_requests)]
        steps.append((survival, verified, [draw(st.integers(0, v)) for v in verified]))
    return steps


@given(draw_steps())
def test_counters_equal_a_plain_count(
    steps: list[tuple[list[list[float]], list[int], list[int]]],
) -> None:
    stats = CalibrationStats(5)
    slots: list[tuple[int, float, int]] = []
    for survival, verified, accepted in steps:
        width = len(survival[0]) if survival else 0
        stats.observe(
            np.array(survival, dtype=np.float64).reshape(len(survival), width),
            np.array(verified, dtype=np.int64),
            np.array(accepted, dtype=np.int64),
        )
        for row, num_verified, num_accepted in zip(survival, verified, accepted, strict=True):
            slots += [(j, row[j], int(j < num_accepted)) for j in range(num_verified)]
    snapshot = stats.snapshot()
    assert snapshot.num_slots == len(slots)
    for bin_ in range(NUM_BINS):
        inside = [s for s in slots if min(int(s[1] * NUM_BINS), NUM_BINS - 1) == bin_]
        assert snapshot.bin_counts[bin_] == len(inside)
        assert snapshot.bin_predicted[bin_] == pytest.approx(sum(s[1] for s in inside))
        assert snapshot.bin_realised[bin_] == sum(s[2] for s in inside)
    for position in range(5):
        inside = [s for s in slots if s[0] == position]
        assert snapshot.position_counts[position] == len(inside)
        assert snapshot.position_predicted[position] == pytest.approx(sum(s[1] for s in inside))
        assert snapshot.position_realised[position] == sum(s[2] for s in inside)
    assert snapshot.realised_accepted == sum(sum(accepted) for _, _, accepted in steps)
    if slots:
        predicted = np.array([s[1] for s in slots])
        realised = np.array([s[2] for s in slots])
        assert snapshot.ece == pytest.approx(compute_ece(predicted, realised, equal_mass=False))
        assert snapshot.brier == pytest.approx(compute_brier(predicted, realised))


def test_before_the_first_outcome_there_is_no_error() -> None:
    snapshot = CalibrationStats(7).snapshot()
    assert (snapshot.ece, snapshot.brier, snapshot.num_slots) == (None, None, 0)


def test_a_snapshot_does_not_move_with_later_outcomes() -> None:
    stats = CalibrationStats(2)
    before = stats.snapshot()
    stats.observe(np.array([[0.5, np.nan]]), np.array([2]), np.array([2]))
    assert before.num_slots == 0
    after = stats.snapshot()
    assert after.predicted_accepted == 0.5
    assert after.realised_accepted == 2.0


def test_true_survivals_look_true_when_trimming_depends_on_them() -> None:
    """Counting trimmed slots behind a rejection as zeros would show more than twice the error."""
    rng = np.random.default_rng(0)
    confidence = rng.uniform(0.3, 1.0, (20_000, 7))
    survival = np.cumprod(confidence, axis=1)
    num_verified = (survival > 0.25).sum(axis=1)
    num_acceptable = np.cumprod(rng.random(confidence.shape) < confidence, axis=1).sum(axis=1)
    stats = CalibrationStats(7)
    stats.observe(survival, num_verified, np.minimum(num_acceptable, num_verified))
    ece = stats.snapshot().ece
    assert ece is not None
    assert ece < 0.01
    positions = np.arange(7)
    rejected = positions >= num_acceptable[:, None]
    counted = (positions < num_verified[:, None]) | (
        rejected & (num_acceptable < num_verified)[:, None]
    )
    biased = compute_ece(survival[counted], ~rejected[counted], equal_mass=False)
    assert biased > 0.02


def test_ece_of_known_gaps() -> None:
    predicted = np.array([0.1, 0.1, 0.9, 0.9])
    realised = np.array([0, 1, 1, 1])
    assert compute_ece(predicted, realised, 2) == pytest.approx((0.4 * 2 + 0.1 * 2) / 4)
    assert compute_ece(predicted, realised, 2, equal_mass=False) == pytest.approx(0.25)
    # Equal mass splits what equal width does not.
    crowded = np.array([0.01, 0.02, 0.08, 0.09])
    assert compute_ece(crowded, np.array([0, 0, 1, 1]), 2) == pytest.approx(0.465)
    assert compute_ece(crowded, np.array([0, 0, 1, 1]), 2, equal_mass=False) == pytest.approx(0.45)


@given(st.lists(st.tuples(SURVIVALS, st.booleans()), min_size=2, max_size=30))
def test_auroc_equals_the_count_over_all_pairs(pairs: list[tuple[float, bool]]) -> None:
    predicted = np.array([p for p, _ in pairs])
    realised = np.array([y for _, y in pairs])
    ones, zeros = predicted[realised], predicted[~realised]
    if len(ones) == 0 or len(zeros) == 0:
        with pytest.raises(ValueError, match="needs both outcomes"):
            compute_auroc(predicted, realised)
        return
    wins = (ones[:, None] > zeros).mean() + 0.5 * (ones[:, None] == zeros).mean()
    assert compute_auroc(predicted, realised) == pytest.approx(wins)


@pytest.mark.parametrize("compute", [compute_ece, compute_brier])
def test_figures_of_nothing_are_refused(compute: Any) -> None:
    with pytest.raises(ValueError, match="at least one prediction"):
        compute(np.zeros(0), np.zeros(0))
