"""Draft tokens by the number of running requests: vLLM's num_speculative_tokens_per_batch_size.

A table [first, last, k], measured by hand or by a sweep. It knows the load and nothing about the
drafts at hand.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.budget.base import BudgetDecision, BudgetInputs, DraftDecision, DraftInputs
from forerun.budget.policies.fixed import verify_all


class SchedulePolicy:
    """Depth by load, verified in full; the last range also serves every larger load."""

    name = "schedule"
    needs_confidence = False
    needs_costs = False

    def __init__(self, *, ranges: Sequence[tuple[int, int, int]]) -> None:
        assert ranges, "an empty schedule decides nothing"
        self._ranges = tuple(ranges)

    def choose_budget(self, inputs: BudgetInputs) -> BudgetDecision:
        """Return the largest budget that fits."""
        return verify_all(inputs)

    def choose_drafting(self, inputs: DraftInputs) -> DraftDecision:
        """Return the depth of the range this load is in."""
        for _, last, depth in self._ranges:
            if inputs.num_requests <= last:
                return DraftDecision(depth=depth)
        return DraftDecision(depth=self._ranges[-1][2])
