"""Native sampling against its PyTorch and float64 definitions, over random shapes and logits.

A comparison leaves out what float rounding may decide either way: winners by less than MARGIN,
uniforms on a boundary of the distribution function.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from forerun.kernels import Kernels, row_calls
from forerun.kernels.loader import VARIANTS
from forerun.kernels.sampling_ops import (
    LeftOut,
    MeasuredRows,
    draw_listed,
    draw_rows,
    measure_rows,
    sample_coupled,
    sample_listed,
)
from forerun.sampling.distribution import DensePart
from forerun.sampling.noise import _hash_tokens, coupled_keys, exponential
from forerun.sampling.scaled import ScaledRows
from native_kernels import load_variant

MARGIN = 1e-5
TEMPERATURES = (1e-4, 0.3, 1.0, 1.7, 100.0)
BELOW_ONE = 1.0 - 2.0**-53

relaxed = settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
shapes = {
    "num_rows": st.integers(1, 70),
    "vocab_size": st.sampled_from([1, 2, 15, 17, 33, 100, 2047, 2049, 5000, 9001]),
    "temperature": st.sampled_from(TEMPERATURES),
    "seed": st.integers(0, 999),
}


@pytest.fixture(autouse=True)
def use(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_calls, "find_kernels", lambda: kernels)


def make_logits(num_rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    """Return rows of very different spread; about a third of the tokens are masked in some."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator)
    logits *= torch.tensor([0.0, 0.01, 1.0, 3.0, 20.0])[torch.arange(num_rows) % 5, None]
    masked = torch.rand(num_rows, vocab_size, generator=generator) < 0.3
    masked[:, vocab_size // 2] = False
    masked[::2] = False
    return logits.masked_fill_(masked, -torch.inf)


def make_column(num_rows: int, temperature: float = 1.0) -> Tensor:
    return torch.full((num_rows, 1), temperature)


def make_keys(num_rows: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(coupled_keys(seed, 0, np.arange(num_rows)))


def measure(logits: Tensor, temperature: float = 1.0) -> MeasuredRows:
    measured = measure_rows(logits, make_column(len(logits), temperature))
    assert measured is not None
    return measured


def compute_laws(logits: Tensor, temperature: float = 1.0) -> Tensor:
    return (logits / temperature).double().softmax(dim=-1)


def assert_inverts(drawn: Tensor | None, laws: Tensor, uniforms: Tensor) -> None:
    """Check draws against the distribution functions of laws [N, V], which need not sum to one."""
    assert drawn is not None
    bounds = laws.cumsum(dim=-1)
    targets = uniforms * bounds[:, -1]
    expected = (bounds <= targets[:, None]).sum(dim=-1)
    is_clear = ((targets[:, None] - bounds).abs() > MARGIN * bounds[:, -1:]).all(dim=-1)
    assert torch.equal(drawn[is_clear], expected[is_clear])
    assert (laws.gather(1, drawn[:, None]) > 0).all()


@relaxed
@given(**shapes)
def test_dense_samples_are_the_argmax_of_scaled_logits_and_noise(
    num_rows: int, vocab_size: int, temperature: float, seed: int
) -> None:
    logits, keys = make_logits(num_rows, vocab_size, seed), make_keys(num_rows, seed)
    drawn = sample_coupled(logits, make_column(num_rows, temperature), keys)
    assert drawn is not None
    noise = exponential(keys, torch.arange(vocab_size)).double().log()
    scores = (logits / temperature).double() - noise
    best = scores.amax(dim=-1)
    chosen = scores.gather(1, drawn[:, None]).squeeze(1)
    assert (chosen >= best - MARGIN).all()
    second = scores.topk(min(2, vocab_size)).values[:, -1]
    is_clear = (best - second > MARGIN) | torch.tensor(vocab_size == 1)
    assert torch.equal(drawn[is_clear], scores.argmax(dim=-1)[is_clear])


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_dense_samples_equal_those_of_pytorch(temperature: float) -> None:
    logits, keys = make_logits(200, 3001), make_keys(200)
    column = np.full(200, temperature, dtype=np.float32)
    part = DensePart(rows=np.arange(200), scaled=ScaledRows.measure(logits, column))
    assert torch.equal(part.sample_coupled(keys), part._sample_reference(keys))


def test_equal_logits_leave_the_choice_to_the_smallest_noise() -> None:
    keys = make_keys(500)
    drawn = sample_coupled(torch.zeros(500, 70), make_column(500), keys)
    assert drawn is not None
    noise = exponential(keys, torch.arange(70)).numpy()
    assert drawn.tolist() == noise.argmin(axis=1).tolist()


def test_ties_go_to_the_lowest_id() -> None:
    """Hashes that round to the same float32 give the same noise."""
    keys = make_keys(1)
    hashes = _hash_tokens(keys, torch.arange(60_000))[0].float()
    values, counts = hashes.unique(return_counts=True)
    pairs = [(hashes == value).nonzero().squeeze(1) for value in values[counts == 2][:20]]
    ties = torch.stack(pairs)
    keys = keys.expand(20)
    logits = torch.full((20, 60_000), -torch.inf).scatter_(1, ties, 1.0)
    for count in (1, 20):
        drawn = sample_coupled(logits[:count], make_column(count, 0.3), keys[:count])
        assert drawn is not None
        assert drawn.tolist() == ties[:count, 0].tolist()
    listed = sample_listed(torch.full((20, 2), 0.5), ties.flip(1).contiguous(), keys)
    assert listed is not None
    assert listed.tolist() == ties[:, 1].tolist()


def test_rare_noise_lifts_a_token_far_below_the_others() -> None:
    """The strongest of three million noises beats a token 11 above it, alone in its vector."""
    keys = make_keys(50)
    noise = -exponential(keys, torch.arange(60_000)).log()
    row, rare = divmod(int(noise.argmax()), 60_000)
    lead = float(noise[row, rare] - noise[row, 0])
    assert noise[row, rare] > 13.0
    assert 500 < rare < 59_500
    logits = torch.full((2, 60_000), -torch.inf)
    logits[:, rare] = 0.0
    logits[0, 0], logits[1, 0] = lead - 0.1, lead + 0.1
    drawn = sample_coupled(logits, make_column(2), keys[row].expand(2))
    assert drawn is not None
    assert drawn.tolist() == [rare, 0]


def test_improbable_tokens_win_as_often_as_they_should() -> None:
    """One token of 1 / 4 against 3,000 that share the rest, 4,000 keys: within 5 deviations."""
    logits = torch.zeros(1, 3001)
    logits[0, 1234] = math.log(1000.0)
    drawn = sample_coupled(logits.expand(4000, -1), make_column(4000), make_keys(4000, 5))
    assert drawn is not None
    assert abs((drawn == 1234).sum().item() - 1000) < 5 * math.sqrt(4000 * 0.25 * 0.75)
    assert len(drawn.unique()) > 1500


@relaxed
@given(width=st.integers(1, 300), num_rows=st.integers(1, 40), seed=st.integers(0, 999))
def test_listed_samples_equal_those_of_pytorch(width: int, num_rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    probs = (4 * torch.randn(num_rows, width + 3, generator=generator)).softmax(dim=-1)
    probs = probs.sort(dim=-1, descending=True).values
    probs[:, width // 2 + 1 :] = 0.0
    ids = torch.rand(num_rows, 5000, generator=generator).argsort(dim=-1)[:, : width + 3]
    keys = make_keys(num_rows, seed)
    drawn = sample_listed(probs[:, :width], ids[:, :width], keys)
    ratios = (probs / exponential(keys, ids))[:, :width]
    best = ratios.topk(min(2, width)).values
    is_clear = (best[:, 0] > best[:, -1] * (1 + MARGIN)) | torch.tensor(width == 1)
    expected = ids.gather(1, ratios.argmax(dim=-1, keepdim=True)).squeeze(1)
    assert drawn is not None
    assert torch.equal(drawn[is_clear], expected[is_clear])


@relaxed
@given(**shapes)
def test_peak_and_its_probability(
    num_rows: int, vocab_size: int, temperature: float, seed: int
) -> None:
    logits = make_logits(num_rows, vocab_size, seed)
    measured = measure(logits, temperature)
    assert torch.equal(measured.peak, (logits / temperature).amax(dim=-1, keepdim=True))
    laws = compute_laws(logits, temperature)
    expected = laws.amax(dim=-1, keepdim=True)
    torch.testing.assert_close(measured.peak_prob.double(), expected, rtol=2e-6, atol=0)
    assert measured.tile_probs is not None
    tiles = torch.stack([tile.sum(dim=-1) for tile in laws.split(2048, dim=-1)], dim=1)
    torch.testing.assert_close(measured.tile_probs.double(), tiles, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("place", [0, 2047, 2048, 4999])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_no_distribution_show(bad: float, place: int) -> None:
    logits = make_logits(4, 5000)
    logits[1, place] = bad
    logits[3] = -torch.inf
    measured = measure(logits)
    is_finite = measured.peak.isfinite() & measured.peak_prob.isfinite()
    assert is_finite.squeeze(1).tolist() == [True, False, True, False]
    drawn = sample_coupled(logits, make_column(4), make_keys(4))
    assert drawn is not None
    assert ((drawn >= 0) & (drawn < 5000)).all()


def test_a_masked_tile_has_no_probability() -> None:
    logits = make_logits(3, 5000)
    logits[:, :2048] = -torch.inf
    logits[2, 4096:] = -torch.inf
    tiles = measure(logits, 0.5).tile_probs
    assert tiles is not None
    assert (tiles == 0).tolist() == [[True, False, False]] * 2 + [[True, False, True]]


@relaxed
@given(**shapes)
def test_draws_invert_the_distribution_function(
    num_rows: int, vocab_size: int, temperature: float, seed: int
) -> None:
    logits = make_logits(num_rows, vocab_size, seed)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, num_rows, (50,), generator=generator)
    uniforms = torch.rand(50, generator=generator, dtype=torch.float64)
    drawn = draw_rows(measure(logits, temperature), rows, uniforms, None)
    assert_inverts(drawn, compute_laws(logits, temperature)[rows], uniforms)


@relaxed
@given(vocab_size=st.sampled_from([2, 100, 2049, 5000]), seed=st.integers(0, 999))
def test_draws_leave_out_what_they_should(vocab_size: int, seed: int) -> None:
    """Thirds of the draws leave out a token, another distribution, nothing."""
    generator = torch.Generator().manual_seed(seed)
    logits, rows = make_logits(9, vocab_size, seed), torch.arange(60) % 9
    others = (logits + torch.randn(9, vocab_size, generator=generator)).softmax(dim=-1)
    uniforms = torch.rand(60, generator=generator, dtype=torch.float64)
    token_ids = torch.randint(0, vocab_size, (60,), generator=generator)
    kind = torch.arange(60) % 3
    left_out = LeftOut(
        token_ids=torch.where(kind == 0, token_ids, -1),
        probs=others,
        rows=torch.where(kind == 1, rows, -1),
    )
    laws = compute_laws(logits)[rows]
    laws[kind == 0] = laws[kind == 0].scatter(1, token_ids[kind == 0, None], 0.0)
    laws[kind == 1] = (laws - others[rows])[kind == 1].clamp(min=0.0)
    # Where rounding is all that is left, either answer is right.
    is_measurable = laws.sum(dim=-1) > 1e-3
    drawn = draw_rows(measure(logits), rows, uniforms, left_out)
    assert drawn is not None
    assert_inverts(drawn[is_measurable], laws[is_measurable], uniforms[is_measurable])


def test_draws_fall_back_where_nothing_is_left() -> None:
    logits = torch.full((2, 3000), -torch.inf)
    logits[0, 2500] = 0.0
    logits[1, [5, 2999]] = 0.0
    given_probs = logits.softmax(dim=-1)
    one = LeftOut(token_ids=torch.tensor([2500, -1]), probs=None, rows=torch.full((2,), -1))
    other = LeftOut(token_ids=torch.full((2,), -1), probs=given_probs, rows=torch.arange(2))
    for left_out in (one, other):
        for uniform, expected in ((0.0, 5), (BELOW_ONE, 2999)):
            uniforms = torch.full((2,), uniform, dtype=torch.float64)
            drawn = draw_rows(measure(logits), torch.arange(2), uniforms, left_out)
            assert drawn is not None
            assert drawn.tolist() == [2500, expected]
            listed = (given_probs[:, ::1], torch.arange(3000).expand(2, -1))
            drawn = draw_listed(listed, torch.arange(2), uniforms, left_out)
            assert drawn is not None
            assert drawn.tolist() == [2500, expected]


@relaxed
@given(width=st.integers(1, 300), seed=st.integers(0, 999))
def test_listed_draws_invert_what_is_left(width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    probs = torch.randn(7, width + 2, generator=generator).softmax(dim=-1)[:, :width]
    ids = torch.rand(7, 500, generator=generator).argsort(dim=-1)[:, : width + 2][:, :width]
    others = torch.randn(4, 500, generator=generator).softmax(dim=-1)
    rows, uniforms = torch.arange(60) % 7, torch.rand(60, generator=generator, dtype=torch.float64)
    kind = torch.arange(60) % 3
    left_out = LeftOut(
        token_ids=torch.where(kind == 0, ids[rows, 0], -1),
        probs=others,
        rows=torch.where(kind == 1, rows % 4, -1),
    )
    weights = probs[rows].double()
    weights[kind == 0, 0] = 0.0
    covered = others[rows % 4].gather(1, ids[rows])
    weights[kind == 1] = (probs[rows] - covered)[kind == 1].clamp(min=0.0).double()
    is_left = weights.sum(dim=-1) > 1e-3
    drawn = draw_listed((probs, ids), rows, uniforms, left_out)
    assert drawn is not None
    columns = (ids[rows] == drawn[:, None]).long().argmax(dim=-1)
    assert_inverts(columns[is_left], weights[is_left], uniforms[is_left])


def compute_everything(logits: Tensor) -> list[Tensor | None]:
    """Return one result of every operation that has a row per row of logits."""
    num_rows, measured = len(logits), measure(logits, 0.8)
    uniforms = torch.linspace(0.0, 0.99, num_rows, dtype=torch.float64)
    return [
        measured.peak_prob,
        measured.tile_probs,
        sample_coupled(logits, make_column(num_rows, 0.8), make_keys(num_rows)),
        draw_rows(measured, torch.arange(num_rows), uniforms, None),
    ]


@pytest.mark.usefixtures("threads")
def test_neither_threads_nor_other_rows_change_a_bit() -> None:
    logits = make_logits(23, 20_001)
    torch.set_num_threads(1)
    expected = compute_everything(logits)
    torch.set_num_threads(2)
    for result, other in zip(compute_everything(logits), expected, strict=True):
        assert result is not None
        assert other is not None
        assert torch.equal(result, other)
    for row in (0, 3, 22):
        alone = measure(logits[row : row + 1], 0.8)
        drawn = sample_coupled(logits[row : row + 1], make_column(1, 0.8), make_keys(23)[row:][:1])
        assert expected[0] is not None
        assert torch.equal(alone.peak_prob[0], expected[0][row])
        assert expected[2] is not None
        assert drawn is not None
        assert drawn[0] == expected[2][row]


def test_instruction_sets_agree_on_every_bit(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = make_logits(40, 7001)
    results = compute_everything(logits)
    for name in VARIANTS:
        if name == kernels.variant:
            continue
        other = load_variant(name)
        monkeypatch.setattr(row_calls, "find_kernels", lambda chosen=other: chosen)
        for result, expected in zip(compute_everything(logits), results, strict=True):
            assert result is not None
            assert expected is not None
            assert torch.equal(result, expected)


def test_rows_may_lie_inside_wider_ones() -> None:
    wide = make_logits(6, 4000)
    logits = wide[::2, 100:3100]
    for result, expected in zip(
        compute_everything(logits), compute_everything(logits.contiguous()), strict=True
    ):
        assert result is not None
        assert expected is not None
        assert torch.equal(result, expected)


def test_other_types_and_layouts_are_left_to_pytorch() -> None:
    keys, column = make_keys(4), make_column(4)
    for logits in (torch.zeros(4, 50).half(), torch.zeros(50, 4).t(), torch.zeros(0, 50)):
        assert measure_rows(logits, column[: len(logits)]) is None
        assert sample_coupled(logits, column[: len(logits)], keys[: len(logits)]) is None
    uniforms, rows = torch.zeros(4, dtype=torch.float64), torch.arange(4)
    left_out = LeftOut(token_ids=rows, probs=torch.zeros(4, 50).double(), rows=rows)
    assert draw_rows(measure(torch.zeros(4, 50)), rows, uniforms, left_out) is None
    listed = (torch.ones(4, 50), torch.zeros(50, 4, dtype=torch.int64).t())
    assert sample_listed(*listed, keys) is None
    assert draw_listed(listed, rows, uniforms, None) is None
