"""The online estimator: calibration while serving, censoring, changes, bounds, determinism."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acceptance_worlds import NUM_POSITIONS, LogisticWorld, MatchWorld, World, serve
from forerun.budget.confidence.calibration import compute_ece
from forerun.budget.confidence.estimator import WINDOW, AcceptanceEstimator, EstimatorPrior

PRIORS = list(EstimatorPrior)
STEEP = {"slope": 1.6, "intercept": -0.5, "decay": 0.15}
SHALLOW = {"slope": 0.5, "intercept": -1.5, "decay": -0.05}


def make_estimator(prior: EstimatorPrior = EstimatorPrior.HEADLESS) -> AcceptanceEstimator:
    return AcceptanceEstimator(NUM_POSITIONS, prior)


class Stream:
    """Requests with constant evidence whose conditional acceptance is set from outside."""

    def __init__(self, prior: EstimatorPrior, *, evidence: float, num_requests: int = 1) -> None:
        self.estimator = make_estimator(prior)
        self._rng = np.random.default_rng(0)
        self._evidence = np.full((num_requests, NUM_POSITIONS), evidence, dtype=np.float32)
        self._hits = np.zeros(num_requests, dtype=np.float32)
        self._verifiers = np.zeros(num_requests, dtype=np.int8)

    def predict(self) -> np.ndarray:
        return self.estimator.predict(self._evidence, self._hits, self._verifiers)[0]

    def step(self, acceptance: float, depth: int) -> float:
        """Verify one draft per request; return the confidence of position 0 afterwards."""
        accepts = self._rng.random(self._evidence.shape) < acceptance
        num_verified = np.full(len(accepts), depth)
        num_accepted = np.minimum(np.cumprod(accepts, axis=1).sum(axis=1), num_verified)
        self.estimator.observe(
            self._evidence, self._hits, self._verifiers, num_verified, num_accepted
        )
        return float(self.predict()[0])


def check_calibration(worlds: list[tuple[World, int]], num_requests: int, limit: float) -> None:
    judged = serve(
        make_estimator(), worlds, num_requests=num_requests, num_unjudged=2000, min_survival=0.15
    )
    assert compute_ece(judged.confidence, judged.accepted, 10) <= limit
    assert compute_ece(judged.survival, judged.survived, 10) <= limit


@pytest.mark.parametrize("num_requests", [2, 32])
@pytest.mark.parametrize("seed", [0, 1])
def test_calibrated_when_acceptance_is_logistic_in_the_evidence(
    seed: int, num_requests: int
) -> None:
    check_calibration([(LogisticWorld(seed, **STEEP), 12000)], num_requests, 0.03)


@pytest.mark.parametrize("num_requests", [2, 32])
@pytest.mark.parametrize("seed", [0, 1])
def test_calibrated_on_matches_of_very_different_requests(seed: int, num_requests: int) -> None:
    check_calibration([(MatchWorld(seed, num_streams=64), 12000)], num_requests, 0.03)


def test_calibrated_on_one_stream_of_changing_luck() -> None:
    check_calibration([(MatchWorld(3, num_streams=1), 12000)], 1, 0.03)


@pytest.mark.parametrize("num_requests", [2, 32])
def test_calibrated_across_a_change_of_domain(num_requests: int) -> None:
    worlds: list[tuple[World, int]] = [
        (LogisticWorld(0, **STEEP), 7000),
        (LogisticWorld(1, **SHALLOW), 5000),
    ]
    check_calibration(worlds, num_requests, 0.04)
    check_calibration(worlds[::-1], num_requests, 0.04)


def test_an_estimator_that_never_learns_fails_the_same_judgement() -> None:
    """The worlds above can be failed: the prior alone is far off in each."""
    for world in (LogisticWorld(0, **STEEP), LogisticWorld(0, **SHALLOW)):
        drafts = world(4000)
        confidence = make_estimator().predict(drafts.evidence, drafts.hits, drafts.verifiers)
        survived = np.cumprod(drafts.accepts, axis=1)
        assert compute_ece(np.cumprod(confidence, axis=1).ravel(), survived.ravel()) > 0.06


def test_trimmed_drafts_are_not_taken_for_rejected_ones() -> None:
    """Depths from 1 to 7 at acceptance 0.8: counting what was not seen as rejected would put the
    last position at 0.8 * 0.8^6 * P(verified), below 0.1."""
    stream = Stream(EstimatorPrior.HEADLESS, evidence=0.0, num_requests=4)
    predicted = []
    for step in range(1500):
        stream.step(0.8, 1 + step % NUM_POSITIONS)
        predicted.append(stream.predict())
    np.testing.assert_allclose(np.mean(predicted[300:], axis=0), 0.8, atol=0.05)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_nothing_is_learnt_from_what_was_not_observed(seed: int) -> None:
    """Evidence behind the first rejection, or trimmed, may be anything."""
    rng = np.random.default_rng(seed)
    one, other = make_estimator(), make_estimator()
    for _ in range(20):
        evidence = rng.normal(0.0, 2.0, (3, NUM_POSITIONS)).astype(np.float32)
        hits = rng.normal(0.0, 1.0, 3).astype(np.float32)
        verifiers = rng.integers(0, 3, 3).astype(np.int8)
        num_verified = rng.integers(0, NUM_POSITIONS + 1, 3)
        num_accepted = rng.integers(0, num_verified + 1)
        positions = np.arange(NUM_POSITIONS)
        observed = positions < np.minimum(num_verified, num_accepted + 1)[:, None]
        noise = rng.normal(0.0, 5.0, evidence.shape).astype(np.float32)
        changed = np.where(observed, evidence, noise)
        one.observe(evidence, hits, verifiers, num_verified, num_accepted)
        other.observe(changed, hits, verifiers, num_verified, num_accepted)
        predicted = one.predict(evidence, hits, verifiers)
        assert predicted.tobytes() == other.predict(evidence, hits, verifiers).tobytes()


@pytest.mark.parametrize("evidence", [-2.0, 0.0, 2.2])
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("depth", [1, NUM_POSITIONS])
def test_collapse_is_believed_within_25_drafts_and_return_within_three(
    prior: EstimatorPrior, evidence: float, depth: int
) -> None:
    stream = Stream(prior, evidence=evidence)
    for _ in range(2):
        confidences = [stream.step(0.9, NUM_POSITIONS) for _ in range(600)]
        assert np.mean(confidences[300:]) == pytest.approx(0.9, abs=0.03)
        assert min(stream.step(0.0, depth) for _ in range(25)) < 0.15
        assert max(stream.step(0.0, 1) for _ in range(800)) < 0.15
        assert max(stream.step(1.0, 1) for _ in range(3)) > 0.5


def test_one_probe_of_four_rows_is_enough_to_return() -> None:
    stream = Stream(EstimatorPrior.HEADLESS, evidence=1.0, num_requests=4)
    for _ in range(300):
        stream.step(0.9, NUM_POSITIONS)
    assert [stream.step(0.0, 1) for _ in range(1000)][-1] < 0.02
    assert stream.step(1.0, 1) > 0.5


def test_identity_prior_returns_the_head_s_own_confidence() -> None:
    confidence = np.array([[0.02, 0.2, 0.5, 0.8, 0.9, 0.97, 0.99]], dtype=np.float32)
    evidence = np.log(confidence / (1.0 - confidence))
    predicted = make_estimator(EstimatorPrior.IDENTITY).predict(
        evidence, np.zeros(1), np.zeros(1, int)
    )
    np.testing.assert_allclose(predicted, confidence, atol=1e-6)


def test_identity_prior_stays_near_a_head_that_is_right() -> None:
    """A few hundred noisy outcomes of a true head may not pull the estimator far away."""
    gaps = []
    for seed in range(8):
        world = LogisticWorld(seed, slope=1.0, intercept=0.0, decay=0.0)
        estimator = make_estimator(EstimatorPrior.IDENTITY)
        for _ in range(300):
            drafts = world(1)
            inputs = (drafts.evidence, drafts.hits, np.zeros(1, dtype=np.int8))
            head = 1.0 / (1.0 + np.exp(-drafts.evidence))
            gaps.append(np.abs(estimator.predict(*inputs) - head).mean())
            # World verifier 1 accepts less; the head is right about the others.
            if drafts.verifiers[0] != 1:
                estimator.observe(*inputs, np.array([NUM_POSITIONS]), drafts.num_acceptable)
    assert np.mean(gaps) < 0.05


def test_evidence_that_misleads_gets_no_weight_instead_of_a_negative_one() -> None:
    world = LogisticWorld(0, slope=-1.0, intercept=0.5, decay=0.0)
    estimator = make_estimator()
    for _ in range(400):
        drafts = world(8)
        estimator.observe(
            drafts.evidence,
            drafts.hits,
            drafts.verifiers,
            np.full(8, NUM_POSITIONS),
            drafts.num_acceptable,
        )
        assert estimator.evidence_weight >= 0.0
    assert estimator.evidence_weight == 0.0
    evidence = np.linspace(-5, 5, NUM_POSITIONS, dtype=np.float32)[None]
    none = np.zeros(1, dtype=np.int8)
    low, high = (estimator.predict(e, np.zeros(1), none) for e in (evidence, evidence[:, ::-1]))
    np.testing.assert_array_equal(low, high)


def test_verifiers_are_told_apart() -> None:
    estimator = make_estimator()
    evidence = np.zeros((3, NUM_POSITIONS), dtype=np.float32)
    hits, verifiers = np.zeros(3, dtype=np.float32), np.array([0, 1, 2], dtype=np.int8)
    rng = np.random.default_rng(0)
    for _ in range(500):
        accepts = rng.random((3, NUM_POSITIONS)) < np.array([[0.9], [0.5], [0.7]])
        num_accepted = np.cumprod(accepts, axis=1).sum(axis=1)
        estimator.observe(evidence, hits, verifiers, np.full(3, NUM_POSITIONS), num_accepted)
    predicted = estimator.predict(evidence, hits, verifiers)
    np.testing.assert_allclose(predicted[:, 0], [0.9, 0.5, 0.7], atol=0.06)


def test_nan_evidence_is_hopeless_and_teaches_nothing() -> None:
    estimator = make_estimator()
    hits, verifiers = np.zeros(1, dtype=np.float32), np.zeros(1, dtype=np.int8)
    plain = np.ones((1, NUM_POSITIONS), dtype=np.float32)
    before = estimator.predict(plain, hits, verifiers)
    hopeless = np.full_like(plain, np.nan)
    for _ in range(100):
        estimator.observe(hopeless, hits, verifiers, np.array([7]), np.array([7]))
        estimator.observe(plain, np.array([np.nan]), verifiers, np.array([7]), np.array([7]))
    np.testing.assert_array_equal(estimator.predict(plain, hits, verifiers), before)
    mixed = plain.copy()
    mixed[0, 2] = np.nan
    predicted = estimator.predict(mixed, hits, verifiers)
    assert predicted[0, 2] == 0.0
    np.testing.assert_array_equal(np.delete(predicted, 2), np.delete(before, 2))


def test_infinite_evidence_gives_confidences_inside_the_interval() -> None:
    evidence = np.array([[np.inf, -np.inf, 1e30, -1e30, 0, 88, -88]], dtype=np.float32)
    estimator = make_estimator(EstimatorPrior.IDENTITY)
    for _ in range(30):
        predicted = estimator.predict(evidence, np.zeros(1), np.zeros(1, dtype=np.int8))
        assert predicted.dtype == np.float32
        assert ((predicted > 0.0) & (predicted < 1.0)).all()
        estimator.observe(
            evidence, np.zeros(1), np.zeros(1, dtype=np.int8), np.array([7]), np.array([1])
        )


def test_same_outcomes_give_the_same_bits() -> None:
    results = []
    for _ in range(2):
        estimator = make_estimator()
        judged = serve(
            estimator,
            [(MatchWorld(0, num_streams=8), 1000)],
            num_requests=4,
            num_unjudged=0,
            min_survival=0.2,
        )
        results.append(judged.confidence.tobytes())
    assert results[0] == results[1]


def test_a_prediction_does_not_depend_on_who_shares_the_batch() -> None:
    estimator = make_estimator()
    serve(
        estimator,
        [(MatchWorld(0, num_streams=8), 400)],
        num_requests=4,
        num_unjudged=0,
        min_survival=0.2,
    )
    drafts = MatchWorld(1, num_streams=8)(8)
    inputs = (drafts.evidence, drafts.hits, drafts.verifiers)
    together = estimator.predict(*inputs)
    alone = [estimator.predict(*(part[r : r + 1] for part in inputs))[0] for r in range(8)]
    np.testing.assert_allclose(together, np.stack(alone), rtol=1e-6)


def measure_bytes(estimator: AcceptanceEstimator) -> int:
    values = vars(estimator).values()
    return sum(v.nbytes if isinstance(v, np.ndarray) else sys.getsizeof(v) for v in values)


def test_memory_does_not_grow_with_outcomes_or_batches() -> None:
    estimator = make_estimator()
    before = measure_bytes(estimator)
    world = LogisticWorld(0, **STEEP)
    for num_requests in (1, 5000, 3, 900, 4096):
        drafts = world(num_requests)
        num_verified = np.full(num_requests, NUM_POSITIONS)
        inputs = (drafts.evidence, drafts.hits, drafts.verifiers)
        assert estimator.predict(*inputs).shape == (num_requests, NUM_POSITIONS)
        estimator.observe(*inputs, num_verified, drafts.num_acceptable)
    assert len(drafts.evidence) * NUM_POSITIONS > WINDOW
    assert measure_bytes(estimator) <= before + 64


def test_batches_beyond_the_window_are_learnt_from_evenly() -> None:
    """Half of the requests are hopeless; whole requests are left out, not whichever come last."""
    estimator = make_estimator()
    num_requests = 4096
    verifiers = (np.arange(num_requests) >= num_requests // 2).astype(np.int8)
    evidence = np.zeros((num_requests, NUM_POSITIONS), dtype=np.float32)
    hits = np.zeros(num_requests, dtype=np.float32)
    num_accepted = np.where(verifiers == 0, NUM_POSITIONS, 0)
    for _ in range(4):
        estimator.observe(
            evidence, hits, verifiers, np.full(num_requests, NUM_POSITIONS), num_accepted
        )
    predicted = estimator.predict(evidence, hits, verifiers)[:, 0]
    assert predicted[0] > 0.9
    assert predicted[-1] < 0.1


def test_an_estimator_without_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="num_positions must be at least 1, got 0"):
        AcceptanceEstimator(0, EstimatorPrior.HEADLESS)
