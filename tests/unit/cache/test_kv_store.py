"""The pool: its tensors, and the bytes that are counted for them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from forerun.cache.kv_store import KVLayerShape, KVStore, compute_block_bytes

# A target's layers and a drafter's.
LAYERS = (
    KVLayerShape(num_kv_heads=3, head_dim=64),
    KVLayerShape(num_kv_heads=3, head_dim=64),
    KVLayerShape(num_kv_heads=1, head_dim=20),
)
DTYPES = (torch.float32, torch.bfloat16, torch.int8)


def make_store(dtype: torch.dtype) -> KVStore:
    return KVStore(LAYERS, num_blocks=5, kv_block_size=4, dtype=dtype, device="cpu")


def list_tensors(store: KVStore) -> list[Tensor]:
    return [*store.keys, *store.values, *store.key_scales, *store.value_scales]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_counted_as_they_are_held(dtype: torch.dtype) -> None:
    held = sum(tensor.numel() * tensor.itemsize for tensor in list_tensors(make_store(dtype)))
    assert held == 5 * compute_block_bytes(LAYERS, kv_block_size=4, dtype=dtype)


def test_int8_with_its_scales_takes_little_more_than_half_of_bfloat16() -> None:
    layer = LAYERS[:1]
    counts = {d: compute_block_bytes(layer, kv_block_size=16, dtype=d) for d in DTYPES}
    assert counts[torch.bfloat16] == 16 * 2 * 3 * 128
    assert counts[torch.int8] == 16 * 2 * 3 * 68


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tensor_starts_as_zeros_of_its_own(dtype: torch.dtype) -> None:
    """Layers share one range of memory: a write must not reach a neighbour."""
    store = make_store(dtype)
    tensors = list_tensors(store)
    assert all(tensor.is_contiguous() and not tensor.any() for tensor in tensors)
    for number, tensor in enumerate(tensors):
        tensor.fill_(number + 1)
    assert all(bool((tensor == number + 1).all()) for number, tensor in enumerate(tensors))


def test_scales_exist_for_int8_alone_one_per_position_and_head() -> None:
    store = make_store(torch.int8)
    pairs = [(store.keys, store.key_scales), (store.values, store.value_scales)]
    for numbers, scales in itertools.chain(*(zip(*pair, strict=True) for pair in pairs)):
        assert numbers.dtype == torch.int8
        assert scales.dtype == torch.float32
        assert scales.shape == numbers.shape[:3]
    plain = make_store(torch.bfloat16)
    assert plain.key_scales == plain.value_scales == []
    assert not plain.is_quantised


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_view_numbers_its_layers_from_zero_and_shares_their_memory(dtype: torch.dtype) -> None:
    store = make_store(dtype)
    view = store.select(1, 2)
    assert view.layers == LAYERS[1:]
    assert (view.num_blocks, view.kv_block_size, view.dtype) == (5, 4, dtype)
    for tensor in list_tensors(view):
        tensor.fill_(3)
    pools = [pool for pool in (store.keys, store.values, store.key_scales) if pool]
    assert all(not pool[0].any() for pool in pools)
    assert all(bool((layer == 3).all()) for pool in pools for layer in pool[1:])


def test_a_view_beyond_the_layers_is_a_mistake() -> None:
    with pytest.raises(AssertionError):
        make_store(torch.float32).select(2, 2)
