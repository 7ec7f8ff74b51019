"""Two-level argmax and draws equal their plain definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from forerun.sampling.reduce import argmax_rows, draw


@pytest.mark.parametrize("width", [1, 5, 256, 511, 512, 1000, 4096, 5001])
def test_argmax_finds_the_first_maximum(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    values = torch.randint(0, 50, (40, width), generator=generator).float()
    expected = np.argmax(values.numpy(), axis=1)  # NumPy promises the first
    assert argmax_rows(values).tolist() == expected.tolist()


@pytest.mark.parametrize("place", [0, 700, 1299])
def test_argmax_points_at_nan(place: int) -> None:
    values = torch.zeros(2, 1300)
    values[1, place] = torch.nan
    assert argmax_rows(values).tolist() == [0, place]


@pytest.mark.parametrize("width", [4, 1024, 1025, 3000, 5120])
def test_draw_inverts_the_distribution_function(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    weights = torch.rand(1, width, generator=generator) * 7
    weights[:, ::3] = 0
    bounds = weights.double().cumsum(-1)[0] / weights.double().sum()
    uniforms = torch.linspace(0, 1, 997, dtype=torch.float64)[:-1]
    # A float32 block sum may move a boundary by 1e-7; uniforms on a boundary are left out.
    clear = (uniforms[:, None] - bounds).abs().amin(dim=-1) > 1e-6
    drawn = draw(weights.expand(996, -1), uniforms)
    expected = (bounds <= uniforms[:, None]).sum(dim=-1)
    assert clear.sum() > 900
    assert torch.equal(drawn[clear], expected[clear])


def test_draw_never_returns_weight_zero() -> None:
    weights = torch.zeros(2, 3000)
    weights[0, 1500] = 1e-30
    weights[1, [0, 2999]] = torch.tensor([1.0, 1e-6])
    edges = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    assert draw(weights[:1].expand(2, -1), edges).tolist() == [1500, 1500]
    assert draw(weights[1:].expand(2, -1), edges).tolist() == [0, 2999]


def test_draw_reaches_tokens_rarer_than_float32_resolution() -> None:
    """The last entry has 3e-8 of the mass, less than one step of a float32 cumulative sum."""
    weights = torch.ones(1, 2000) / 2000
    weights[0, -1] = 3e-8
    top = torch.tensor([1 - 1e-8], dtype=torch.float64)
    assert draw(weights, top).tolist() == [1999]


def test_draws_follow_the_weights() -> None:
    """Chi-square over 1,500 entries, n = 60,000 even uniforms in random order: p > 1e-3."""
    weights = 1.0 + (torch.arange(1500) % 7).float()
    uniforms = torch.from_numpy(np.random.default_rng(1).random(60_000))
    drawn = torch.cat([draw(weights.expand(len(u), -1), u) for u in uniforms.split(5000)])
    counts = torch.bincount(drawn, minlength=1500).numpy()
    expected = (weights.double() / weights.double().sum() * 60_000).numpy()
    assert stats.chisquare(counts, expected).pvalue > 1e-3
