"""Verify every draft that fits, always draft the same depth: what other engines do.

When the rows left are fewer than the drafts, positions fill up evenly: all first positions before
any second one (survival counts as 1 everywhere, so allocation falls to its position tie-break).
"""

from __future__ import annotations

from forerun.budget.base import BudgetDecision, BudgetInputs, DraftDecision, DraftInputs


def verify_all(inputs: BudgetInputs) -> BudgetDecision:
    """Return the largest budget that fits."""
    budget = min(int(inputs.num_draft_tokens.sum()), inputs.max_verified)
    return BudgetDecision(verification_budget=budget, max_verified=inputs.num_draft_tokens)


class FixedPolicy:
    """Budget = all drafts, capped by the rows left; constant depth."""

    name = "fixed"
    needs_confidence = False
    needs_costs = False

    def __init__(self, *, draft_depth: int) -> None:
        self._draft_depth = draft_depth

    def choose_budget(self, inputs: BudgetInputs) -> BudgetDecision:
        """Return the largest budget that fits."""
        return verify_all(inputs)

    def choose_drafting(self, inputs: DraftInputs) -> DraftDecision:
        """Return the constant depth for everyone."""
        return DraftDecision(depth=self._draft_depth)
