"""The drafter's own gap: what it is said to have K/V of, it really has, whatever happens.

A runner notes in every slot which prefix the drafter's layers hold there. When a request is said to
be computed up to a position, every slot before it must spell the request's own prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import (
    NextToken,
    PrefixCheckingRunner,
    collect_tokens,
    continue_greedily,
    count_up,
    draft_right,
    drain,
    make_engine,
    new_request,
)
from forerun.core import RequestOutput
from forerun.engine.engine import Engine
from forerun.plan import DraftRequest, RequestDraft

K = 3


class GapCheckingRunner(PrefixCheckingRunner):
    """Drafts for some of the requests asked, and computes like a draft model would."""

    def __init__(self, next_token: NextToken, *, num_right: int, skips: Sequence[bool]) -> None:
        super().__init__(next_token, draft=draft_right(next_token, num_right))
        self.drafter_slots: dict[int, tuple[int, ...]] = {}
        self.drafter_rows: dict[str, int] = {}
        self.mistakes: list[str] = []
        self._skips = skips
        self._num_asked = 0

    def draft(self, requests: Sequence[DraftRequest]) -> list[RequestDraft]:
        # NOTE: an engine survives a drafter that raises, so mistakes are kept until the end.
        try:
            return [self._draft(request) for request in requests]
        except (AssertionError, IndexError) as error:
            self.mistakes.append(repr(error))
            raise

    def _draft(self, request: DraftRequest) -> RequestDraft:
        known = request.num_drafter_computed_tokens
        assert known < len(request.token_ids), "the anchor itself is said to be computed"
        for position in range(known):
            held = self.drafter_slots.get(self._slot(request, position))
            assert held == tuple(request.token_ids[: position + 1]), (request.request_id, position)
        self._num_asked += 1
        if self._skips[self._num_asked % len(self._skips)]:
            return RequestDraft(
                request_id=request.request_id, token_ids=[], num_drafter_computed_tokens=known
            )
        drafts = self.draft_tokens(request.token_ids, request.depth)
        tokens = [*request.token_ids, *drafts]
        for position in range(known, len(tokens) - 1):
            self.drafter_slots[self._slot(request, position)] = tuple(tokens[: position + 1])
        rows = len(tokens) - 1 - known
        name = request.request_id
        self.drafter_rows[name] = self.drafter_rows.get(name, 0) + rows
        return RequestDraft(
            request_id=name, token_ids=drafts, num_drafter_computed_tokens=len(tokens) - 1
        )


def build(
    num_right: int, skips: Sequence[bool] = (False,), **options: object
) -> tuple[Engine, GapCheckingRunner]:
    runner = GapCheckingRunner(count_up, num_right=num_right, skips=skips)
    engine = make_engine(runner, num_speculative_tokens=K, num_lookahead_slots=K, **options)
    return engine, runner


def finish(engine: Engine, runner: GapCheckingRunner) -> list[RequestOutput]:
    outputs = drain(engine)
    assert runner.mistakes == []
    return outputs


REQUESTS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 30), st.integers(1, 3), st.integers(1, 14)),
    min_size=1,
    max_size=7,
)


@settings(max_examples=80, deadline=None)
@given(
    REQUESTS,
    st.integers(0, K),
    st.lists(st.booleans(), min_size=1, max_size=5),
    st.integers(14, 60),
    st.booleans(),
)
def test_what_counts_as_computed_is_computed(
    given_requests: list[tuple[int, int, int, int]],
    num_right: int,
    skips: list[bool],
    num_blocks: int,
    enable_prefix_caching: bool,
) -> None:
    """Random prompts with common prefixes, choices, preemption, and steps without drafting."""
    engine, runner = build(
        num_right,
        skips,
        num_blocks=num_blocks,
        max_num_batched_tokens=40,
        enable_prefix_caching=enable_prefix_caching,
    )
    prompts = {}
    for index, (family, length, n, max_tokens) in enumerate(given_requests):
        prompts[f"r{index}"] = [family + 1] * length, n, max_tokens
        prompt, _, _ = prompts[f"r{index}"]
        engine.add(new_request(f"r{index}", prompt, n=n, max_tokens=max_tokens))
        engine.step()
    tokens = collect_tokens(finish(engine, runner))
    for name, (prompt, n, max_tokens) in prompts.items():
        if len(prompt) + max_tokens > (num_blocks - 1) * 4:
            continue
        expected = continue_greedily(count_up, prompt, max_tokens)
        for choice in range(n):
            made = tokens.get((name, choice), [])
            assert made == expected[len(expected) - len(made) :]


def test_a_prefix_hit_brings_the_drafters_blocks_along() -> None:
    engine, runner = build(K)
    prompt = list(range(1, 42))
    for name in ("first", "again"):
        engine.add(new_request(name, prompt, max_tokens=3))
        finish(engine, runner)
    assert runner.drafter_rows["first#0"] == 41 + 1
    assert runner.drafter_rows["again#0"] == 1 + 1, "40 tokens in 10 blocks were there"


def test_sibling_choices_do_not_compute_the_prompt_again() -> None:
    engine, runner = build(K)
    engine.add(new_request("r", list(range(1, 42)), n=3, max_tokens=4))
    finish(engine, runner)
    assert runner.drafter_rows["r#0"] >= 41
    assert max(runner.drafter_rows["r#1"], runner.drafter_rows["r#2"]) < 41


def test_blocks_of_a_request_that_never_drafted_are_caught_up() -> None:
    engine, runner = build(K, [True])
    prompt = list(range(1, 42))
    engine.add(new_request("plain", prompt, max_tokens=4))
    finish(engine, runner)
    runner._skips = [False]
    engine.add(new_request("drafting", prompt, max_tokens=3))
    finish(engine, runner)
    assert runner.drafter_rows == {"drafting#0": 41 + 1}


def test_preemption_resets_the_gap_to_what_blocks_still_hold() -> None:
    engine, runner = build(1, num_blocks=17)
    for index in range(4):
        engine.add(new_request(f"r{index}", [index + 1] * 10, max_tokens=30))
    finish(engine, runner)
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize(("num_free", "num_drafts"), [(1, 0), (2, 2)])
def test_requests_draft_only_where_blocks_are_to_spare(num_free: int, num_drafts: int) -> None:
    """After the prompt's block: one more for the drafts, and one per running request stays free."""
    engine, runner = build(K, num_blocks=2 + num_free)
    engine.add(new_request("r", [1, 2, 3, 4], max_tokens=4))
    finish(engine, runner)
    assert runner.plans[:2] == [[("r#0", 4, 0)], [("r#0", 1, num_drafts)]]
