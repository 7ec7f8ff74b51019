"""Taps written to the pool in one call: the bits of the same operations one by one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import forerun.kernels
from forerun.cache.kv_store import KVLayerShape, KVStore
from forerun.kernels import Kernels
from forerun.kernels.ingest_ops import ContextWeights, ContextWriter
from forerun.kernels.ops import rms_norm, rotate_heads
from forerun.kernels.packed import (
    PackedMemory,
    PackedWeight,
    measure_blocks,
    measure_packed,
    pack,
    pack_blocks,
)
from forerun.quantisation.rows import quantise_rows
from quantised_blocks import make_blocks

EPS = 1e-5
NUM_BLOCKS = 40
NUM_POSITIONS = 50


@pytest.fixture(autouse=True)
def chosen(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one instruction set be the one this machine has."""
    monkeypatch.setattr(forerun.kernels, "_probe", lambda: (kernels, kernels.variant))


@dataclass
class Drafter:
    """Random weights of L layers of H heads of D numbers, and angles."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    is_quantised: bool = False
    hidden_size: int = 32
    num_taps: int = 3

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        num_heads = self.num_layers * self.num_kv_heads
        self.weights = ContextWeights(
            fc=self._make_weight(self.hidden_size, self.num_taps * self.hidden_size),
            key_value=self._make_weight(2 * num_heads * self.head_dim, self.hidden_size),
            hidden_norm=torch.rand(self.hidden_size) + 0.5,
            key_norm=torch.rand(num_heads, self.head_dim) + 0.5,
            eps=EPS,
        )
        angles = torch.rand(NUM_POSITIONS, 1, 1, self.head_dim // 2) * 6
        self.cos = angles.cos().to(self.dtype)
        self.sin = torch.cat((-angles.sin(), angles.sin()), dim=2).to(self.dtype)

    def _make_weight(self, out_features: int, in_features: int) -> PackedWeight:
        if self.is_quantised:
            blocks = make_blocks("Q8_0", out_features, in_features)
            size = measure_blocks([blocks])
            assert size is not None
            memory = PackedMemory(torch.empty(PackedMemory.count_bytes([size]), dtype=torch.uint8))
            return pack_blocks([blocks], self.dtype, memory)
        weight = (torch.randn(out_features, in_features) * in_features**-0.5).to(self.dtype)
        size = measure_packed(weight)
        assert size is not None
        memory = PackedMemory(torch.empty(PackedMemory.count_bytes([size]), dtype=torch.uint8))
        return pack(weight, memory)

    def make_store(self, block_size: int, kv_dtype: torch.dtype) -> KVStore:
        """Return a pool in which an earlier owner left NaN, or scales of it."""
        shape = KVLayerShape(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        store = KVStore(
            [shape] * self.num_layers,
            num_blocks=NUM_BLOCKS,
            kv_block_size=block_size,
            dtype=kv_dtype,
            device="cpu",
        )
        for pool in list_pools(store):
            pool.fill_(torch.nan if pool.is_floating_point() else 3)
        return store

    def compute(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [T, L * H, D] one operation after the other."""
        given = self.weights
        fused = rms_norm(given.fc.multiply(features, None, self.dtype), given.hidden_norm, EPS)
        heads = given.key_value.multiply(fused, None, self.dtype).unflatten(1, (-1, self.head_dim))
        keys, values = heads.chunk(2, dim=1)
        normed = rms_norm(keys, given.key_norm, EPS)
        return rotate_heads(normed, self.cos[positions], self.sin[positions]), values


def list_pools(store: KVStore) -> list[Tensor]:
    return [*store.keys, *store.values, *store.key_scales, *store.value_scales]


def write_plainly(store: KVStore, rows: tuple[Tensor, Tensor], slots: np.ndarray) -> None:
    """Clear the blocks whose first slots are written, then write keys and values."""
    pools = [store.keys, store.values], [store.key_scales, store.value_scales]
    num_heads = store.layers[0].num_kv_heads
    for kind, numbers in enumerate(rows):
        for index, own in enumerate(numbers.split(num_heads, dim=1)):
            parts = quantise_rows(own) if store.is_quantised else (own,)
            for part, pool in zip(parts, (pools[0][kind], pools[1][kind]), strict=False):
                blocks, offsets = np.divmod(slots, store.kv_block_size)
                pool[index][blocks[offsets == 0]] = 0
                pool[index][blocks, :, offsets] = part


@settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    num_rows=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([4, 12, 16, 34, 64])),
    block_size=st.sampled_from([1, 4, 16]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    is_quantised=st.booleans(),
    int8_pool=st.booleans(),
    num_threads=st.integers(1, 3),
)
def test_writes_what_the_operations_one_by_one_write(
    num_rows: list[int],
    sizes: tuple[int, int, int],
    block_size: int,
    dtype: torch.dtype,
    is_quantised: bool,
    int8_pool: bool,
    num_threads: int,
    threads: None,
) -> None:
    """In several steps, which fill the pool in any order; nothing else is touched."""
    torch.set_num_threads(num_threads)
    drafter = Drafter(*sizes, dtype, is_quantised)
    stores = [drafter.make_store(block_size, torch.int8 if int8_pool else dtype) for _ in range(2)]
    writer = ContextWriter.build(drafter.weights, stores[0])
    assert writer is not None
    for count in num_rows:
        features = torch.randn(count, drafter.num_taps * drafter.hidden_size).to(dtype)
        positions = torch.randint(0, NUM_POSITIONS, (count,))
        slots = torch.randperm(NUM_BLOCKS * block_size)[:count].numpy()
        writer.write(features, positions, slots, (drafter.cos, drafter.sin[:, 0, 1]))
        write_plainly(stores[1], drafter.compute(features, positions), slots)
    for ours, expected in zip(*map(list_pools, stores), strict=True):
        assert torch.equal(ours.view(torch.int8), expected.view(torch.int8))


@pytest.mark.parametrize("position", [-1, NUM_POSITIONS])
def test_a_position_without_angles_is_refused_and_nothing_written(position: int) -> None:
    drafter = Drafter(1, 2, 16, torch.float32)
    store = drafter.make_store(4, torch.float32)
    writer = ContextWriter.build(drafter.weights, store)
    assert writer is not None
    features, angles = torch.randn(2, 96), (drafter.cos, drafter.sin[:, 0, 1])
    with pytest.raises(IndexError, match=rf"0 \.\. {NUM_POSITIONS - 1}"):
        writer.write(features, torch.tensor([3, position]), np.array([0, 1]), angles)
    assert all(bool(pool.isnan().all()) for pool in list_pools(store))


def test_a_pool_of_another_type_has_no_writer() -> None:
    drafter = Drafter(1, 2, 16, torch.bfloat16)
    assert ContextWriter.build(drafter.weights, drafter.make_store(4, torch.float32)) is None
