"""From what a drafter says to confidences: temperatures, estimator, statistics. No torch.

A confidence head's probability is corrected by the checkpoint's temperatures and then by outcomes,
if those contradict it; a drafter without a head gives evidence, which outcomes turn into
confidences. Either way what the policy sees is an estimate that keeps learning.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from forerun.budget.confidence.calibration import CalibrationStats, ConfidenceTemperatures
from forerun.budget.confidence.estimator import AcceptanceEstimator, EstimatorPrior
from forerun.logs import get_logger
from forerun.plan import RequestDraft

logger = get_logger(__name__)

# Confidences of 0 and 1 must stay finite in log-odds.
_LARGEST_LOGIT = 16.0


class ConfidenceModel:
    """Owns the estimator and the live calibration statistics of one engine."""

    def __init__(
        self,
        *,
        num_positions: int,
        has_head: bool,
        temperatures: ConfidenceTemperatures | None = None,
    ) -> None:
        prior = EstimatorPrior.IDENTITY if has_head else EstimatorPrior.HEADLESS
        self.estimator = AcceptanceEstimator(num_positions, prior)
        self.stats = CalibrationStats(num_positions)
        self._num_positions = num_positions
        self._temperatures = temperatures
        self._has_reported_nan = False

    def read_one(self, draft: RequestDraft, verifier: int) -> list[float]:
        """Return the evidence of one draft, without arrays where the drafter gives it as such."""
        if draft.evidence is not None:
            return draft.evidence
        is_draft = np.ones((1, len(draft.token_ids)), dtype=bool)
        rows: list[list[float]] = self.read_evidence(
            [draft], is_draft, np.array([verifier])
        ).tolist()
        return rows[0]

    def read_evidence(
        self, drafts: Sequence[RequestDraft], is_draft: np.ndarray, verifiers: np.ndarray
    ) -> np.ndarray:
        """Return the evidence of every draft slot in log-odds, [R, k], 0 where none is given."""
        evidence = np.zeros(is_draft.shape, dtype=np.float32)
        rows = [draft.evidence for draft in drafts if draft.evidence is not None]
        heads = [draft.confidence for draft in drafts if draft.confidence is not None]
        if len(rows) == len(drafts):
            evidence[is_draft] = _flatten(rows)
        elif len(heads) == len(drafts):
            confidence = np.full(is_draft.shape, 0.5, dtype=np.float32)
            confidence[is_draft] = _flatten(heads)
            if self._temperatures is not None:
                confidence = self._temperatures.apply(confidence, verifiers)
            evidence = _logit(confidence)
        if not self._has_reported_nan and np.isnan(evidence).any():
            self._has_reported_nan = True
            logger.warning("the drafter gave confidences that are not numbers; they count as 0")
        return evidence


def _logit(probability: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        logit = np.log(probability) - np.log1p(-probability)
    clipped: np.ndarray = np.clip(logit, -_LARGEST_LOGIT, _LARGEST_LOGIT)
    return clipped


def _flatten(rows: Sequence[Sequence[float]]) -> np.ndarray:
    return np.fromiter(chain.from_iterable(rows), dtype=np.float32)
