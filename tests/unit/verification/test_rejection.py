"""The acceptance rules on examples small enough to work out by hand, and the law they imply."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.verification.rejection import (
    accept_drafts,
    compute_one_hot_residual,
    compute_residual,
    count_accepted,
    count_matches,
)

WEIGHTS = st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any)


@pytest.mark.parametrize(
    ("sampled", "drafts", "expected"),
    [
        ([5], [], 0),
        ([5, 6], [4], 0),
        ([5, 6], [5], 1),
        ([5, 6, 7], [5, 9], 1),
        ([5, 6, 7], [5, 6], 2),
    ],
)
def test_matches_count_up_to_the_first_difference(
    sampled: list[int], drafts: list[int], expected: int
) -> None:
    assert count_matches(sampled, drafts) == expected


def test_a_draft_is_accepted_below_p_over_q() -> None:
    target = torch.tensor([0.3, 0.3, 0.9, 0.0, torch.nan])
    draft = torch.tensor([0.6, 0.6, 0.5, 0.5, 0.5])
    uniforms = torch.tensor([0.49, 0.51, 0.999999, 0.0, 0.0], dtype=torch.float64)
    assert accept_drafts(target, draft, uniforms).tolist() == [True, False, True, False, False]


def test_nothing_counts_after_the_first_rejection() -> None:
    accepted = torch.tensor([True, True, False, True, True, False])
    requests, positions = torch.tensor([0, 0, 1, 1, 1, 3]), torch.tensor([0, 1, 0, 1, 2, 0])
    assert count_accepted(accepted, requests, positions, (4, 3)).tolist() == [2, 0, 0, 0]


def test_residual_is_what_p_has_more_than_q() -> None:
    target, draft = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.6, 0.2]])
    torch.testing.assert_close(compute_residual(target, draft), torch.tensor([[0.3, 0.0, 0.0]]))
    is_draft = torch.tensor([[False, True, False]])
    assert compute_one_hot_residual(target, is_draft).tolist() == [[0.5, 0.0, pytest.approx(0.2)]]


@pytest.mark.parametrize("draft", [[[0.5, 0.5, 0.0]], [[torch.nan, 0.5, 0.5]]])
def test_without_residual_mass_the_target_itself_is_used(draft: list[list[float]]) -> None:
    target = torch.tensor([[0.5, 0.5, 0.0]])
    assert torch.equal(compute_residual(target, torch.tensor(draft)), target)
    certain = torch.tensor([[0.0, 1.0, 0.0]])
    assert torch.equal(compute_one_hot_residual(certain, certain > 0), certain)


@settings(max_examples=100, deadline=None)
@given(target=WEIGHTS, draft=WEIGHTS)
def test_accepting_and_recovering_adds_up_to_the_target(
    target: list[int], draft: list[int]
) -> None:
    """q(x) P(accept x) + P(reject) residual(x) = p(x), with P(accept) measured on a fine grid."""
    p, q = (torch.tensor([w], dtype=torch.float32) / sum(w) for w in (target, draft))
    grid = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    accept = torch.stack(
        [
            accept_drafts(p[0, x].expand(20_000), q[0, x].expand(20_000), grid).double().mean()
            for x in range(4)
        ]
    )
    kept = q[0] * accept
    residual = compute_residual(p, q)[0]
    law = kept + (1 - kept.sum()) * residual / residual.sum()
    torch.testing.assert_close(law.float(), p[0], atol=2e-4, rtol=0)
