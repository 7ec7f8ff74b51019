"""Which requests are let in, where the KV pool is smaller than the context."""

from __future__ import annotations

import pytest

from fakes import PrefixCheckingRunner, collect_tokens, count_up, drain, make_engine, new_request
from forerun.core import FinishReason
from forerun.engine.admission import check_request
from forerun.errors import RequestError


def make_small_engine():
    """Return an engine whose context is 512 tokens and whose pool holds fewer, and how many."""
    runner = PrefixCheckingRunner(count_up)
    engine = make_engine(runner, num_blocks=9)
    return engine, 8 * runner.kv_block_size


def test_without_max_tokens_the_output_ends_where_the_pool_does() -> None:
    engine, num_kv_tokens = make_small_engine()
    engine.add(new_request("a", [1, 2, 3], max_tokens=None, ignore_eos=True))
    outputs = drain(engine)
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert len(collect_tokens(outputs)[("a", 0)]) == num_kv_tokens - 3


@pytest.mark.parametrize(
    "params", [{"max_tokens": None, "min_tokens": 13}, {"max_tokens": 13}, {"max_tokens": 400}]
)
def test_what_the_pool_could_never_hold_is_refused_with_the_number_needed(params) -> None:
    engine, num_kv_tokens = make_small_engine()
    prompt = [1] * (num_kv_tokens - 12)
    needed = len(prompt) + (params["max_tokens"] or params["min_tokens"])
    with pytest.raises(RequestError, match=f"may need {needed} tokens") as info:
        check_request(prompt, new_request("a", prompt, **params).params, engine.limits)
    assert info.value.code == "kv_cache_too_small"


def test_a_prompt_too_large_for_the_pool_blames_the_prompt() -> None:
    """Without max_tokens the refusal blamed max_tokens, which the client had not sent."""
    engine, num_kv_tokens = make_small_engine()
    prompt = [1] * num_kv_tokens
    params = new_request("a", prompt, max_tokens=None).params
    with pytest.raises(RequestError, match=f"may need {num_kv_tokens + 1} tokens") as info:
        check_request(prompt, params, engine.limits, prompt_param="messages")
    assert info.value.param == "messages"
