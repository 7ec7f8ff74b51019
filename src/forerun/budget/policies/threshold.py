"""Verify up to the first draft whose confidence is below a constant.

The static rule of the DSpark paper's figure 5: it knows how good a draft is and nothing about the
load. Lossless without further care, since stopping at the first low confidence reads only the
tokens before it.
"""

from __future__ import annotations

import numpy as np

from forerun.budget.base import BudgetDecision, BudgetInputs, DraftDecision, DraftInputs


class ThresholdPolicy:
    """Cut at the first confidence below `threshold`; constant depth."""

    name = "threshold"
    needs_confidence = True
    needs_costs = False

    def __init__(self, *, threshold: float, draft_depth: int) -> None:
        self._threshold = threshold
        self._draft_depth = draft_depth

    def choose_budget(self, inputs: BudgetInputs) -> BudgetDecision:
        """Return the leading run of sufficient confidences of every request."""
        assert inputs.confidence is not None, "this policy needs confidences"
        leading = np.cumprod(inputs.confidence >= self._threshold, axis=1).sum(axis=1)
        wanted = np.minimum(leading, inputs.num_draft_tokens)
        budget = min(int(wanted.sum()), inputs.max_verified)
        return BudgetDecision(verification_budget=budget, max_verified=wanted)

    def choose_drafting(self, inputs: DraftInputs) -> DraftDecision:
        """Return the constant depth for everyone."""
        return DraftDecision(depth=self._draft_depth)
