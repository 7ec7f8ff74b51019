"""The reference multiplication: exact integers, and what float64 arithmetic says beside them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forerun.quantisation.decode import decode
from forerun.quantisation.formats import FORMATS
from forerun.quantisation.reference import ReferenceWeight, multiply_reference, quantise_groups
from quantised_blocks import EXTREMES, make_blocks


def multiply_float64(x: torch.Tensor, parts: list, bias: torch.Tensor | None) -> np.ndarray:
    """Multiply quantised rows with decoded weights in float64, the integers as integers."""
    codes, scales, _ = (tensor.numpy() for tensor in quantise_groups(x))
    rows = codes.astype(np.float64) * np.repeat(scales, 32, axis=1).astype(np.float64)
    weights = []
    for part in parts:
        found = decode(part)
        wide = [np.repeat(a, 32, axis=1).astype(np.float64) for a in (found.scales, found.minima)]
        weights.append(found.codes * wide[0] + wide[1])
    out = rows @ np.concatenate(weights).T
    return out if bias is None else out + bias.double().numpy()


@pytest.mark.parametrize("fill", [None, *EXTREMES])
@pytest.mark.parametrize("name", FORMATS)
def test_equals_float64_arithmetic(name: str, fill: int | None) -> None:
    tensor = make_blocks(name, 9, 512, fill=fill)
    x, bias = torch.randn(5, 512), torch.randn(9)
    expected = multiply_float64(x, [tensor], bias)
    result = multiply_reference(x, decode(tensor), bias)
    assert result.dtype == torch.float32
    # Rounding of 2 * 16 terms and of their sum, of the size of the largest terms.
    weights = np.abs(decode(tensor).to_float()).astype(np.float64)
    bound = 1e-6 * (np.abs(x.numpy()) @ weights.T + 1)
    assert (np.abs(result.numpy() - expected) <= 8 * bound).all()


@pytest.mark.parametrize("code", [127, -127])
def test_integer_sums_are_exact_at_their_largest(code: int) -> None:
    """32 times 4,096 * 127 is the largest sum of a group; one row code is one off."""
    tensor = make_blocks("Q6_K", 1, 256)
    block = tensor.blocks.reshape(-1)
    block[:192], block[192:208] = 0, 0x80  # numbers -32 under sub-block scales of -128
    block[208:210] = np.array([1], "<f2").view(np.uint8)
    x = torch.full((1, 256), float(code))
    x[0, 0] += code // -127  # one code of 126
    result = multiply_reference(x, decode(tensor), None)
    assert result.item() == 4096 * (256 * code + code // -127)


def test_quantised_rows_by_hand() -> None:
    x = torch.zeros(2, 64)
    x[0, :4] = torch.tensor([127.0, -63.5, 0.5, 1.5])
    x[1, 32:] = -2.0
    codes, scales, sums = quantise_groups(x)
    assert codes.dtype == torch.int8
    assert sums.dtype == torch.int32
    assert codes[0, :4].tolist() == [127, -64, 0, 2]  # halves go to the even neighbour
    assert codes[1, 32:].tolist() == [-127] * 32
    assert scales.tolist() == [[1.0, 0.0], [0.0, torch.tensor(2.0).div(127).item()]]
    assert sums.tolist() == [[65, 0], [0, -127 * 32]]


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    weight = ReferenceWeight([make_blocks(name, 40, 256) for name in FORMATS], torch.float32)
    x = torch.randn(33, 256)
    together = weight.multiply(x, None, torch.float32)
    alone = torch.cat([weight.multiply(row[None], None, torch.float32) for row in x])
    assert torch.equal(together, alone)


def test_what_is_not_finite_stays_in_its_row() -> None:
    weight = ReferenceWeight([make_blocks("Q4_1", 4, 64)], torch.float32)
    x = torch.randn(4, 64)
    clean = weight.multiply(x, None, torch.float32)
    x[0, 3], x[1, 40], x[2, 0] = float("nan"), float("inf"), 1e-38
    result = weight.multiply(x, None, torch.float32)
    assert not result[:2].isfinite().any()
    assert result[2].isfinite().all()
    assert torch.equal(result[3], clean[3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_several_formats_are_one_weight(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [make_blocks("Q5_K", 7, 256), make_blocks("Q8_0", 3, 256), make_blocks("Q6_K", 5, 256)]
    whole = ReferenceWeight(parts, dtype)
    assert (whole.out_features, whole.in_features, whole.dtype) == (15, 256, dtype)
    x, bias = torch.randn(3, 256).to(dtype), torch.randn(15)
    expected = multiply_float64(x, parts, bias)
    for chunk_values in (2**22, 3 * 256):
        monkeypatch.setattr("forerun.quantisation.reference._CHUNK_VALUES", chunk_values)
        result = whole.multiply(x, bias, dtype)
        assert result.dtype == dtype
        tolerance = 1e-4 if dtype == torch.float32 else 0.05
        np.testing.assert_allclose(result.float().numpy(), expected, atol=tolerance, rtol=0.01)
    rows = torch.from_numpy(np.concatenate([decode(part).to_float() for part in parts])).to(dtype)
    ids = torch.tensor([14, 0, 7, 7, 9, 10, 6])
    assert torch.equal(whole.read_rows(ids), rows[ids])
    assert whole.read_rows(ids[:0]).shape == (0, 256)


@pytest.mark.parametrize("row", [-1, 4])
def test_rows_that_do_not_exist_are_refused(row: int) -> None:
    weight = ReferenceWeight([make_blocks("Q4_0", 4, 64)], torch.float32)
    with pytest.raises(IndexError, match=r"0 \.\. 3"):
        weight.read_rows(torch.tensor([0, row]))


def test_the_bytes_are_its_own() -> None:
    part = make_blocks("Q8_0", 4, 64)
    weight = ReferenceWeight([part], torch.float32)
    before = weight.read_rows(torch.arange(4))
    part.blocks[:] = 0
    assert torch.equal(weight.read_rows(torch.arange(4)), before)
