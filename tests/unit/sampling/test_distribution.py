"""Coupled samples: the same token whatever representation a row has, and the right law."""

from __future__ import annotations

import numpy as np
import torch
from scipy import stats

from forerun.core import SamplingParams
from forerun.sampling.filters import RowFilters, build_distribution
from forerun.sampling.noise import coupled_keys, gumbel

VOCAB = 700


def sample(logits: torch.Tensor, params: list[SamplingParams], keys: np.ndarray) -> torch.Tensor:
    rows = RowFilters.from_params(params, np.ones(len(params), dtype=np.int64))
    return build_distribution(logits, rows).sample_coupled(torch.from_numpy(keys))


def make_logits(num_rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(num_rows, VOCAB, generator=generator) * 3


def test_coupled_sample_is_the_gumbel_max_of_the_scaled_logits() -> None:
    logits, keys = make_logits(80), coupled_keys(5, 0, np.arange(80))
    drawn = sample(logits, [SamplingParams(temperature=0.7)] * 80, keys)
    noisy = logits / 0.7 + gumbel(torch.from_numpy(keys), torch.arange(VOCAB))
    assert torch.equal(drawn, noisy.argmax(dim=-1))


def test_a_filter_that_keeps_the_winner_does_not_change_it() -> None:
    """Dense and sparse rows race with the same noise: cutting losers cannot change the winner."""
    logits, keys = make_logits(200), coupled_keys(5, 0, np.arange(200))
    dense = sample(logits, [SamplingParams()] * 200, keys)
    filtered = sample(logits, [SamplingParams(top_k=40)] * 200, keys)
    survives = (logits.topk(40).indices == dense[:, None]).any(dim=-1)
    assert torch.equal(dense[survives], filtered[survives])
    assert 0 < survives.sum() < 200
    assert (filtered[~survives] != dense[~survives]).all()


def test_rows_of_several_parts_come_back_in_their_own_order() -> None:
    logits, keys = make_logits(60), coupled_keys(9, 1, np.arange(60))
    kinds = [SamplingParams(), SamplingParams(top_k=5), SamplingParams(temperature=0.4, top_p=0.8)]
    params = [kinds[row % 3] for row in range(60)]
    together = sample(logits, params, keys)
    alone = [
        sample(logits[i : i + 1], params[i : i + 1], keys[i : i + 1]).item() for i in range(60)
    ]
    assert together.tolist() == alone


def test_coupled_samples_follow_the_distribution() -> None:
    """Chi-square over 6 tokens, n = 30,000 positions of one seed: p > 1e-3."""
    logits = torch.tensor([[0.0, 1.0, 2.0, 0.5, -1.0, 1.5]])
    keys = coupled_keys(3, 0, np.arange(30_000))
    drawn = sample(logits.expand(30_000, -1), [SamplingParams()] * 30_000, keys)
    expected = logits[0].double().softmax(-1).numpy() * 30_000
    assert stats.chisquare(torch.bincount(drawn, minlength=6).numpy(), expected).pvalue > 1e-3
