"""Verify nothing and draft nothing: ordinary decoding through the same step."""

from __future__ import annotations

from forerun.budget.base import BudgetDecision, BudgetInputs


class NonePolicy:
    """Budget 0, depth 0."""

    name = "none"

    def decide(self, inputs: BudgetInputs) -> BudgetDecision:
        """Return a zero budget."""
        return BudgetDecision(verification_budget=0, draft_depth=0)
