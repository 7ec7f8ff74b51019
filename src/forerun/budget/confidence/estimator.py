"""Learn, while serving, how often drafts are accepted: confidences for drafters without a head.

One logistic model for all requests: the log-odds that draft j is accepted, given that those before
it were, are w * evidence + v * hits + an offset of the verifier + an intercept of the position. It
is refitted by Newton's method, with a Gaussian prior, on a bounded window of recent outcomes that
fade with age. Only outcomes that were seen count: nothing is known after the first rejection, and
what was trimmed was not rejected. A change detector drops the past when acceptance jumps.

Shapes: R requests, k draft positions, m observed outcomes, D = 4 + k parameters.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.budget.confidence.change_detector import ChangeDetector

WINDOW = 4096
# After so many outcomes an outcome counts half.
HALF_LIFE = 1024
MAX_LOG_ODDS = 12.0
# After a change the past weighs at most this much of what was seen since.
PAST_AFTER_CHANGE = 0.25
# Refits come after so many outcomes, or this share of what the window holds.
MIN_REFIT_INTERVAL = 4
REFIT_SHARE = 1 / 16
REFIT_ITERATIONS = 2
CHANGE_ITERATIONS = 12
MAX_NEWTON_STEP = 1.5
NUM_SHARED = 4  # evidence, hits, standard, coupled; then one intercept per position


@dataclass(frozen=True, kw_only=True, slots=True)
class Belief:
    """Means and standard deviations of the Gaussian prior.

    `intercept_std` is that of the first position; each later intercept differs from the one before
    it by `position_std`, so that positions seldom reached follow those before them.
    """

    evidence_weight: float
    evidence_std: float
    hits_weight: float
    hits_std: float
    verifier_std: float
    intercept: float
    intercept_std: float
    position_std: float


class EstimatorPrior(enum.Enum):
    """What is believed before the first outcome.

    IDENTITY: evidence is the logit of a confidence that is about right. HEADLESS: evidence is only
    known to rise with the chance of acceptance.
    """

    IDENTITY = Belief(
        evidence_weight=1.0,
        evidence_std=0.3,
        hits_weight=0.0,
        hits_std=0.3,
        verifier_std=0.5,
        intercept=0.0,
        intercept_std=1.5,
        position_std=0.2,
    )
    HEADLESS = Belief(
        evidence_weight=0.5,
        evidence_std=1.0,
        hits_weight=0.3,
        hits_std=0.5,
        verifier_std=0.5,
        intercept=-0.2,
        intercept_std=2.0,
        position_std=0.5,
    )


class AcceptanceEstimator:
    """P(draft j accepted | those before were) from evidence, learnt from outcomes.

    Deterministic: the same calls give the same bits. Memory does not grow.
    """

    def __init__(self, num_positions: int, prior: EstimatorPrior) -> None:
        if num_positions < 1:
            raise ValueError(f"num_positions must be at least 1, got {num_positions}.")
        self.num_positions = num_positions
        self._prior_mean, self._prior_precision = _build_prior(num_positions, prior.value)
        self._features = np.zeros((WINDOW, NUM_SHARED + num_positions), dtype=np.float32)
        self._labels = np.zeros(WINDOW, dtype=np.float32)
        self._weights = np.zeros(WINDOW, dtype=np.float32)
        self.num_changes = 0  # times the past was dropped
        self._num_seen = 0
        self._num_since_refit = 0
        self._refit_interval: float = MIN_REFIT_INTERVAL
        self._detector = ChangeDetector()
        self._set_parameters(self._prior_mean)

    @property
    def evidence_weight(self) -> float:
        """The fitted weight of the evidence; never negative."""
        return float(self._parameters[0])

    def predict(
        self,
        evidence: np.ndarray,  # [R, k] log-odds
        hits: np.ndarray,  # [R] log-odds
        verifiers: np.ndarray,  # [R] 0 greedy, 1 sampled standard, 2 coupled
    ) -> np.ndarray:
        """Return confidences [R, k] float32 in (0, 1); exactly 0 where the evidence is NaN."""
        evidence = np.asarray(evidence, dtype=np.float32)
        per_request = hits * self._hits_weight + self._verifier_offsets[verifiers]
        log_odds: np.ndarray = np.minimum(np.maximum(evidence, -MAX_LOG_ODDS), MAX_LOG_ODDS)
        log_odds = log_odds * self._evidence_weight + self._intercepts[: evidence.shape[1]]
        log_odds += per_request[:, None]
        np.minimum(np.maximum(log_odds, -MAX_LOG_ODDS, out=log_odds), MAX_LOG_ODDS, out=log_odds)
        np.exp(np.negative(log_odds, out=log_odds), out=log_odds)
        log_odds += 1.0
        np.reciprocal(log_odds, out=log_odds)
        # fmax takes the number where the other is NaN.
        np.fmax(log_odds, 0.0, out=log_odds)
        return log_odds

    def predict_one(self, evidence: Sequence[float], hits: float, verifier: int) -> list[float]:
        """Return the confidences of one request: as `predict`, without arrays, for few requests."""
        own = hits * float(self._hits_weight) + float(self._verifier_offsets[verifier])
        confidences = []
        for value, intercept in zip(evidence, self._intercept_list, strict=False):
            if math.isnan(value):
                confidences.append(0.0)
                continue
            log_odds = min(max(value, -MAX_LOG_ODDS), MAX_LOG_ODDS) * self._weight + intercept + own
            log_odds = min(max(log_odds, -MAX_LOG_ODDS), MAX_LOG_ODDS)
            confidences.append(1.0 / (1.0 + math.exp(-log_odds)))
        return confidences

    def observe(
        self,
        evidence: np.ndarray,  # [R, k] as given to predict
        hits: np.ndarray,  # [R]
        verifiers: np.ndarray,  # [R]
        num_verified: np.ndarray,  # [R]
        num_accepted: np.ndarray,  # [R]
    ) -> None:
        """Learn from what verification decided about these drafts."""
        # Whole requests are left out of a batch larger than the window, by turns.
        stride = -(-evidence.size // WINDOW)
        if stride > 1:
            kept = slice(self._num_seen % stride, None, stride)
            evidence, hits, verifiers = evidence[kept], hits[kept], verifiers[kept]
            num_verified, num_accepted = num_verified[kept], num_accepted[kept]
        positions = np.arange(evidence.shape[1])
        last_seen = np.minimum(num_accepted, num_verified - 1)
        # NaN is what cannot be learnt from, in the hits as well.
        usable = ~np.isnan(evidence) & np.isfinite(hits)[:, None]
        observed = (positions <= last_seen[:, None]) & usable
        rows, columns = np.nonzero(observed)
        if len(rows) == 0:
            return
        accepted = columns < num_accepted[rows]
        predicted = self.predict(evidence, hits, verifiers)[rows, columns]
        self._remember(evidence[rows, columns], hits[rows], verifiers[rows], columns, accepted)
        num_changed = self._detector.observe(predicted, accepted)
        if num_changed:
            self.num_changes += 1
            self._discount_past(num_changed)
            self._refit(CHANGE_ITERATIONS)
        elif self._num_since_refit >= self._refit_interval:
            self._refit(REFIT_ITERATIONS)

    def _remember(
        self,
        evidence: np.ndarray,  # [m]
        hits: np.ndarray,  # [m]
        verifiers: np.ndarray,  # [m]
        positions: np.ndarray,  # [m]
        accepted: np.ndarray,  # [m] bool
    ) -> None:
        """Write outcomes over the oldest ones; all that were there fade."""
        num_new = len(accepted)
        slots = (self._num_seen + np.arange(num_new)) % WINDOW
        self._weights *= np.float32(0.5 ** (num_new / HALF_LIFE))
        self._weights[slots] = 1.0
        self._labels[slots] = accepted
        features = np.zeros((num_new, self._features.shape[1]), dtype=np.float32)
        features[:, 0] = np.minimum(np.maximum(evidence, -MAX_LOG_ODDS), MAX_LOG_ODDS)
        features[:, 1] = hits
        features[:, 2] = verifiers == 1
        features[:, 3] = verifiers == 2
        features[np.arange(num_new), NUM_SHARED + positions] = 1.0
        self._features[slots] = features
        self._num_seen += num_new
        self._num_since_refit += num_new

    def _discount_past(self, num_changed: int) -> None:
        """Keep the latest outcomes as they are and let all before them nearly vanish."""
        latest = (self._num_seen - 1 - np.arange(min(num_changed, WINDOW))) % WINDOW
        kept = self._weights[latest]
        self._weights[latest] = 0.0
        past = float(self._weights.sum())
        allowed = PAST_AFTER_CHANGE * float(kept.sum())
        self._weights *= np.float32(min(1.0, allowed / max(past, 1e-9)))
        self._weights[latest] = kept

    def _refit(self, max_iterations: int) -> None:
        """Move the parameters to the maximum of the posterior, by Newton steps of bounded size."""
        num_kept = min(self._num_seen, WINDOW)
        features, labels = self._features[:num_kept], self._labels[:num_kept]
        weights = self._weights[:num_kept]
        parameters = self._parameters
        for _ in range(max_iterations):
            predicted = 1.0 / (1.0 + np.exp(-(features @ parameters.astype(np.float32))))
            pull = self._prior_precision @ (self._prior_mean - parameters)
            gradient = (weights * (labels - predicted)) @ features + pull
            curvature = weights * predicted * (1.0 - predicted)
            hessian = (features * curvature[:, None]).T @ features + self._prior_precision
            step = _solve_step(hessian, gradient, parameters[0])
            largest = float(np.abs(step).max())
            parameters = parameters + step * min(1.0, MAX_NEWTON_STEP / max(largest, 1e-9))
            if largest < 1e-3:
                break
        self._set_parameters(parameters)
        self._num_since_refit = 0
        self._refit_interval = max(MIN_REFIT_INTERVAL, REFIT_SHARE * float(weights.sum()))

    def _set_parameters(self, parameters: np.ndarray) -> None:
        self._parameters = parameters
        single = parameters.astype(np.float32)
        self._evidence_weight, self._hits_weight = single[0], single[1]
        self._verifier_offsets = np.array([0.0, single[2], single[3]], dtype=np.float32)
        self._intercepts = single[NUM_SHARED:]
        self._weight, self._intercept_list = float(single[0]), self._intercepts.tolist()


def _build_prior(num_positions: int, belief: Belief) -> tuple[np.ndarray, np.ndarray]:
    """Return the prior's mean [D] and precision [D, D]."""
    mean = np.full(NUM_SHARED + num_positions, belief.intercept)
    mean[:NUM_SHARED] = (belief.evidence_weight, belief.hits_weight, 0.0, 0.0)
    # Rows of what is independent a priori: the shared ones, the first intercept, differences.
    independent = np.eye(len(mean)) - np.eye(len(mean), k=-1)
    independent[: NUM_SHARED + 1] = np.eye(len(mean))[: NUM_SHARED + 1]
    stds = np.full(len(mean), belief.position_std)
    stds[:NUM_SHARED] = (belief.evidence_std, belief.hits_std) + (belief.verifier_std,) * 2
    stds[NUM_SHARED] = belief.intercept_std
    scaled = independent / stds[:, None]
    return mean, scaled.T @ scaled


def _solve_step(hessian: np.ndarray, gradient: np.ndarray, evidence_weight: float) -> np.ndarray:
    """Return the Newton step that does not take the weight of the evidence below zero."""
    step = np.linalg.solve(hessian, gradient)
    if evidence_weight + step[0] >= 0.0:
        return step
    # On the bound: the weight goes to zero and the others move as best they can.
    step[0] = -evidence_weight
    step[1:] = np.linalg.solve(hessian[1:, 1:], gradient[1:] - hessian[1:, 0] * step[0])
    return step
