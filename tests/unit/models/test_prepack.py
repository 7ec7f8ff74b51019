"""Prepacked weights: same results, and one resident copy."""

from __future__ import annotations

import pytest
import torch

import tiny_models
from forerun.layers.linear import Linear, WeightOptions, _can_prepack


def make_linear(dtype: torch.dtype, *, bias: bool) -> Linear:
    linear = Linear(40, 56, WeightOptions(dtype, torch.device("cpu")), bias=bias)
    for parameter in linear.parameters():
        parameter.data.normal_()
    return linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 7, 64])
def test_prepacked_linear_equals_plain(num_rows: int, bias: bool) -> None:
    linear = make_linear(torch.bfloat16, bias=bias)
    rows = torch.randn(num_rows, 40).bfloat16()
    expected = linear(rows).float()
    linear.prepack()
    torch.testing.assert_close(linear(rows).float(), expected, atol=0.1, rtol=0.02)


def test_only_one_copy_of_a_weight_is_held() -> None:
    linear = make_linear(torch.bfloat16, bias=False)
    can = _can_prepack(linear.weight)
    linear.prepack()
    assert (linear.weight is None) == can
    assert (linear.packed_weight is not None) == can


def test_float32_is_left_alone() -> None:
    model = tiny_models.make_model(dtype=torch.float32)
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    assert len(linears) == 8
    assert all(linear.packed_weight is None for linear in linears)
