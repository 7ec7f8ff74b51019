"""Commit rules, refusals and failures of the engine, over the prefix-checking runner."""

from __future__ import annotations

import itertools

import pytest

from fakes import (
    EOS,
    PrefixCheckingRunner,
    collect_tokens,
    continue_greedily,
    count_up,
    draft_right,
    drain,
    make_engine,
    new_request,
)
from forerun.core import FinishReason

TEXT = b"the quick brown fox jumps"


def recite(prefix: list[int]) -> int:
    """A target that recites TEXT after a one-token prompt, then EOS."""
    position = len(prefix) - 1
    return TEXT[position] if position < len(TEXT) else EOS


def join_text(outputs: list) -> str:
    return "".join(output.text for output in outputs)


def run_recital(num_right: int, **params: object) -> list:
    runner = PrefixCheckingRunner(recite, draft=draft_right(recite, num_right))
    engine = make_engine(runner, num_speculative_tokens=5)
    engine.add(new_request("r", [1], **params))
    return drain(engine)


@pytest.mark.parametrize(
    ("stop_at", "max_tokens", "num_right"),
    list(itertools.product(range(1, 9), range(1, 9), (0, 2, 5))),
)
def test_stop_token_and_max_tokens_at_every_offset_of_a_block(
    stop_at: int, max_tokens: int, num_right: int
) -> None:
    """A stop id that falls on any offset of a verified block, crossed with max_tokens at any."""
    stop_token = TEXT[stop_at - 1]
    first = TEXT.index(stop_token) + 1
    outputs = run_recital(num_right, max_tokens=max_tokens, stop_token_ids=(stop_token,))
    committed = collect_tokens(outputs)["r", 0]
    last = outputs[-1]
    expected = min(first, max_tokens)
    assert committed == list(TEXT[:expected])
    assert last.num_output_tokens == expected
    if first <= max_tokens:
        assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, stop_token)
        assert join_text(outputs) == TEXT[: first - 1].decode()
    else:
        assert (last.finish_reason, last.stop_reason) == (FinishReason.LENGTH, None)
        assert join_text(outputs) == TEXT[:max_tokens].decode()


@pytest.mark.parametrize("num_right", [0, 1, 3, 5])
@pytest.mark.parametrize("stop", ["quick", "k b", "x", "the"])
def test_stop_string_cuts_text_but_counts_its_tokens(stop: str, num_right: int) -> None:
    outputs = run_recital(num_right, max_tokens=100, stop=(stop,))
    end = TEXT.decode().index(stop)
    assert join_text(outputs) == TEXT[:end].decode()
    assert outputs[-1].stop_reason == stop
    assert outputs[-1].num_output_tokens == end + len(stop)
    assert len(collect_tokens(outputs)["r", 0]) == end + len(stop)


def test_stop_string_can_be_kept() -> None:
    outputs = run_recital(5, max_tokens=100, stop=("quick",), include_stop_str_in_output=True)
    assert join_text(outputs) == "the quick"


@pytest.mark.parametrize("num_right", [0, 2, 5])
def test_eos_ends_the_text_and_is_counted(num_right: int) -> None:
    outputs = run_recital(num_right, max_tokens=100)
    assert join_text(outputs) == TEXT.decode()
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].stop_reason is None
    assert outputs[-1].num_output_tokens == len(TEXT) + 1


def test_ignore_eos_goes_on_to_max_tokens() -> None:
    outputs = run_recital(5, max_tokens=40, ignore_eos=True)
    assert outputs[-1].num_output_tokens == 40
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_stop_strings_wait_for_min_tokens() -> None:
    outputs = run_recital(5, max_tokens=100, stop=("e", "o"), min_tokens=8)
    assert join_text(outputs) == "the quick br"


def test_context_limit_ends_a_request_without_max_tokens() -> None:
    engine = make_engine(max_model_len=20)
    engine.add(new_request("r", [1, 2, 3], max_tokens=None))
    outputs = drain(engine)
    assert outputs[-1].num_output_tokens == 17
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_speculation_counts_are_exact() -> None:
    """Two of five drafts are right: every full step verifies 5, accepts 2, commits 3."""
    runner = PrefixCheckingRunner(count_up, draft=draft_right(count_up, 2))
    engine = make_engine(runner, num_speculative_tokens=5)
    engine.add(new_request("r", [1], max_tokens=22))
    messages = []
    while engine.has_work:
        messages.append(engine.step())
    stats = messages[-1].outputs[-1].spec_stats
    assert stats.accepted_per_step == [2] * 7
    assert stats.verified_per_step == [5] * 6 + [2]
    assert stats.num_accepted_tokens == 14
    assert stats.num_verified_tokens == 32
    assert stats.num_draft_tokens == 32
    assert sum(m.stats.num_committed_tokens for m in messages) == 22
    assert messages[1].stats.verified_per_position == [1, 1, 1, 1, 1]
    assert messages[1].stats.accepted_per_position == [1, 1]


def test_tokens_accepted_past_a_stop_are_not_counted() -> None:
    runner = PrefixCheckingRunner(count_up, draft=draft_right(count_up))
    engine = make_engine(runner)
    expected = continue_greedily(count_up, [1], 3)
    engine.add(new_request("r", [1], max_tokens=50, stop_token_ids=(expected[2],)))
    stats = drain(engine)[-1].spec_stats
    assert stats.num_accepted_tokens == 2
    assert stats.num_verified_tokens == 5


def test_failed_forward_fails_that_steps_requests_and_the_engine_survives() -> None:
    runner = PrefixCheckingRunner(count_up)
    engine = make_engine(runner, max_num_seqs=2)
    for name in ("a", "b", "c"):
        engine.add(new_request(name, [1, 2], max_tokens=3))
    runner.fail_next = True
    failed = engine.step().outputs
    assert {o.request_id for o in failed} == {"a", "b"}
    assert all(o.error.status == 500 and o.error.code == "step_failed" for o in failed)
    assert all(o.finish_reason is FinishReason.ERROR for o in failed)
    assert len(collect_tokens(drain(engine))["c", 0]) == 3
    assert sorted(runner.released) == ["a#0", "b#0", "c#0"]


def test_failing_drafter_costs_only_its_drafts() -> None:
    def broken(prefix: list[int], depth: int) -> list[int]:
        raise RuntimeError("no drafts today")

    engine = make_engine(PrefixCheckingRunner(count_up, draft=broken))
    engine.add(new_request("r", [1], max_tokens=5))
    assert collect_tokens(drain(engine))["r", 0] == continue_greedily(count_up, [1], 5)


def test_detokenizer_failure_fails_one_request_only() -> None:
    engine = make_engine()
    for name in ("good", "bad"):
        engine.add(new_request(name, [1], max_tokens=3))

    def explode(token_id: int) -> None:
        raise KeyError(token_id)

    engine._committer._streams["bad#0"].detokenizer.push = explode
    outputs = drain(engine)
    errors = {o.request_id: o.error for o in outputs if o.error}
    assert list(errors) == ["bad"]
    assert errors["bad"].status == 500
    assert len(collect_tokens(outputs)["good", 0]) == 3


def test_full_queue_is_a_503_with_retry_after_for_every_choice() -> None:
    engine = make_engine(max_waiting_requests=2)
    engine.add(new_request("fits", [1], n=2))
    engine.add(new_request("refused", [1], n=2))
    refused = [o for o in drain(engine) if o.request_id == "refused"]
    assert [o.choice_index for o in refused] == [0, 1]
    assert all(o.error.status == 503 and o.error.retry_after_s == 1 for o in refused)


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([], {}, "prompt"),
        ([999], {}, "prompt"),
        ([1] * 64, {}, "prompt"),
        ([1] * 60, {"max_tokens": 10}, "max_tokens"),
        ([1], {"logit_bias": ((300, 1.0),)}, "logit_bias"),
        ([1], {"stop_token_ids": (-1,)}, "stop_token_ids"),
        ([1], {"min_tokens": 64, "max_tokens": None}, "min_tokens"),
        ([1], {"n": 65}, "n"),
    ],
)
def test_refusals_name_the_field(prompt: list[int], params: dict, param: str) -> None:
    engine = make_engine(max_model_len=64)
    engine.add(new_request("r", prompt, **params))
    outputs = drain(engine)
    assert len(outputs) == params.get("n", 1)
    assert {(o.error.status, o.error.param) for o in outputs} == {(400, param)}


def test_request_larger_than_the_pool_is_refused_with_the_number_needed() -> None:
    engine = make_engine(num_blocks=9, max_model_len=400)
    engine.add(new_request("r", [1] * 10, max_tokens=30))
    (output,) = drain(engine)
    assert output.error.code == "kv_cache_too_small"
    assert "40 tokens" in output.error.message
    assert "10 blocks" in output.error.message


def test_abort_frees_running_and_waiting_choices() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.add(new_request("r", [1, 2], max_tokens=100, n=3))
    engine.step()
    engine.abort("r")
    engine.abort("unknown")
    outputs = drain(engine)
    assert [o.finish_reason for o in outputs] == [FinishReason.ABORT] * 3
    assert engine.scheduler.cache.usage_frac == 0.0
