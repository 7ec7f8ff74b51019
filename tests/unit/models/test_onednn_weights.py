"""Prepacked weights (oneDNN's layout): same results, and one resident copy."""

from __future__ import annotations

import pytest
import torch

import tiny_models
from forerun import kernels
from forerun.layers.linear import Linear, WeightOptions, _can_pack_for_onednn


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
    linear.pack_for_onednn()
    torch.testing.assert_close(linear(rows).float(), expected, atol=0.1, rtol=0.02)


def test_only_one_copy_of_a_weight_is_held() -> None:
    linear = make_linear(torch.bfloat16, bias=False)
    can = _can_pack_for_onednn(linear.plain_weight)
    linear.pack_for_onednn()
    assert (linear.weight is None) == can
    assert (linear.onednn_weight is not None) == can


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_without_kernels_only_bfloat16_layers_are_prepacked(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_probe", lambda: (None, "switched off"))
    model = tiny_models.make_model(dtype=dtype)
    linears = [linear for layer in model.layers for linear in layer.linears()]
    can = dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert len(linears) == 8
    assert all((linear.onednn_weight is not None) == can for linear in linears)
    # Rows of the embedding are read, which oneDNN's layout does not allow.
    assert model.embed.table.weight is not None
    assert model.segments is None
