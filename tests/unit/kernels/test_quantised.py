"""Quantised weights: every format against the integer-exact reference, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import forerun.kernels
from forerun.kernels import Kernels
from forerun.kernels.packed import PackedMemory, PackedWeight, measure_blocks, pack_blocks
from forerun.quantisation.decode import Codes, decode
from forerun.quantisation.formats import FORMATS, BlockTensor
from forerun.quantisation.reference import multiply_reference
from quantised_blocks import EXTREMES, make_blocks

DTYPES = (torch.float32, torch.bfloat16)
FILLS = (None, *EXTREMES)
shared = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(autouse=True)
def chosen(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one instruction set be the one this machine has."""
    monkeypatch.setattr(forerun.kernels, "_probe", lambda: (kernels, kernels.variant))


def pack_all(*parts: BlockTensor, dtype: torch.dtype = torch.float32) -> PackedWeight:
    size = measure_blocks(parts)
    assert size is not None
    buffer = torch.empty(PackedMemory.count_bytes([size]), dtype=torch.uint8)
    return pack_blocks(parts, dtype, PackedMemory(buffer))


def make_rows(num_rows: int, in_features: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, in_features, generator=generator)
    # Groups of very different sizes, and one of zeros.
    rows *= torch.logspace(-3, 3, in_features // 32).repeat_interleave(32)
    rows[:, :32] = 0
    return rows.to(dtype)


def join(parts: list[Codes]) -> Codes:
    fields = ("codes", "scales", "minima")
    return Codes(*(np.concatenate([getattr(part, name) for part in parts]) for name in fields))


def check_product(weight: PackedWeight, codes: Codes, x: Tensor, bias: Tensor | None) -> None:
    expected = multiply_reference(x, codes, bias)
    result = weight.multiply(x, bias, torch.float32)
    # Only the order and rounding of float32 sums may differ: relative to the terms, not the sum.
    terms = Codes(abs(codes.codes), abs(codes.scales), abs(codes.minima))
    size = multiply_reference(x.abs().float(), terms, None)
    bound = 1e-6 * float(size.abs().max()) + 1e-20
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=bound)


@shared
@given(
    name=st.sampled_from(sorted(FORMATS)),
    out_features=st.integers(1, 90),
    super_blocks=st.integers(1, 3),
    num_rows=st.integers(1, 9),
    fill=st.sampled_from(FILLS),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
)
def test_products_equal_the_reference(
    kernels: Kernels,
    name: str,
    out_features: int,
    super_blocks: int,
    num_rows: int,
    fill: int | None,
    dtype: torch.dtype,
    has_bias: bool,
) -> None:
    in_features = super_blocks * 256 if FORMATS[name].block_size == 256 else super_blocks * 96
    blocks = make_blocks(name, out_features, in_features, fill=fill)
    x = make_rows(num_rows, in_features, dtype)
    bias = torch.arange(out_features).float() if has_bias else None
    check_product(pack_all(blocks, dtype=dtype), decode(blocks), x, bias)


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_integer_sums_are_exact_where_floats_are_too(
    name: str, fill: int | None, sign: float
) -> None:
    """Powers of two as scales and one group of +-127 a row: every sum fits into a float32."""
    blocks = make_blocks(name, 48, 256, fill=fill, scales=[0.25, 0.5])
    x = 127.0 * sign * torch.eye(8).repeat_interleave(32, dim=1)
    x = torch.cat([x, x * torch.tensor([1.0, -1.0]).repeat(128)])
    exact = x.double() @ torch.from_numpy(decode(blocks).to_float()).double().T
    assert torch.equal(pack_all(blocks).multiply(x, None, torch.float32).double(), exact)


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_bits_beside_any_other_rows(
    name: str, dtype: torch.dtype, threads: None
) -> None:
    weight = pack_all(make_blocks(name, 130, 512), dtype=dtype)
    x = make_rows(150, 512, dtype)
    together = weight.multiply(x, None, dtype)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for size in (1, 3, 8, 64, 65):
            parts = [weight.multiply(part, None, dtype) for part in x.split(size)]
            assert torch.equal(torch.cat(parts), together), (num_threads, size)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_packing_keeps_every_number_and_every_byte(name: str) -> None:
    blocks = make_blocks(name, 64, 512)
    assert measure_blocks([blocks]) == blocks.blocks.nbytes
    row_ids = torch.tensor([63, 0, 17, 17])
    expected = torch.from_numpy(decode(blocks).to_float())[row_ids]
    torch.testing.assert_close(pack_all(blocks).read_rows(row_ids), expected, rtol=1e-6, atol=1e-9)
    rounded = pack_all(blocks, dtype=torch.bfloat16).read_rows(row_ids)
    torch.testing.assert_close(rounded.float(), expected, rtol=2**-8, atol=1e-9)


def test_rows_beyond_the_weight_are_refused() -> None:
    weight = pack_all(make_blocks("Q4_1", 48, 64))
    for row_id in (-1, 48):
        with pytest.raises(IndexError, match=r"0 \.\. 47"):
            weight.read_rows(torch.tensor([row_id]))


@shared
@given(
    names=st.lists(st.sampled_from(["Q8_0", "Q5_0", "Q4_K", "Q6_K"]), min_size=2, max_size=3),
    sizes=st.lists(st.sampled_from([16, 48, 112]), min_size=3, max_size=3),
    num_rows=st.integers(1, 5),
)
def test_parts_of_several_formats_are_one_weight(
    kernels: Kernels, names: list[str], sizes: list[int], num_rows: int
) -> None:
    parts = [
        make_blocks(name, size, 256, seed=seed)
        for seed, (name, size) in enumerate(zip(names, sizes, strict=False))
    ]
    weight = pack_all(*parts)
    codes = join([decode(part) for part in parts])
    check_product(weight, codes, make_rows(num_rows, 256, torch.float32), None)
    rows = weight.read_rows(torch.arange(weight.out_features))
    torch.testing.assert_close(rows, torch.from_numpy(codes.to_float()), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_spoils_no_other(bad: float) -> None:
    weight = pack_all(make_blocks("Q4_1", 32, 96))
    x = make_rows(3, 96, torch.float32)
    expected = weight.multiply(x, None, torch.float32)
    x[1, 40] = bad
    result = weight.multiply(x, None, torch.float32)
    assert not result[1].isfinite().any()
    assert torch.equal(result[[0, 2]], expected[[0, 2]])


def test_rows_too_small_for_a_scale_count_as_zero() -> None:
    weight = pack_all(make_blocks("Q8_0", 32, 64))
    x = torch.full((1, 64), 1e-38)
    assert weight.multiply(x, None, torch.float32).abs().max() < 1e-30


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [("Q8_0", (24, 64)), ("Q8_0", (16, 64))],
        [("Q8_0", (16, 64))] * 4,
    ],
)
def test_what_the_kernel_cannot_hold_is_not_measured(
    parts: list[tuple[str, tuple[int, int]]],
) -> None:
    tensors = [make_blocks(name, *shape) for name, shape in parts]
    assert measure_blocks(tensors) is None
    with pytest.raises(ValueError, match="cannot be packed"):
        pack_blocks(tensors, torch.float32, PackedMemory(torch.empty(64, dtype=torch.uint8)))
