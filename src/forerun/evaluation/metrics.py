"""Figures of verified drafts: acceptance length, acceptance by position, calibration.

Acceptance length counts the token a round commits beyond the accepted drafts (bonus or correction),
as DSpark's tables do. Shapes: n drafts, k positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.budget.confidence.calibration import compute_auroc, compute_ece
from forerun.evaluation.rollouts import Rollouts

ECE_BINS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionFigures:
    """One draft position. `conditional` is None where nothing was judged, as are the others.

    `survival` is the share of drafts accepted up to here, `predicted` what the head expected of it.
    """

    num_judged: int
    conditional: float | None
    survival: float | None
    predicted: float | None = None
    ece: float | None = None
    auroc: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptanceFigures:
    """What a drafter reached on some drafts."""

    num_drafts: int
    acceptance_length: float
    positions: tuple[PositionFigures, ...]


def compute_survival(confidence: np.ndarray) -> np.ndarray:
    """Return the running product of confidences [n, k]."""
    survival: np.ndarray = np.cumprod(confidence, axis=1, dtype=np.float64)
    return survival


def measure(rollouts: Rollouts, survival: np.ndarray | None = None) -> AcceptanceFigures:
    """Return the figures of some drafts; `survival` [n, k] are predictions, if there are any."""
    if survival is None and rollouts.has_confidence:
        survival = compute_survival(rollouts.confidence)
    committed = rollouts.num_accepted + ~rollouts.ends_text
    positions = range(int(rollouts.num_known.max(initial=0)))
    return AcceptanceFigures(
        num_drafts=rollouts.num_drafts,
        acceptance_length=float(committed.mean()) if rollouts.num_drafts else float("nan"),
        positions=tuple(_measure_position(rollouts, survival, j) for j in positions),
    )


def _measure_position(
    rollouts: Rollouts, survival: np.ndarray | None, position: int
) -> PositionFigures:
    known = rollouts.num_known > position
    survived = rollouts.num_accepted[known] > position
    reached = rollouts.num_accepted[known] >= position
    predicted = None if survival is None else survival[known, position]
    is_both = 0 < survived.sum() < len(survived)
    return PositionFigures(
        num_judged=int(known.sum()),
        conditional=float(survived[reached].mean()) if reached.any() else None,
        survival=float(survived.mean()) if known.any() else None,
        predicted=None if predicted is None else float(predicted.mean()),
        ece=None if predicted is None else compute_ece(predicted, survived, ECE_BINS),
        auroc=None if predicted is None or not is_both else compute_auroc(predicted, survived),
    )
