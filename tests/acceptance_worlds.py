"""Synthetic traffic with known acceptance, and the loop that serves it: predict, then observe.

A world draws a step's evidence and hits for R requests and, for all k positions, whether the draft
would be accepted if those before it were. Shapes: R requests, k draft positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from forerun.budget.confidence.estimator import AcceptanceEstimator

NUM_POSITIONS = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafts:
    """One step of a world; `accepts` are outcomes nobody may see beyond the first rejection."""

    evidence: np.ndarray  # [R, k]
    hits: np.ndarray  # [R]
    verifiers: np.ndarray  # [R]
    accepts: np.ndarray  # [R, k] bool

    @property
    def num_acceptable(self) -> np.ndarray:
        """How many drafts [R] would be accepted if all were verified."""
        return np.cumprod(self.accepts, axis=1).sum(axis=1)


World = Callable[[int], Drafts]


class LogisticWorld:
    """Logistic in the logit of max q, with a slope of its own and intercepts that decay."""

    def __init__(self, seed: int, *, slope: float, intercept: float, decay: float) -> None:
        self._rng = np.random.default_rng(seed)
        self._slope, self._intercept, self._decay = slope, intercept, decay

    def __call__(self, num_requests: int) -> Drafts:
        shape = (num_requests, NUM_POSITIONS)
        evidence = self._rng.normal(1.5, 1.8, shape).astype(np.float32)
        verifiers = self._rng.integers(0, 3, num_requests).astype(np.int8)
        log_odds = self._slope * evidence + self._intercept - 0.4 * (verifiers == 1)[:, None]
        log_odds = log_odds - self._decay * np.arange(NUM_POSITIONS)
        return Drafts(
            evidence=evidence,
            hits=np.zeros(num_requests, dtype=np.float32),
            verifiers=verifiers,
            accepts=self._rng.random(shape) < 1.0 / (1.0 + np.exp(-log_odds)),
        )


class MatchWorld:
    """N-gram-like: log of a match length; requests differ a lot; a block shares its luck.

    `num_streams` requests take turns; each ends after some drafts and makes room for another.
    """

    def __init__(self, seed: int, *, num_streams: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._next_stream = 0
        self._base = self._rng.normal(0.0, 1.5, num_streams)
        self._num_left = self._rng.integers(20, 200, num_streams)
        self._recent = np.zeros((num_streams, 2))  # accepted and seen, fading

    def __call__(self, num_requests: int) -> Drafts:
        rng = self._rng
        ids = (self._next_stream + np.arange(num_requests)) % len(self._base)
        self._next_stream += num_requests
        self._replace_finished(ids)
        lengths = np.minimum(1 + rng.geometric(0.25, num_requests), 40)
        evidence = np.log(lengths)[:, None] + np.log1p(0.2 * np.arange(NUM_POSITIONS))
        luck = rng.normal(0.0, 1.0, num_requests)
        log_odds = (self._base[ids] + luck)[:, None] + 0.9 * (evidence - 1.2) + 0.2
        recent = self._recent[ids]
        hits = np.log((recent[:, 0] + 0.5) / (recent[:, 1] - recent[:, 0] + 0.5))
        drafts = Drafts(
            evidence=evidence.astype(np.float32),
            hits=hits.astype(np.float32),
            verifiers=np.zeros(num_requests, dtype=np.int8),
            accepts=rng.random(evidence.shape) < 1.0 / (1.0 + np.exp(-log_odds)),
        )
        num_accepted = drafts.num_acceptable
        num_seen = np.minimum(num_accepted + 1, NUM_POSITIONS)
        self._recent[ids] = 0.9 * recent + np.stack([num_accepted, num_seen], axis=1)
        return drafts

    def _replace_finished(self, ids: np.ndarray) -> None:
        self._num_left[ids] -= 1
        done = ids[self._num_left[ids] <= 0]
        self._base[done] = self._rng.normal(0.0, 1.5, len(done))
        self._num_left[done] = self._rng.integers(20, 200, len(done))
        self._recent[done] = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """Predictions and true outcomes of the drafts that were judged, flat."""

    confidence: np.ndarray
    accepted: np.ndarray
    survival: np.ndarray
    survived: np.ndarray


def serve(
    estimator: AcceptanceEstimator,
    worlds: list[tuple[World, int]],
    *,
    num_requests: int,
    num_unjudged: int,
    min_survival: float,
) -> Judged:
    """Serve each world for so many drafts, trimming by predicted survival; judge against truth.

    The first position is always verified. Confidence is judged where those before it would have
    been accepted, verified or not; survival everywhere.
    """
    parts: list[tuple[np.ndarray, ...]] = []
    num_served = 0
    for world, num_drafts in worlds:
        for _ in range(num_drafts // num_requests):
            drafts = world(num_requests)
            inputs = (drafts.evidence, drafts.hits, drafts.verifiers)
            confidence = estimator.predict(*inputs)
            survival = np.cumprod(confidence, axis=1)
            if num_served >= num_unjudged:
                reached = np.arange(NUM_POSITIONS) <= drafts.num_acceptable[:, None]
                survived = np.cumprod(drafts.accepts, axis=1)
                judged = (confidence[reached], drafts.accepts[reached])
                parts.append((*judged, survival.ravel(), survived.ravel()))
            num_verified = np.maximum((survival > min_survival).sum(axis=1), 1)
            num_accepted = np.minimum(drafts.num_acceptable, num_verified)
            estimator.observe(*inputs, num_verified, num_accepted)
            num_served += num_requests
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return Judged(
        confidence=columns[0], accepted=columns[1], survival=columns[2], survived=columns[3]
    )
