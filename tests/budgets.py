"""Budget controllers, requests and cost tables for tests that need no engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forerun.budget import build_controller
from forerun.budget.controller import BudgetController
from forerun.budget.costs.model import StepShape
from forerun.budget.costs.profile import CostProfile
from forerun.config import SpeculativeConfig
from forerun.core import Request, SamplingParams
from forerun.plan import RequestDraft

GREEDY, STANDARD, COUPLED = range(3)


def make_profile(
    verify_rows: Sequence[int],
    verify_ms: Sequence[float],
    *,
    graph_rows: int = 0,
    draft_requests: Sequence[int] = (),
    draft_first_ms: Sequence[float] = (),
    draft_next_ms: Sequence[float] = (),
    sampled_row_ms: float = 0.0,
) -> CostProfile:
    """Return a cost table in which only rows cost something, unless more is given."""
    return CostProfile(
        verify_rows=np.array(verify_rows),
        verify_ms=np.array(verify_ms, dtype=np.float64),
        graph_rows=graph_rows,
        request_ms=0.0,
        kv_token_ms=0.0,
        sampled_row_ms=sampled_row_ms,
        filtered_row_ms=sampled_row_ms,
        draft_requests=np.array(draft_requests, dtype=np.int64),
        draft_first_ms=np.array(draft_first_ms, dtype=np.float64),
        draft_next_ms=np.array(draft_next_ms, dtype=np.float64),
        key={},
        source="test",
    )


def make_controller(
    profile: CostProfile | None,
    *,
    num_slots: int,
    num_positions: int,
    has_head: bool = True,
    min_gain: float = 0.0,
    threshold: float | None = None,
    looks_up: bool = False,
) -> BudgetController:
    """Return a controller of the adaptive policy, or of the threshold policy if one is given."""
    config = SpeculativeConfig(
        method="dspark",
        model="given",
        prompt_lookup=looks_up,
        num_speculative_tokens=num_positions,
        enable_adaptive_verification=threshold is None,
        confidence_threshold=threshold,
        adaptive_min_gain=min_gain,
    )
    return build_controller(config, num_slots=num_slots, profile=profile, has_head=has_head)


def open_requests(
    controller: BudgetController, count: int, verifiers: Sequence[int] = (STANDARD,)
) -> list[Request]:
    """Return running requests; their verifiers take turns."""
    requests = [
        Request(
            request_id=f"r{index}",
            parent_id=f"r{index}",
            params=SamplingParams(),
            token_ids=[0],
            num_prompt_tokens=1,
            seed=index,
        )
        for index in range(count)
    ]
    for index, request in enumerate(requests):
        controller.open(request, verifiers[index % len(verifiers)])
    return requests


def set_drafts(
    controller: BudgetController, requests: Sequence[Request], drafts: Sequence[RequestDraft]
) -> None:
    """Attach drafts to requests and let the controller see them, as the scheduler does."""
    for request, draft in zip(requests, drafts, strict=True):
        request.draft_token_ids = draft.token_ids
    controller.record(requests, drafts)


def choose_budget(
    controller: BudgetController,
    requests: Sequence[Request],
    *,
    num_prompt_rows: int = 0,
    max_verified: int = 2**31,
) -> list[int]:
    """Return the admitted drafts of each request in a step of one row each and prompt rows."""
    shape = StepShape(
        num_rows=len(requests) + num_prompt_rows,
        num_requests=len(requests),
        num_prompt_rows=num_prompt_rows,
    )
    return controller.choose_budget(requests, shape, len(requests), max_verified)
