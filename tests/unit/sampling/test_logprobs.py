"""Logprobs and ranks of given tokens, in any number of rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from forerun.sampling.logprobs import compute_logprobs


def test_values_computed_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(2.0), math.log(5.0)], [1.0, 1.0, 1.0]])
    first, second = compute_logprobs(logits, [0, 1], [1, 2], [2, 0])
    assert (first.token_id, first.rank) == (1, 2)
    assert first.logprob == pytest.approx(math.log(2 / 8))
    assert [token for token, _ in first.top] == [2, 1]
    assert first.top[0][1] == pytest.approx(math.log(5 / 8))
    assert (second.rank, second.top) == (1, [])
    assert second.logprob == pytest.approx(math.log(1 / 3))


def test_many_rows_equal_a_float64_reference() -> None:
    """150 rows are more than one chunk; rows are taken out of order."""
    logits = torch.randn(150, 90, generator=torch.Generator().manual_seed(0)) * 5
    rows = list(reversed(range(150)))
    token_ids = [(7 * row) % 90 for row in rows]
    entries = compute_logprobs(logits, rows, token_ids, [5] * 150)
    reference = logits.double().log_softmax(dim=-1).numpy()
    for row, token, entry in zip(rows, token_ids, entries, strict=True):
        order = np.argsort(-reference[row])
        assert entry.rank == 1 + int(np.where(order == token)[0][0])
        assert entry.logprob == pytest.approx(reference[row, token], abs=1e-5)
        assert [t for t, _ in entry.top] == order[:5].tolist()


def test_no_more_alternatives_than_tokens() -> None:
    (entry,) = compute_logprobs(torch.tensor([[3.0, 4.0]]), [0], [0], [20])
    assert [token for token, _ in entry.top] == [1, 0]
