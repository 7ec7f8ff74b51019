"""Who drafts for the next step and how deep: when to look, what to replay, whom to probe. No torch.

The policy decides; this keeps what it decided for some steps, because a look costs as much as a few
per cent of a small step and its answer seldom changes. Where nobody drafts, a few requests try
again once in a while: nothing else would tell that it pays again.
Shapes: N requests that could draft, k draft positions, M remembered drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from forerun.budget.base import BudgetPolicy, DraftDecision, DraftInputs
from forerun.budget.confidence.model import ConfidenceModel
from forerun.budget.costs.model import CostModel, ModelledDrafting, StepShape
from forerun.budget.recent_drafts import RecentDrafts
from forerun.budget.request_memory import RequestMemory, find_slots
from forerun.budget.survival import compute_survival, mark_drafts
from forerun.core import Request

# Rows that a probe verifies, and tokens it drafts.
PROBE_ROWS = 2

# Drafts kept for replays.
_NUM_RECENT = 256
# Steps between two looks: few where a wrong answer costs something, or after acceptance changed.
_STEPS_PER_PLAN = 16
_STEPS_PER_CHEAP_PLAN = 64
_CHEAP_SHARE = 0.02
_PLANS_AFTER_CHANGE = 3
# Or sooner, when the number of requests changed by more than this share.
_LOAD_CHANGE = 0.2
# A step whose drafts were all turned down makes the next look come sooner by so many steps.
_HASTE = 4
# Steps without drafting before a few requests try again; sooner after an acceptance that was less
# likely than this.
_STEPS_PER_PROBE = 75
_STEPS_AFTER_SURPRISE = 3
_SURPRISE = 0.25
_PROBE_SHARE = 16
_MAX_PROBES = 4


class DraftPlanner:
    """Owns the decision in force, the drafts it rests on, and the probes."""

    def __init__(
        self,
        policy: BudgetPolicy,
        memory: RequestMemory,
        *,
        num_positions: int,
        confidence: ConfidenceModel | None,
        costs: CostModel | None,
    ) -> None:
        self.decision = DraftDecision(depth=num_positions)
        self.recent = RecentDrafts(_NUM_RECENT, num_positions)
        self.num_probes = 0
        self.has_probes = False  # requests whose draft must be verified, whatever it is worth
        self._policy = policy
        self._memory = memory
        self._num_positions = num_positions
        self._confidence = confidence
        self._costs = costs
        self._age = 0
        self._lifetime = _STEPS_PER_PLAN
        self._num_decoding = 0  # when it was planned
        self._num_planned = 0  # of these, those the plan is for
        self._num_drafting = 0  # now
        self._num_expected = 0.0  # tokens that an average draft brings
        self._num_hasty_plans = 0
        self._steps_to_probe = _STEPS_PER_PROBE

    @property
    def draft_ms(self) -> float:
        """What drafting after a step is expected to cost; 0 where nobody drafts."""
        if not self.decision.depth:
            return 0.0
        return self.decision.draft_ms * self._num_drafting / max(1, self._num_planned)

    @property
    def is_as_planned(self) -> bool:
        """Whether about as many requests draft as the plan in force is for."""
        return abs(self._num_drafting - self._num_planned) <= _LOAD_CHANGE * self._num_planned

    def value_drafting(self, tokens_per_ms: float) -> float:
        """Return what the drafter gains a request: tokens, less those its time would give.

        0 where nobody drafts.
        """
        if not self.decision.depth:
            return 0.0
        cost = tokens_per_ms * self.decision.draft_ms / max(1, self._num_planned)
        return max(0.0, self._num_expected - cost)

    def choose_depths(
        self,
        candidates: Sequence[Request],
        num_context_tokens: int,
        step_ms: float,
        num_decoding: int,
    ) -> list[int]:
        """Return how many tokens each request drafts; a step takes about `step_ms` now.

        Of `num_decoding` requests, those that are no candidates need no drafter.
        """
        count = self._num_drafting = len(candidates)
        if self.has_probes:  # of requests that had nothing to draft
            self._memory.is_probe[:] = self.has_probes = False
        if not candidates:
            return []
        self._age += 1
        is_stale = (
            self._age >= self._lifetime
            or abs(num_decoding - self._num_decoding) > _LOAD_CHANGE * num_decoding
            or not self._policy.needs_costs
        )
        if is_stale:
            self._num_decoding = num_decoding
            self._plan(find_slots(candidates), num_context_tokens, step_ms)
        if self.decision.depth == 0 and self._policy.needs_costs:
            return self._probe(candidates)
        self._steps_to_probe = _STEPS_PER_PROBE
        if self.decision.min_hits == -np.inf:
            return [self.decision.depth] * count
        return self._select(find_slots(candidates))

    def note_idle_drafts(self) -> None:
        """Look sooner: drafts were made and none was worth verifying."""
        self._age += _HASTE

    def note_change(self) -> None:
        """Look at once, and again soon: acceptance is not what it was."""
        self._age = self._lifetime
        self._num_hasty_plans = _PLANS_AFTER_CHANGE

    def finish_probes(self, slots: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Look at once; probe again soon if one was accepted against expectation."""
        memory = self._memory
        for slot, accepted in zip(slots, num_accepted, strict=True):
            if memory.is_probe[slot] and accepted and memory.confidence[slot, 0] < _SURPRISE:
                self._steps_to_probe = _STEPS_AFTER_SURPRISE
            memory.is_probe[slot] = False
        self.has_probes = False
        self._age = self._lifetime

    def _plan(self, slots: np.ndarray, num_context_tokens: int, step_ms: float) -> None:
        """Decide anew who drafts and how deep."""
        self._age, self._num_planned = 0, len(slots)
        inputs = DraftInputs(num_requests=len(slots), max_depth=self._num_positions)
        if self._policy.needs_costs:
            inputs = self._add_recent(inputs, slots, num_context_tokens)
        self.decision = self._policy.choose_drafting(inputs)
        if inputs.recent_survival is not None:
            drafted = inputs.recent_survival[:, : self.decision.depth]
            self._num_expected = float(drafted.sum(axis=1).mean())
        is_cheap = self.decision.draft_ms <= _CHEAP_SHARE * step_ms
        is_calm = self._num_hasty_plans == 0
        self._num_hasty_plans = max(0, self._num_hasty_plans - 1)
        self._lifetime = _STEPS_PER_CHEAP_PLAN if is_cheap and is_calm else _STEPS_PER_PLAN

    def _add_recent(
        self, inputs: DraftInputs, slots: np.ndarray, num_context_tokens: int
    ) -> DraftInputs:
        """Add costs, and remembered drafts judged by what is known now."""
        assert self._costs is not None
        assert self._confidence is not None
        recent, memory = self.recent, self._memory
        row_ms = memory.row_ms[slots]
        shape = StepShape(
            num_rows=len(slots),
            num_requests=len(slots),
            num_context_tokens=num_context_tokens,
            row_ms=float(row_ms.sum()),
            sampling_ms=float(row_ms.mean()),
        )
        inputs = replace(
            inputs, hits=memory.hits[slots], costs=ModelledDrafting(self._costs, shape)
        )
        if not len(recent):
            return inputs
        confidence = self._confidence.estimator.predict(
            recent.evidence, recent.hits, recent.verifiers
        )
        confidence *= mark_drafts(recent.num_drafts, self._num_positions)
        survival = compute_survival(confidence)
        return replace(inputs, recent_survival=survival, recent_hits=recent.hits)

    def _select(self, slots: np.ndarray) -> list[int]:
        """Return the plan's depth for requests with enough hits, and for those not tried yet."""
        memory = self._memory
        idle = (memory.hits[slots] < self.decision.min_hits) & ~memory.is_new[slots]
        memory.fade(slots[idle])
        depths: list[int] = np.where(idle, 0, self.decision.depth).tolist()
        return depths

    def _probe(self, candidates: Sequence[Request]) -> list[int]:
        """Return depth 0 for all, or a few tokens for a few requests once in a while, by turns."""
        count = len(candidates)
        depths = [0] * count
        self._steps_to_probe -= 1
        if self._steps_to_probe > 0:
            return depths
        self._steps_to_probe = _STEPS_PER_PROBE
        num_chosen = min(_MAX_PROBES, max(1, count // _PROBE_SHARE))
        for turn in range(num_chosen):
            chosen = (self.num_probes + turn) % count
            depths[chosen] = min(PROBE_ROWS, self._num_positions)
            self._memory.is_probe[candidates[chosen].slot] = True
        self.has_probes = True
        self.num_probes += num_chosen
        return depths
