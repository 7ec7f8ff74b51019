"""Native top-k, top-p and min-p against a float64 oracle that sorts everything.

Rows so close to an edge that float rounding may decide are left out. The same filters are tested
through `sampling.filters` too, there with tiny vocabularies.
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
from forerun.kernels.cut_ops import CutRows, cut_rows, mask_tail
from forerun.kernels.sampling_ops import MeasuredRows, measure_rows

OFF = 2**31
CAPACITY = 64
BORDER = 1e-5
ZERO_DEPTH = 88.0  # l / T this far below the peak is no probability in float32

relaxed = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(autouse=True)
def use(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_calls, "find_kernels", lambda: kernels)


def measure(logits: Tensor, temperature: float) -> MeasuredRows:
    measured = measure_rows(logits, torch.full((len(logits), 1), temperature))
    assert measured is not None
    return measured


def cut(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = OFF,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> CutRows:
    num_rows = len(logits)
    filters = {
        "top_k": np.full(num_rows, top_k),
        "top_p": np.full(num_rows, top_p),
        "min_p": np.full(num_rows, min_p),
    }
    result = cut_rows(measure(logits, temperature), np.arange(num_rows), filters, CAPACITY)
    assert result is not None
    return result


def find_survivors(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[np.ndarray, bool]:
    """Return what survives by (logit descending, id), and whether rounding might change that."""
    scaled = (logits / np.float32(temperature)).astype(np.float64)
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = np.lexsort((np.arange(len(probs)), -logits))[:top_k]
    mass = probs[order]
    before = np.cumsum(mass) - mass
    norm = mass.sum() if top_k < OFF else 1.0
    depth = scaled.max() - scaled[order]
    keep = (mass >= min_p * probs.max()) & (depth < ZERO_DEPTH)
    is_close = bool((np.abs(depth - ZERO_DEPTH) < 2).any())
    if min_p > 0:
        is_close |= bool(np.abs(mass / (min_p * probs.max()) - 1).min() < BORDER)
    if top_p < 1.0:
        keep &= before < top_p * norm
        is_close |= bool(np.abs(before - top_p * norm).min() < BORDER)
    return order[keep], is_close


def make_row(kind: str, vocab_size: int, generator: np.random.Generator) -> np.ndarray:
    """Return logits that are spread, in ties, nearly or exactly equal, partly masked, or huge."""
    row = generator.standard_normal(vocab_size)
    if kind == "ties":
        return np.round(row * 8) / 4
    scale = {"spread": 4.0, "close": 1e-4, "equal": 0.0, "masked": 3.0, "huge": 1e30}[kind]
    row = row * scale
    if kind == "masked":
        row[generator.random(vocab_size) < 0.7] = -np.inf
        row[vocab_size // 2] = 0.0
    return row


@relaxed
@given(
    kind=st.sampled_from(["spread", "ties", "close", "equal", "masked", "huge"]),
    vocab_size=st.sampled_from([1, 7, 16, 33, 600, 3001]),
    temperature=st.sampled_from([0.3, 1.0, 4.0]),
    top_k=st.sampled_from([OFF, OFF, 1, 5, 64, 65, 600, 2999, 10_000]),
    top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.3, 0.9, 0.9999]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.7, 1.0]),
    seed=st.integers(0, 999),
)
def test_what_survives_equals_the_oracle(
    kind: str,
    vocab_size: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
) -> None:
    generator = np.random.default_rng(seed)
    rows = [make_row(kind, vocab_size, generator).astype(np.float32) for _ in range(3)]
    logits = torch.from_numpy(np.stack(rows))
    result = cut(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    masked = mask_tail(logits, np.arange(3), result.last_logits, result.last_ids)
    assert masked is not None
    for index, row in enumerate(rows):
        kept, is_close = find_survivors(row, temperature, top_k, top_p, min_p)
        if is_close:
            continue
        num_kept = int(result.num_kept[index])
        assert num_kept == len(kept)
        assert (masked[index] > -torch.inf).nonzero().squeeze(1).tolist() == sorted(kept)
        if num_kept > CAPACITY:
            continue
        assert result.token_ids[index, :num_kept].tolist() == kept.tolist()
        law = (torch.from_numpy(row)[kept] / temperature).double().softmax(dim=-1)
        torch.testing.assert_close(
            result.probs[index, :num_kept].double(), law, rtol=2e-5, atol=1e-30
        )
        assert (result.probs[index, num_kept:] == 0).all()


@pytest.mark.parametrize("spread", [0.0, 1e-6, 1.0, 1e20])
def test_long_flat_rows_are_cut_by_count(spread: float) -> None:
    """20,000 tokens in one or few bins; equal ones stay by token id."""
    logits = torch.linspace(spread, 0.0, 20_000)[None]
    result = cut(logits, top_k=12_345, temperature=100.0)
    survives = int((logits[0] / 100.0 - logits[0, 0] / 100.0 > -80.0).sum())
    assert result.num_kept.tolist() == [min(12_345, survives)]
    assert result.last_ids.tolist() == [result.num_kept[0] - 1]


def test_top_p_is_relative_to_what_top_k_left() -> None:
    """Ten tokens of a hundred are kept, and of those less than half."""
    assert cut(torch.zeros(1, 100), top_k=10, top_p=0.45).num_kept.tolist() == [5]
    assert cut(torch.zeros(1, 100), top_k=10, top_p=0.45, min_p=1.0).num_kept.tolist() == [5]
    assert cut(torch.zeros(1, 100), top_p=0.045).num_kept.tolist() == [5]


def test_logits_far_from_zero_at_the_lowest_temperature() -> None:
    """l / T is 10^12, where neighbouring float32 numbers are 65,536 apart."""
    logits = torch.full((2, 40), 9.9e6)
    logits[:, 17] = 1e7
    logits[1] -= 2e7
    result = cut(logits, temperature=1e-5, top_p=0.9)
    assert result.num_kept.tolist() == [1, 1]
    assert result.token_ids[:, 0].tolist() == [17, 17]


def test_some_rows_of_many_are_cut_where_they_lie() -> None:
    logits = torch.zeros(5, 90)
    logits[2, 50] = logits[4, 60] = 30.0
    filters = {"top_k": np.array([OFF, 2]), "top_p": np.array([0.5, 1.0]), "min_p": np.zeros(2)}
    result = cut_rows(measure(logits, 1.0), np.array([2, 4]), filters, CAPACITY)
    assert result is not None
    assert result.num_kept.tolist() == [1, 2]
    assert result.token_ids.tolist() == [[50, 0], [60, 0]]
    assert result.probs[0].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_no_distribution_keep_some_token(bad: float) -> None:
    logits = torch.zeros(3, 300)
    logits[1, :] = bad
    result = cut(logits, top_p=0.1)
    assert result.num_kept.tolist() == [30, 1, 30]
    assert result.token_ids[1, 0] == 0
    assert result.probs[1, 0] == 1.0


@pytest.mark.usefixtures("threads")
def test_neither_threads_nor_other_rows_change_a_bit() -> None:
    logits = torch.randn(24, 3000, generator=torch.Generator().manual_seed(0)) * 5
    torch.set_num_threads(1)
    expected = cut(logits, top_p=0.8)
    torch.set_num_threads(2)
    result = cut(logits, top_p=0.8)
    assert torch.equal(result.probs, expected.probs)
    assert torch.equal(result.token_ids, expected.token_ids)
    for row in (0, 11, 23):
        alone = cut(logits[row : row + 1], top_p=0.8)
        width = int(alone.num_kept[0])
        assert torch.equal(alone.probs[0], expected.probs[row, :width])
