"""The BudgetPolicy contract: how many draft slots to verify, and who drafts next.

Pure Python and NumPy, no clock, no globals: the simulator runs the same code. Non-anticipating
rule: the admission of draft token j may depend on tokens before j, on other requests and on past
steps, never on token j or later; `survival` is a function of prefixes, so allocating by it with
ties broken by (-survival, position, request) keeps the rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetInputs:
    """The step as the policy sees it.

    `survival[r, j]` is the chance that drafts 0..j of request r are all accepted; entries at or
    past `num_draft_tokens[r]` are ignored. `num_rows` counts rows already in the step (anchors and
    prefill chunks), `max_verified` how many draft rows still fit.
    """

    survival: np.ndarray  # [num_reqs, k] float32
    num_draft_tokens: np.ndarray  # [num_reqs] int64
    num_rows: int
    num_context_tokens: int
    max_verified: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetDecision:
    """`verification_budget` draft slots now; `draft_depth` tokens per request for the next step."""

    verification_budget: int
    draft_depth: int


class BudgetPolicy(Protocol):
    """Chooses the budget of a step."""

    name: str

    def decide(self, inputs: BudgetInputs) -> BudgetDecision:
        """Return the decision for this step; must not keep or change the inputs."""
        ...
