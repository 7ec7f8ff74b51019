"""The law of what the Verifier emits, against enumeration.

N = 5,000 numbered requests per case, so every p-value is fixed; the bound is 1e-4, because there
are about a hundred of them. The power of the test is itself tested: wrong rules fall below 1e-9.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats as scipy_stats

from forerun.core import SamplingParams
from forerun.verification import methods
from stats.law import (
    DRAFTS,
    Row,
    compute_p_value,
    draft_by_table,
    draft_successors,
    generate,
)

NUM_SAMPLES = 5_000
ALPHA = 1e-4
PARAMS = {
    "plain": SamplingParams(),
    "hot": SamplingParams(temperature=1.8),
    "top_p": SamplingParams(top_p=0.75, temperature=0.8),
    "top_k_min_p": SamplingParams(top_k=4, min_p=0.2),
    "penalties": SamplingParams(
        repetition_penalty=1.5, presence_penalty=0.6, frequency_penalty=0.4, min_tokens=1
    ),
}
SPECULATION = [
    ("none", 0),
    ("deterministic", 1),
    ("deterministic", 3),
    ("probabilistic", 1),
    ("probabilistic", 2),
    ("probabilistic", 3),
]


def make_rows(count: int, *, choice_index: int = 0) -> list[Row]:
    return [Row(number, choice_index=choice_index) for number in range(count)]


@pytest.mark.parametrize(("drafter", "num_drafts"), SPECULATION)
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("method", ["standard", "coupled"])
def test_output_follows_the_target_law(
    method: str, params: str, drafter: str, num_drafts: int
) -> None:
    """First token and first two tokens jointly, N = 5,000, p > 1e-4 each."""
    rows = make_rows(NUM_SAMPLES)
    given = PARAMS[params]
    outputs = generate(method, rows, 2, given, DRAFTS[drafter], num_drafts)
    assert compute_p_value(outputs[:, :1], given) > ALPHA
    assert compute_p_value(outputs, given) > ALPHA


def test_the_tests_notice_a_missing_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recovering from p instead of max(p - q, 0) must be rejected: p < 1e-9."""
    monkeypatch.setattr(methods, "_find_left_out", lambda drafts, rejected: None)
    for draft in (draft_successors, draft_by_table):
        outputs = generate("standard", make_rows(NUM_SAMPLES), 2, SamplingParams(), draft, 2)
        assert compute_p_value(outputs, SamplingParams()) < 1e-9


def test_the_tests_notice_a_wrong_draft_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treating drawn drafts as certain (q = 1 in the ratio) must be rejected: p < 1e-9."""
    accept = methods.accept_drafts
    monkeypatch.setattr(methods, "accept_drafts", lambda p, q, u: accept(p, torch.ones_like(q), u))
    outputs = generate("standard", make_rows(NUM_SAMPLES), 2, SamplingParams(), draft_by_table, 2)
    assert compute_p_value(outputs, SamplingParams()) < 1e-9


@pytest.mark.parametrize("params", PARAMS)
def test_coupled_text_depends_on_seed_and_position_alone(params: str) -> None:
    """Six tokens of 150 requests are identical for every drafter, depth and batch."""
    given = PARAMS[params]
    expected = generate("coupled", make_rows(150), 6, given)
    for drafter, num_drafts in SPECULATION[1:]:
        outputs = generate("coupled", make_rows(150), 6, given, DRAFTS[drafter], num_drafts)
        assert np.array_equal(outputs, expected)
    for row in make_rows(150)[::15]:
        alone = generate("coupled", [row], 6, given, draft_successors, 2)
        assert np.array_equal(alone[0], expected[row.number])


def test_choices_of_one_seed_are_different_and_independent() -> None:
    """Chi-square of first tokens of choices 0 and 1 (5 x 5 table), N = 5,000: p > 1e-4."""
    for method in ("standard", "coupled"):
        first, second = (
            generate(method, make_rows(NUM_SAMPLES, choice_index=choice), 1, SamplingParams())[:, 0]
            for choice in (0, 1)
        )
        table = np.zeros((5, 5))
        np.add.at(table, (first, second), 1)
        assert scipy_stats.chi2_contingency(table).pvalue > ALPHA


def test_three_long_choices_of_one_seed_are_three_texts() -> None:
    for method in ("standard", "coupled"):
        rows = [Row(17, choice_index=choice) for choice in range(3)]
        outputs = generate(method, rows, 20, SamplingParams(), draft_successors, 3)
        assert len({tuple(output) for output in outputs}) == 3
