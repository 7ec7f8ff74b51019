"""Verify every draft that fits, always draft the same depth: what other engines do.

When the rows left are fewer than the drafts, positions fill up evenly: all first positions before
any second one (survival is 1 everywhere, so allocation falls to its position tie-break).
"""

from __future__ import annotations

from forerun.budget.base import BudgetDecision, BudgetInputs


class FixedPolicy:
    """Budget = all drafts, capped by the rows left; constant depth."""

    name = "fixed"

    def __init__(self, *, draft_depth: int) -> None:
        self.draft_depth = draft_depth

    def decide(self, inputs: BudgetInputs) -> BudgetDecision:
        """Return the largest budget that fits."""
        wanted = int(inputs.num_draft_tokens.sum())
        budget = min(wanted, inputs.max_verified)
        return BudgetDecision(verification_budget=budget, draft_depth=self.draft_depth)
