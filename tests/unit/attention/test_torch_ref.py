"""TorchRefBackend against attention computed row by row in float64, on random ragged steps.

The pool is filled with NaN except the null block and the positions a request may read, so any read
outside them (a neighbour's block, a stale slot, padding that is not masked) shows up.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.attention.torch_plan import PIECE_ROWS
from forerun.attention.torch_ref import TorchRefBackend
from forerun.cache.kv_store import KVStore
from ragged_steps import RaggedStep, list_pools, make_layer

HEAD_DIM = 8


class Step(RaggedStep):
    """A ragged step over a pool as the reference reads it: whole blocks, under a mask."""

    def build_store(self, unused: float = math.nan) -> KVStore:
        """Return the pool with zeros in block 0 and behind the contexts, as a first write does."""
        store = super().build_store(unused)
        for pool in itertools.chain(*list_pools(store, self.layer.index)):
            pool[0] = 0
            for index, (context, _) in enumerate(self.requests):
                begun = np.unique(self.slots(index, 0, context) // self.kv_block_size)
                pool[begun] = pool[begun].nan_to_num(0.0)
        return store


requests_strategy = st.lists(
    st.tuples(st.integers(0, 70), st.one_of(st.integers(1, 9), st.integers(10, 40))),
    min_size=1,
    max_size=7,
)


@settings(max_examples=150, deadline=None)
@given(
    requests=requests_strategy,
    kv_block_size=st.sampled_from([1, 4, 16]),
    num_kv_heads=st.integers(1, 3),
    group_size=st.integers(1, 4),
    window=st.one_of(st.none(), st.integers(1, 60)),
    causal=st.booleans(),
    kv_dtype=st.sampled_from([torch.float32, torch.int8]),
    seed=st.integers(0, 99),
)
def test_equals_the_oracle(
    requests: list[tuple[int, int]],
    kv_block_size: int,
    num_kv_heads: int,
    group_size: int,
    window: int | None,
    causal: bool,
    kv_dtype: torch.dtype,
    seed: int,
) -> None:
    layer = make_layer(
        num_kv_heads=num_kv_heads, group_size=group_size, window=window, causal=causal
    )
    step = Step(requests, layer, kv_block_size=kv_block_size, kv_dtype=kv_dtype, seed=seed)
    torch.testing.assert_close(
        step.run(TorchRefBackend()), step.compute_oracle(), atol=2e-5, rtol=0
    )


@pytest.mark.parametrize("window", [None, 100, 300])
@pytest.mark.parametrize("context", [0, 37])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_long_chunks_are_cut_without_a_seam(
    context: int, window: int | None, causal: bool, kv_dtype: torch.dtype
) -> None:
    layer = make_layer(window=window, causal=causal)
    step = Step([(context, 2 * PIECE_ROWS + 9), (3, 2)], layer, kv_dtype=kv_dtype, seed=1)
    torch.testing.assert_close(
        step.run(TorchRefBackend()), step.compute_oracle(), atol=2e-5, rtol=0
    )


def test_very_different_lengths_use_several_buckets() -> None:
    requests = [(2000, 1), (8, 1), (1990, 5), (40, 1), (900, 12), (0, 1), (30, 3), (2000, 1)]
    step = Step(requests, make_layer(), kv_block_size=16, seed=2)
    backend = TorchRefBackend()
    metadata = backend.prepare(step.build_batch(), step.build_store())
    assert len(metadata.find_plan(step.layer, torch.float32).buckets) > 1
    torch.testing.assert_close(step.run(backend), step.compute_oracle(), atol=2e-5, rtol=0)


def test_equal_decode_rows_use_one_bucket_as_it_stands() -> None:
    step = Step([(250 - i, 1) for i in range(8)], make_layer(), kv_block_size=16, seed=3)
    backend = TorchRefBackend()
    metadata = backend.prepare(step.build_batch(), step.build_store())
    plan = metadata.find_plan(step.layer, torch.float32)
    assert len(plan.buckets) == 1
    assert plan.result_index is None


def test_window_gathers_only_blocks_it_touches() -> None:
    layer = make_layer(window=20)
    step = Step([(1000, 1), (990, 30)], layer, kv_block_size=16, seed=4)
    backend = TorchRefBackend()
    metadata = backend.prepare(step.build_batch(), step.build_store())
    plan = metadata.find_plan(layer, torch.float32)
    piece_index = plan.pieces[0].gather_index
    assert piece_index is not None
    assert len(plan.buckets[0].gather_index) <= 2 * layer.num_kv_heads
    assert len(piece_index) <= 5 * layer.num_kv_heads


def test_result_does_not_depend_on_the_other_requests() -> None:
    layer = make_layer()
    alone = Step([(50, 3)], layer, kv_block_size=16, seed=5)
    together = Step([(50, 3), (400, 1), (7, 20)], layer, kv_block_size=16, seed=5)
    together.keys[0], together.values[0] = alone.keys[0], alone.values[0]
    together.query[:3] = alone.query
    backend = TorchRefBackend()
    torch.testing.assert_close(together.run(backend)[:3], alone.run(backend), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8])
def test_bfloat16_stays_within_its_rounding(kv_dtype: torch.dtype) -> None:
    step = Step(
        [(200, 1), (60, 6), (0, 40), (33, 20)],
        make_layer(num_kv_heads=3, group_size=3, window=90),
        dtype=torch.bfloat16,
        kv_dtype=kv_dtype,
        seed=6,
    )
    result = step.run(TorchRefBackend())
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.float(), step.compute_oracle(), atol=0.04, rtol=0)


def test_writes_go_to_the_slots_of_their_layer_only() -> None:
    step = Step([(5, 2), (0, 3)], make_layer(index=1), kv_block_size=4, seed=7)
    store = step.build_store()
    before = store.keys[0].clone()
    backend = TorchRefBackend()
    metadata = backend.prepare(step.build_batch(), store)
    key = torch.cat([step.keys[0][5:], step.keys[1]])
    value = torch.cat([step.values[0][5:], step.values[1]])
    backend.attend(step.query, key, value, layer=step.layer, kv_store=store, metadata=metadata)
    assert torch.equal(store.keys[0], before)
    for request, (context, rows) in enumerate(step.requests):
        for position in range(context, context + rows):
            block, offset = divmod(position, 4)
            written = store.keys[1][step.tables[request][block], :, offset]
            assert torch.equal(written, step.keys[request][position])


def test_strided_inputs_are_read_by_their_strides() -> None:
    """The model passes views of one merged projection."""
    step = Step([(20, 1), (9, 1)], make_layer(), kv_block_size=4, seed=8)
    expected = step.run(TorchRefBackend())
    wide = torch.zeros(2, 9, HEAD_DIM)
    wide[:, 1:5] = step.query
    step.query = wide[:, 1:5]
    assert not step.query.is_contiguous()
    torch.testing.assert_close(step.run(TorchRefBackend()), expected, atol=1e-6, rtol=0)
