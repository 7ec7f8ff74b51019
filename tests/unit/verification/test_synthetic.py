"""Synthetic acceptance: the exact law of accepted counts, and tokens that do not depend on luck."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from forerun.core import SamplingParams
from forerun.plan import ScheduledRequest
from forerun.speculative_config import SpeculativeConfig
from forerun.verification.verify import Verifier
from unit.sampling.scheduled import make_scheduled

VOCAB = 64
DRAFTS = (5, 6, 7)
RATES = (0.9, 0.45, 0.3)
NUM_SAMPLES = 20_000
GREEDY = SamplingParams(temperature=0.0)


def make_verifier(rates: tuple[float, ...] = RATES) -> Verifier:
    return Verifier("synthetic", rates)


def make_logits(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(0)) * 3


def make_requests(count: int, params: SamplingParams, **fields: object) -> list[ScheduledRequest]:
    return [
        make_scheduled(f"r{seed}", drafts=DRAFTS, params=params, seed=seed, **fields)
        for seed in range(count)
    ]


def count_accepted(rates: tuple[float, ...], **fields: object) -> np.ndarray:
    requests = make_requests(NUM_SAMPLES, GREEDY, **fields)
    results = make_verifier(rates).verify(make_logits(4).repeat(NUM_SAMPLES, 1), requests)
    return np.bincount([result.num_accepted_tokens for result in results], minlength=4)


def test_accepted_counts_follow_the_rates() -> None:
    """20,000 requests against P(n) = s[n-1] - s[n], s the survival; p > 1e-3."""
    survival = np.array([1.0, *RATES, 0.0])
    expected = (survival[:-1] - survival[1:]) * NUM_SAMPLES
    assert stats.chisquare(count_accepted(RATES), expected).pvalue > 1e-3


def test_the_test_sees_other_rates() -> None:
    survival = np.array([1.0, 0.9, 0.5, 0.3, 0.0])
    expected = (survival[:-1] - survival[1:]) * NUM_SAMPLES
    assert stats.chisquare(count_accepted(RATES), expected).pvalue < 1e-6


@pytest.mark.parametrize(
    ("rates", "accepted"), [((1.0, 1.0, 1.0), 3), ((0.0, 0.0, 0.0), 0), ((1.0, 1.0, 0.0), 2)]
)
def test_certain_rates_leave_nothing_to_chance(rates: tuple[float, ...], accepted: int) -> None:
    assert count_accepted(rates)[accepted] == NUM_SAMPLES


def test_each_step_draws_anew() -> None:
    steps = [count_one(num_draws) for num_draws in range(300)]
    assert {0, 1, 3} <= set(steps)
    assert np.mean(steps) == pytest.approx(sum(RATES), abs=0.25)


def count_one(num_draws: int) -> int:
    (request,) = make_requests(1, GREEDY, num_draws=num_draws)
    (result,) = make_verifier().verify(make_logits(4), [request])
    return result.num_accepted_tokens


@given(st.floats(1.0, 4.0))
def test_a_mean_length_is_kept(length: float) -> None:
    config = SpeculativeConfig(
        method="synthetic",
        num_speculative_tokens=3,
        rejection_sample_method="synthetic",
        synthetic_acceptance_length=length,
    )
    rates = config.survival_rates
    assert rates is not None
    assert 1.0 + sum(rates) == pytest.approx(length)


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(),
        SamplingParams(top_p=0.8),
        SamplingParams(seed=7),
        SamplingParams(temperature=0.0, repetition_penalty=1.5),
    ],
)
def test_the_next_token_is_the_targets_after_what_was_accepted(params: SamplingParams) -> None:
    logits = make_logits(4)
    seen = set()
    for request in make_requests(40, params):
        (result,) = make_verifier().verify(logits, [request])
        count = result.num_accepted_tokens
        grown = make_scheduled(
            request.request_id,
            token_ids=[*request.token_ids, *DRAFTS[:count]],
            params=params,
            seed=request.seed,
        )
        (expected,) = Verifier().verify(logits[count : count + 1], [grown])
        assert result.token_ids == [*DRAFTS[:count], *expected.token_ids]
        seen.add(count)
    assert seen == {0, 1, 2, 3}


def test_results_do_not_depend_on_the_batch() -> None:
    kinds = [GREEDY, SamplingParams(), SamplingParams(seed=3), SamplingParams(top_k=5)]
    requests = [
        make_scheduled(f"r{i}", drafts=DRAFTS[: i % 4], params=kinds[i % 3], seed=i, num_draws=i)
        for i in range(24)
    ]
    logits = make_logits(sum(1 + i % 4 for i in range(24)))
    together = make_verifier().verify(logits, requests)
    assert together == make_verifier().verify(logits, requests)
    start = 0
    for request, result in zip(requests, together, strict=True):
        end = start + 1 + len(request.draft_token_ids)
        (alone,) = make_verifier().verify(logits[start:end], [request])
        assert alone == result
        start = end


def test_draft_probabilities_are_not_looked_at() -> None:
    requests = make_requests(8, SamplingParams())
    logits = make_logits(4).repeat(8, 1)
    probs = [torch.full((3, VOCAB), 1.0 / VOCAB)] * 8
    verifier = make_verifier()
    assert verifier.verify(logits, requests, probs) == verifier.verify(logits, requests)


def test_logits_without_a_distribution_fail_the_request() -> None:
    (request,) = make_requests(1, GREEDY)
    (result,) = make_verifier((1.0, 1.0, 1.0)).verify(torch.full((4, VOCAB), torch.nan), [request])
    assert result.error is not None


def test_start_warns_that_text_is_not_the_models(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("forerun").propagate = True
    with caplog.at_level(logging.WARNING):
        make_verifier()
    assert "not the model's" in caplog.text
