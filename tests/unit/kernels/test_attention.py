"""Native attention against a float64 oracle and against TorchRefBackend, on random ragged steps.

Everything a request must not read holds NaN. What depends on nothing but the request's own context
is compared bit for bit.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forerun.attention.native import NativeBackend
from forerun.attention.native_plan import BLOCK_ROWS, CHUNK_SIZE
from forerun.attention.torch_ref import TorchRefBackend
from forerun.cache.kv_store import KVStore
from forerun.kernels import Kernels
from ragged_steps import RaggedStep, list_pools, make_layer

# Types of the model and of the pool.
TYPES = [
    {"dtype": dtype, "kv_dtype": kv_dtype}
    for dtype in (torch.float32, torch.bfloat16)
    for kv_dtype in (dtype, torch.int8)
]
Types = dict[str, torch.dtype]
every_type = pytest.mark.parametrize(
    "types",
    TYPES,
    ids=lambda types: "-".join(str(x).removeprefix("torch.") for x in types.values()),
)
# Weights and the result are rounded to 8 bits each: one part in 256 of the largest value.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 5.0 / 128}


def assert_equal_pools(ours: KVStore, theirs: KVStore) -> None:
    for left, right in zip(list_pools(ours, 0), list_pools(theirs, 0), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


some_rows = st.tuples(
    st.one_of(st.integers(0, 40), st.integers(CHUNK_SIZE - 3, 2 * CHUNK_SIZE + 3)),
    st.one_of(st.integers(1, 9), st.integers(10, BLOCK_ROWS), st.integers(BLOCK_ROWS, 80)),
)
fixtures_are_constant = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def assert_close(result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert result.dtype == dtype
    torch.testing.assert_close(result.float(), expected, atol=TOLERANCES[dtype], rtol=0)


@settings(fixtures_are_constant, max_examples=100)
@given(
    requests=st.lists(some_rows, min_size=1, max_size=5),
    kv_block_size=st.sampled_from([1, 4, 5, 16, 64]),
    num_kv_heads=st.integers(1, 3),
    group_size=st.integers(1, 5),
    head_dim=st.sampled_from([2, 6, 12, 16, 40, 64, 80]),
    window=st.one_of(st.none(), st.integers(1, 300)),
    causal=st.booleans(),
    num_shared=st.integers(0, 3),
    types=st.sampled_from(TYPES),
    seed=st.integers(0, 99),
)
def test_equals_the_oracle_and_never_reads_elsewhere(
    kernels: Kernels,
    requests: list[tuple[int, int]],
    kv_block_size: int,
    num_kv_heads: int,
    group_size: int,
    head_dim: int,
    window: int | None,
    causal: bool,
    num_shared: int,
    types: Types,
    seed: int,
) -> None:
    layer = make_layer(
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        head_dim=head_dim,
        window=window,
        causal=causal,
    )
    step = RaggedStep(
        requests,
        layer,
        kv_block_size=kv_block_size,
        num_shared=num_shared,
        seed=seed,
        **types,
    )
    assert_close(step.run(NativeBackend(kernels)), step.compute_oracle(), types["dtype"])


@every_type
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_heads_of_real_models(kernels: Kernels, head_dim: int, types: Types) -> None:
    layer = make_layer(num_kv_heads=2, group_size=4, head_dim=head_dim)
    step = RaggedStep([(300, 1), (127, 8), (0, 3), (128, 1)], layer, seed=1, **types)
    assert_close(step.run(NativeBackend(kernels)), step.compute_oracle(), types["dtype"])


@settings(fixtures_are_constant, max_examples=25)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 150), st.integers(1, 2 * BLOCK_ROWS)), min_size=1, max_size=6
    ),
    window=st.one_of(st.none(), st.integers(1, 100)),
    types=st.sampled_from(TYPES),
    seed=st.integers(0, 99),
)
def test_writes_and_answers_what_the_reference_does(
    kernels: Kernels, requests: list[tuple[int, int]], window: int | None, types: Types, seed: int
) -> None:
    """Requests with many rows may stand at any place among the others."""
    step = RaggedStep(requests, make_layer(window=window), kv_block_size=4, seed=seed, **types)
    ours, theirs = step.build_store(unused=0.0), step.build_store(unused=0.0)
    result = step.run(NativeBackend(kernels), ours)
    assert_close(result, step.run(TorchRefBackend(), theirs).float(), types["dtype"])
    assert_equal_pools(ours, theirs)


@every_type
def test_a_new_block_is_left_finite(kernels: Kernels, types: Types) -> None:
    """The reference reads whole blocks under a mask, where 0 * NaN would be NaN."""
    step = RaggedStep([(16, 3), (40, 1)], make_layer(), **types)
    store, before = step.build_store(), step.build_store()
    step.run(NativeBackend(kernels), store)
    for new, old in zip(list_pools(store, 0), list_pools(before, 0), strict=True):
        for pool, unwritten in zip(new, old, strict=True):
            block, other = step.tables[0][1], step.tables[1][2]
            assert pool[block, :, :3].isfinite().all()
            assert not pool[block, :, 3:].any()
            assert torch.equal(
                pool[other, :, 9:].nan_to_num(-1), unwritten[other, :, 9:].nan_to_num(-1)
            )


def test_only_its_own_layer_is_written(kernels: Kernels) -> None:
    step = RaggedStep([(5, 2), (0, 3)], make_layer(index=1))
    store = step.build_store()
    before = store.keys[0].clone()
    step.run(NativeBackend(kernels), store)
    assert torch.equal(store.keys[0], before)


@pytest.mark.usefixtures("threads")
@every_type
def test_threads_do_not_change_a_bit(kernels: Kernels, types: Types) -> None:
    step = RaggedStep([(400, 1), (3, 5), (129, 2), (90, 1)], make_layer(head_dim=64), **types)
    torch.set_num_threads(1)
    single = step.run(NativeBackend(kernels))
    torch.set_num_threads(2)
    assert torch.equal(step.run(NativeBackend(kernels)), single)


@pytest.mark.parametrize("window", [None, 50])
@every_type
def test_the_rest_of_the_batch_does_not_change_a_bit(
    kernels: Kernels, types: Types, window: int | None
) -> None:
    layer = make_layer(head_dim=64, group_size=3, window=window)
    requests = [(300, 1), (127, 6), (12, 1), (0, 4), (255, 17)]
    step = RaggedStep(requests, layer, num_shared=1, **types)
    backend = NativeBackend(kernels)
    together = step.run(backend)
    for index in range(len(requests)):
        alone = step.select(index).run(backend)
        assert torch.equal(together[step.rows(index)], alone), requests[index]


@pytest.mark.parametrize("window", [None, 50, 130])
@every_type
def test_a_verified_row_equals_the_same_row_decoded(
    kernels: Kernels, types: Types, window: int | None
) -> None:
    """With drafts or without, a position gets the same bits."""
    context, rows = 250, 9
    layer = make_layer(head_dim=64, group_size=3, window=window)
    step = RaggedStep([(context, rows)], layer, **types)
    backend = NativeBackend(kernels)
    verified = step.run(backend)
    for row in range(rows):
        single = RaggedStep([(context + row, 1)], layer, **types)
        single.keys, single.values = (
            [whole[0][: context + row + 1]] for whole in (step.keys, step.values)
        )
        single.query = step.query[row : row + 1]
        assert torch.equal(single.run(backend)[0], verified[row]), row


@pytest.mark.parametrize("window", [None, 50, 130])
@every_type
def test_a_row_is_the_same_in_chunks_of_any_size(
    kernels: Kernels, types: Types, window: int | None
) -> None:
    """Prefill whole, in chunks or after a prefix hit: a position gets the same bits."""
    layer = make_layer(head_dim=64, group_size=3, window=window)
    step = RaggedStep([(40, 260)], layer, **types)
    backend = NativeBackend(kernels)
    whole = step.run(backend)
    start = 0
    for count in (1, 31, 33, 64, 97, 34):
        part = RaggedStep([(40 + start, count)], layer, **types)
        part.keys, part.values = (
            [numbers[0][: 40 + start + count]] for numbers in (step.keys, step.values)
        )
        part.query = step.query[start : start + count]
        assert torch.equal(part.run(backend), whole[start : start + count]), start
        start += count
    assert start == 260


def test_rows_are_read_where_they_lie(kernels: Kernels) -> None:
    """The model passes views of one merged projection."""
    layer = make_layer(num_kv_heads=2, group_size=3)
    step = RaggedStep([(20, 1), (9, 2)], layer)
    backend = NativeBackend(kernels)
    expected = step.run(backend)
    wide = torch.full((3, 10, layer.head_dim), math.nan)
    wide[:, :6] = step.query
    step.query = wide[:, :6]
    assert not step.query.is_contiguous()
    assert torch.equal(step.run(backend), expected)


def test_unusual_strides_are_copied_first(kernels: Kernels) -> None:
    step = RaggedStep([(20, 1), (9, 2)], make_layer())
    backend = NativeBackend(kernels)
    expected = step.run(backend)
    step.query = step.query.transpose(1, 2).contiguous().transpose(1, 2)
    assert step.query.stride(2) != 1
    assert torch.equal(step.run(backend), expected)


def test_what_the_kernel_cannot_read_goes_to_the_reference(kernels: Kernels) -> None:
    """An odd number of bfloat16 does not fill whole units."""
    step = RaggedStep([(20, 1), (9, 40)], make_layer(head_dim=7), dtype=torch.bfloat16)
    store, other = step.build_store(unused=0.0), step.build_store(unused=0.0)
    expected = step.run(TorchRefBackend(), other)
    assert torch.equal(step.run(NativeBackend(kernels), store), expected)
    assert torch.equal(store.keys[0], other.keys[0])


def test_layers_of_different_kinds_share_one_step(kernels: Kernels) -> None:
    """Drafter layers may have other heads, windows and scales than the target's."""
    backend = NativeBackend(kernels)
    requests = [(200, 1), (30, 4)]
    steps = [
        RaggedStep(requests, make_layer(num_kv_heads=heads, head_dim=dim, window=window), seed=7)
        for heads, dim, window in [(2, 16, None), (2, 16, 33), (1, 64, None)]
    ]
    for step in steps[1:]:
        step.tables = steps[0].tables
    metadata = backend.prepare(steps[0].build_batch(), steps[0].build_store())
    for step in steps:
        key, value = step.new_rows()
        store = step.build_store()
        result = backend.attend(
            step.query, key, value, layer=step.layer, kv_store=store, metadata=metadata
        )
        assert_close(result, step.compute_oracle(), torch.float32)


def test_a_nan_of_the_request_itself_is_not_hidden(kernels: Kernels) -> None:
    step = RaggedStep([(30, 1), (8, 1)], make_layer())
    step.keys[0][4] = math.nan
    result = step.run(NativeBackend(kernels))
    assert result[0].isnan().all()
    assert result[1].isfinite().all()


def test_host_arrays_of_other_integer_types_are_converted(kernels: Kernels) -> None:
    step = RaggedStep([(20, 1), (9, 2)], make_layer())
    backend = NativeBackend(kernels)
    expected = step.run(backend)
    step.tables = [table.astype(np.int32) for table in step.tables]
    assert torch.equal(step.run(backend), expected)
