"""The sampled law of the whole engine with the adaptive policy, against the exact law.

The model, its enumerated law and chi-square are those of test_engine_law: three output tokens over
a vocabulary of 6, N = 4,000 seeds, p > 1e-3. The drafter draws its tokens and says after which
prefixes they are good, which its own draws decide; the cost table makes trimming worth while. That
budgets really vary, and that planning from live confidences would break the law, is tested too.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from budgets import make_profile
from fakes import collect_tokens, new_request
from forerun.budget.controller import BudgetController
from forerun.budget.costs.profile import CostProfile
from forerun.drafters.base import Drafter, DraftProposal
from forerun.engine import engine as engine_module
from forerun.plan import DraftRequest
from model_engines import compute_last_logits, make_model_engine
from scripted_drafters import RandomDrafter, ScriptedDrafter
from stats.test_engine_law import (
    CASES,
    MODEL,
    NUM_SAMPLES,
    PROMPT,
    VOCAB,
    compute_p_value,
    draft_cycle,
    enumerate_law,
)

DEPTH = 3
# Three output tokens leave at most two to draft; two more let budgets vary.
LENGTH = 5


@dataclass(slots=True)
class Sampled:
    """The first three tokens of every request, and (drafted, admitted) of every step."""

    counts: Counter[tuple[int, ...]]
    budgets: list[tuple[int, int]] = field(default_factory=list)


# How good a draft token is, by the token before it.
QUALITY = (0.55, 0.9, 0.3, 0.55, 0.0, 0.9)


@functools.cache
def compute_laws(prefix: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the target's law and the drafter's: part of it, and the rest on its least token."""
    target = torch.softmax(compute_last_logits(MODEL, prefix), -1)
    quality = QUALITY[prefix[-1]]
    worst = torch.nn.functional.one_hot(target.argmin(), VOCAB)
    return target, quality * target + (1 - quality) * worst


def draft_unevenly(prefix: Sequence[int]) -> torch.Tensor:
    return compute_laws(tuple(prefix))[1]


def judge(prefix: Sequence[int]) -> float:
    """Return the chance that a token drawn after this prefix is accepted: the laws' overlap."""
    target, draft = compute_laws(tuple(prefix))
    return float(torch.minimum(target, draft).sum().clamp(max=1.0))


def make_random() -> RandomDrafter:
    return RandomDrafter(draft_unevenly, DEPTH, judge)


class HalfDrawn(RandomDrafter):
    """Draws for requests of even seed; the others get a fixed draft, with confidences too."""

    def __init__(self) -> None:
        super().__init__(draft_unevenly, DEPTH, judge)

    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        proposal = super().propose(requests)
        assert proposal.draft_probs is not None
        assert proposal.confidence is not None
        laws = list(proposal.draft_probs)
        for index, request in enumerate(requests):
            if request.seed % 2:
                prefix = list(request.token_ids)
                draft = draft_cycle(prefix, min(request.depth, DEPTH))
                proposal.draft_token_ids[index], laws[index] = draft, None
                proposal.confidence[index] = [
                    judge([*prefix, *draft[:j]]) for j in range(len(draft))
                ]
        return replace(proposal, draft_probs=laws)


@functools.cache
def find_best(prefix: tuple[int, ...]) -> int:
    return int(compute_last_logits(MODEL, prefix).argmax())


def draft_best(prefix: Sequence[int], depth: int) -> list[int]:
    """Draft the target's likeliest tokens."""
    tokens = list(prefix)
    for _ in range(depth):
        tokens.append(find_best(tuple(tokens)))
    return tokens[len(prefix) :]


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "drawn": make_random,
    "half_drawn": HalfDrawn,
    "fixed": lambda: ScriptedDrafter(draft_best),
    "ngram": lambda: None,
}


def crowded(num_requests: int) -> CostProfile:
    """Return costs of a loaded step: rows beyond one per request come in uneven stairs."""
    rows = [1, *(num_requests * eighths // 8 for eighths in (8, 9, 10, 12, 14, 17, 20, 25, 32))]
    return make_profile(rows, [1.0, 1.0, 1.01, 1.08, 1.1, 1.25, 1.3, 1.33, 1.6, 1.9])


def sample(
    drafter: str,
    method: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    params: dict | None = None,
    num_requests: int = 32,
    num_samples: int = NUM_SAMPLES,
    profile: CostProfile | None = None,
    length: int = LENGTH,
) -> Sampled:
    """Run requests of known seeds through an engine with the policy on."""
    seeds = itertools.count()
    monkeypatch.setattr(engine_module.secrets, "randbits", lambda _: next(seeds))
    engine = make_model_engine(
        MODEL,
        drafter=DRAFTERS[drafter](),
        profile=profile or crowded(num_requests),
        max_num_seqs=num_requests,
        max_waiting_requests=num_samples,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": DEPTH,
            "prompt_lookup_min": 1,
            "rejection_sample_method": method,
            "enable_adaptive_verification": True,
            "adaptive_min_gain": 0.0,
        },
    )
    for index in range(num_samples):
        engine.add(new_request(f"r{index}", PROMPT, max_tokens=length, **(params or {})))
    outputs, budgets = [], []
    while engine.has_work:
        message = engine.step()
        outputs += message.outputs
        budgets.append((message.stats.num_draft_tokens, message.stats.num_verified_tokens))
    engine.check_integrity()
    tokens = collect_tokens(outputs).values()
    drafted = [0, *(drafted for drafted, _ in budgets)]
    return Sampled(
        counts=Counter(tuple(output[:3]) for output in tokens),
        budgets=list(zip(drafted, (verified for _, verified in budgets), strict=False)),
    )


def find_budgets(sampled: Sampled) -> set[int]:
    """Return budgets that were neither nothing nor all that had been drafted."""
    return {verified for drafted, verified in sampled.budgets if 0 < verified < drafted}


@pytest.mark.parametrize(
    ("drafter", "case", "method"),
    [
        ("drawn", "plain", "standard"),
        ("drawn", "plain", "coupled"),
        ("drawn", "penalties", "standard"),
        ("half_drawn", "top_p", "standard"),
        ("half_drawn", "top_p", "coupled"),
        ("fixed", "plain", "standard"),
        ("fixed", "plain", "coupled"),
        ("ngram", "plain", "standard"),
    ],
)
def test_output_law_is_the_targets(
    drafter: str, case: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 requests at a time, first three of five tokens, N = 4,000: p > 1e-3."""
    sampled = sample(drafter, method, monkeypatch, params=CASES[case])
    assert compute_p_value(sampled.counts, enumerate_law(CASES[case])) > 1e-3
    assert len(find_budgets(sampled)) >= (1 if drafter == "ngram" else 4)


# The first draft row is dear and further ones are cheap: one is verified for the sake of the next.
ALONE = make_profile([1, 2, 3, 4], [1.0, 1.6, 1.65, 1.7])


def sample_alone(monkeypatch: pytest.MonkeyPatch) -> Sampled:
    """Return 1,500 samples of an engine that runs one request at a time."""
    options = {"num_requests": 1, "num_samples": 1_500, "profile": ALONE, "length": 4}
    return sample("drawn", "standard", monkeypatch, **options)


def compute_pair_p_value(sampled: Sampled) -> float:
    """Chi-square of the first two tokens, which the first drafts decide."""
    law: Counter[tuple[int, ...]] = Counter()
    counts: Counter[tuple[int, ...]] = Counter()
    for output, mass in enumerate_law({}).items():
        law[output[:2]] += mass
    for output, count in sampled.counts.items():
        counts[output[:2]] += count
    return compute_p_value(counts, law)


def test_output_law_of_requests_that_are_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a request's own drafts would decide the budget, N = 1,500: p > 1e-3."""
    sampled = sample_alone(monkeypatch)
    assert {(1, 0), (1, 1), (2, 2)} <= set(sampled.budgets)
    assert compute_pair_p_value(sampled) > 1e-3


def test_planning_from_live_confidences_would_break_the_law(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Power: the same engine, not told that drafts are drawn, N = 1,500: p < 1e-6."""
    record = BudgetController.record

    def record_as_fixed(controller, requests, drafts) -> None:
        record(controller, requests, [replace(draft, is_drawn=False) for draft in drafts])

    monkeypatch.setattr(BudgetController, "record", record_as_fixed)
    sampled = sample_alone(monkeypatch)
    assert compute_pair_p_value(sampled) < 1e-6
