"""Verify nothing and draft nothing: ordinary decoding through the same step."""

from __future__ import annotations

import numpy as np

from forerun.budget.base import BudgetDecision, BudgetInputs, DraftDecision, DraftInputs


class NonePolicy:
    """Budget 0, depth 0."""

    name = "none"
    needs_confidence = False
    needs_costs = False

    def choose_budget(self, inputs: BudgetInputs) -> BudgetDecision:
        """Return a zero budget."""
        nothing = np.zeros_like(inputs.num_draft_tokens)
        return BudgetDecision(verification_budget=0, max_verified=nothing)

    def choose_drafting(self, inputs: DraftInputs) -> DraftDecision:
        """Return depth 0."""
        return DraftDecision(depth=0)
