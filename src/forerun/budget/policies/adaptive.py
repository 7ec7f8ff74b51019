"""Verify the drafts that are worth their time; draft only where that pays.

Maximises expected tokens per second (DSpark section 3.2.2, eq. 9, with the cost of the whole step):
B maximises N + S_B - lambda x cost(B), lambda the long-run tokens per ms. The ratio of a single
step, (N + S_B) / cost(B), has the same argmax while steps are alike. With few requests they are
not: one with a good draft would price its own time by its own rate and trim what the average step
would gladly pay for. And beside a prompt, whose rows make any draft look free in a ratio, drafts
still have to earn what they cost. The argmax is global: the cost is a staircase.

Drafting is compared with not drafting by replaying remembered drafts at today's load, in batches:
what counts is what the best budget for them would have gained, not what the average draft would,
because the budget is chosen once the drafts are known.
Shapes: N requests that decode, M remembered drafts, d draft depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from forerun.budget.base import BudgetDecision, BudgetInputs, DraftCosts, DraftDecision, DraftInputs
from forerun.budget.survival import mark_drafts

# Drafters whose depth costs time are tried at these depths, up to the configured one.
_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
# Depth counts as free if all of it costs less than this share of a plain step.
_FREE_DEPTH_FRAC = 0.01
_FEW_SLOTS = 32


class AdaptivePolicy:
    """Global argmax of expected tokens per second; see the module docstring.

    A trim must beat verifying everything by `min_gain`: predictions are never exact.
    """

    name = "adaptive"
    needs_confidence = True
    needs_costs = True

    def __init__(self, *, min_gain: float) -> None:
        self._min_gain = min_gain

    def choose_budget(self, inputs: BudgetInputs) -> BudgetDecision:
        """Return the budget of highest value; the largest that fits if trimming gains little."""
        planning, costs = inputs.planning_survival, inputs.costs
        assert planning is not None, "this policy needs confidences"
        assert costs is not None, "this policy needs costs"
        largest = min(int(inputs.num_draft_tokens.sum()), inputs.max_verified)
        if largest <= 0:
            nothing = np.zeros_like(inputs.num_draft_tokens)
            return BudgetDecision(verification_budget=0, max_verified=nothing)
        step_ms = costs.step(largest)
        decode_ms = costs.decode(largest) if costs.has_prompt_rows else step_ms
        choose = self._choose_among_few if largest <= _FEW_SLOTS else self._choose
        best = choose(inputs, step_ms, decode_ms)
        return BudgetDecision(
            verification_budget=best,
            max_verified=inputs.num_draft_tokens,
            step_ms=float(step_ms[best]),
        )

    def _choose(self, inputs: BudgetInputs, step_ms: np.ndarray, decode_ms: np.ndarray) -> int:
        planning, largest = inputs.planning_survival, len(step_ms) - 1
        assert planning is not None, "checked above"
        slots = -np.sort(-planning[mark_drafts(inputs.num_draft_tokens, planning.shape[1])])
        tokens = np.full(largest + 1, float(inputs.num_decoding))
        tokens[1:] += np.cumsum(slots[:largest], dtype=np.float64)
        rate = inputs.rate or (tokens / decode_ms).max()
        value = tokens - rate * step_ms
        best = int(value.argmax())
        if value[best] - value[largest] < self._min_gain * tokens[largest]:
            return largest
        return best

    def _choose_among_few(
        self, inputs: BudgetInputs, step_ms: np.ndarray, decode_ms: np.ndarray
    ) -> int:
        """Do the same without arrays: for a few slots an array operation costs more than a loop."""
        assert inputs.planning_survival is not None, "checked above"
        rows = inputs.planning_survival.tolist()
        counts = inputs.num_draft_tokens.tolist()
        slots = [chance for row, n in zip(rows, counts, strict=True) for chance in row[:n]]
        slots.sort(reverse=True)
        costs, decode_costs = step_ms.tolist(), decode_ms.tolist()
        tokens = list(accumulate(slots[: len(costs) - 1], initial=float(inputs.num_decoding)))
        rate = inputs.rate or max(t / cost for t, cost in zip(tokens, decode_costs, strict=True))
        value = [t - rate * cost for t, cost in zip(tokens, costs, strict=True)]
        best = max(range(len(value)), key=value.__getitem__)
        if value[best] - value[-1] < self._min_gain * tokens[-1]:
            return len(value) - 1
        return best

    def choose_drafting(self, inputs: DraftInputs) -> DraftDecision:
        """Return the depth and the requests of highest rate; depth 0 if not drafting is faster.

        With nothing to go by, everyone drafts: that is how it becomes known.
        """
        costs, recent = inputs.costs, inputs.recent_survival
        assert costs is not None, "this policy needs costs"
        if recent is None or len(recent) == 0:
            return DraftDecision(depth=inputs.max_depth)
        plans = [
            _plan_drafting(inputs, costs, recent, depth)
            for depth in _list_depths(costs, inputs.num_requests, inputs.max_depth)
        ]
        best = max(plans, key=lambda plan: plan.gain)
        return DraftDecision(
            depth=best.depth if best.pays else 0,
            min_hits=best.min_hits,
            gain=best.gain,
            draft_ms=best.draft_ms,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """What drafting to one depth would bring."""

    depth: int
    pays: bool
    min_hits: float
    gain: float
    draft_ms: float


def _list_depths(costs: DraftCosts, num_requests: int, max_depth: int) -> list[int]:
    """Return the depths worth comparing: only the largest if depth costs nothing."""
    count = np.array([num_requests])
    difference = costs.draft(count, max_depth) - costs.draft(count, 1)
    if difference[0] <= _FREE_DEPTH_FRAC * costs.verify(np.zeros(1))[0]:
        return [max_depth]
    return [*(depth for depth in _DEPTHS if depth < max_depth), max_depth]


def _plan_drafting(inputs: DraftInputs, costs: DraftCosts, recent: np.ndarray, depth: int) -> _Plan:
    """Replay the remembered drafts, cut to `depth`, in steps of today's requests."""
    num_requests = inputs.num_requests
    rate = num_requests / float(costs.verify(np.zeros(1))[0])
    draft_ms = costs.draft(np.arange(1, num_requests + 1), depth)
    gains, rows = _replay(recent[:, :depth], costs, num_requests, float(draft_ms[-1]))
    expected = _predict_gains(gains, inputs)
    order = np.argsort(-expected, kind="stable")
    surplus = np.cumsum(expected[order]) - rate * draft_ms
    count = int(surplus.argmax())
    min_hits = -np.inf
    if count + 1 < num_requests and inputs.hits is not None:
        min_hits = float(inputs.hits[order[count]])
    spent_ms = costs.verify(np.array([(count + 1) * rows]))[0] + draft_ms[count]
    return _Plan(
        depth=depth,
        pays=bool(surplus[count] > 0),
        min_hits=min_hits,
        gain=float(surplus[count] / (rate * spent_ms)),
        draft_ms=float(draft_ms[count]),
    )


def _replay(
    recent: np.ndarray,  # [M, d]
    costs: DraftCosts,
    num_requests: int,
    draft_ms: float,
) -> tuple[np.ndarray, float]:
    """Return (tokens each draft gained net of what verifying cost [M], mean rows per draft).

    The drafts come in batches of as many as there are requests, and each batch gets the budget that
    a step would give it. Where requests outnumber drafts, a draft stands for several of them.
    """
    num_recent, depth = recent.shape
    size = min(num_requests, num_recent)
    scale = num_requests / size
    recent = recent[num_recent % size :].astype(np.float64)
    batches = recent.reshape(-1, size * depth)
    slots = -np.sort(-batches, axis=1)
    tokens = np.zeros((len(slots), size * depth + 1))
    np.cumsum(scale * slots, axis=1, out=tokens[:, 1:])
    verify_ms = costs.verify(scale * np.arange(tokens.shape[1]))
    plain = rate = num_requests / verify_ms[0]
    # The first pass prices time at what plain decoding makes of it, the second at what it found.
    for _ in range(2):
        best = (tokens - rate * verify_ms).argmax(axis=1)
        gained = np.take_along_axis(tokens, best[:, None], axis=1)[:, 0]
        total_ms = float((verify_ms[best] + draft_ms).sum())
        rate = max(rate, float((num_requests + gained).sum()) / total_ms)
    spent_ms = verify_ms[best] - verify_ms[0]
    net = float((gained - plain * spent_ms).mean()) / num_requests
    # A draft's share: its admitted slots, less the mean price of a row of its batch.
    last = np.take_along_axis(slots, np.maximum(best - 1, 0)[:, None], axis=1)
    is_kept = (batches >= last) & (best > 0)[:, None]
    price = plain * spent_ms / (scale * np.maximum(best, 1))
    shares = ((batches - price[:, None]) * is_kept).reshape(-1, depth).sum(axis=1)
    return shares + (net - shares.mean()), float(best.mean()) / size


def _predict_gains(gains: np.ndarray, inputs: DraftInputs) -> np.ndarray:
    """Return the gain each request may expect, [N]: linear in its own recent acceptance."""
    mean = gains.mean()
    hits, seen = inputs.hits, inputs.recent_hits
    if hits is None or seen is None:
        return np.full(inputs.num_requests, mean)
    seen = seen[len(seen) - len(gains) :]
    spread = seen - seen.mean()
    variance = float(spread @ spread)
    slope = max(0.0, float(spread @ gains) / variance) if variance > 1e-6 else 0.0
    expected: np.ndarray = np.maximum(0.0, mean + slope * (hits - seen.mean()))
    return expected
