"""The Verifier's contract: grouping, processors per row, logprobs, and failures kept apart.

Laws of sampled output are tested in tests/stats.
"""

from __future__ import annotations

import math

import pytest
import torch

from forerun.core import SamplingParams
from forerun.plan import RequestResult, ScheduledRequest
from forerun.verification.verify import Verifier
from unit.sampling.scheduled import make_scheduled

VOCAB = 1000
GREEDY = SamplingParams(temperature=0.0)
KINDS = {
    "greedy": GREEDY,
    "greedy_penalised": SamplingParams(temperature=0.0, repetition_penalty=1.3, min_tokens=9),
    "standard": SamplingParams(),
    "filtered": SamplingParams(top_p=0.8, temperature=0.7),
    "top_k": SamplingParams(top_k=3, logit_bias=((4, 2.0),)),
    "coupled": SamplingParams(seed=3),
    "coupled_filtered": SamplingParams(seed=4, top_p=0.6),
}


def make_logits(num_rows: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


def make_mixed_batch() -> tuple[list[ScheduledRequest], torch.Tensor, list[torch.Tensor | None]]:
    """Return every kind of request with 0 to 3 drafts, some of them likely, some with q."""
    logits = make_logits(sum(1 + i % 4 for i in range(28)))
    requests: list[ScheduledRequest] = []
    draft_probs: list[torch.Tensor | None] = []
    row = 0
    for i in range(28):
        count, name = i % 4, list(KINDS)[i % 7]
        drafts = logits[row : row + count].argmax(dim=-1).tolist()
        request = make_scheduled(
            f"{i}-{name}",
            token_ids=[3, 4, i],
            drafts=drafts,
            params=KINDS[name],
            seed=i,
            banned=(1,),
        )
        requests.append(request)
        has_probs = count > 0 and i % 3 == 0
        draft_probs.append(logits[row : row + count].mul(0.7).softmax(-1) if has_probs else None)
        row += 1 + count
    return requests, logits, draft_probs


def test_greedy_keeps_drafts_while_they_are_the_argmax() -> None:
    logits = torch.full((4, VOCAB), -1.0)
    for row, token in enumerate([7, 8, 9, 10]):
        logits[row, token] = 1.0
    cases = {(7, 8, 9): [7, 8, 9, 10], (7, 5, 9): [7, 8], (5, 8, 9): [7]}
    for drafts, expected in cases.items():
        (result,) = Verifier().verify(logits, [make_scheduled(drafts=drafts, params=GREEDY)])
        assert result.token_ids == expected
        assert result.num_accepted_tokens == len(expected) - 1


def test_certain_and_impossible_drafts_under_sampling() -> None:
    logits = torch.full((3, VOCAB), -torch.inf)
    logits[0, 7] = logits[1, 8] = logits[2, 9] = 0.0
    for params in (SamplingParams(), SamplingParams(top_k=2), SamplingParams(seed=1)):
        kept, cut = (
            Verifier().verify(logits, [make_scheduled(drafts=drafts, params=params)])[0]
            for drafts in ((7, 8), (7, 6))
        )
        assert (kept.token_ids, kept.num_accepted_tokens) == ([7, 8, 9], 2)
        assert (cut.token_ids, cut.num_accepted_tokens) == ([7, 8], 1)


def test_a_mixed_batch_gives_what_each_request_gives_alone() -> None:
    requests, logits, draft_probs = make_mixed_batch()
    together = Verifier().verify(logits, requests, draft_probs)
    row = 0
    for request, probs, result in zip(requests, draft_probs, together, strict=True):
        end = row + 1 + len(request.draft_token_ids)
        (alone,) = Verifier().verify(logits[row:end], [request], [probs])
        assert result == alone
        assert result.request_id == request.request_id
        assert result.token_ids[:-1] == request.draft_token_ids[: result.num_accepted_tokens]
        row = end
    assert {r.num_accepted_tokens for r in together} == {0, 1, 2, 3}


def test_verification_leaves_the_logits_unchanged() -> None:
    requests, logits, draft_probs = make_mixed_batch()
    before = logits.clone()
    Verifier().verify(logits, requests, draft_probs)
    Verifier().verify(logits[:1], [make_scheduled(params=KINDS["greedy_penalised"], banned=(1,))])
    assert torch.equal(logits, before)


def test_coupled_is_the_default_method_when_asked_for() -> None:
    """Coupled results do not depend on the step counter; standard ones do."""
    logits = torch.zeros(1, VOCAB)
    for method, is_stable in (("coupled", True), ("standard", False)):
        results = [
            Verifier(method).verify(logits, [make_scheduled(num_draws=draws)])[0].token_ids[0]
            for draws in range(5)
        ]
        assert (len(set(results)) == 1) is is_stable


def test_logprobs_are_raw_and_one_per_emitted_token() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 5] = math.log(1000.0)
    logits[1, 6] = math.log(2000.0)
    params = SamplingParams(temperature=0.0, logit_bias=((9, 100.0),), logprobs=2)
    requests = [make_scheduled("biased", drafts=(9, 7), params=params)]
    (result,) = Verifier().verify(logits, requests)
    assert result.token_ids == [9, 9]
    assert result.logprobs is not None
    first, second = result.logprobs
    assert [first.token_id, second.token_id] == [9, 9]
    assert first.logprob == pytest.approx(-math.log(1999.0), abs=1e-4)
    assert first.top[0][0] == 5
    assert [token for token, _ in second.top] == [6, 5]
    assert second.top[0][1] == pytest.approx(math.log(2000 / 3998), abs=1e-4)


def test_logprobs_only_for_those_who_asked() -> None:
    asks = SamplingParams(temperature=0.0, logprobs=0)
    requests = [make_scheduled("a", params=GREEDY), make_scheduled("b", params=asks)]
    first, second = Verifier().verify(make_logits(2), requests)
    assert first.logprobs is None
    assert second.logprobs is not None
    assert second.logprobs[0].top == []
    assert second.logprobs[0].rank == 1


def check_failure(
    results: list[RequestResult], failing: int, expected: list[RequestResult]
) -> None:
    for i, result in enumerate(results):
        if i == failing:
            assert result.error is not None
            assert (result.error.status, result.error.code) == (500, "sampling_failed")
            assert result.token_ids == []
        else:
            assert result == expected[i]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", ["nan", "all_nan", "inf", "all_minus_inf"])
def test_logits_that_are_not_finite_fail_their_request_alone(kind: str, bad: str) -> None:
    requests = [make_scheduled(str(i), token_ids=[5, i], params=KINDS[kind]) for i in range(4)]
    logits = make_logits(4)
    expected = Verifier().verify(logits, requests)
    if bad == "nan":
        logits[2, VOCAB - 1] = torch.nan
    elif bad == "inf":
        logits[2, 400] = torch.inf
    else:
        logits[2] = torch.nan if bad == "all_nan" else -torch.inf
    check_failure(Verifier().verify(logits, requests), 2, expected)


def test_rows_after_a_rejection_may_be_anything() -> None:
    for params in (GREEDY, SamplingParams(), SamplingParams(seed=1)):
        logits = torch.full((3, VOCAB), -torch.inf)
        logits[0, 7] = 0.0
        logits[1:] = torch.nan
        (result,) = Verifier().verify(logits, [make_scheduled(drafts=(6, 7), params=params)])
        assert result.token_ids == [7]


def test_an_exception_fails_its_request_alone() -> None:
    """Token ids past the vocabulary raise inside the vectorised path of their group."""
    for params in (GREEDY, SamplingParams(), SamplingParams(seed=2)):
        fields = {name: getattr(params, name) for name in ("temperature", "seed")}
        biased = SamplingParams(**fields, logit_bias=((VOCAB + 5, 1.0),))
        requests = [make_scheduled(str(i), token_ids=[5, i], params=params) for i in range(3)]
        logits = make_logits(3)
        expected = Verifier().verify(logits, requests)
        requests[1] = make_scheduled("1", token_ids=[5, 1], params=biased)
        check_failure(Verifier().verify(logits, requests), 1, expected)


def test_draft_probs_with_too_few_rows_fail_their_request_alone() -> None:
    requests = [make_scheduled(str(i), drafts=(1, 2)) for i in range(3)]
    logits, good = make_logits(9), torch.full((2, VOCAB), 1 / VOCAB)
    expected = Verifier().verify(logits, requests, [good] * 3)
    check_failure(Verifier().verify(logits, requests, [good, good[:1], good]), 1, expected)


def test_no_requests_is_no_work() -> None:
    assert Verifier().verify(torch.zeros(0, VOCAB), []) == []


def test_release_forgets_what_penalties_remember() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=2.0)
    logits = torch.zeros(1, 4)
    logits[0, :3] = torch.tensor([1.5, 1.2, 1.0])
    verifier = Verifier()
    first = make_scheduled(token_ids=[3, 0, 1], params=params)
    assert verifier.verify(logits, [first])[0].token_ids == [2]
    verifier.release(["r"])
    again = make_scheduled(token_ids=[3, 2, 2], params=params)
    assert verifier.verify(logits, [again])[0].token_ids == [0]
