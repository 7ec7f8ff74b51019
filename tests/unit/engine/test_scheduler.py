"""Row accounting, preemption and admission of the scheduler, over the prefix-checking runner."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import (
    PrefixCheckingRunner,
    collect_tokens,
    continue_greedily,
    count_up,
    draft_right,
    drain,
    make_engine,
    new_request,
)


def test_new_prompt_makes_progress_every_step_beside_32_full_speculators() -> None:
    """Design rule 5: 32 streams at k = 7 want 256 rows; a new prompt must not wait for them."""
    runner = PrefixCheckingRunner(count_up, draft=draft_right(count_up, 0), kv_block_size=16)
    engine = make_engine(
        runner, num_blocks=2000, max_num_seqs=64, num_speculative_tokens=7, max_model_len=2048
    )
    for index in range(32):
        engine.add(new_request(f"r{index}", [index + 1, 2, 3], max_tokens=500))
    for _ in range(4):
        engine.step()
    assert runner.plans[-1] == [(f"r{i}#0", 1, 7) for i in range(32)], "all rows are in use"
    prompt = [7] * 1000
    engine.add(new_request("new", prompt, max_tokens=4))
    taken = []
    while sum(taken) < len(prompt):
        engine.step()
        taken += [rows for name, rows, _ in runner.plans[-1] if name == "new#0"]
        assert len(taken) == len(runner.plans) - 4, "the prompt was left out of a step"
        total = sum(rows + drafts for _, rows, drafts in runner.plans[-1])
        assert total <= 256
        assert sum(1 for name, _, _ in runner.plans[-1] if name != "new#0") == 32
    assert taken[0] == 256 - 32, "anchors first, then the prompt, drafts from what is left"


def test_prompts_leave_the_gaps_of_decoding_requests_short() -> None:
    """Two new prompts share 50 rows a step beside one that decodes, and get all 256 without it."""
    runner = PrefixCheckingRunner(count_up)
    engine = make_engine(runner, num_blocks=400, max_prefill_while_decoding=50)
    engine.add(new_request("decoding", [1, 2], max_tokens=5))
    engine.step()
    for token, name in enumerate(("long", "next"), start=7):
        engine.add(new_request(name, [token] * 400, max_tokens=1))
    for _ in range(4):
        engine.step()
    assert runner.plans[1:5] == [[("decoding#0", 1, 0), ("long#0", 50, 0)]] * 4
    engine.step()
    engine.step()
    assert runner.plans[5:7] == [
        [("long#0", 200, 0), ("next#0", 56, 0)],
        [("next#0", 256, 0)],
    ]


def test_absent_requests_pay_nothing() -> None:
    """One prompt alone gets the whole token budget whatever max_num_seqs and k are."""
    runner = PrefixCheckingRunner(count_up)
    engine = make_engine(runner, max_num_seqs=200, num_speculative_tokens=7)
    engine.add(new_request("only", [1] * 300, max_tokens=1))
    engine.step()
    assert runner.plans[0] == [("only#0", 256, 0)]


def test_drafts_fill_positions_evenly_when_rows_are_short() -> None:
    runner = PrefixCheckingRunner(count_up, draft=draft_right(count_up, 0))
    engine = make_engine(runner, max_num_seqs=4, max_num_batched_tokens=11)
    for index in range(4):
        engine.add(new_request(f"r{index}", [index + 1], max_tokens=50))
    engine.step()
    engine.step()
    assert [drafts for _, _, drafts in runner.plans[-1]] == [2, 2, 2, 1]


def test_drafts_are_clipped_to_remaining_tokens() -> None:
    runner = PrefixCheckingRunner(count_up, draft=draft_right(count_up))
    engine = make_engine(runner, num_speculative_tokens=5)
    engine.add(new_request("r", [1], max_tokens=4))
    outputs = drain(engine)
    assert collect_tokens(outputs)["r", 0] == continue_greedily(count_up, [1], 4)
    assert runner.plans == [[("r#0", 1, 0)], [("r#0", 1, 2)]], "1 token, then 2 drafts + 1"


def test_preemption_by_recompute_changes_no_output() -> None:
    """Eight requests that together need four times the pool all finish with the right tokens."""
    runner = PrefixCheckingRunner(count_up, draft=draft_right(count_up, 2))
    engine = make_engine(runner, num_blocks=17, max_model_len=64)
    for index in range(8):
        engine.add(new_request(f"r{index}", [index + 1] * 5, max_tokens=30))
    tokens = collect_tokens(drain(engine))
    assert engine.scheduler.num_preemptions > 0
    for index in range(8):
        assert tokens[f"r{index}", 0] == continue_greedily(count_up, [index + 1] * 5, 30)
    assert engine.scheduler.cache.usage_frac == 0.0


def test_drafts_yield_before_anyone_is_preempted() -> None:
    """A full pool costs drafts, not other requests' work."""
    runner = PrefixCheckingRunner(count_up, draft=draft_right(count_up, 0))
    engine = make_engine(runner, num_blocks=5, max_model_len=16, enable_prefix_caching=False)
    engine.add(new_request("a", [1] * 6, max_tokens=2))
    engine.add(new_request("b", [2] * 6, max_tokens=2))
    drain(engine)
    assert engine.scheduler.num_preemptions == 0


def test_prefix_hit_skips_whole_blocks_and_is_reported() -> None:
    runner = PrefixCheckingRunner(count_up, kv_block_size=4)
    engine = make_engine(runner)
    prompt = list(range(1, 14))
    for name in ("first", "second"):
        engine.add(new_request(name, prompt, max_tokens=2))
        outputs = drain(engine)
    assert outputs[-1].num_cached_tokens == 12
    assert runner.plans[2] == [("second#0", 1, 0)], "13 tokens: 12 cached, 1 computed"


@pytest.mark.parametrize("length", [4, 7, 8, 9, 12])
def test_fully_cached_prompt_still_computes_at_least_one_row(length: int) -> None:
    runner = PrefixCheckingRunner(count_up, kv_block_size=4)
    engine = make_engine(runner)
    prompt = list(range(1, length + 1))
    tokens = []
    for name in ("first", "second"):
        engine.add(new_request(name, prompt, max_tokens=3))
        tokens.append(collect_tokens(drain(engine))[name, 0])
    assert tokens[0] == tokens[1] == continue_greedily(count_up, prompt, 3)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_choices_of_one_prompt_share_its_full_blocks(enable_prefix_caching: bool) -> None:
    runner = PrefixCheckingRunner(count_up, kv_block_size=4)
    engine = make_engine(runner, enable_prefix_caching=enable_prefix_caching)
    engine.add(new_request("r", list(range(1, 42)), max_tokens=3, n=3))
    engine.step()
    engine.step()
    tables = [engine.scheduler.cache.block_table(r) for r in engine.scheduler.running]
    assert len(tables) == 3
    assert tables[0][:10] == tables[1][:10] == tables[2][:10]
    assert len({table[10] for table in tables}) == 3, "the partial block is each one's own"
    prompt_rows = sum(rows for _, rows, _ in runner.plans[0] + runner.plans[1])
    assert prompt_rows == 41 + 1 + 2, "one full prompt, then one row for each choice"
    drain(engine)


def test_max_num_seqs_bounds_running_requests() -> None:
    engine = make_engine(max_num_seqs=3)
    for index in range(8):
        engine.add(new_request(f"r{index}", [1, 2], max_tokens=5))
    peak = 0
    while engine.has_work:
        engine.step()
        peak = max(peak, len(engine.scheduler.running))
    assert peak == 3


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=40), min_size=1, max_size=12),
    num_blocks=st.integers(20, 60),
    rows=st.integers(8, 64),
    num_right=st.integers(0, 4),
    aborts=st.sets(st.integers(0, 11)),
)
def test_any_load_gives_the_targets_own_tokens(
    prompts: list[list[int]], num_blocks: int, rows: int, num_right: int, aborts: set[int]
) -> None:
    """Random prompts with shared prefixes, small pools, few rows, aborts: outputs are the target's,
    budgets hold in every step and nothing leaks."""
    runner = PrefixCheckingRunner(count_up, draft=draft_right(count_up, num_right))
    engine = make_engine(
        runner, num_blocks=num_blocks, max_num_batched_tokens=rows, max_num_seqs=8, max_model_len=76
    )
    for index, prompt in enumerate(prompts):
        engine.add(new_request(f"r{index}", prompt, max_tokens=20, n=1 + index % 2))
    outputs = []
    for _ in range(3):
        outputs += engine.step().outputs
        engine.check_integrity()
    for index in aborts:
        engine.abort(f"r{index}")
    tokens = collect_tokens(outputs + drain(engine))
    for index, prompt in enumerate(prompts):
        expected = continue_greedily(count_up, prompt, 20)
        for choice in range(1 + index % 2):
            got = tokens.get((f"r{index}", choice), [])
            assert got == expected[: len(got)]
            assert index in aborts or got == expected
    for plan in runner.plans:
        assert sum(new + drafts for _, new, drafts in plan) <= rows
        assert len(plan) <= 8
    assert engine.scheduler.cache.usage_frac == 0.0
