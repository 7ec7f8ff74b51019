"""Policies that know nothing of costs: none, fixed, schedule, threshold."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.budget.base import BudgetInputs, DraftInputs
from forerun.budget.policies.fixed import FixedPolicy
from forerun.budget.policies.none import NonePolicy
from forerun.budget.policies.schedule import SchedulePolicy
from forerun.budget.policies.threshold import ThresholdPolicy


def make_inputs(num_drafts: list[int], max_verified: int = 100, **more: object) -> BudgetInputs:
    return BudgetInputs(
        num_draft_tokens=np.array(num_drafts),
        num_decoding=len(num_drafts),
        max_verified=max_verified,
        **more,
    )


def draft_depth(policy: object, num_requests: int) -> int:
    return policy.choose_drafting(DraftInputs(num_requests=num_requests, max_depth=4)).depth


@pytest.mark.parametrize(("room", "budget"), [(100, 8), (5, 5), (0, 0)])
def test_fixed_policy_verifies_what_fits_and_always_drafts(room: int, budget: int) -> None:
    policy = FixedPolicy(draft_depth=4)
    decision = policy.choose_budget(make_inputs([4, 4], room))
    assert decision.verification_budget == budget
    assert draft_depth(policy, 1) == draft_depth(policy, 256) == 4


def test_none_policy_neither_verifies_nor_drafts() -> None:
    decision = NonePolicy().choose_budget(make_inputs([4, 4]))
    assert decision.verification_budget == 0
    assert draft_depth(NonePolicy(), 1) == 0


def test_schedule_goes_by_running_requests_and_its_last_range_has_no_end() -> None:
    policy = SchedulePolicy(ranges=[(1, 4, 5), (5, 16, 2), (17, 64, 0)])
    depths = {n: draft_depth(policy, n) for n in (1, 4, 5, 16, 17, 64, 65, 1000)}
    assert depths == {1: 5, 4: 5, 5: 2, 16: 2, 17: 0, 64: 0, 65: 0, 1000: 0}
    assert policy.choose_budget(make_inputs([5, 2, 0])).verification_budget == 7


def test_threshold_cuts_at_the_first_low_confidence() -> None:
    """A high confidence after a low one must not count: its token was drawn by then."""
    confidence = np.array([[0.9, 0.3, 0.99], [0.5, 0.5, 0.5], [0.2, 1.0, 1.0]], dtype=np.float32)
    policy = ThresholdPolicy(threshold=0.5, draft_depth=3)
    decision = policy.choose_budget(make_inputs([3, 2, 3], confidence=confidence))
    assert decision.max_verified.tolist() == [1, 2, 0]
    assert decision.verification_budget == 3
    tight = policy.choose_budget(make_inputs([3, 2, 3], 2, confidence=confidence))
    assert tight.verification_budget == 2
    assert draft_depth(policy, 99) == 3
