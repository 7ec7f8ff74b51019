"""What is done without arrays for a few requests is what is done with arrays for many."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.budget import survival
from forerun.budget.base import BudgetInputs
from forerun.budget.confidence.estimator import AcceptanceEstimator, EstimatorPrior
from forerun.budget.policies import adaptive
from forerun.budget.survival import allocate, compute_survival

K = 5
ROWS = st.lists(
    st.lists(st.sampled_from([0.0, 0.3, 0.75, 1.0]), max_size=K), min_size=2, max_size=4
)


def pad(rows: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    confidence = np.zeros((len(rows), K), dtype=np.float32)
    for index, row in enumerate(rows):
        confidence[index, : len(row)] = row
    return compute_survival(confidence), np.array([len(row) for row in rows])


@dataclass(frozen=True, slots=True)
class Costs:
    """A step with 0, 1, 2, ... draft rows; what its prompt rows cost is a constant."""

    whole: np.ndarray
    prompt_ms: float
    has_prompt_rows: bool = True

    def step(self, most: int) -> np.ndarray:
        return self.whole[: most + 1] + self.prompt_ms

    def decode(self, most: int) -> np.ndarray:
        return self.whole[: most + 1]


@given(ROWS, st.integers(0, 25))
def test_allocation(rows: list[list[float]], budget: int) -> None:
    given_survival, counts = pad(rows)
    few = allocate(given_survival, counts, budget)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(survival, "_FEW_REQUESTS", 0)
        many = allocate(given_survival, counts, budget)
    assert few.tolist() == many.tolist()


@given(ROWS, st.integers(1, 9), st.integers(0, 2**31))
def test_budget(rows: list[list[float]], num_decoding: int, seed: int) -> None:
    planning, counts = pad(rows)
    rng = np.random.default_rng(seed)
    costs = Costs(np.cumsum(rng.uniform(0.1, 2.0, 30)), float(rng.uniform(0, 3)))
    inputs = BudgetInputs(
        num_draft_tokens=counts,
        num_decoding=num_decoding,
        max_verified=int(rng.integers(0, 25)),
        planning_survival=planning,
        costs=costs,
    )
    policy = adaptive.AdaptivePolicy(min_gain=0.01)
    few = policy.choose_budget(inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adaptive, "_FEW_SLOTS", 0)
        many = policy.choose_budget(inputs)
    assert (few.verification_budget, few.step_ms) == (many.verification_budget, many.step_ms)


def test_confidence() -> None:
    rng = np.random.default_rng(4)
    estimator = AcceptanceEstimator(K, EstimatorPrior.HEADLESS)
    evidence = rng.normal(0, 3, (40, K)).astype(np.float32)
    hits = rng.normal(0, 1, 40).astype(np.float32)
    verifiers = rng.integers(0, 3, 40)
    verified = rng.integers(1, K + 1, 40)
    estimator.observe(evidence, hits, verifiers, verified, rng.integers(0, verified + 1))
    evidence[7, 2] = np.nan
    many = estimator.predict(evidence, hits, verifiers)
    few = [
        estimator.predict_one(row.tolist(), float(own), int(verifier))
        for row, own, verifier in zip(evidence, hits, verifiers, strict=True)
    ]
    np.testing.assert_allclose(few, many, rtol=1e-4)
    assert few[7][2] == many[7, 2] == 0.0
