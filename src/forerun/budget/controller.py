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
from itertools import accumulate
from operator import mul

import numpy as np

from forerun.budget.base import BudgetInputs, BudgetPolicy
from forerun.budget.confidence.calibration import CalibrationSnapshot
from forerun.budget.confidence.model import ConfidenceModel
from forerun.budget.costs.model import CostModel, ModelledStep, StepShape
from forerun.budget.draft_planner import PROBE_ROWS, DraftPlanner
from forerun.budget.outcomes import OutcomeBuffer, Outcomes
from forerun.budget.request_memory import RequestMemory, find_slots
from forerun.budget.speed_up import SpeedUp
from forerun.budget.survival import allocate, compute_survival, mark_drafts
from forerun.core import Request
from forerun.plan import RequestDraft

# Values of `BudgetController.state` while the policy is adaptive; otherwise it names the policy.
ACTIVE = "active"
DOES_NOT_PAY = "drafting_does_not_pay"

_STEPS_PER_SNAPSHOT = 64
# For so few an array operation costs more than a loop.
_FEW_REQUESTS = 4


@dataclass(slots=True, kw_only=True)
class StepDecision:
    """The step under way as decided; times are predictions, 0 without a cost model."""

    num_rows: int = 0
    num_decoding: int = 0
    num_prompt_rows: int = 0
    num_accepted: int = 0
    plain_ms: float = 0.0  # the target's part without drafts
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
        self.decision = StepDecision()
        self._num_positions = num_positions
        self.planner = DraftPlanner(
            policy, self.memory, num_positions=num_positions, confidence=confidence, costs=costs
        )
        self.speed_up = SpeedUp()
        self._outcomes = OutcomeBuffer()
        self._num_steps = 0

    @property
    def state(self) -> str:
        """Whether verification adapts and drafting goes on, or why not: one word for a label."""
        if self.policy.name != "adaptive":
            return f"policy_{self.policy.name}"
        return ACTIVE if self.planner.decision.depth else DOES_NOT_PAY

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
        self._learn()
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
        step_ms = None
        self.decision = StepDecision(
            num_decoding=num_decoding, num_prompt_rows=shape.num_prompt_rows
        )
        if price is not None:
            self.decision.plain_ms = price.target_ms(0)
        if any(num_drafts):
            counts = np.array(num_drafts, dtype=np.int64)
            num_drafts, step_ms = self._admit(anchors, counts, max_verified, price)
            if not any(num_drafts):
                self.planner.note_idle_drafts()
        total = sum(num_drafts)
        self.decision.num_rows = shape.num_rows + total
        if price is not None:
            draft_ms = self.decision.draft_ms = price.draft_ms
            expected_ms = price.target_ms(total) if step_ms is None else step_ms - draft_ms
            self.decision.target_ms = expected_ms
        return num_drafts

    def choose_depths(self, candidates: Sequence[Request], num_context_tokens: int) -> list[int]:
        """Return how many tokens each request should draft for the next step."""
        return self.planner.choose_depths(candidates, num_context_tokens, self.decision.target_ms)

    def record(self, requests: Sequence[Request], drafts: Sequence[RequestDraft]) -> None:
        """Take in what the drafter proposed to these requests."""
        if not self.policy.needs_confidence or not requests:
            return
        assert self.confidence is not None
        if not any(draft.token_ids for draft in drafts):
            return
        if len(drafts) <= _FEW_REQUESTS:
            for request, draft in zip(requests, drafts, strict=True):
                self._record_one(request.slot, draft)
            return
        memory, slots = self.memory, find_slots(requests)
        counts = np.array([len(draft.token_ids) for draft in drafts], dtype=np.int64)
        is_draft = mark_drafts(counts, self._num_positions)
        hits, verifiers = memory.hits[slots], memory.verifier[slots]
        evidence = self.confidence.read_evidence(drafts, is_draft, verifiers)
        confidence = self.confidence.estimator.predict(evidence, hits, verifiers) * is_draft
        memory.earlier_survival[slots] = memory.survival[slots]
        memory.evidence[slots], memory.confidence[slots] = evidence, confidence
        memory.survival[slots] = compute_survival(confidence)
        memory.is_bound[slots] = [draft.is_drawn for draft in drafts]
        memory.is_new[slots] = False
        self.planner.recent.add(evidence, counts, hits, verifiers)

    def _record_one(self, slot: int, draft: RequestDraft) -> None:
        """Do the same for one request without array arithmetic, which costs more than the work."""
        assert self.confidence is not None
        memory, num_drafts = self.memory, len(draft.token_ids)
        verifier = int(memory.verifier[slot])
        evidence = self.confidence.read_one(draft, verifier)
        confidence = self.confidence.estimator.predict_one(
            evidence, float(memory.hits[slot]), verifier
        )
        if draft.is_drawn:
            memory.earlier_survival[slot] = memory.survival[slot]
        padding = [0.0] * (self._num_positions - num_drafts)
        memory.evidence[slot] = evidence + padding
        memory.survival[slot] = [*accumulate(confidence, mul), *padding]
        memory.confidence[slot] = confidence + padding
        memory.is_bound[slot] = draft.is_drawn
        memory.is_new[slot] = False
        if num_drafts:
            self.planner.recent.add_one(memory, slot, num_drafts)

    def observe(
        self, requests: Sequence[Request], num_verified: Sequence[int], num_accepted: Sequence[int]
    ) -> None:
        """Take in what verification said of these requests, all of which verified a draft."""
        if not self.policy.needs_confidence or not requests:
            return
        assert self.confidence is not None
        memory, slots = self.memory, [request.slot for request in requests]
        self.decision.num_accepted = sum(num_accepted)
        self._outcomes.add(
            Outcomes(
                slots=slots,
                evidence=memory.evidence[slots],
                hits=memory.hits[slots],
                verifiers=memory.verifier[slots],
                survival=memory.survival[slots],
                num_verified=list(num_verified),
                num_accepted=list(num_accepted),
            )
        )
        has_probes = self.planner.has_probes
        if has_probes:
            self.planner.finish_probes(slots, num_accepted)
        if has_probes or self._outcomes.is_due:
            self._learn()

    def observe_times(self, target_ms: float, draft_ms: float | None) -> None:
        """Take in how long the step took; `draft_ms` is None if nobody drafted."""
        if self.costs is None or self.decision.num_rows == 0:
            return
        decision = self.decision
        self.costs.observe_step(decision.num_rows, decision.target_ms, target_ms)
        if decision.num_prompt_rows == 0:
            self.speed_up.observe(
                decision.num_decoding + decision.num_accepted,
                decision.num_decoding,
                decision.plain_ms,
                decision.target_ms + decision.draft_ms,
            )
        if draft_ms is not None and self.planner.draft_ms > 0:
            self.costs.observe_draft(self.planner.draft_ms, draft_ms)

    def _learn(self) -> None:
        """Let estimator and statistics take in the outcomes that wait."""
        for part in self._outcomes.parts:
            self.memory.count_hits(part.slots, part.num_verified, part.num_accepted)
        outcomes = self._outcomes.take()
        if outcomes is None or self.confidence is None:
            return
        estimator = self.confidence.estimator
        num_changes = estimator.num_changes
        verified, accepted = np.array(outcomes.num_verified), np.array(outcomes.num_accepted)
        self.confidence.stats.observe(outcomes.survival, verified, accepted)
        estimator.observe(outcomes.evidence, outcomes.hits, outcomes.verifiers, verified, accepted)
        if estimator.num_changes != num_changes:
            self.planner.note_change()

    def _price(self, anchors: Sequence[Request], shape: StepShape) -> ModelledStep | None:
        if self.costs is None:
            return None
        if self.memory.has_sampled and anchors:
            row_ms = self.memory.row_ms[find_slots(anchors)]
            shape = replace(shape, row_ms=float(row_ms.sum()), sampling_ms=float(row_ms.mean()))
        return self.costs.price(shape, self.planner.draft_ms)

    def _admit(
        self,
        anchors: Sequence[Request],
        num_drafts: np.ndarray,
        max_verified: int,
        price: ModelledStep | None,
    ) -> tuple[list[int], float | None]:
        """Return admitted drafts per request, and what the step will cost if that is known."""
        memory = self.memory
        # A slice is a view: nothing below keeps or changes it.
        first = anchors[0].slot
        slots = slice(first, first + 1) if len(anchors) == 1 else find_slots(anchors)
        confidence = survival = planning = None
        planned = num_drafts
        if self.policy.needs_confidence:
            confidence, survival = memory.confidence[slots], memory.survival[slots]
            planning = survival
            is_bound = memory.is_bound[slots]
            if is_bound.any():
                planning = np.where(is_bound[:, None], memory.earlier_survival[slots], survival)
                # NOTE: where a drafter stops may be the last token's doing: plan as many as asked.
                is_open = is_bound & (num_drafts > 0)
                planned = np.where(is_open, self.planner.decision.depth or PROBE_ROWS, num_drafts)
        decision = self.policy.choose_budget(
            BudgetInputs(
                num_draft_tokens=planned,
                num_decoding=self.decision.num_decoding,
                max_verified=max_verified,
                rate=self._find_rate(price),
                confidence=confidence,
                planning_survival=planning,
                costs=price,
            )
        )
        if survival is None:
            survival = np.ones((len(anchors), self._num_positions), dtype=np.float32)
        wanted = np.minimum(decision.max_verified, num_drafts)
        counts = allocate(survival, wanted, decision.verification_budget)
        step_ms = decision.step_ms
        if self.planner.has_probes:
            is_probe = memory.is_probe[slots]
            counts = np.maximum(counts, np.minimum(num_drafts, PROBE_ROWS) * is_probe)
            counts = allocate(survival, counts, max_verified)
            step_ms = None
        return counts.tolist(), step_ms

    def _find_rate(self, price: ModelledStep | None) -> float | None:
        """Return the long-run tokens per ms at this load; None before the first step."""
        if price is None or not self.speed_up.is_known:
            return None
        decision = self.decision
        return self.speed_up.value * decision.num_decoding / price.plain_decode_ms()
