"""Sequential temperature scaling of confidences (DSpark section 3.2.1), with offsets.

From left to right, each position gets the temperature whose cumulative survival is closest to what
happened, those before it fixed. The paper publishes neither grid nor bins: here it is a grid of 61
between 1/4 and 4, evenly in logarithm, refined once around its best, with 20 equal-mass bins.
Beyond the paper, every temperature comes with the offset that makes the mean right: a temperature
alone only moves confidences away from 1/2 or towards it, and ours are too high on both sides.
Leaving all as it is is a candidate, so the error never grows on the drafts it is fitted to. The
order of confidences within a position stays.
Shapes: n drafts, k positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.budget.confidence.calibration import compute_ece
from forerun.evaluation.metrics import ECE_BINS
from forerun.evaluation.rollouts import Rollouts

_GRID = 2.0 ** np.linspace(-2.0, 2.0, 61)
_FINE = 2.0 ** np.linspace(-1 / 15, 1 / 15, 21)
_LARGEST_OFFSET = 4.0
_HALVINGS = 20
# Fewer outcomes than this say nothing about a position: it keeps the values before it.
MIN_OUTCOMES = 200
_EDGE = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """c becomes sigmoid(logit(c) / temperature + offset), by position."""

    temperatures: np.ndarray  # [k]
    offsets: np.ndarray  # [k]

    @classmethod
    def leave(cls, num_positions: int) -> Scaling:
        """Return the one that changes nothing."""
        return cls(np.ones(num_positions), np.zeros(num_positions))

    def apply(self, confidence: np.ndarray) -> np.ndarray:
        """Return scaled confidences [n, k]."""
        return _sigmoid(_logit(confidence) / self.temperatures + self.offsets)


def fit_scaling(rollouts: Rollouts) -> Scaling:
    """Return what makes the confidences of one verifier's drafts true.

    Raises ValueError where the drafter gave no confidences.
    """
    if not rollouts.has_confidence:
        raise ValueError("temperatures need a drafter with a confidence head.")
    logits = _logit(rollouts.confidence)
    found = Scaling.leave(rollouts.num_positions)
    survival = np.ones(rollouts.num_drafts)
    for position in range(rollouts.num_positions):
        known = rollouts.num_known > position
        if known.sum() < MIN_OUTCOMES:
            if position:
                found.temperatures[position:] = found.temperatures[position - 1]
                found.offsets[position:] = found.offsets[position - 1]
            break
        survived = (rollouts.num_accepted > position)[known].astype(np.float64)
        temperature, offset = _fit(logits[known, position], survival[known], survived)
        found.temperatures[position], found.offsets[position] = temperature, offset
        survival = survival * _sigmoid(logits[:, position] / temperature + offset)
    return found


def _fit(logits: np.ndarray, before: np.ndarray, survived: np.ndarray) -> tuple[float, float]:
    def judge(candidate: tuple[float, float]) -> tuple[float, float]:
        temperature, offset = candidate
        predicted = before * _sigmoid(logits / temperature + offset)
        return compute_ece(predicted, survived, ECE_BINS), abs(np.log(temperature))

    def complete(temperature: float) -> tuple[float, float]:
        return temperature, _find_offset(logits / temperature, before, float(survived.mean()))

    best = min((1.0, 0.0), *map(complete, _GRID.tolist()), key=judge)
    return min(best, *map(complete, (best[0] * _FINE).tolist()), key=judge)


def _find_offset(logits: np.ndarray, before: np.ndarray, wanted: float) -> float:
    """Return the offset at which the mean of predicted survival is what happened."""
    low, high = -_LARGEST_OFFSET, _LARGEST_OFFSET
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if float((before * _sigmoid(logits + middle)).mean()) < wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _logit(probability: np.ndarray) -> np.ndarray:
    clipped = np.clip(probability.astype(np.float64), _EDGE, 1 - _EDGE)
    logits: np.ndarray = np.log(clipped) - np.log1p(-clipped)
    return logits


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    chances: np.ndarray = 1.0 / (1.0 + np.exp(-logits))
    return chances
