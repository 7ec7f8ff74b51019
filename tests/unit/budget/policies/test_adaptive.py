"""AdaptivePolicy as a function: its choices against enumeration of all there are.

Costs are plain functions of the number of draft rows, so that nothing of the cost model is needed.
Symbols: N requests, B verified drafts, S_B their expected accepted tokens, k draft positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from forerun.budget.base import BudgetInputs, DraftDecision, DraftInputs
from forerun.budget.policies.adaptive import AdaptivePolicy

NUM_CASES = 400


@dataclass(frozen=True, slots=True)
class Tables:
    """Costs of a step with 0, 1, 2, ... draft rows, with its prompt rows and without."""

    whole: np.ndarray
    without_prompt: np.ndarray
    has_prompt_rows: bool = True

    def step(self, most: int) -> np.ndarray:
        return self.whole[: most + 1]

    def decode(self, most: int) -> np.ndarray:
        return self.without_prompt[: most + 1]


@dataclass(frozen=True, slots=True)
class Drafting:
    """A decode step of N requests; `verify_ms` is of all rows, `draft_ms` of (requests, depth)."""

    num_requests: int
    verify_ms: Callable[[np.ndarray], np.ndarray]
    draft_ms: Callable[[np.ndarray, int], np.ndarray]

    def verify(self, num_draft_rows: np.ndarray) -> np.ndarray:
        return self.verify_ms(self.num_requests + num_draft_rows)

    def draft(self, num_requests: np.ndarray, depth: int) -> np.ndarray:
        return self.draft_ms(num_requests, depth)


def draw_survival(rng: np.random.Generator, num_requests: int, depth: int) -> np.ndarray:
    """Return random survivals [R, k], some of them tied or saturated."""
    confidence = rng.random((num_requests, depth))
    certain = rng.random(confidence.shape) < 0.3
    confidence[certain] = rng.choice([0.0, 0.5, 1.0], certain.sum())
    return np.cumprod(confidence, axis=1).astype(np.float32)


def draw_costs(rng: np.random.Generator, num_rows: int) -> np.ndarray:
    """Return costs of 0..num_rows draft rows: never falling, some flat, some with stairs."""
    rises = rng.random(num_rows) * (rng.random(num_rows) < rng.choice([0.1, 0.5, 1.0]))
    return np.cumsum([rng.uniform(0.2, 5.0), *rises * rng.uniform(0.0, 1.0)])


def draw_inputs(rng: np.random.Generator, *, has_prompt: bool) -> tuple[BudgetInputs, np.ndarray]:
    """Return a random step and S_B for every B that fits, by plain sorting."""
    num_requests, depth = int(rng.integers(1, 7)), int(rng.integers(1, 6))
    survival = draw_survival(rng, num_requests, depth)
    lengths = rng.integers(0, depth + 1, num_requests)
    room = int(rng.integers(0, lengths.sum() + 3))
    slots = [survival[r, j] for r in range(num_requests) for j in range(lengths[r])]
    slots = sorted(slots, reverse=True)[:room]
    expected = np.array([float(np.sum(slots[:budget])) for budget in range(len(slots) + 1)])
    whole = draw_costs(rng, len(slots))
    costs = Tables(whole, draw_costs(rng, len(slots)) if has_prompt else whole)
    inputs = BudgetInputs(
        num_draft_tokens=lengths,
        num_decoding=num_requests + int(rng.integers(0, 3)) * has_prompt,
        max_verified=room,
        planning_survival=survival,
        costs=costs,
    )
    return inputs, expected


def choose(inputs: BudgetInputs, min_gain: float = 0.0) -> int:
    decision = AdaptivePolicy(min_gain=min_gain).choose_budget(inputs)
    largest = min(int(inputs.num_draft_tokens.sum()), inputs.max_verified)
    assert 0 <= decision.verification_budget <= largest
    assert (decision.max_verified <= inputs.num_draft_tokens).all()
    return decision.verification_budget


@pytest.mark.parametrize("seed", range(4))
def test_pure_decode_step_has_the_best_rate_of_all_budgets(seed: int) -> None:
    """(N + S_B) / cost(B) is the largest of all B, within rounding of float32 survivals."""
    rng = np.random.default_rng(seed)
    budgets = set()
    for _ in range(NUM_CASES):
        inputs, expected = draw_inputs(rng, has_prompt=False)
        rates = (inputs.num_decoding + expected) / inputs.costs.whole
        budget = choose(inputs)
        assert rates[budget] >= rates.max() * (1 - 1e-6)
        budgets.add((budget > 0) + (budget == len(expected) - 1))
    assert budgets == {0, 1, 2}, "nothing, some and all of the drafts should all have been best"


@pytest.mark.parametrize("seed", range(4))
def test_mixed_step_weighs_time_by_the_best_decode_rate(seed: int) -> None:
    """N + S_B - lambda cost(B) is the largest of all B; lambda leaves prompt rows out."""
    rng = np.random.default_rng(seed)
    for _ in range(NUM_CASES):
        inputs, expected = draw_inputs(rng, has_prompt=True)
        tokens = inputs.num_decoding + expected
        rate = max(tokens / inputs.costs.without_prompt)
        values = tokens - rate * inputs.costs.whole
        assert values[choose(inputs)] >= values.max() - 1e-5 * tokens.max()


@pytest.mark.parametrize("min_gain", [0.02, 0.2])
def test_trims_that_gain_less_than_asked_are_not_made(min_gain: float) -> None:
    """Gain is that of the rate over verifying everything that fits."""
    rng = np.random.default_rng(7)
    outcomes = []
    for _ in range(NUM_CASES):
        inputs, expected = draw_inputs(rng, has_prompt=False)
        rates = (inputs.num_decoding + expected) / inputs.costs.whole
        gain = rates.max() / rates[-1] - 1.0
        if abs(gain - min_gain) < 1e-6 or gain < 1e-6:
            continue
        is_trimmed = choose(inputs, min_gain) < len(expected) - 1
        assert is_trimmed == (gain > min_gain)
        outcomes.append(is_trimmed)
    assert 10 < sum(outcomes) < len(outcomes) - 10


@pytest.mark.parametrize(("chance", "load", "budget"), [(0.9, 1, 7), (0.1, 1, 7), (0.1, 2, 6)])
def test_free_rows_are_filled(chance: float, load: int, budget: int) -> None:
    """Up to 8 rows cost the same: whatever fits in them is verified."""
    assert choose_at_load(chance, load) == budget


def choose_at_load(chance: float, num_requests: int) -> int:
    """Return B for 7 drafts per request of one chance; 8 rows cost 1, each further one 1/16."""
    survival = np.tile(np.cumprod(np.full(7, chance)), (num_requests, 1)).astype(np.float32)
    rows = num_requests + np.arange(7 * num_requests + 1)
    costs = 1.0 + np.maximum(0, rows - 8) / 16.0
    inputs = BudgetInputs(
        num_draft_tokens=np.full(num_requests, 7),
        num_decoding=num_requests,
        max_verified=10_000,
        planning_survival=survival,
        costs=Tables(costs, costs),
    )
    return choose(inputs)


def test_budget_per_request_falls_with_load_and_earlier_for_bad_drafts() -> None:
    loads = (1, 2, 3, 4, 8, 16, 64)
    good, bad = ([choose_at_load(c, n) / n for n in loads] for c in (0.9, 0.1))
    assert good[0] == bad[0] == 7
    assert good == sorted(good, reverse=True)
    assert bad == sorted(bad, reverse=True)
    assert all(b <= g for b, g in zip(bad, good, strict=True))
    assert bad[loads.index(8)] == 0 < good[loads.index(8)]


def test_nothing_fits() -> None:
    inputs, _ = draw_inputs(np.random.default_rng(1), has_prompt=False)
    empty = BudgetInputs(
        num_draft_tokens=inputs.num_draft_tokens,
        num_decoding=inputs.num_decoding,
        max_verified=0,
        planning_survival=inputs.planning_survival,
        costs=inputs.costs,
    )
    assert choose(empty) == 0


def repeat_survival(chance: float, depth: int, count: int = 32) -> np.ndarray:
    """Return as many remembered drafts, each token accepted with this chance."""
    return np.tile(np.cumprod(np.full(depth, chance)), (count, 1)).astype(np.float32)


def plan(
    drafting: Drafting,
    recent: np.ndarray | None,
    *,
    hits: Sequence[float] | None = None,
    recent_hits: Sequence[float] | None = None,
    depth: int = 7,
) -> DraftDecision:
    """Return who should draft, all requests being alike unless hits tell them apart."""
    num_recent = 0 if recent is None else len(recent)
    return AdaptivePolicy(min_gain=0.01).choose_drafting(
        DraftInputs(
            num_requests=drafting.num_requests,
            max_depth=depth,
            hits=np.array(hits or [0.0] * drafting.num_requests, dtype=np.float32),
            recent_survival=recent,
            recent_hits=np.array(recent_hits or [0.0] * num_recent, dtype=np.float32),
            costs=drafting,
        )
    )


def cost_flat(rows: np.ndarray) -> np.ndarray:
    return np.ones(np.shape(rows))


def cost_nothing(num_requests: np.ndarray, depth: int) -> np.ndarray:
    return np.zeros(np.shape(num_requests))


def find_best_rate(drafting: Drafting, chance: float, depth: int) -> float:
    """Return the largest (N + S_B) / (cost + drafting) over who drafts, how deep, and B >= 1."""
    best = 0.0
    for count in range(1, drafting.num_requests + 1):
        for deep in range(1, depth + 1):
            slots = np.sort(np.tile(np.cumprod(np.full(deep, chance)), count))[::-1]
            tokens = drafting.num_requests + np.cumsum(slots)
            ms = drafting.verify(np.arange(1, len(slots) + 1))
            ms = ms + drafting.draft(np.array([count]), deep)
            best = max(best, float((tokens / ms).max()))
    return best


def test_everyone_drafts_while_nothing_is_known() -> None:
    expensive = Drafting(4, cost_flat, lambda n, depth: 100.0 * np.asarray(n))
    assert plan(expensive, None).depth == 7
    assert plan(expensive, np.zeros((0, 7), dtype=np.float32)).depth == 7


@pytest.mark.parametrize("num_requests", [1, 4, 64])
def test_a_free_drafter_of_good_drafts_drafts_all_it_can(num_requests: int) -> None:
    decision = plan(Drafting(num_requests, cost_flat, cost_nothing), repeat_survival(0.9, 7))
    assert decision.depth == 7
    assert decision.min_hits == -np.inf
    assert decision.gain == pytest.approx(sum(0.9**j for j in range(1, 8)), rel=1e-5)


@pytest.mark.parametrize(("share", "depth"), [(0.9, 7), (1.1, 0)])
def test_drafting_must_gain_what_it_costs(share: float, depth: int) -> None:
    """A block drafter that costs a share of what its drafts are worth: 2 requests, rows free."""
    worth_ms = sum(0.8**j for j in range(1, 8))  # per request at one token per request and ms
    drafting = Drafting(2, cost_flat, lambda n, _: share * worth_ms * np.asarray(n) / 2)
    decision = plan(drafting, repeat_survival(0.8, 7))
    assert decision.depth == depth
    assert (decision.gain > 0) == (depth > 0)


@pytest.mark.parametrize("token_ms", [0.6, 0.3, 0.2, 0.1, 0.04, 0.015, 0.001])
def test_depth_of_a_sequential_drafter_is_that_of_the_best_rate(token_ms: float) -> None:
    """One request at a token per ms, free rows, each draft token half as likely as the last."""
    drafting = Drafting(1, cost_flat, lambda n, d: token_ms * d * np.ones(np.shape(n)))
    rates = {d: (2.0 - 0.5**d) / (1.0 + token_ms * d) for d in (0, 1, 2, 3, 4, 6, 8)}
    best = max(rates, key=lambda depth: rates[depth])
    assert plan(drafting, repeat_survival(0.5, 8), depth=8).depth == best


def test_depth_of_a_sequential_drafter_falls_with_its_price() -> None:
    depths = []
    for token_ms in (0.6, 0.2, 0.04, 0.001):
        drafting = Drafting(1, cost_flat, lambda n, d, ms=token_ms: ms * d * np.ones(np.shape(n)))
        depths.append(plan(drafting, repeat_survival(0.5, 8), depth=8).depth)
    assert depths[0] == 0
    assert depths == sorted(set(depths)), "each price should have a depth of its own"


def test_only_requests_of_which_something_is_expected_draft() -> None:
    """Drafting costs per request; past drafts were good where hits were high, and useless where
    they were low."""
    recent = np.concatenate([repeat_survival(0.9, 7, 16), repeat_survival(0.0, 7, 16)])
    drafting = Drafting(8, cost_flat, lambda n, _: 0.2 * np.asarray(n))
    hits = [2.0, -2.0, 2.0, -2.0, 1.5, -1.5, 2.5, -2.5]
    decision = plan(drafting, recent, hits=hits, recent_hits=[2.0] * 16 + [-2.0] * 16)
    assert decision.depth == 7
    assert [hit >= decision.min_hits for hit in hits] == [hit > 0 for hit in hits]


def test_hits_that_tell_nothing_leave_nobody_out() -> None:
    recent = repeat_survival(0.9, 7)
    drafting = Drafting(4, cost_flat, lambda n, _: 0.2 * np.asarray(n))
    decision = plan(drafting, recent, hits=[2.0, -2.0, 1.0, -1.0], recent_hits=[2.0, -2.0] * 16)
    assert (decision.depth, decision.min_hits) == (7, -np.inf)


@pytest.mark.parametrize("seed", range(3))
def test_drafting_is_on_where_some_way_of_it_pays_and_off_where_none_does(seed: int) -> None:
    """Against enumeration of who drafts, how deep and B, for drafts of one chance and costs that
    are flat up to a knee; gains and losses under 10 % are left open."""
    rng = np.random.default_rng(seed)
    decisions = []
    for _ in range(60):
        num_requests, knee = int(rng.integers(1, 17)), int(rng.integers(1, 40))
        slope, chance = rng.uniform(0.01, 0.3), float(rng.choice([0.1, 0.5, 0.9]))
        first_ms, next_ms = rng.choice([0.0, 0.1, 1.0], 2) * rng.random(2)
        drafting = Drafting(
            num_requests,
            lambda rows, knee=knee, slope=slope: 1.0 + slope * np.maximum(0, rows - knee),
            lambda n, d, a=first_ms, b=next_ms: (a + b * (d - 1)) * np.ones(np.shape(n)),
        )
        plain = num_requests / float(drafting.verify(np.zeros(1))[0])
        gain = find_best_rate(drafting, chance, 7) / plain - 1.0
        if abs(gain) > 0.1:
            is_on = plan(drafting, repeat_survival(chance, 7)).depth > 0
            assert is_on == (gain > 0), (num_requests, knee, slope, chance, first_ms, next_ms)
            decisions.append(is_on)
    assert 5 < sum(decisions) < len(decisions) - 5
