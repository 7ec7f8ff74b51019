"""Sequential temperature scaling: one temperature per draft position (DSpark section 3.2.1).

From left to right, each position gets the temperature whose cumulative survival is closest to what
happened, those before it fixed. The paper publishes neither grid nor bins: here it is a grid of 61
between 1/4 and 4, evenly in logarithm, refined once around its best, with 20 equal-mass bins. 1 is
in the grid, so the error never grows on the drafts it is fitted to. A temperature keeps the order
of confidences within a position.
Shapes: n drafts, k positions.
"""

from __future__ import annotations

import numpy as np

from forerun.budget.confidence.calibration import compute_ece
from forerun.evaluation.metrics import ECE_BINS
from forerun.evaluation.rollouts import Rollouts

_GRID = 2.0 ** np.linspace(-2.0, 2.0, 61)
_FINE = 2.0 ** np.linspace(-1 / 15, 1 / 15, 21)
# Fewer outcomes than this say nothing about a position: it keeps the temperature before it.
MIN_OUTCOMES = 200
_EDGE = 1e-6


def fit_temperatures(rollouts: Rollouts) -> np.ndarray:
    """Return a temperature per position [k] for the drafts of one verifier.

    Raises ValueError where the drafter gave no confidences.
    """
    if not rollouts.has_confidence:
        raise ValueError("temperatures need a drafter with a confidence head.")
    logits = _logit(rollouts.confidence)
    temperatures = np.ones(rollouts.num_positions)
    survival = np.ones(rollouts.num_drafts)
    for position in range(rollouts.num_positions):
        known = rollouts.num_known > position
        if known.sum() < MIN_OUTCOMES:
            temperatures[position:] = temperatures[position - 1] if position else 1.0
            break
        survived = rollouts.num_accepted > position
        temperatures[position] = _fit(
            logits[known, position], survival[known], survived[known].astype(np.float64)
        )
        survival = survival * _sigmoid(logits[:, position] / temperatures[position])
    return temperatures


def apply_temperatures(confidence: np.ndarray, temperatures: np.ndarray) -> np.ndarray:
    """Return tempered confidences [n, k]."""
    return _sigmoid(_logit(confidence) / temperatures)


def _fit(logits: np.ndarray, before: np.ndarray, survived: np.ndarray) -> float:
    def judge(temperature: float) -> tuple[float, float]:
        error = compute_ece(before * _sigmoid(logits / temperature), survived, ECE_BINS)
        return error, abs(np.log(temperature))

    best = min(_GRID, key=judge)
    return float(min([best, *(best * _FINE)], key=judge))


def _logit(probability: np.ndarray) -> np.ndarray:
    clipped = np.clip(probability.astype(np.float64), _EDGE, 1 - _EDGE)
    logits: np.ndarray = np.log(clipped) - np.log1p(-clipped)
    return logits


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    chances: np.ndarray = 1.0 / (1.0 + np.exp(-logits))
    return chances
