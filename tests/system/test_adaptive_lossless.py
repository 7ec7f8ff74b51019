"""Greedy text with the adaptive policy is that without speculation, whatever is trimmed.

Drafts are always right, always wrong, or right up to a place that differs from request to request;
the policy learns that from outcomes and trims by a table of costs. Real model, cache and runner.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest

from budgets import make_profile
from fakes import collect_tokens, draft_right, new_request
from forerun.drafters.base import Drafter
from forerun.engine.messages import StepStats
from model_engines import compute_last_logits, make_model, make_model_engine
from scripted_drafters import ScriptedDrafter

MODEL = make_model(seed=1)
NUM_REQUESTS = 12
NUM_TOKENS = 40
DEPTH = 5
ADAPTIVE = {
    "num_speculative_tokens": DEPTH,
    "prompt_lookup_min": 1,
    "enable_adaptive_verification": True,
}
# Two rows a request are nearly free, then each costs as much as two tokens bring, or as a half.
ROWS = [1, NUM_REQUESTS, NUM_REQUESTS * 2, NUM_REQUESTS * 3, NUM_REQUESTS * 6]
COSTS = {
    "cheap": make_profile(ROWS, [1.0, 1.0, 1.1, 1.2, 1.5]),
    "stairs": make_profile(ROWS, [1.0, 1.0, 1.1, 1.6, 2.5], graph_rows=ROWS[-1]),
    "dear": make_profile(ROWS, [1.0, 1.0, 1.4, 2.2, 5.0]),
}


@functools.cache
def find_next_token(prefix: tuple[int, ...]) -> int:
    return int(compute_last_logits(MODEL, prefix).argmax())


def next_token(prefix: Sequence[int]) -> int:
    return find_next_token(tuple(prefix))


def draft_unevenly(prefix: Sequence[int], depth: int) -> list[int]:
    """Be right for as many tokens as the first token of the prompt says."""
    return draft_right(next_token, prefix[0] % (DEPTH + 1))(prefix, depth)


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "right": lambda: ScriptedDrafter(draft_right(next_token)),
    "wrong": lambda: ScriptedDrafter(draft_right(next_token, 0)),
    "right_until_2": lambda: ScriptedDrafter(draft_right(next_token, 2)),
    "uneven": lambda: ScriptedDrafter(draft_unevenly),
    "ngram": lambda: None,
}


def answer(
    drafter: Drafter | None, config: dict[str, object], **options: object
) -> tuple[dict[tuple[str, int], list[int]], list[StepStats]]:
    """Return the greedy tokens of every request and the stats of every step."""
    engine = make_model_engine(MODEL, drafter=drafter, speculative_config=config, **options)
    for index in range(NUM_REQUESTS):
        prompt = [index, 5, 2 * index + 1, 5]
        engine.add(new_request(f"r{index}", prompt, temperature=0.0, max_tokens=NUM_TOKENS))
    outputs, stats = [], []
    while engine.has_work:
        message = engine.step()
        outputs += message.outputs
        stats.append(message.stats)
        engine.check_integrity()
    return collect_tokens(outputs), stats


@functools.cache
def answer_plainly() -> dict[tuple[str, int], list[int]]:
    return answer(None, {"method": "none"})[0]


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_tokens_are_those_without_speculation(drafter: str, costs: str) -> None:
    config = {"method": "ngram", **ADAPTIVE}
    tokens, stats = answer(DRAFTERS[drafter](), config, profile=COSTS[costs])
    assert tokens == answer_plainly()
    assert sum(step.num_verified_tokens for step in stats) > 0


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("drafter", ["right", "wrong", "uneven"])
def test_greedy_tokens_with_lookups_before_the_drafter(drafter: str, costs: str) -> None:
    config = {"method": "draft_model", "model": "scripted", "prompt_lookup": True, **ADAPTIVE}
    tokens, stats = answer(DRAFTERS[drafter](), config, profile=COSTS[costs])
    assert tokens == answer_plainly()
    assert sum(step.num_drafting for step in stats) > 0
    num_copied = sum(step.num_lookup_tokens for step in stats)
    assert 0 < num_copied < sum(step.num_draft_tokens for step in stats)


def test_costs_and_drafts_make_the_budget_vary() -> None:
    """What the test above rests on: uneven drafts on stairs are trimmed, not just on or off."""
    config = {"num_speculative_tokens": DEPTH, "enable_adaptive_verification": True}
    _, stats = answer(DRAFTERS["uneven"](), config, profile=COSTS["stairs"])
    drafted = [step.num_draft_tokens for step in stats]
    verified = [step.num_verified_tokens for step in stats[1:]]
    trimmed = {v for d, v in zip(drafted, verified, strict=False) if 0 < v < d}
    assert len(trimmed) >= 3
