"""The offline API's own bookkeeping, over an engine with a fake runner."""

from __future__ import annotations

import pytest

from fakes import ByteTokenizer, continue_greedily, count_up, make_engine
from forerun.core import SamplingParams
from forerun.engine import llm as llm_module
from forerun.engine.llm import LLM

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    """Return an LLM whose engine counts up."""
    built = (make_engine(), ByteTokenizer(), {})
    monkeypatch.setattr(llm_module, "build_engine", lambda config, progress, sink: built)
    return LLM()


def test_a_second_call_during_a_stream_is_refused_and_the_stream_goes_on(llm: LLM) -> None:
    """generate() in the middle of a stream() took its outputs, failed with KeyError and aborted
    it; reading on then never returned. Two streams at once mixed up their texts."""
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=5))
    tokens = list(next(stream).token_ids)
    with pytest.raises(RuntimeError, match="earlier stream"):
        llm.generate([PROMPT], SamplingParams(max_tokens=5))
    with pytest.raises(RuntimeError, match="earlier stream"):
        next(llm.stream(PROMPT))
    for output in stream:
        tokens += output.token_ids
    assert tokens == continue_greedily(count_up, PROMPT, 5)


def test_a_stream_left_early_frees_everything_for_the_next_call(llm: LLM) -> None:
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=50, n=2))
    next(stream)
    stream.close()
    llm.engine.check_integrity()
    assert llm.engine.scheduler.cache.usage_frac == 0.0
    (completion,) = llm.generate([PROMPT], SamplingParams(max_tokens=5))
    assert completion.choices[0].token_ids == continue_greedily(count_up, PROMPT, 5)


def test_blocks_that_choices_share_are_no_prefix_hits(llm: LLM) -> None:
    """With n = 2 the second choice shares the first one's blocks, and a prompt nobody had sent
    before was reported as cached; the server never did."""
    params = SamplingParams(max_tokens=2, n=2)
    first, again = (llm.generate([PROMPT], params)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert again.num_cached_tokens == 8
