"""Sequential temperature scaling against worlds whose temperature is known."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.budget.confidence.calibration import compute_ece
from forerun.evaluation.metrics import ECE_BINS, compute_survival, measure
from forerun.evaluation.rollouts import Rollouts
from forerun.evaluation.temperatures import Scaling, fit_scaling

TRUE = np.array([1.8, 0.6, 1.0, 2.5])


def make_world(
    count: int, *, seed: int, temperatures: np.ndarray = TRUE, offset: float = 0.0
) -> Rollouts:
    """Return drafts accepted with the chance sigmoid(logit / T + offset) of what they claim."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(1.0, 2.0, (count, len(temperatures)))
    chances = 1 / (1 + np.exp(-logits / temperatures - offset))
    accepted = (rng.random(chances.shape) < chances).cumprod(axis=1).sum(axis=1)
    return Rollouts(
        dataset=np.full(count, "x"),
        num_known=np.full(count, len(temperatures)),
        num_accepted=accepted,
        ends_text=np.zeros(count, dtype=bool),
        confidence=(1 / (1 + np.exp(-logits))).astype(np.float32),
    )


def test_the_temperatures_of_a_world_are_found() -> None:
    found = fit_scaling(make_world(40_000, seed=1))
    np.testing.assert_allclose(found.temperatures, TRUE, rtol=0.2)
    np.testing.assert_allclose(found.offsets, 0.0, atol=0.15)


def test_confidences_that_are_too_high_are_lowered() -> None:
    """What no temperature does: every claim is higher than the truth by the same log-odds."""
    moved = [make_world(20_000, seed=seed, temperatures=np.ones(3), offset=-0.7) for seed in (1, 2)]
    found = fit_scaling(moved[0])
    np.testing.assert_allclose(found.offsets, -0.7, atol=0.15)
    before = measure(moved[1]).positions
    after = measure(moved[1], compute_survival(found.apply(moved[1].confidence))).positions
    assert max(place.ece or 0.0 for place in before) > 0.08
    assert max(place.ece or 0.0 for place in after) < 0.02


def test_errors_on_other_drafts_become_small() -> None:
    found = fit_scaling(make_world(20_000, seed=1))
    judged = make_world(20_000, seed=2)
    before = measure(judged).positions
    survival = compute_survival(found.apply(judged.confidence))
    after = measure(judged, survival).positions
    assert max(place.ece or 0.0 for place in before) > 0.05
    assert max(place.ece or 0.0 for place in after) < 0.02


@pytest.mark.parametrize("seed", range(8))
def test_the_error_never_grows_where_it_was_fitted(seed: int) -> None:
    """Even of a world that no temperature describes: 1 is among the candidates (I.8)."""
    rng = np.random.default_rng(seed)
    rollouts = make_world(500, seed=seed, temperatures=rng.uniform(0.3, 3.0, 3))
    rollouts = Rollouts(
        dataset=rollouts.dataset,
        num_known=rng.integers(1, 4, 500),
        num_accepted=np.minimum(rollouts.num_accepted, rng.integers(0, 4, 500)),
        ends_text=rollouts.ends_text,
        confidence=rollouts.confidence,
    )
    found = fit_scaling(rollouts)
    known = rollouts.num_known > 0
    survived = (rollouts.num_accepted > 0)[known]
    errors = [
        compute_ece(scaling.apply(rollouts.confidence)[known, 0], survived, ECE_BINS)
        for scaling in (Scaling.leave(3), found)
    ]
    assert errors[1] <= errors[0] + 1e-6


def test_the_order_within_a_position_stays() -> None:
    confidence = np.random.default_rng(0).random((300, 4))
    tempered = Scaling(TRUE, np.array([0.5, -1.0, 0.0, 2.0])).apply(confidence)
    for position in range(4):
        assert (np.argsort(confidence[:, position]) == np.argsort(tempered[:, position])).all()


def test_a_position_with_few_outcomes_keeps_its_neighbours_temperature() -> None:
    world = make_world(2_000, seed=3)
    known = np.where(np.arange(2_000) < 50, 4, 2)
    rollouts = Rollouts(
        dataset=world.dataset,
        num_known=known,
        num_accepted=np.minimum(world.num_accepted, known),
        ends_text=world.ends_text,
        confidence=world.confidence,
    )
    found = fit_scaling(rollouts)
    for values in (found.temperatures, found.offsets):
        assert values[2] == values[3] == values[1]


def test_a_drafter_without_a_head_has_none() -> None:
    world = make_world(300, seed=0)
    headless = Rollouts(
        dataset=world.dataset,
        num_known=world.num_known,
        num_accepted=world.num_accepted,
        ends_text=world.ends_text,
        confidence=np.full_like(world.confidence, np.nan),
    )
    with pytest.raises(ValueError, match="confidence head"):
        fit_scaling(headless)
