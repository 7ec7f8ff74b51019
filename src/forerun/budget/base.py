"""The BudgetPolicy contract: how many draft slots to verify, and who drafts next.

Pure Python and NumPy, no clock, no globals, no memory: the simulator runs the same code; what is
learnt from step to step lives in the controller. Two decisions, because the drafts at hand are paid
for and the next ones are not (design section 4).

Non-anticipating rule: whether draft token j is admitted may depend on tokens before j, on other
requests and on past steps, never on token j or later. Allocation by `survival`, ties broken by
(-survival, position, request), keeps the rule for a budget that keeps it; so a budget is chosen
from `planning_survival` alone, which holds no live number of a request that the rule binds.
Shapes: R requests with an anchor in the step, k draft positions, M remembered drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


class StepCosts(Protocol):
    """What the coming step costs in ms with 0 .. `most` draft rows, float64 [most + 1]."""

    @property
    def has_prompt_rows(self) -> bool:
        """Whether `decode` is another cost than `step`."""
        ...

    def step(self, most: int) -> np.ndarray:
        """Return the cost of the whole step."""
        ...

    def decode(self, most: int) -> np.ndarray:
        """Return what it would cost without its prompt rows."""
        ...


class DraftCosts(Protocol):
    """What a decode step of the requests that could draft costs in ms."""

    def verify(self, num_draft_rows: np.ndarray) -> np.ndarray:
        """Return the cost of the target's part with so many draft rows, [n] -> [n]."""
        ...

    def draft(self, num_requests: np.ndarray, depth: int) -> np.ndarray:
        """Return the cost of drafting for so many requests, [n] -> [n]."""
        ...


@dataclass(kw_only=True, slots=True)
class BudgetInputs:
    """The step as the policy sees it.

    `planning_survival[r, j]` is the chance that drafts 0..j of request r are all accepted, by older
    numbers where the rule above asks for them; entries at or past `num_draft_tokens[r]` are
    ignored. `num_decoding` requests get a token anyway; `max_verified` draft
    rows still fit. `rate` is what a millisecond is worth: the tokens the engine makes of one in the
    long run, at this load; None if that is not known yet. Policies get what they say they need, the
    rest is None.
    """

    num_draft_tokens: np.ndarray  # [R] int64
    num_decoding: int
    max_verified: int
    confidence: np.ndarray | None = None  # [R, k] float32
    planning_survival: np.ndarray | None = None  # [R, k] float32
    costs: StepCosts | None = None
    rate: float | None = None


@dataclass(kw_only=True, slots=True)
class BudgetDecision:
    """At most `verification_budget` drafts are verified, and `max_verified[r]` of request r.

    `step_ms` is what the policy expects the step to cost; None if it has no idea.
    """

    verification_budget: int
    max_verified: np.ndarray  # [R] int64
    step_ms: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftInputs:
    """The requests that could draft for the next step, and what recent drafts were like.

    `hits` is each request's own recent acceptance, in log-odds against the average (0: unknown).
    `recent_survival` and `recent_hits` replay remembered drafts as they would be judged now, zeros
    past their ends.
    """

    num_requests: int
    max_depth: int
    hits: np.ndarray | None = None  # [num_requests] float32
    recent_survival: np.ndarray | None = None  # [M, k] float32
    recent_hits: np.ndarray | None = None  # [M] float32
    costs: DraftCosts | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftDecision:
    """Requests whose hits reach `min_hits` draft `depth` tokens.

    `gain` is the expected gain in tokens per second over not drafting at all, as a fraction;
    `draft_ms` what the drafting is expected to cost, also if it was turned down for that.
    """

    depth: int
    min_hits: float = -np.inf
    gain: float = 0.0
    draft_ms: float = 0.0


class BudgetPolicy(Protocol):
    """Chooses the budget of a step and the drafting for the next one.

    `needs_confidence` and `needs_costs` say which optional inputs it reads.
    """

    name: str
    needs_confidence: bool
    needs_costs: bool

    def choose_budget(self, inputs: BudgetInputs) -> BudgetDecision:
        """Return how many drafts to verify; must not keep or change the inputs."""
        ...

    def choose_drafting(self, inputs: DraftInputs) -> DraftDecision:
        """Return who drafts and how deep; must not keep or change the inputs."""
        ...
