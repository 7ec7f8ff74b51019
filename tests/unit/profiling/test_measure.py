"""Measuring a cost profile: a runner with a known law of costs, and one that must not notice.

The law's clock moves only inside of `execute` and `draft`, so every term comes out exactly.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from fakes import collect_tokens, drain, new_request
from forerun.plan import DraftRequest, RequestDraft, RequestResult, StepPlan, StepResult
from forerun.profiling.measure import MEASURED, MEASURED_BUSY, measure_profile
from forerun.profiling.shapes import (
    GREEDY,
    ProfileLimits,
    Shape,
    build_draft_requests,
    build_requests,
    grow,
    list_row_counts,
    shape_step,
)
from model_engines import KV_BLOCK_SIZE, make_model, make_model_engine


def make_limits(**changes: int) -> ProfileLimits:
    fields = {
        "max_num_batched_tokens": 256,
        "max_num_seqs": 64,
        "max_model_len": 4096,
        "max_draft_tokens": 3,
        "num_kv_blocks": 5000,
        "kv_block_size": 16,
        "vocab_size": 97,
    }
    return ProfileLimits(**{**fields, **changes})


@dataclass
class LawfulRunner:
    """Costs 2 ms, 0.05 a row, 0.2 a request, 0.001 a cached token, 0.0004 a later row and token.

    Sampling costs 0.01 a row, with filters 0.03; drafting 0.1 and 0.02 per request and token. The
    first run of a plan costs a hundred times as much, and all runs from number `slow_from` on.
    """

    now_ms: float = 0.0
    slow_from: int = 10**9
    live: set[str] = field(default_factory=set)
    executed: list[StepPlan] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    last: tuple[Any, ...] = ()

    def now_s(self) -> float:
        return self.now_ms / 1000.0

    def execute(self, plan: StepPlan) -> StepResult:
        requests = plan.requests
        params = requests[0].params
        ms = 2.0 + 0.05 * plan.num_rows + 0.2 * len(requests)
        for request in requests:
            later = request.num_rows - 1
            ms += (0.001 + 0.0004 * later) * request.num_computed_tokens
        if not params.is_greedy:
            ms += (0.01 if params.top_k == 0 else 0.03) * plan.num_rows
        self.executed.append(plan)
        self._spend(ms, ("step", plan.num_rows, len(requests), ms), requests)
        return StepResult(results=[RequestResult(request_id=r.request_id) for r in requests])

    def draft(self, requests: Sequence[DraftRequest]) -> list[RequestDraft]:
        depth = requests[0].depth
        self.drafted.append(len(requests))
        ms = len(requests) * (0.1 + 0.02 * (depth - 1))
        self._spend(ms, ("draft", len(requests), depth), requests)
        return [RequestDraft(request_id=r.request_id, token_ids=[]) for r in requests]

    def release(self, request_ids: Sequence[str]) -> None:
        self.live.difference_update(request_ids)
        self.last = ()

    def _spend(self, ms: float, what: tuple[Any, ...], requests: Sequence[Any]) -> None:
        is_first = what != self.last
        is_slow = len(self.executed) >= self.slow_from
        self.now_ms += ms * (100.0 if is_first else 1.0) * (3.0 if is_slow else 1.0)
        self.last = what
        self.live.update(request.request_id for request in requests)


def measure(runner: LawfulRunner, limits: ProfileLimits, **options: Any) -> Any:
    options = {"budget_s": 1e9, "count_lost": lambda: 0, **options}
    return measure_profile(runner, limits=limits, key={"a": "b"}, now_s=runner.now_s, **options)


def test_every_term_of_a_lawful_runner_is_found() -> None:
    runner = LawfulRunner()
    profile = measure(runner, make_limits())
    # The table prices the context of a request's first row too; the request is cheaper by that.
    row_context_ms = 0.0004 * 128
    assert profile.request_ms == pytest.approx(0.2 - row_context_ms)
    assert profile.kv_token_ms == pytest.approx(0.001)
    assert profile.row_token_ms == pytest.approx(0.0004)
    assert profile.context_tokens == 128
    assert profile.sampled_row_ms == pytest.approx(0.01)
    assert profile.filtered_row_ms == pytest.approx(0.03)
    rows = profile.verify_rows
    assert rows.tolist() == list_row_counts(256)
    assert profile.verify_ms == pytest.approx(2.0 + (0.05 + row_context_ms) * rows)
    assert profile.draft_requests.tolist() == [1, 2, 4, 8, 16, 32, 64]
    assert profile.draft_first_ms == pytest.approx(0.1 * profile.draft_requests)
    assert profile.draft_next_ms == pytest.approx(0.02 * profile.draft_requests)
    assert (profile.key, profile.source) == ({"a": "b"}, MEASURED)


@pytest.mark.parametrize("rows_each", [1, 2, 4])
@pytest.mark.parametrize("context", [16, 128, 3000])
def test_the_terms_add_up_to_what_any_step_costs(rows_each: int, context: int) -> None:
    runner = LawfulRunner()
    limits = make_limits()
    profile = measure(runner, limits)
    shape = Shape((rows_each,) * 10, context)
    plan = StepPlan(step=0, requests=build_requests(shape, limits, GREEDY))
    runner.execute(plan)
    started_ms = runner.now_ms
    runner.execute(plan)
    predicted = profile.verify(10 * rows_each) + profile.request_ms * 10
    predicted += profile.kv_token_ms * shape.num_context_tokens
    predicted += profile.row_token_ms * 10 * (rows_each - 1) * (context - profile.context_tokens)
    assert predicted == pytest.approx(runner.now_ms - started_ms)


def test_nothing_stays_behind_and_no_step_counter_comes_twice() -> None:
    runner = LawfulRunner()
    measure(runner, make_limits())
    assert runner.live == set()
    steps = [plan.step for plan in runner.executed]
    assert len(set(steps)) == len(steps)


def test_requests_are_released_when_a_step_fails() -> None:
    class FailingRunner(LawfulRunner):
        def execute(self, plan: StepPlan) -> StepResult:
            super().execute(plan)
            raise RuntimeError("out of memory")

    runner = FailingRunner()
    with pytest.raises(RuntimeError, match="out of memory"):
        measure(runner, make_limits())
    assert runner.live == set()


def test_without_a_drafter_nothing_is_drafted() -> None:
    runner = LawfulRunner()
    profile = measure(runner, make_limits(max_draft_tokens=0))
    assert runner.drafted == []
    assert len(profile.draft_requests) == 0
    assert profile.kv_token_ms == pytest.approx(0.001)
    assert all(len(request.draft_token_ids) <= 3 for p in runner.executed for request in p.requests)


def test_with_one_draft_token_there_is_no_further_one() -> None:
    profile = measure(LawfulRunner(), make_limits(max_draft_tokens=1))
    assert profile.draft_next_ms.tolist() == [0.0] * 7


def test_past_the_budget_sizes_and_repeats_are_left_out() -> None:
    runner = LawfulRunner()
    profile = measure(runner, make_limits(), budget_s=0.0)
    assert profile.verify_rows.tolist() == [1, 2]
    assert profile.draft_requests.tolist() == [1, 2]
    shapes = [tuple(r.num_rows for r in plan.requests) for plan in runner.executed]
    assert len(shapes) == 2 + 4 + 2 * 2 + 1
    assert runner.drafted == [1, 1, 2, 2]


def test_progress_ends_at_its_total() -> None:
    seen: list[tuple[int, int]] = []
    measure(LawfulRunner(), make_limits(), progress=lambda done, total: seen.append((done, total)))
    done = [count for count, _ in seen]
    assert done == sorted(done)
    assert {total for _, total in seen} == {done[-1]}
    assert done[-2] == done[-1], "the last measurement is the last point"


def test_a_machine_that_became_busy_is_noticed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("forerun"), "propagate", True)
    with caplog.at_level("WARNING", logger="forerun"):
        profile = measure(LawfulRunner(slow_from=40), make_limits())
    assert profile.source == MEASURED_BUSY
    assert "one of 1 rows took" in caplog.text


def test_a_machine_that_was_busy_all_along_is_noticed() -> None:
    """Steps took ten times as long from the first to the last, and were stored as the cost."""
    runner = LawfulRunner()
    for per_s, source in ((90.0, MEASURED), (110.0, MEASURED_BUSY)):
        profile = measure(
            runner, make_limits(), count_lost=lambda rate=per_s: int(rate * runner.now_s())
        )
        assert profile.source == source


def test_the_largest_step_is_measured_even_if_it_is_no_round_number() -> None:
    assert list_row_counts(20) == [1, 2, 3, 4, 6, 8, 12, 16, 20]
    assert list_row_counts(1) == [1]


def test_a_step_uses_as_few_requests_as_it_can() -> None:
    limits = make_limits()
    assert shape_step(3, limits) == Shape((3,), 128)
    assert shape_step(10, limits) == Shape((4, 4, 2), 128)
    lengthened = shape_step(256, make_limits(max_num_seqs=3))
    assert lengthened.rows == (86, 85, 85)


@pytest.mark.parametrize("max_model_len", [2, 5, 9, 40, 300])
@pytest.mark.parametrize("max_num_seqs", [1, 3, 64])
def test_no_step_is_longer_than_the_model_allows(max_model_len: int, max_num_seqs: int) -> None:
    runner = LawfulRunner()
    limits = make_limits(max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_draft_tokens=7)
    measure(runner, limits)
    for plan in runner.executed:
        assert len(plan.requests) <= max_num_seqs
        for request in plan.requests:
            assert request.samples
            assert 0 <= request.num_computed_tokens + request.num_rows <= max_model_len
            assert len(request.block_table) * 16 >= request.num_computed_tokens + request.num_rows


def test_requests_have_blocks_of_their_own_while_the_pool_lasts() -> None:
    shape = Shape((4,) * 8, 128)
    own = [r.block_table for r in build_requests(shape, make_limits(), GREEDY)]
    blocks = list(itertools.chain.from_iterable(own))
    assert sorted(blocks) == list(range(1, 8 * 9 + 1))
    shared = [r.block_table for r in build_requests(shape, make_limits(num_kv_blocks=20), GREEDY)]
    assert {block for table in shared for block in table} == set(range(1, 21))


def test_tokens_of_drafting_requests_repeat_as_they_grow() -> None:
    (request,) = build_draft_requests(1, 3, make_limits())
    before = len(request.token_ids)
    for _ in range(5):
        grow(request)
    assert len(request.token_ids) == before + 5
    assert request.num_drafter_computed_tokens == before + 4
    assert list(request.token_ids[-10:]) == list(request.token_ids[-58:-48])
    assert all(0 <= token < 97 for token in request.token_ids)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}])
def test_text_does_not_depend_on_whether_a_profile_was_taken(params: dict[str, Any]) -> None:
    prompts = {f"r{index}": [5, 6, 7, 8, 5, 6, 7, 8 + index] for index in range(3)}
    texts = []
    for is_profiled in (False, True):
        engine = make_model_engine(
            make_model(vocab_size=31), speculative_config={"num_speculative_tokens": 3}
        )
        if is_profiled:
            limits = make_limits(
                max_num_batched_tokens=64,
                max_num_seqs=8,
                max_model_len=engine.limits.max_model_len,
                num_kv_blocks=engine.limits.num_kv_blocks,
                kv_block_size=KV_BLOCK_SIZE,
                vocab_size=31,
            )
            runner = engine._runner
            profile = measure_profile(runner, limits=limits, key={})
            assert profile.verify_rows[-1] == 64
            assert runner._draft_probs == {}
            assert runner._drafter._indexes == {}
        for name, prompt in prompts.items():
            engine.add(new_request(name, prompt, max_tokens=24, **params))
        texts.append(collect_tokens(drain(engine)))
        engine.check_integrity()
    assert texts[0] == texts[1]
