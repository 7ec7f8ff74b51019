"""Filters against a brute-force float64 oracle that sorts everything.

Candidate widths are shrunk so that a vocabulary of 40 goes through every stage: few candidates,
more candidates, threshold. Logits are multiples of 1/4, so ties are common.
"""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from forerun.core import SamplingParams
from forerun.sampling import filters as filters_module
from forerun.sampling.distribution import SparsePart, TargetDistribution
from forerun.sampling.filters import RowFilters, build_distribution

WIDTHS = {"candidates": (64,), "grown": (3, 12), "threshold": (2,)}
BORDER = 1e-5


def filter_by_sorting(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, bool]:
    """Return the filtered law, and whether it is so close to an edge that rounding may decide."""
    scaled = logits.astype(np.float64) / params.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = np.lexsort((np.arange(len(probs)), -scaled))
    if params.top_k > 0:
        order = order[: params.top_k]
    mass = probs[order] / probs[order].sum()
    before = np.cumsum(mass) - mass
    floor = params.min_p * probs.max()
    keep = probs[order] >= floor
    is_close = 0 < params.min_p < 1 and bool(np.abs(probs[order] / floor - 1).min() < BORDER)
    if params.top_p < 1.0:
        keep &= before < params.top_p
        is_close |= bool(np.abs(before - params.top_p).min() < BORDER)
    law = np.zeros_like(probs)
    law[order[keep]] = probs[order[keep]]
    return law / law.sum(), is_close


def to_dense(distribution: TargetDistribution, vocab_size: int) -> torch.Tensor:
    num_rows = len(distribution.is_finite)
    rows = torch.arange(num_rows).repeat_interleave(vocab_size)
    tokens = torch.arange(vocab_size).repeat(num_rows)
    return distribution.get_probs(rows, tokens).view(num_rows, vocab_size)


def build(logits: np.ndarray, params: list[SamplingParams]) -> TargetDistribution:
    rows = RowFilters.from_params(params, np.ones(len(params), dtype=np.int64))
    return build_distribution(torch.tensor(logits, dtype=torch.float32), rows)


sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 2, 3, 7, 11, 12, 39, 40, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.2, 0.5, 0.83, 0.97, 0.9999]),
    min_p=st.sampled_from([0.0, 0.0, 0.03, 0.4, 1.0]),
)


@pytest.mark.parametrize("stage", WIDTHS)
@settings(max_examples=150, deadline=None)
@given(
    quarters=st.lists(st.integers(-20, 20), min_size=2, max_size=40),
    params=st.lists(sampling_params, min_size=1, max_size=4),
)
def test_filters_equal_the_oracle(
    stage: str, quarters: list[int], params: list[SamplingParams]
) -> None:
    logits = np.array(quarters) / 4
    laws, are_close = zip(*(filter_by_sorting(logits, p) for p in params), strict=True)
    assume(not any(are_close))
    expected = np.stack(laws)
    with mock.patch.object(filters_module, "CANDIDATE_WIDTHS", WIDTHS[stage]):
        distribution = build(np.tile(logits, (len(params), 1)), params)
    dense = to_dense(distribution, len(logits)).numpy()
    assert ((dense > 0) == (expected > 0)).all()
    np.testing.assert_allclose(dense, expected, rtol=2e-5)


def test_each_row_uses_the_narrowest_stage_that_suffices(path: str) -> None:
    """A peaked row stays with 256 candidates, a flatter one takes 2048, a flat one a threshold.

    Native kernels list what survives, up to 2048 candidates.
    """
    ranks = np.arange(1, 10_001, dtype=np.float64)
    logits = np.stack([-4.0 * np.log(ranks), -1.2 * np.log(ranks), 0.0001 * ranks, ranks])
    params = [SamplingParams(top_p=0.9)] * 3 + [SamplingParams()]
    distribution = build(logits, params)
    shapes = {
        int(row): part.token_ids.shape[1] if isinstance(part, SparsePart) else "dense"
        for part in distribution.parts
        for row in part.rows
    }
    widths = {0: 256, 1: 2048} if path == "pytorch" else {0: 937, 1: 937}
    assert shapes == {**widths, 2: "dense", 3: "dense"}
    dense = to_dense(distribution, 10_000)
    for row, given_params in enumerate(params):
        expected, _ = filter_by_sorting(logits[row].astype(np.float32), given_params)
        np.testing.assert_allclose(dense[row].numpy(), expected, rtol=1e-3, atol=1e-9)


def test_candidates_come_by_logit_then_token_id() -> None:
    logits = np.zeros((1, 400))
    logits[0, [350, 20, 7]] = [2.0, 1.0, 1.0]
    part = build(logits, [SamplingParams(top_k=5)]).parts[0]
    assert isinstance(part, SparsePart)
    assert part.token_ids[0, :5].tolist() == [350, 7, 20, 0, 1]
    assert (part.probs[0] > 0).nonzero().squeeze(1).tolist() == [0, 1, 2, 3, 4]


def test_ties_at_the_edge_are_cut_by_token_id() -> None:
    """All 5,000 logits equal: top-k keeps the first ids, whatever partial selection returned."""
    distribution = build(np.zeros((2, 5000)), [SamplingParams(top_k=3), SamplingParams(top_p=0.01)])
    dense = to_dense(distribution, 5000)
    assert dense[0].nonzero().squeeze(1).tolist() == [0, 1, 2]
    assert len(dense[1].nonzero()) == pytest.approx(50, abs=1)
    assert dense[1].nonzero().squeeze(1).tolist() == list(range(len(dense[1].nonzero())))


def test_filters_leave_the_logits_unchanged() -> None:
    logits = torch.randn(3, 600, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    params = [
        SamplingParams(temperature=0.5, top_p=0.9),
        SamplingParams(min_p=0.1),
        SamplingParams(),
    ]
    distribution = build_distribution(logits, RowFilters.from_params(params, np.ones(3, np.int64)))
    distribution.sample_coupled(torch.arange(3))
    assert torch.equal(logits, before)


def test_masked_logits_do_not_widen_the_search() -> None:
    logits = np.full((1, 3000), -np.inf)
    logits[0, :100] = np.linspace(0, 3, 100)
    distribution = build(logits, [SamplingParams(top_k=200)])
    assert isinstance(distribution.parts[0], SparsePart)
    assert (to_dense(distribution, 3000) > 0).sum() == 100


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_without_a_distribution_are_marked(bad: float) -> None:
    logits = np.zeros((4, 300))
    logits[1, 299] = bad
    logits[2] = -np.inf
    params = [SamplingParams(top_p=0.5), SamplingParams(top_p=0.5)]
    assert build(logits, params * 2).is_finite.tolist() == [True, False, False, True]
    assert build(logits, [SamplingParams()] * 4).is_finite.tolist() == [True, False, False, True]
