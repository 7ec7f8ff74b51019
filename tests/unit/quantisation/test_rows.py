"""Rows in int8: numbers computed by hand, the bound of the error, and what is no number."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.quantisation.rows import TINIEST, dequantise_rows, quantise_rows


def test_the_largest_number_becomes_127_and_ties_go_to_even() -> None:
    rows = torch.tensor([[254.0, 1.0, 3.0, -5.0, 2.0], [0.0, 0.0, -0.5, 0.25, 0.0]])
    numbers, scales = quantise_rows(rows)
    assert numbers.tolist() == [[127, 0, 2, -2, 1], [0, 0, -127, 64, 0]]
    assert scales.tolist() == [2.0, pytest.approx(0.5 / 127)]


def test_zeros_read_back_as_zeros() -> None:
    numbers, scales = quantise_rows(torch.zeros(2, 3, 4))
    assert not numbers.any()
    assert not scales.any()
    assert not dequantise_rows(numbers, scales, torch.bfloat16).any()


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_a_number_is_wrong_by_half_a_scale_at_most(row: list[float]) -> None:
    rows = torch.tensor([row])
    numbers, scales = quantise_rows(rows)
    assert numbers.abs().max() <= 127
    exact = numbers.double() * scales.double()[:, None]
    bound = scales.double() * (0.5 + 1e-5) + TINIEST
    assert ((exact - rows.double()).abs() <= bound[:, None]).all()


@given(st.lists(st.floats(-1e4, 1e4, width=16), min_size=4, max_size=4), st.integers(0, 3))
def test_rows_do_not_depend_on_each_other(row: list[float], place: int) -> None:
    rows = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    rows[place] = torch.tensor(row)
    together, alone = quantise_rows(rows), quantise_rows(rows[place])
    assert torch.equal(together[0][place], alone[0])
    assert torch.equal(together[1][place], alone[1])


def test_bfloat16_rows_are_quantised_as_the_numbers_they_are() -> None:
    rows = torch.randn(5, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    for narrow, wide in zip(quantise_rows(rows), quantise_rows(rows.float()), strict=True):
        assert torch.equal(narrow, wide)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_makes_the_row_show_it(bad: float) -> None:
    rows = torch.ones(2, 4)
    rows[0, 2] = bad
    numbers, scales = quantise_rows(rows)
    read_back = dequantise_rows(numbers, scales, torch.float32)
    assert not read_back[0].isfinite().any()
    torch.testing.assert_close(read_back[1], rows[1])
