"""Noise: pinned values, uniformity, and independence of everything it is keyed by.

All seeds are fixed, so each p-value below is one number, not a chance of failure; the bound 1e-3
says how surprising a sound generator would have to be.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from forerun.sampling.noise import (
    Stream,
    coupled_keys,
    derive_keys,
    exponential,
    gumbel,
    uniform,
)

NUM_SAMPLES = 20_000
GOLDEN = 0x9E3779B97F4A7C15


def splitmix64(state: int) -> int:
    """Return the published finaliser, in Python integers."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
    return state ^ (state >> 31)


def keys_of(**fields: object) -> torch.Tensor:
    named = {"stream": Stream.COUPLED, "seeds": 1, "choices": 0, "counters": 0, **fields}
    return torch.from_numpy(derive_keys(**named))


def test_keys_never_change() -> None:
    """These values decide the text of seeded requests: a change here is a breaking change."""
    keys = coupled_keys([0, 1, -5, 2**63 - 1], [0, 1, 0, 2], [10, 11, 12, 13])
    assert keys.tolist() == [
        -603463120486473253,
        -7355787137580386039,
        -9135700529857572591,
        -3378063472593999298,
    ]
    assert derive_keys(Stream.ACCEPT, [7], [0], [3], [2]).tolist() == [-3202487985132982454]


def test_uniforms_never_change() -> None:
    keys = derive_keys(Stream.ACCEPT, [7], [0], [3], [2])
    assert uniform(keys).tolist() == [0.1439230324492371]


def test_gumbel_never_changes() -> None:
    keys = torch.tensor([-603463120486473253, -7355787137580386039])
    noise = gumbel(keys, torch.tensor([0, 1, 2, 49151]))
    expected = [
        [-0.38880178332328796, 0.5502269268035889, -0.9378061294555664, -0.5523240566253662],
        [0.469696044921875, 0.14950260519981384, 3.583432674407959, 0.017832139506936073],
    ]
    torch.testing.assert_close(noise, torch.tensor(expected), rtol=1e-6, atol=1e-7)


def test_keys_follow_the_documented_mixing() -> None:
    state = 0
    for value in (-5, int(Stream.DRAFT), 2, 9, 4):
        state = splitmix64((state + (value + 1) * GOLDEN) % 2**64)
    assert derive_keys(Stream.DRAFT, [-5], [2], [9], [4]).view(np.uint64).tolist() == [state]


def test_exponential_follows_the_documented_hash() -> None:
    key, token = 123456789, 31337
    x = splitmix64((key + token * GOLDEN) % 2**64) >> 32
    noise = exponential(torch.tensor([key]), torch.tensor([token]))
    # The last bit of x is not finalised; it moves w by 2^-32.
    assert noise.item() == pytest.approx(-np.log1p(-(x + 0.5) * 2.0**-32), rel=1e-5)


def test_noise_is_the_same_alone_and_in_a_batch() -> None:
    keys = keys_of(counters=np.arange(37))
    every_id = torch.arange(1000)
    batch = gumbel(keys, every_id)
    for row in (0, 17, 36):
        assert torch.equal(gumbel(keys[row : row + 1], every_id)[0], batch[row])


def test_noise_of_a_reduced_list_equals_that_of_the_full_range() -> None:
    keys = keys_of(counters=np.arange(5))
    chosen = torch.tensor([[999, 3, 500], [1, 2, 3], [0, 0, 998], [7, 6, 5], [123, 456, 789]])
    full = gumbel(keys, torch.arange(1000))
    assert torch.equal(gumbel(keys, chosen), full.gather(1, chosen))


def test_uniforms_are_uniform() -> None:
    """Kolmogorov-Smirnov, n = 20,000: p > 1e-3; also in the lowest thousandth (n = 200,000)."""
    assert (
        stats.kstest(uniform(keys_of(counters=np.arange(NUM_SAMPLES)).numpy()), "uniform")[1] > 1e-3
    )
    many = uniform(keys_of(seeds=np.arange(200_000)).numpy())
    tail = many[many < 1e-3] * 1e3
    assert stats.kstest(tail, "uniform")[1] > 1e-3
    assert stats.binomtest(len(tail), 200_000, 1e-3).pvalue > 1e-3


@pytest.mark.parametrize("axis", ["seeds", "choices", "counters", "positions", "token_ids"])
def test_gumbel_has_its_law_along_every_axis(axis: str) -> None:
    """Kolmogorov-Smirnov against Gumbel(0, 1), n = 20,000 along one axis: p > 1e-3."""
    if axis == "token_ids":
        noise = gumbel(keys_of(), torch.arange(NUM_SAMPLES)).ravel()
    else:
        noise = gumbel(keys_of(**{axis: np.arange(NUM_SAMPLES)}), torch.tensor([11])).ravel()
    assert stats.kstest(noise.double().numpy(), "gumbel_r")[1] > 1e-3


@pytest.mark.parametrize(
    "axis", ["seeds", "choices", "counters", "positions", "token_ids", "stream"]
)
def test_neighbours_along_every_axis_are_independent(axis: str) -> None:
    """Chi-square of an 8 x 8 table of ranks of neighbours, n = 20,000: p > 1e-3."""
    base = {"counters": np.arange(NUM_SAMPLES)}
    first, second = dict(base), dict(base)
    tokens = [torch.tensor([5]), torch.tensor([5])]
    if axis == "token_ids":
        tokens[1] = torch.tensor([6])
    elif axis == "stream":
        first["stream"], second["stream"] = Stream.ACCEPT, Stream.RESIDUAL
    elif axis == "counters":
        second["counters"] = base["counters"] + 1
    else:
        second[axis] = 1 if axis != "seeds" else 2
    a = exponential(keys_of(**first), tokens[0]).ravel().double().numpy()
    b = exponential(keys_of(**second), tokens[1]).ravel().double().numpy()
    cells = np.floor(8 * (1 - np.exp(-np.stack([a, b])))).astype(int).clip(0, 7)
    table = np.zeros((8, 8))
    np.add.at(table, tuple(cells), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-3


def test_the_largest_hash_keeps_noise_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = torch.tensor([[0, 2**32 - 1]])
    monkeypatch.setattr("forerun.sampling.noise._hash_tokens", lambda *_: extremes)
    noise = gumbel(torch.tensor([0]), torch.tensor([0, 1]))[0]
    assert noise[0].item() == pytest.approx(np.log(2.0**33), rel=1e-5)
    assert -3.0 < noise[1].item() < -2.7


def test_fields_do_not_stand_in_for_one_another() -> None:
    keys = [
        derive_keys(Stream.DRAFT, 1, 0, 2, 3),
        derive_keys(Stream.DRAFT, 1, 0, 3, 2),
        derive_keys(Stream.DRAFT, 0, 1, 2, 3),
        derive_keys(Stream.ACCEPT, 1, 0, 2, 3),
        derive_keys(Stream.DRAFT, 2, 0, 1, 3),
    ]
    assert len(np.unique(np.concatenate(keys))) == len(keys)
