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
from itertools import compress

import numpy as np

from forerun.budget.base import BudgetInputs, BudgetPolicy
from forerun.budget.confidence.calibration import CalibrationSnapshot
from forerun.budget.confidence.model import ConfidenceModel
from forerun.budget.costs.model import CostModel, ModelledStep, StepShape
from forerun.budget.draft_planner import PROBE_ROWS, DraftPlanner
from forerun.budget.draft_source import DRAFTER, LOOKUP, DraftSource
from forerun.budget.request_memory import RequestMemory, find_slots
from forerun.budget.speed_up import SpeedUp
from forerun.budget.survival import allocate
from forerun.core import Request
from forerun.plan import RequestDraft

# Values of `BudgetController.state` while the policy is adaptive; otherwise it names the policy.
ACTIVE = "active"
DOES_NOT_PAY = "drafting_does_not_pay"

_STEPS_PER_SNAPSHOT = 64


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
    """The state around a policy. One per scheduler; every request it is asked about has a slot.

    `lookup_confidence` is there where requests' own text is looked up before the drafter is asked.
    """

    def __init__(
        self,
        policy: BudgetPolicy,
        *,
        num_slots: int,
        num_positions: int,
        confidence: ConfidenceModel | None = None,
        costs: CostModel | None = None,
        lookup_confidence: ConfidenceModel | None = None,
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
        self._drafter = self._lookups = None
        if confidence is not None:
            self._drafter = DraftSource(DRAFTER, self.memory, confidence, self.planner.recent)
        if lookup_confidence is not None:
            self._lookups = DraftSource(LOOKUP, self.memory, lookup_confidence)
        self._sources = [s for s in (self._drafter, self._lookups) if s is not None]
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

    def choose_depths(
        self,
        candidates: Sequence[Request],
        num_context_tokens: int,
        num_decoding: int | None = None,
    ) -> list[int]:
        """Return how many tokens each request should draft for the next step.

        `num_decoding` counts those too that have a draft already; by default there are none.
        """
        return self.planner.choose_depths(
            candidates,
            num_context_tokens,
            self.decision.target_ms,
            len(candidates) if num_decoding is None else num_decoding,
        )

    def choose_lookups(
        self, candidates: Sequence[Request], drafts: Sequence[RequestDraft]
    ) -> list[bool]:
        """Return which requests take the tokens that were looked up; the others may draft.

        A copy is taken where it is expected to bring more tokens than the drafter would, less what
        drafting costs. A function of what was committed before, so no token decides its admission.
        """
        assert self._lookups is not None, "nothing is looked up"
        decision, tokens_per_ms = self.decision, 0.0
        if decision.plain_ms > 0.0:
            tokens_per_ms = self.speed_up.value * decision.num_decoding / decision.plain_ms
        worth = self.planner.value_drafting(tokens_per_ms)
        is_taken = [
            bool(draft.token_ids) and sum(self._lookups.judge(request, draft)) > worth
            for request, draft in zip(candidates, drafts, strict=True)
        ]
        taken = list(compress(zip(candidates, drafts, strict=True), is_taken))
        if taken:
            self._lookups.record([request for request, _ in taken], [draft for _, draft in taken])
        return is_taken

    def record(self, requests: Sequence[Request], drafts: Sequence[RequestDraft]) -> None:
        """Take in what the drafter proposed to these requests."""
        if not self.policy.needs_confidence or not any(draft.token_ids for draft in drafts):
            return
        assert self._drafter is not None
        self._drafter.record(requests, drafts)

    def observe(
        self, requests: Sequence[Request], num_verified: Sequence[int], num_accepted: Sequence[int]
    ) -> None:
        """Take in what verification said of these requests, all of which verified a draft."""
        if not self.policy.needs_confidence or not requests:
            return
        slots = [request.slot for request in requests]
        self.decision.num_accepted = sum(num_accepted)
        for source in self._sources:
            source.observe(slots, num_verified, num_accepted)
        has_probes = self.planner.has_probes
        if has_probes:
            self.planner.finish_probes(slots, num_accepted)
        if has_probes or any(source.outcomes.is_due for source in self._sources):
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
        if draft_ms is not None and self.planner.draft_ms > 0 and self.planner.is_as_planned:
            self.costs.observe_draft(self.planner.draft_ms, draft_ms)

    def _learn(self) -> None:
        """Let every source take in the outcomes that wait."""
        has_changed = [source.learn() for source in self._sources]
        if any(has_changed):
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
