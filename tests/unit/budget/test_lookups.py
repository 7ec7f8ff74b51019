"""Copies of a request's own text beside a drafter: which is taken, and who learns from what."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from budgets import GREEDY, choose_budget, make_controller, make_profile, open_requests, set_drafts
from forerun.budget.controller import BudgetController
from forerun.core import Request
from forerun.plan import RequestDraft

DEPTH = 4
LONG, SHORT = 5.0, 1.0  # evidence: log2 of the length of a match


def make(draft_ms: float = 0.05) -> BudgetController:
    profile = make_profile(
        [1, 8, 16, 64],
        [1.0, 1.1, 1.2, 2.0],
        draft_requests=[1, 8],
        draft_first_ms=[draft_ms, draft_ms],
        draft_next_ms=[0.0, 0.0],
    )
    return make_controller(profile, num_slots=8, num_positions=DEPTH, looks_up=True)


def copy(request: Request, evidence: float, count: int = DEPTH) -> RequestDraft:
    return RequestDraft(
        request_id=request.request_id, token_ids=[7] * count, evidence=[evidence] * count
    )


def draft(request: Request, confidence: float) -> RequestDraft:
    return RequestDraft(
        request_id=request.request_id, token_ids=[9] * DEPTH, confidence=[confidence] * DEPTH
    )


def run_step(
    controller: BudgetController, requests: Sequence[Request], num_accepted: Sequence[int]
) -> None:
    """Verify all drafts in full, tell what came of them and how long it took."""
    choose_budget(controller, requests)
    counts = [len(request.draft_token_ids) for request in requests]
    controller.observe(requests, counts, num_accepted)
    controller.observe_times(controller.decision.target_ms, None)


def teach_drafter(controller: BudgetController, requests: Sequence[Request], hits: int) -> None:
    for _ in range(80):
        set_drafts(controller, requests, [draft(r, 0.5) for r in requests])
        run_step(controller, requests, [hits] * len(requests))
        controller.choose_depths(requests, 0)


def teach_lookups(
    controller: BudgetController, requests: Sequence[Request], outcomes: dict[float, int]
) -> None:
    """Copies of each evidence are always accepted so far."""
    for _ in range(80):
        for evidence, hits in outcomes.items():
            drafts = [copy(request, evidence) for request in requests]
            for request, one in zip(requests, drafts, strict=True):
                request.draft_token_ids = one.token_ids
            controller._lookups.record(requests, drafts)
            run_step(controller, requests, [hits] * len(requests))


def test_a_copy_is_taken_where_it_promises_more_than_the_drafter() -> None:
    controller = make()
    requests = open_requests(controller, 2, [GREEDY])
    teach_lookups(controller, requests, {LONG: DEPTH, SHORT: 0})
    teach_drafter(controller, requests, hits=2)
    long, short = copy(requests[0], LONG), copy(requests[1], SHORT)
    assert controller.choose_lookups(requests, [long, short]) == [True, False]


def test_nothing_found_is_never_taken() -> None:
    controller = make()
    requests = open_requests(controller, 2, [GREEDY])
    found = [copy(requests[0], LONG, count=0), copy(requests[1], LONG)]
    assert controller.choose_lookups(requests, found) == [False, True]


def test_where_drafting_does_not_pay_any_copy_is_taken() -> None:
    controller = make(draft_ms=50.0)
    requests = open_requests(controller, 2, [GREEDY])
    teach_lookups(controller, requests, {LONG: DEPTH, SHORT: 0})
    teach_drafter(controller, requests, hits=2)
    assert controller.choose_depths(requests, 0) == [0, 0]
    assert controller.choose_lookups(requests, [copy(r, SHORT) for r in requests]) == [True, True]


def test_outcomes_teach_the_source_they_came_from() -> None:
    controller = make()
    requests = open_requests(controller, 2, [GREEDY])
    drafter, lookups = controller._drafter, controller._lookups
    assert drafter is not None
    assert lookups is not None
    before = [draft(requests[0], 0.7), copy(requests[0], LONG)]
    first = drafter.judge(requests[0], before[0]), lookups.judge(requests[0], before[1])
    # In the same steps: the drafter is right, the copies are wrong.
    for _ in range(60):
        set_drafts(controller, requests[:1], [draft(requests[0], 0.7)])
        copied = copy(requests[1], LONG)
        requests[1].draft_token_ids = copied.token_ids
        lookups.record(requests[1:], [copied])
        run_step(controller, requests, [DEPTH, 0])
    controller._learn()
    controller.memory.hits[:] = 0.0
    assert drafter.judge(requests[0], before[0])[0] > first[0][0] + 0.1
    assert lookups.judge(requests[0], before[1])[0] < first[1][0] - 0.3


def test_drafting_is_priced_by_those_who_draft() -> None:
    controller = make()
    requests = open_requests(controller, 4, [GREEDY])
    teach_drafter(controller, requests, hits=3)
    controller.planner.note_change()
    controller.choose_depths(requests, 0)
    whole = controller.planner.draft_ms
    assert whole > 0.0
    assert controller.planner.is_as_planned
    controller.choose_depths(requests[:1], 0, num_decoding=4)
    assert controller.planner.draft_ms == pytest.approx(whole / 4)
    assert not controller.planner.is_as_planned
    controller.choose_depths([], 0, num_decoding=4)
    assert controller.planner.draft_ms == 0.0
