"""TorchRefBackend against attention computed row by row in float64, on random ragged steps.

The pool is filled with NaN except the null block and the positions a request may read, so any read
outside them (a neighbour's block, a stale slot, padding that is not masked) shows up.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.attention.base import AttentionBatch, AttentionLayer
from forerun.attention.torch_plan import PIECE_ROWS
from forerun.attention.torch_ref import TorchRefBackend
from forerun.cache.kv_store import KVLayerShape, KVStore

HEAD_DIM = 8


class Step:
    """One step over requests given as (context length, rows), with its K/V kept on the side."""

    def __init__(
        self, requests: list[tuple[int, int]], layer: AttentionLayer, kv_block_size: int, seed: int
    ) -> None:
        self.requests, self.layer, self.kv_block_size = requests, layer, kv_block_size
        self.generator = torch.Generator().manual_seed(seed)
        totals = [context + rows for context, rows in requests]
        counts = [-(-total // kv_block_size) for total in totals]
        order = 1 + torch.randperm(sum(counts), generator=self.generator).numpy()
        self.tables = np.split(order, np.cumsum(counts)[:-1])
        self.keys = [self.draw(total, layer.num_kv_heads) for total in totals]
        self.values = [self.draw(total, layer.num_kv_heads) for total in totals]
        self.query = self.draw(sum(rows for _, rows in requests), layer.num_heads)
        self.num_blocks = sum(counts) + 1

    def draw(self, length: int, num_heads: int) -> torch.Tensor:
        return torch.randn(length, num_heads, HEAD_DIM, generator=self.generator)

    def slots(self, request: int, start: int, stop: int) -> np.ndarray:
        block, offset = np.divmod(np.arange(start, stop), self.kv_block_size)
        return self.tables[request][block] * self.kv_block_size + offset

    def build_batch(self) -> AttentionBatch:
        width = max(len(table) for table in self.tables)
        rows = [rows for _, rows in self.requests]
        slots = [
            self.slots(index, context, context + rows)
            for index, (context, rows) in enumerate(self.requests)
        ]
        return AttentionBatch(
            query_start_loc=np.cumsum([0, *rows]),
            context_lens=np.array([context for context, _ in self.requests]),
            block_tables=np.stack([np.pad(t, (0, width - len(t))) for t in self.tables]),
            slot_mapping=np.concatenate(slots),
        )

    def build_store(self, dtype: torch.dtype) -> KVStore:
        """Return a pool holding the contexts, NaN where nothing was written, zeros in block 0."""
        shape = KVLayerShape(num_kv_heads=self.layer.num_kv_heads, head_dim=HEAD_DIM)
        store = KVStore(
            [shape] * (self.layer.index + 1),
            num_blocks=self.num_blocks,
            kv_block_size=self.kv_block_size,
            dtype=dtype,
            device="cpu",
        )
        pools = (store.keys[self.layer.index], store.values[self.layer.index])
        for pool, contexts in zip(pools, (self.keys, self.values), strict=True):
            pool[1:] = math.nan
            for index, (context, _) in enumerate(self.requests):
                for position in range(context):
                    block, offset = divmod(position, self.kv_block_size)
                    if offset == 0:  # what a first write does to a block
                        pool[self.tables[index][block]] = 0
                    pool[self.tables[index][block], :, offset] = contexts[index][position].to(dtype)
        return store

    def run(self, backend: TorchRefBackend, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        store = self.build_store(dtype)
        metadata = backend.prepare(self.build_batch(), store)
        new = [slice(context, context + rows) for context, rows in self.requests]
        key, value = (
            torch.cat([whole[part] for whole, part in zip(wholes, new, strict=True)]).to(dtype)
            for wholes in (self.keys, self.values)
        )
        with torch.inference_mode():
            return backend.attend(
                self.query.to(dtype),
                key,
                value,
                layer=self.layer,
                kv_store=store,
                metadata=metadata,
            )

    def compute_oracle(self) -> torch.Tensor:
        group_size = self.layer.num_heads // self.layer.num_kv_heads
        rows = []
        for index, (context, count) in enumerate(self.requests):
            for position in range(context, context + count):
                first = 0 if self.layer.window is None else position - self.layer.window + 1
                last = position if self.layer.causal else context + count - 1
                seen = slice(max(first, 0), last + 1)
                keys = self.keys[index][seen].double().repeat_interleave(group_size, 1)
                values = self.values[index][seen].double().repeat_interleave(group_size, 1)
                query = self.query[len(rows)].double()
                scores = torch.einsum("hd,khd->hk", query, keys) * self.layer.scale
                rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values).flatten())
        return torch.stack(rows).float()


def make_layer(
    num_kv_heads: int = 2,
    group_size: int = 2,
    window: int | None = None,
    index: int = 0,
    causal: bool = True,
) -> AttentionLayer:
    return AttentionLayer(
        index=index,
        num_heads=num_kv_heads * group_size,
        num_kv_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        scale=0.3,
        window=window,
        causal=causal,
    )


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
    seed=st.integers(0, 99),
)
def test_equals_the_oracle(
    requests: list[tuple[int, int]],
    kv_block_size: int,
    num_kv_heads: int,
    group_size: int,
    window: int | None,
    causal: bool,
    seed: int,
) -> None:
    layer = make_layer(num_kv_heads, group_size, window, causal=causal)
    step = Step(requests, layer, kv_block_size, seed)
    torch.testing.assert_close(
        step.run(TorchRefBackend()), step.compute_oracle(), atol=2e-5, rtol=0
    )


@pytest.mark.parametrize("window", [None, 100, 300])
@pytest.mark.parametrize("context", [0, 37])
@pytest.mark.parametrize("causal", [True, False])
def test_long_chunks_are_cut_without_a_seam(context: int, window: int | None, causal: bool) -> None:
    layer = make_layer(window=window, causal=causal)
    step = Step([(context, 2 * PIECE_ROWS + 9), (3, 2)], layer, 16, seed=1)
    torch.testing.assert_close(
        step.run(TorchRefBackend()), step.compute_oracle(), atol=2e-5, rtol=0
    )


def test_very_different_lengths_use_several_buckets() -> None:
    requests = [(2000, 1), (8, 1), (1990, 5), (40, 1), (900, 12), (0, 1), (30, 3), (2000, 1)]
    step = Step(requests, make_layer(), 16, seed=2)
    backend = TorchRefBackend()
    metadata = backend.prepare(step.build_batch(), step.build_store(torch.float32))
    assert len(metadata.find_plan(step.layer, torch.float32).buckets) > 1
    torch.testing.assert_close(step.run(backend), step.compute_oracle(), atol=2e-5, rtol=0)


def test_equal_decode_rows_use_one_bucket_as_it_stands() -> None:
    step = Step([(250 - i, 1) for i in range(8)], make_layer(), 16, seed=3)
    backend = TorchRefBackend()
    metadata = backend.prepare(step.build_batch(), step.build_store(torch.float32))
    plan = metadata.find_plan(step.layer, torch.float32)
    assert len(plan.buckets) == 1
    assert plan.result_index is None


def test_window_gathers_only_blocks_it_touches() -> None:
    layer = make_layer(window=20)
    step = Step([(1000, 1), (990, 30)], layer, 16, seed=4)
    backend = TorchRefBackend()
    metadata = backend.prepare(step.build_batch(), step.build_store(torch.float32))
    plan = metadata.find_plan(layer, torch.float32)
    piece_index = plan.pieces[0].gather_index
    assert piece_index is not None
    assert len(plan.buckets[0].gather_index) <= 2 * layer.num_kv_heads
    assert len(piece_index) <= 5 * layer.num_kv_heads


def test_result_does_not_depend_on_the_other_requests() -> None:
    layer = make_layer()
    alone = Step([(50, 3)], layer, 16, seed=5)
    together = Step([(50, 3), (400, 1), (7, 20)], layer, 16, seed=5)
    together.keys[0], together.values[0] = alone.keys[0], alone.values[0]
    together.query[:3] = alone.query
    backend = TorchRefBackend()
    torch.testing.assert_close(together.run(backend)[:3], alone.run(backend), atol=1e-6, rtol=0)


def test_bfloat16_stays_within_its_rounding() -> None:
    step = Step([(200, 1), (60, 6), (0, 40), (33, 20)], make_layer(3, 3, 90), 16, seed=6)
    result = step.run(TorchRefBackend(), torch.bfloat16)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.float(), step.compute_oracle(), atol=0.04, rtol=0)


def test_writes_go_to_the_slots_of_their_layer_only() -> None:
    step = Step([(5, 2), (0, 3)], make_layer(index=1), 4, seed=7)
    store = step.build_store(torch.float32)
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
    step = Step([(20, 1), (9, 1)], make_layer(), 4, seed=8)
    expected = step.run(TorchRefBackend())
    wide = torch.zeros(2, 9, HEAD_DIM)
    wide[:, 1:5] = step.query
    step.query = wide[:, 1:5]
    assert not step.query.is_contiguous()
    torch.testing.assert_close(step.run(TorchRefBackend()), expected, atol=1e-6, rtol=0)
