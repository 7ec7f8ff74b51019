"""The adaptive policy in the real step loop, on a clock that only the runner moves.

The runner's target takes what a table says, its drafts are right with a set chance per position.
Loads: 1 (rows are free up to 8), 16 and 64 requests (every row costs). Everything is counted.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from fakes import PrefixCheckingRunner, collect_tokens, count_up, drain, make_engine, new_request
from forerun.budget.costs.profile import CostProfile
from forerun.engine.engine import Engine
from forerun.engine.messages import StepStats
from forerun.plan import DraftRequest, RequestDraft, StepPlan, StepResult

K = 7
LOADS = (1, 16, 64)


def make_profile(draft_ms: float = 0.01, next_ms: float = 0.0) -> CostProfile:
    """Return a table that is flat to 8 rows and linear from there on."""
    return CostProfile(
        verify_rows=np.array([1, 8, 16, 64, 512]),
        verify_ms=np.array([4.0, 4.2, 8.0, 32.0, 256.0]),
        request_ms=0.0,
        kv_token_ms=0.0,
        sampled_row_ms=0.0,
        filtered_row_ms=0.0,
        draft_requests=np.array([1, 64]),
        draft_first_ms=np.array([draft_ms, draft_ms]),
        draft_next_ms=np.array([next_ms, next_ms]),
        key={},
        source="test",
    )


class TimedRunner(PrefixCheckingRunner):
    """Moves `now_s` by what the profile says; drafts are right with chance `acceptance`."""

    def __init__(self, profile: CostProfile, acceptance: float) -> None:
        super().__init__(count_up, draft=self._draft, kv_block_size=16)
        self.profile = profile
        self.acceptance = acceptance
        self.slowdown = 1.0
        self.now_s = 0.0
        self._random = random.Random(5)

    def execute(self, plan: StepPlan) -> StepResult:
        self.now_s += self.slowdown * float(self.profile.verify(plan.num_rows)) / 1000
        return super().execute(plan)

    def draft(self, requests: Sequence[DraftRequest]) -> list[RequestDraft]:
        depth = max(request.depth for request in requests)
        self.now_s += float(self.profile.draft(len(requests), depth)) / 1000
        return super().draft(requests)

    def _draft(self, prefix: Sequence[int], depth: int) -> list[int]:
        tokens = list(prefix)
        for _ in range(depth):
            right = count_up(tokens)
            is_right = self._random.random() < self.acceptance
            tokens.append(right if is_right else right % 250 + 1)
        return tokens[len(prefix) :]


def start(num_requests: int, acceptance: float, profile: CostProfile | None = None):
    """Return (engine, runner) with requests that never end by themselves."""
    profile = profile or make_profile()
    runner = TimedRunner(profile, acceptance)
    engine = make_engine(
        runner,
        num_blocks=20_000,
        max_num_seqs=64,
        max_num_batched_tokens=1024,
        max_model_len=4096,
        num_speculative_tokens=K,
        enable_adaptive_verification=True,
        profile=profile,
        now_s=lambda: runner.now_s,
    )
    for index in range(num_requests):
        engine.add(new_request(f"r{index}", [index + 1, 2, 3], max_tokens=4000))
    return engine, runner


def run(engine: Engine, num_steps: int) -> list[StepStats]:
    return [engine.step().stats for _ in range(num_steps)]


def mean_verified(steps: Sequence[StepStats], num_requests: int) -> float:
    return sum(s.num_verified_tokens for s in steps) / len(steps) / num_requests


def best_depth(profile: CostProfile, num_requests: int, chance: float) -> int:
    """Return the equal depth of highest rate when everyone is accepted with this chance."""
    rates = []
    for depth in range(K + 1):
        tokens = num_requests * sum(chance**j for j in range(depth + 1))
        cost = float(profile.verify(num_requests * (1 + depth)))
        rates.append(tokens / cost)
    return int(np.argmax(rates))


@pytest.mark.parametrize("num_requests", LOADS)
@pytest.mark.parametrize("acceptance", [0.9, 0.1])
def test_budget_follows_the_objective_at_every_load(num_requests: int, acceptance: float) -> None:
    engine, _ = start(num_requests, acceptance)
    run(engine, 60)
    verified = mean_verified(run(engine, 60), num_requests)
    expected = best_depth(make_profile(), num_requests, acceptance)
    assert abs(verified - expected) <= max(0.6, 0.25 * expected), (verified, expected)


@pytest.mark.parametrize("num_requests", LOADS)
def test_drafting_stops_without_acceptance_and_is_back_when_it_returns(num_requests: int) -> None:
    engine, runner = start(num_requests, 0.9)
    run(engine, 100)
    runner.acceptance = 0.0
    run(engine, 50)
    silent = run(engine, 150)
    assert sum(s.num_drafting > 0 for s in silent) / len(silent) < 0.02
    assert engine.scheduler.budget.state == "drafting_does_not_pay"
    runner.acceptance = 0.9
    run(engine, 100)
    busy = run(engine, 50)
    expected = best_depth(make_profile(), num_requests, 0.9)
    if expected:
        assert mean_verified(busy, num_requests) > 0.5 * expected
        assert engine.scheduler.budget.state == "active"


def test_an_engine_that_starts_without_acceptance_stops_drafting() -> None:
    engine, _ = start(16, 0.0)
    run(engine, 50)
    assert sum(s.num_drafting > 0 for s in run(engine, 100)) < 2


@pytest.mark.parametrize("num_requests", LOADS)
def test_a_drafter_as_costly_as_half_the_target_is_switched_off_where_it_does_not_pay(
    num_requests: int,
) -> None:
    """Each draft token costs half a plain step, so being right three times of ten cannot pay."""
    half = 0.5 * float(make_profile().verify(num_requests))
    profile = make_profile(draft_ms=half, next_ms=half)
    engine, _ = start(num_requests, 0.3, profile)
    run(engine, 100)
    steps = run(engine, 100)
    assert sum(s.num_drafting > 0 for s in steps) < 3
    assert steps[-1].budget_state == "drafting_does_not_pay"


def test_depth_is_cut_where_every_further_token_costs() -> None:
    engine, _ = start(1, 0.8, make_profile(draft_ms=0.8, next_ms=0.8))
    run(engine, 100)
    steps = run(engine, 100)
    depth = sum(s.num_draft_tokens for s in steps) / max(1, sum(s.num_drafting for s in steps))
    rates = [
        sum(0.8**j for j in range(d + 1)) / (float(make_profile().verify(1 + d)) + 0.8 * d)
        for d in range(K + 1)
    ]
    assert abs(depth - int(np.argmax(rates))) <= 1.0


@pytest.mark.parametrize("slowdown", [0.4, 3.0])
def test_predicted_times_follow_a_machine_that_changes_speed(slowdown: float) -> None:
    engine, runner = start(4, 0.7)
    run(engine, 50)
    runner.slowdown = slowdown
    run(engine, 100)
    ratios = [s.predicted_step_s / s.step_s for s in run(engine, 50)]
    assert 0.9 < float(np.median(ratios)) < 1.1


def test_what_was_decided_never_changes_the_text() -> None:
    """The same requests with the policy on, and without any drafts."""
    texts = []
    for acceptance in (0.6, 0.0):
        profile = make_profile()
        runner = TimedRunner(profile, acceptance)
        engine = make_engine(
            runner,
            num_blocks=2000,
            num_speculative_tokens=K,
            enable_adaptive_verification=acceptance > 0,
            profile=profile,
            now_s=lambda runner=runner: runner.now_s,
        )
        for index in range(12):
            engine.add(new_request(f"r{index}", [index + 1, 2], max_tokens=20 + 11 * index))
        texts.append(collect_tokens(drain(engine)))
    assert texts[0] == texts[1]
