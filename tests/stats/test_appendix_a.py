"""The DSpark paper's appendix A: a budget chosen from live confidences changes the output law.

One request, two drafts, step rates of 1, .5 and .45 for one, two and three rows, q = (.5, .5)
against p = (.7, .3), so that the first draft is accepted with chance .8. A draft A makes the second
one good (.9), a draft B hopeless (0): Theta is (1, .9, 1.134) or (1, .9, .81), and an argmax over
these numbers verifies A but never B. Then A comes out with .5 + .5 x .7 = .85 instead of .7.

The controller runs as in the engine: real policy, real estimator (confidences of a head, corrected
by outcomes), real cost table, real verifier. What a drawn draft's budget is planned from are the
confidences of the draft before it, which here is random.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy import stats

from budgets import choose_budget, make_controller, make_profile, open_requests, set_drafts
from forerun.budget.controller import BudgetController
from forerun.core import Request
from forerun.plan import RequestDraft
from forerun.verification.verify import Verifier
from unit.sampling.scheduled import make_scheduled

NUM_SAMPLES = 24_000
BATCH = 200
A, B = 0, 1
TARGET = np.array([0.7, 0.3])
# Target and draft law of the second token after A and after B: they overlap by .9 and by 0.
TARGET_AFTER = np.array([[0.6, 0.4], [0.0, 1.0]])
DRAFT = np.array([0.5, 0.5])
DRAFT_AFTER = np.array([[0.5, 0.5], [1.0, 0.0]])
FIRST_CONFIDENCE = 0.8
CONFIDENCE_AFTER = (0.9, 0.0)
# Confidences of the draft before; None is a request that has drafted nothing yet.
EARLIER = {"none": None, "good": (0.8, 0.9), "hopeless": (0.8, 0.0), "low": (0.1, 0.1)}

# (earlier state, first draft, first token that came out, admitted drafts) of one sample.
Sample = tuple[str, int, int, int]


def propose(token_ids: list[int], confidence: Sequence[float], *, is_drawn: bool) -> RequestDraft:
    return RequestDraft(
        request_id="", token_ids=token_ids, confidence=list(confidence), is_drawn=is_drawn
    )


def draw_drafts(rng: np.random.Generator) -> list[list[int]]:
    """Draw two tokens for each request of a batch from the draft laws."""
    first = (rng.random(BATCH) >= DRAFT[A]).astype(int)
    second = (rng.random(BATCH) >= DRAFT_AFTER[first, A]).astype(int)
    return np.stack([first, second], axis=1).tolist()


def remember_earlier(
    controller: BudgetController, requests: Sequence[Request], states: Sequence[str], *, drawn: bool
) -> None:
    """Let some requests have drafted before, whatever became of it."""
    drafted = [(r, EARLIER[s]) for r, s in zip(requests, states, strict=True) if EARLIER[s]]
    drafts = [propose([A, A], confidence, is_drawn=drawn) for _, confidence in drafted]
    set_drafts(controller, [request for request, _ in drafted], drafts)


def verify(drafts: Sequence[list[int]], admitted: Sequence[int], seed: int) -> tuple[list, list]:
    """Return (first tokens, numbers of accepted drafts) of a batch."""
    rows, scheduled, laws = [], [], []
    for index, (tokens, count) in enumerate(zip(drafts, admitted, strict=True)):
        rows += [TARGET, TARGET_AFTER[tokens[0]], DRAFT][: count + 1]
        laws.append(torch.tensor(np.array([DRAFT, DRAFT_AFTER[tokens[0]]]), dtype=torch.float32))
        scheduled.append(make_scheduled(f"r{index}", drafts=tokens[:count], seed=seed + index))
    with np.errstate(divide="ignore"):
        logits = torch.tensor(np.log(np.array(rows)), dtype=torch.float32)
    results = Verifier().verify(logits, scheduled, laws)
    return [r.token_ids[0] for r in results], [r.num_accepted_tokens for r in results]


@functools.cache
def sample(*, is_drawn: bool, learns: bool = True) -> list[Sample]:
    """Return NUM_SAMPLES first tokens; every request is alone in its step."""
    rng = np.random.default_rng(0)
    profile = make_profile([1, 2, 3], [1.0, 1.0 / 0.5, 1.0 / 0.45])
    controller = make_controller(profile, num_slots=BATCH, num_positions=2)
    samples: list[Sample] = []
    for start in range(0, NUM_SAMPLES, BATCH):
        requests = open_requests(controller, BATCH)
        states = rng.choice(list(EARLIER), BATCH).tolist()
        remember_earlier(controller, requests, states, drawn=is_drawn)
        drafts = draw_drafts(rng)
        confidences = [(FIRST_CONFIDENCE, CONFIDENCE_AFTER[first]) for first, _ in drafts]
        proposed = [
            propose(tokens, confidence, is_drawn=is_drawn)
            for tokens, confidence in zip(drafts, confidences, strict=True)
        ]
        set_drafts(controller, requests, proposed)
        admitted = [choose_budget(controller, [request])[0] for request in requests]
        tokens, accepted = verify(drafts, admitted, start)
        seen = [index for index, count in enumerate(admitted) if count and learns]
        controller.observe(
            [requests[i] for i in seen], [admitted[i] for i in seen], [accepted[i] for i in seen]
        )
        for request in requests:
            controller.close(request)
        firsts = [first for first, _ in drafts]
        samples += zip(states, firsts, tokens, admitted, strict=True)
    return samples


def count_a(samples: Sequence[Sample]) -> Any:
    """Test the hypothesis that A comes out with chance .7."""
    num_a = sum(token == A for _, _, token, _ in samples)
    return stats.binomtest(num_a, len(samples), TARGET[A])


def test_unrestricted_argmax_over_live_confidences_is_lossy() -> None:
    """N = 24,000: A's share within .85 +- .01 (4.3 sd), and .7 is rejected with p < 1e-100.

    The estimator learns nothing here, as it would learn from the bias: that drafts never fail."""
    samples = sample(is_drawn=False, learns=False)
    admitted = {(first, count) for _, first, _, count in samples}
    assert admitted == {(A, 2), (B, 0)}, "the argmax should verify A and nothing else"
    result = count_a(samples)
    assert abs(result.statistic - 0.85) < 0.01
    assert result.pvalue < 1e-100


def test_the_controller_keeps_the_law_of_a_drawn_draft() -> None:
    """N = 24,000, two-sided exact binomial against .7: p > 1e-3 over all, and over each earlier
    state (N = 6,000 each) alone; A's share is within .01 (3.4 sd) over all."""
    samples = sample(is_drawn=True)
    budgets = defaultdict(set)
    for state, _, _, count in samples:
        budgets[state].add(count)
    assert budgets == {"none": {2}, "good": {2}, "hopeless": {0}, "low": {0}}
    result = count_a(samples)
    assert abs(result.statistic - TARGET[A]) < 0.01
    assert result.pvalue > 1e-3
    for state in EARLIER:
        alone = [entry for entry in samples if entry[0] == state]
        assert len(alone) > NUM_SAMPLES / 5
        assert count_a(alone).pvalue > 1e-3


def test_admission_of_the_first_draft_does_not_tell_which_token_it_is() -> None:
    """Given the earlier state, A and B are admitted alike, whatever the estimator has learnt."""
    outcomes = defaultdict(set)
    for state, first, _, count in sample(is_drawn=True):
        outcomes[state, first].add(count > 0)
    for state in EARLIER:
        assert outcomes[state, A] == outcomes[state, B]
        assert len(outcomes[state, A]) == 1
