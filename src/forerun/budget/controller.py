"""What a policy decides on, gathered from step to step. No torch, no clock.

The policy is pure; here live its inputs: per-request memory, recent drafts, the estimator of
acceptance, the cost model. The scheduler asks for admitted counts and for draft depths, tells what
was proposed and what came of it, and the engine how long it took. All of it is a function of what
it is told: two controllers told the same decide the same.
Shapes: R requests asked about, k draft positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from forerun.budget.base import BudgetInputs, BudgetPolicy, DraftDecision, DraftInputs
from forerun.budget.calibration import CalibrationSnapshot
from forerun.budget.confidence import ConfidenceModel
from forerun.budget.cost_model import CostModel, ModelledDrafting, ModelledStep, StepShape
from forerun.budget.recent_drafts import RecentDrafts
from forerun.budget.request_memory import RequestMemory
from forerun.budget.survival import allocate, compute_survival, mark_drafts
from forerun.core import Request
from forerun.plan import RequestDraft

# Values of `BudgetController.state` while the policy is adaptive; otherwise it names the policy.
ACTIVE = "active"
DOES_NOT_PAY = "drafting_does_not_pay"

# Drafts kept for replays.
_NUM_RECENT = 256
# Steps between two looks at whether drafting pays.
_STEPS_PER_PLAN = 8
# Steps without drafting before a few requests try again; sooner after an acceptance that was less
# likely than this.
_STEPS_PER_PROBE = 75
_STEPS_AFTER_SURPRISE = 3
_SURPRISE = 0.25
_PROBE_SHARE = 16
_MAX_PROBES = 4
_PROBE_ROWS = 2
_STEPS_PER_SNAPSHOT = 64


@dataclass(slots=True, kw_only=True)
class StepDecision:
    """What was decided for the step under way; times are predictions."""

    num_admitted: list[int]
    num_rows: int = 0
    target_ms: float = 0.0
    draft_ms: float = 0.0


class BudgetController:
    """The state around a policy. One per scheduler; every request it is asked about has a slot."""

    def __init__(
        self,
        policy: BudgetPolicy,
        *,
        num_slots: int,
        num_positions: int,
        confidence: ConfidenceModel | None = None,
        costs: CostModel | None = None,
    ) -> None:
        assert confidence is not None or not policy.needs_confidence, policy.name
        assert costs is not None or not policy.needs_costs, policy.name
        self.policy = policy
        self.confidence = confidence
        self.costs = costs
        self.memory = RequestMemory(num_slots, num_positions)
        self.decision = StepDecision(num_admitted=[])
        self.drafting = DraftDecision(depth=num_positions)
        self.num_probes = 0
        self._num_positions = num_positions
        self._recent = RecentDrafts(_NUM_RECENT, num_positions)
        self._plan_age = 0
        self._plan_requests = 0
        self._steps_to_probe = _STEPS_PER_PROBE
        self._num_steps = 0

    @property
    def state(self) -> str:
        """Whether verification adapts and drafting goes on, or why not: one word for a label."""
        if self.policy.name != "adaptive":
            return f"policy_{self.policy.name}"
        return ACTIVE if self.drafting.depth else DOES_NOT_PAY

    def take_calibration(self) -> CalibrationSnapshot | None:
        """Return how true confidences have been so far, once in a while; call it every step."""
        self._num_steps += 1
        if self.confidence is None or self._num_steps % _STEPS_PER_SNAPSHOT:
            return None
        return self.confidence.stats.snapshot()

    def open(self, request: Request, verifier: int) -> None:
        """Give a request that starts running its memory."""
        row_ms = 0.0
        if self.costs is not None and verifier:
            profile, params = self.costs.profile, request.params
            row_ms = profile.filtered_row_ms if params.is_filtered else profile.sampled_row_ms
        request.slot = self.memory.open(verifier, row_ms)

    def close(self, request: Request) -> None:
        """Forget a request that stops running."""
        self.memory.close(request.slot)
        request.slot = -1

    def choose_budget(
        self, anchors: Sequence[Request], shape: StepShape, num_decoding: int, max_verified: int
    ) -> list[int]:
        """Return how many drafts of each request are verified in this step.

        `shape` is the step without drafts; it samples `num_decoding` tokens anyway.
        """
        num_drafts = [len(request.draft_token_ids) for request in anchors]
        price = self._price(anchors, shape)
        admitted = num_drafts
        if any(num_drafts):
            counts = np.array(num_drafts, dtype=np.int64)
            admitted = self._admit(anchors, counts, num_decoding, max_verified, price)
        self.decision = StepDecision(num_admitted=admitted, num_rows=shape.num_rows + sum(admitted))
        if price is not None:
            self.decision.target_ms = price.target_ms(sum(admitted))
            self.decision.draft_ms = price.draft_ms
        return admitted

    def choose_depths(self, candidates: Sequence[Request], num_context_tokens: int) -> list[int]:
        """Return how many tokens each request should draft for the next step."""
        if not candidates:
            return []
        self._plan_age += 1
        count = len(candidates)
        is_stale = self._plan_age >= _STEPS_PER_PLAN or count != self._plan_requests
        slots = _find_slots(candidates)
        if is_stale or not self.policy.needs_costs:
            self._plan(slots, num_context_tokens)
        if not self.policy.needs_confidence:
            return [self.drafting.depth] * count
        depths: list[int] = self._select(slots).tolist()
        return depths

    def record(self, requests: Sequence[Request], drafts: Sequence[RequestDraft]) -> None:
        """Take in what the drafter proposed to these requests."""
        if not self.policy.needs_confidence or not requests:
            return
        assert self.confidence is not None
        memory, slots = self.memory, _find_slots(requests)
        counts = np.array([len(draft.token_ids) for draft in drafts], dtype=np.int64)
        is_draft = mark_drafts(counts, self._num_positions)
        hits, verifiers = memory.hits(slots), memory.verifier[slots]
        evidence = self.confidence.read_evidence(drafts, is_draft, verifiers)
        confidence = self.confidence.estimator.predict(evidence, hits, verifiers)
        confidence[~is_draft] = 0.0
        memory.earlier_survival[slots] = memory.survival[slots]
        memory.evidence[slots], memory.confidence[slots] = evidence, confidence
        memory.survival[slots] = compute_survival(confidence)
        memory.num_drafts[slots] = counts
        memory.is_bound[slots] = [draft.is_drawn for draft in drafts]
        memory.is_new[slots] = False
        self._recent.add(evidence, counts, hits, verifiers)

    def observe(
        self, requests: Sequence[Request], num_verified: Sequence[int], num_accepted: Sequence[int]
    ) -> None:
        """Take in what verification said of these requests, all of which verified a draft."""
        if not self.policy.needs_confidence or not requests:
            return
        assert self.confidence is not None
        memory, slots = self.memory, _find_slots(requests)
        verified, accepted = np.array(num_verified), np.array(num_accepted)
        self.confidence.stats.observe(memory.survival[slots], verified, accepted)
        self.confidence.estimator.observe(
            memory.evidence[slots], memory.hits(slots), memory.verifier[slots], verified, accepted
        )
        memory.count_hits(slots, verified, accepted)
        if memory.is_probe[slots].any():
            self._plan_age = _STEPS_PER_PLAN
            if ((accepted > 0) & (memory.confidence[slots, 0] < _SURPRISE)).any():
                self._steps_to_probe = _STEPS_AFTER_SURPRISE
            memory.is_probe[slots] = False

    def observe_times(self, target_ms: float, draft_ms: float | None) -> None:
        """Take in how long the step took; `draft_ms` is None if nobody drafted."""
        if self.costs is None or self.decision.num_rows == 0:
            return
        self.costs.observe_step(self.decision.num_rows, self.decision.target_ms, target_ms)
        if draft_ms is not None and self.drafting.draft_ms > 0:
            self.costs.observe_draft(self.drafting.draft_ms, draft_ms)

    def _price(self, anchors: Sequence[Request], shape: StepShape) -> ModelledStep | None:
        if self.costs is None:
            return None
        row_ms = self.memory.row_ms[_find_slots(anchors)]
        if row_ms.any():
            shape = replace(shape, row_ms=float(row_ms.sum()), sampling_ms=float(row_ms.mean()))
        draft_ms = self.drafting.draft_ms if self.drafting.depth else 0.0
        return self.costs.price(shape, draft_ms)

    def _admit(
        self,
        anchors: Sequence[Request],
        num_drafts: np.ndarray,
        num_decoding: int,
        max_verified: int,
        price: ModelledStep | None,
    ) -> list[int]:
        inputs = BudgetInputs(
            num_draft_tokens=num_drafts,
            num_decoding=num_decoding,
            max_verified=max_verified,
            costs=price,
        )
        if not self.policy.needs_confidence:
            decision = self.policy.choose_budget(inputs)
            even = np.ones((len(anchors), self._num_positions), dtype=np.float32)
            counts = allocate(even, decision.max_verified, decision.verification_budget)
            return counts.tolist()  # type: ignore[no-any-return]
        memory, slots = self.memory, _find_slots(anchors)
        survival, is_bound = memory.survival[slots], memory.is_bound[slots]
        planning = survival
        if is_bound.any():
            planning = np.where(is_bound[:, None], memory.earlier_survival[slots], survival)
        inputs = replace(
            inputs,
            confidence=memory.confidence[slots],
            survival=survival,
            planning_survival=planning,
        )
        decision = self.policy.choose_budget(inputs)
        counts = allocate(survival, decision.max_verified, decision.verification_budget)
        if memory.is_probe[slots].any():
            wanted = np.minimum(num_drafts, _PROBE_ROWS) * memory.is_probe[slots]
            counts = np.maximum(counts, wanted)
            counts = allocate(survival, counts, max_verified)
        return counts.tolist()  # type: ignore[no-any-return]

    def _plan(self, slots: np.ndarray, num_context_tokens: int) -> None:
        """Decide anew who drafts and how deep."""
        self._plan_age, self._plan_requests = 0, len(slots)
        inputs = DraftInputs(num_requests=len(slots), max_depth=self._num_positions)
        if self.policy.needs_costs:
            inputs = self._add_recent(inputs, slots, num_context_tokens)
        self.drafting = self.policy.choose_drafting(inputs)

    def _add_recent(
        self, inputs: DraftInputs, slots: np.ndarray, num_context_tokens: int
    ) -> DraftInputs:
        assert self.costs is not None
        assert self.confidence is not None
        recent, memory = self._recent, self.memory
        row_ms = memory.row_ms[slots]
        shape = StepShape(
            num_rows=len(slots),
            num_requests=len(slots),
            num_context_tokens=num_context_tokens,
            row_ms=float(row_ms.sum()),
            sampling_ms=float(row_ms.mean()),
        )
        survival = None
        if len(recent):
            confidence = self.confidence.estimator.predict(
                recent.evidence, recent.hits, recent.verifiers
            )
            confidence[~mark_drafts(recent.num_drafts, self._num_positions)] = 0.0
            survival = compute_survival(confidence)
        return replace(
            inputs,
            hits=memory.hits(slots),
            recent_survival=survival,
            recent_hits=recent.hits if len(recent) else None,
            costs=ModelledDrafting(self.costs, shape),
        )

    def _select(self, slots: np.ndarray) -> np.ndarray:
        """Return the depth of each request: the plan's, or the probes' when nobody drafts."""
        memory, drafting = self.memory, self.drafting
        if drafting.depth:
            self._steps_to_probe = _STEPS_PER_PROBE
            depths = np.full(len(slots), drafting.depth, dtype=np.int64)
            if drafting.min_hits > -np.inf:
                idle = (memory.hits(slots) < drafting.min_hits) & ~memory.is_new[slots]
                depths[idle] = 0
                memory.fade(slots[idle])
            return depths
        depths = np.zeros(len(slots), dtype=np.int64)
        self._steps_to_probe -= 1
        if self._steps_to_probe <= 0:
            self._steps_to_probe = _STEPS_PER_PROBE
            count = min(_MAX_PROBES, max(1, len(slots) // _PROBE_SHARE))
            chosen = (self.num_probes + np.arange(count)) % len(slots)
            depths[chosen] = min(_PROBE_ROWS, self._num_positions)
            memory.is_probe[slots[chosen]] = True
            self.num_probes += count
        return depths


def _find_slots(requests: Sequence[Request]) -> np.ndarray:
    return np.fromiter((request.slot for request in requests), dtype=np.int64, count=len(requests))
