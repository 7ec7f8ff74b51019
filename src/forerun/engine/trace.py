"""One step of the budget in full: what was drafted, what was admitted and why, what came of it.

For people (`forerun generate --explain`), not for metrics: it is only put together when asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forerun.engine.messages import StepStats
from forerun.engine.scheduler import Scheduler
from forerun.plan import RequestDraft, RequestResult, StepPlan


@dataclass(slots=True, kw_only=True)
class RequestTrace:
    """The drafts of one request; survival is empty for policies that do not ask for it.

    `confidence` is what the drafter said, before any correction; empty for one without a head.
    """

    request_id: str
    draft_token_ids: list[int]
    survival: list[float]
    num_admitted: int
    confidence: list[float] = field(default_factory=list)
    num_accepted: int = 0
    emitted_token_ids: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class StepTrace:
    """A step; predicted times are 0 without a cost model."""

    step: int
    num_rows: int
    requests: list[RequestTrace]
    predicted_ms: float = 0.0
    measured_ms: float = 0.0
    draft_ms: float = 0.0
    state: str = ""

    def finish(self, results: Sequence[RequestResult], stats: StepStats) -> None:
        """Add what is known after the step."""
        for request, result in zip(self.requests, results, strict=True):
            request.num_accepted = result.num_accepted_tokens
            request.emitted_token_ids = result.token_ids
        self.predicted_ms = stats.predicted_step_s * 1000
        self.measured_ms = stats.step_s * 1000
        self.draft_ms = stats.draft_s * 1000
        self.state = stats.budget_state


def begin_trace(
    scheduler: Scheduler, plan: StepPlan, drafts: Mapping[str, RequestDraft]
) -> StepTrace:
    """Return what is known before the step runs; drafting overwrites it.

    `drafts` are the latest proposals, by request.
    """
    requests = []
    for scheduled in plan.requests:
        request = scheduler.requests[scheduled.request_id]
        survival: list[float] = []
        if scheduler.budget.policy.needs_confidence:
            row = scheduler.budget.memory.survival[request.slot]
            survival = row[: len(request.draft_token_ids)].tolist()
        requests.append(
            RequestTrace(
                request_id=scheduled.request_id,
                draft_token_ids=list(request.draft_token_ids),
                survival=survival,
                confidence=_find_confidence(drafts.get(scheduled.request_id)),
                num_admitted=len(scheduled.draft_token_ids),
            )
        )
    return StepTrace(step=plan.step, num_rows=plan.num_rows, requests=requests)


def _find_confidence(draft: RequestDraft | None) -> list[float]:
    return [] if draft is None or draft.confidence is None else draft.confidence
