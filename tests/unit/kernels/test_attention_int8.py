"""Native attention over int8 pools: what is particular to them.

test_attention.py runs its tests over both kinds of pools.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forerun.attention.native import MAX_INT8_HEAD_DIM, NativeBackend
from forerun.attention.torch_ref import TorchRefBackend
from forerun.cache.kv_store import KVStore
from forerun.kernels import Kernels
from ragged_steps import RaggedStep, list_pools, make_layer

DTYPES = (torch.float32, torch.bfloat16)
# Zeros, ties, numbers that leave nothing of the others, and the ends of float32 and bfloat16.
ODD_NUMBERS = [0.0, -0.0, 1.0, -1.0, 63.5, 127.0, 0.5, 1.5, -2.5, 3e38, -3e38, 1e-38, 1e-45, 2e-30]


def run_step(step: RaggedStep, backend: NativeBackend | TorchRefBackend) -> tuple:
    """Return the answer and the pool after the step."""
    store = step.build_store(unused=0.0)
    return step.run(backend, store), store


def assert_equal_pools(ours: KVStore, theirs: KVStore) -> None:
    for left, right in zip(list_pools(ours, 0), list_pools(theirs, 0), strict=True):
        for a, b in zip(left, right, strict=True):
            assert torch.equal(a.view(torch.int8), b.view(torch.int8))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    numbers=st.lists(st.sampled_from(ODD_NUMBERS), min_size=40, max_size=40),
    head_dim=st.sampled_from([2, 6, 16, 40]),
    dtype=st.sampled_from(DTYPES),
)
def test_rows_are_quantised_bit_for_bit_like_the_reference(
    kernels: Kernels, numbers: list[float], head_dim: int, dtype: torch.dtype
) -> None:
    step = RaggedStep([(0, 3)], make_layer(head_dim=head_dim), dtype=dtype, kv_dtype=torch.int8)
    for rows in (step.keys[0], step.values[0]):
        rows[1] = torch.tensor(numbers[:head_dim]).to(dtype)
    _, ours = run_step(step, NativeBackend(kernels))
    _, theirs = run_step(step, TorchRefBackend())
    assert_equal_pools(ours, theirs)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_bfloat16_model_loses_little_but_the_rounding_of_its_result(
    kernels: Kernels, rows: int
) -> None:
    """15 bits of queries and weights are next to nothing beside the 8 of the result."""
    step = RaggedStep(
        [(700, rows), (90, rows)],
        make_layer(group_size=3, head_dim=64),
        dtype=torch.bfloat16,
        kv_dtype=torch.int8,
    )
    result = step.run(NativeBackend(kernels)).float()
    torch.testing.assert_close(result, step.compute_oracle(), rtol=2**-8, atol=5e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 9])
def test_the_largest_sums_stay_exact(kernels: Kernels, dtype: torch.dtype, rows: int) -> None:
    """Every product of the longest head, and of a chunk of equal weights, has the same sign."""
    layer = make_layer(num_kv_heads=1, group_size=1, head_dim=MAX_INT8_HEAD_DIM)
    step = RaggedStep([(255, rows)], layer, dtype=dtype, kv_dtype=torch.int8)
    for numbers in (step.query, step.keys[0], step.values[0]):
        numbers.fill_(2.0)
    result = step.run(NativeBackend(kernels)).float()
    torch.testing.assert_close(result, torch.full_like(result, 2.0), rtol=2e-6, atol=0)


def test_longer_heads_are_left_to_the_reference(kernels: Kernels) -> None:
    layer = make_layer(num_kv_heads=1, group_size=1, head_dim=MAX_INT8_HEAD_DIM + 8)
    step = RaggedStep([(40, 2)], layer, kv_dtype=torch.int8)
    ours, theirs = run_step(step, NativeBackend(kernels)), run_step(step, TorchRefBackend())
    assert torch.equal(ours[0], theirs[0])
    assert_equal_pools(ours[1], theirs[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rows", [1, 5])
def test_what_is_no_number_shows_in_its_request_alone(
    kernels: Kernels, dtype: torch.dtype, bad: float, rows: int
) -> None:
    """One bad number of a row of keys, of values, or of a query, beside sound requests."""
    for place in ("keys", "values", "query"):
        step = RaggedStep([(30, rows), (8, rows)], make_layer(), dtype=dtype, kv_dtype=torch.int8)
        numbers = step.query if place == "query" else getattr(step, place)[0]
        numbers[rows - 1 if place == "query" else 4, 0, 3] = bad
        result = step.run(NativeBackend(kernels)).view(2, rows, 2, -1)
        first_head = result[0, rows - 1, 0]
        assert not first_head.isfinite().any() if place != "query" else first_head.isnan().any()
        assert result[1].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_positions_of_nothing_but_zeros_answer_zero(kernels: Kernels, dtype: torch.dtype) -> None:
    step = RaggedStep([(200, 1)], make_layer(), dtype=dtype, kv_dtype=torch.int8)
    step.keys[0].zero_()
    step.values[0].zero_()
    assert not step.run(NativeBackend(kernels)).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_values_share_the_weight(kernels: Kernels, dtype: torch.dtype) -> None:
    """A position whose values are zeros has a scale of zero, and counts in the sum of weights."""
    layer = make_layer(num_kv_heads=1, group_size=1)
    step = RaggedStep([(3, 1)], layer, dtype=dtype, kv_dtype=torch.int8)
    step.keys[0].zero_()
    step.values[0].fill_(4.0)
    step.values[0][:2] = 0.0
    result = step.run(NativeBackend(kernels)).float()
    torch.testing.assert_close(result, torch.full_like(result, 2.0), rtol=1e-6, atol=0)
