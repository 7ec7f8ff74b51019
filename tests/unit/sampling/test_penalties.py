"""Logits processors against a row-by-row oracle, and what they must not touch."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core import SamplingParams
from forerun.plan import ScheduledRequest
from forerun.sampling.penalties import LogitsProcessors, needs_processing
from unit.sampling.scheduled import make_scheduled

VOCAB = 12
TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)


def process_row(row: np.ndarray, request: ScheduledRequest, num_assumed: int) -> np.ndarray:
    """Return one row processed token by token, with `num_assumed` drafts taken as output."""
    params = request.params
    tokens = [*request.token_ids, *request.draft_token_ids[:num_assumed]]
    output = Counter(tokens[request.num_prompt_tokens :])
    row = row.astype(np.float64)
    for token, bias in params.logit_bias:
        row[token] += bias
    for token in set(tokens):
        scale = params.repetition_penalty
        row[token] = row[token] / scale if row[token] > 0 else row[token] * scale
    for token, count in output.items():
        row[token] -= params.frequency_penalty * count + params.presence_penalty
    if sum(output.values()) < params.min_tokens:
        row[list(request.banned_token_ids)] = -np.inf
    return row


def check_rows(processors: LogitsProcessors, requests: list[ScheduledRequest]) -> None:
    counts = [1 + len(r.draft_token_ids) for r in requests]
    starts = [sum(counts[:i]) for i in range(len(counts))]
    raw = torch.randn(sum(counts), VOCAB, generator=torch.Generator().manual_seed(1)) * 4
    processed = raw.clone()
    processors.apply_(processed, requests, starts)
    for request, start in zip(requests, starts, strict=True):
        for j in range(1 + len(request.draft_token_ids)):
            expected = process_row(raw[start + j].numpy(), request, j)
            np.testing.assert_allclose(processed[start + j].numpy(), expected, rtol=1e-5, atol=1e-5)


sampling_params = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.5]),
    presence_penalty=st.sampled_from([0.0, -0.5, 1.2]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -1.1]),
    logit_bias=st.sampled_from([(), ((2, 1.5), (7, -100.0)), ((3, 2.0), (3, 0.5))]),
    min_tokens=st.sampled_from([0, 2, 5]),
)
scheduled = st.builds(
    lambda tokens, drafts, params, split: make_scheduled(
        token_ids=tokens,
        num_prompt_tokens=min(split, len(tokens)),
        drafts=drafts,
        params=params,
        banned=(1, 4),
    ),
    TOKENS,
    st.lists(st.integers(0, VOCAB - 1), max_size=4),
    sampling_params,
    st.integers(1, 12),
)


@settings(max_examples=200, deadline=None)
@given(requests=st.lists(scheduled, min_size=1, max_size=3))
def test_every_row_sees_committed_tokens_and_the_drafts_before_it(
    requests: list[ScheduledRequest],
) -> None:
    for i, request in enumerate(requests):
        request.request_id = str(i)
    check_rows(LogitsProcessors(), requests)


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(TOKENS, min_size=1, max_size=4), params=sampling_params)
def test_counts_follow_the_committed_tokens_from_step_to_step(
    steps: list[list[int]], params: SamplingParams
) -> None:
    processors, tokens = LogitsProcessors(), [3, 3, 5]
    for new in steps:
        request = make_scheduled(
            token_ids=tokens, num_prompt_tokens=3, drafts=new, params=params, banned=(1,)
        )
        check_rows(processors, [request])
        tokens += new[: len(new) // 2 + 1]  # the other drafts were rejected


def test_more_distinct_tokens_than_the_first_allocation() -> None:
    tokens = [token % 300 for token in range(500)]
    request = make_scheduled(
        token_ids=tokens, num_prompt_tokens=1, params=SamplingParams(frequency_penalty=1.0)
    )
    logits = torch.zeros(1, 400)
    LogitsProcessors().apply_(logits, [request], [0])
    assert logits[0].tolist() == [-1.0] + [-2.0] * 199 + [-1.0] * 100 + [0.0] * 100


@pytest.mark.parametrize("forget", ["release", "generation"])
def test_a_reused_request_id_starts_afresh(forget: str) -> None:
    processors, params = LogitsProcessors(), SamplingParams(repetition_penalty=2.0)
    check_rows(processors, [make_scheduled(token_ids=[1, 2, 3], params=params)])
    if forget == "release":
        processors.release(["r", "unknown"])
    generation = int(forget == "generation")
    check_rows(processors, [make_scheduled(token_ids=[9, 9], params=params, generation=generation)])


def test_only_requests_with_something_to_apply_need_processing() -> None:
    neutral = SamplingParams(temperature=0.5, top_p=0.5)
    assert not needs_processing(make_scheduled(params=neutral, banned=(1,)))
    assert needs_processing(make_scheduled(params=SamplingParams(logit_bias=((1, 1.0),))))
    assert needs_processing(make_scheduled(params=SamplingParams(presence_penalty=0.1)))
    waiting = SamplingParams(min_tokens=2)
    assert needs_processing(make_scheduled(token_ids=[0, 5], params=waiting, banned=(1,)))
    assert not needs_processing(make_scheduled(token_ids=[0, 5, 5], params=waiting, banned=(1,)))
    assert not needs_processing(make_scheduled(token_ids=[0, 5], params=waiting))


def test_an_id_outside_the_vocabulary_raises_instead_of_hitting_another_row() -> None:
    request = make_scheduled(params=SamplingParams(logit_bias=((VOCAB, 5.0),)))
    with pytest.raises(IndexError):
        LogitsProcessors().apply_(torch.zeros(2, VOCAB), [request], [0])
