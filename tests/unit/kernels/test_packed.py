"""Packed weights: results, independence of the batch, and rows read back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forerun.kernels import explain_kernels, find_kernels
from forerun.kernels.packed import PackedMemory, PackedWeight, measure_packed, pack

pytestmark = pytest.mark.skipif(find_kernels() is None, reason=explain_kernels())

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02}


def make_weight(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * shape[1] ** -0.5).to(dtype)


def pack_one(weight: Tensor) -> PackedWeight:
    size = measure_packed(weight)
    assert size is not None
    return pack(
        weight, PackedMemory(torch.empty(PackedMemory.count_bytes([size]), dtype=torch.uint8))
    )


@settings(max_examples=60, deadline=None)
@given(
    out_features=st.integers(1, 150),
    units=st.integers(1, 70),
    num_rows=st.integers(1, 40),
    has_bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    wants_float=st.booleans(),
)
def test_equals_the_product_in_float64(
    out_features: int,
    units: int,
    num_rows: int,
    has_bias: bool,
    dtype: torch.dtype,
    wants_float: bool,
) -> None:
    in_features = units * 4 // dtype.itemsize
    weight = make_weight((out_features, in_features), dtype)
    x = make_weight((num_rows, in_features), dtype, seed=1) * in_features**0.5
    bias = make_weight((1, out_features), torch.float32, seed=2)[0] if has_bias else None
    out_dtype = torch.float32 if wants_float else dtype
    result = pack_one(weight).multiply(x, bias, out_dtype)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert result.dtype == out_dtype
    tolerance = 1e-4 if wants_float else TOLERANCE[dtype]
    torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    packed = pack_one(make_weight((200, 96), dtype))
    x = make_weight((80, 96), dtype, seed=1)
    whole = packed.multiply(x, None, dtype)
    for num_rows in range(1, 80):
        assert torch.equal(packed.multiply(x[:num_rows], None, dtype), whole[:num_rows])
    assert torch.equal(packed.multiply(x[37:50], None, dtype), whole[37:50])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_nothing(dtype: torch.dtype) -> None:
    packed = pack_one(make_weight((200, 96), dtype))
    x = make_weight((20, 96), dtype, seed=1)
    before = torch.get_num_threads()
    results = []
    for num_threads in (1, 2, 3, 16):
        torch.set_num_threads(num_threads)
        results.append(packed.multiply(x, None, torch.float32))
    torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (31, 6), (33, 64), (160, 10)])
def test_rows_come_back_as_they_were(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = make_weight(shape, dtype)
    packed = pack_one(weight)
    row_ids = torch.arange(shape[0] - 1, -1, -1)
    assert torch.equal(packed.read_rows(row_ids), weight.flip(0))
    for outside in (-1, shape[0]):
        with pytest.raises(IndexError, match=f"0 .. {shape[0] - 1}"):
            packed.read_rows(torch.tensor([0, outside]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_not_dense_are_copied_first(dtype: torch.dtype) -> None:
    weight = make_weight((40, 8), dtype)
    packed = pack_one(weight)
    base = make_weight((9, 18), dtype, seed=1)
    for x in (base[:, 1:9], base[::2, :8], base[:, :16:2]):
        assert torch.equal(packed.multiply(x, None, dtype), packed.multiply(x.clone(), None, dtype))


def test_no_rows_give_no_rows() -> None:
    packed = pack_one(make_weight((40, 8), torch.float32))
    assert packed.multiply(torch.empty(0, 8), None, torch.float32).shape == (0, 40)


def test_what_cannot_be_packed() -> None:
    assert measure_packed(torch.zeros(4, 3, dtype=torch.bfloat16)) is None
    assert measure_packed(torch.zeros(4, 4, dtype=torch.float16)) is None
    assert measure_packed(torch.zeros(4, 3)) is not None
