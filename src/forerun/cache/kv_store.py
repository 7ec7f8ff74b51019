"""The K/V tensors of all layers, target first, then drafter. Fixed size, written by slot.

Layout per layer: [num_blocks, num_kv_heads, kv_block_size, head_dim], so that one (block, head)
pair is one contiguous run of kv_block_size * head_dim numbers. Gathering a context is then an
index_select over long rows, which costs a fraction of what token-wise gathering does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.cache.huge_pages import advise_huge_pages


@dataclass(frozen=True, kw_only=True, slots=True)
class KVLayerShape:
    """Geometry of one layer's K/V."""

    num_kv_heads: int
    head_dim: int


class KVStore:
    """Owns the pool. Block 0 is the null block: padding reads it, nobody owns it."""

    def __init__(
        self,
        layers: Sequence[KVLayerShape],
        *,
        num_blocks: int,
        kv_block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.num_blocks = num_blocks
        self.kv_block_size = kv_block_size
        self.layers = tuple(layers)
        self.keys: list[Tensor] = []  # each [num_blocks, num_kv_heads, kv_block_size, head_dim]
        self.values: list[Tensor] = []
        for layer in layers:
            shape = (num_blocks, layer.num_kv_heads, kv_block_size, layer.head_dim)
            self.keys.append(_allocate(shape, dtype, device))
            self.values.append(_allocate(shape, dtype, device))


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return zeroed memory that is resident from the start, on huge pages where the system can.

    NOTE: zeros, not empty: a padded read must never see NaN (0 * NaN is NaN). Huge pages, because
    attention reads short runs all over the pool and would miss the TLB at every one.
    """
    pool = torch.empty(shape, dtype=dtype, device=device)
    if pool.is_cpu:
        advise_huge_pages(pool.data_ptr(), pool.numel() * pool.itemsize)
    return pool.zero_()


def compute_block_bytes(
    layers: Sequence[KVLayerShape], *, kv_block_size: int, dtype: torch.dtype
) -> int:
    """Return the bytes one block takes over all layers, keys and values."""
    numbers = sum(2 * layer.num_kv_heads * layer.head_dim for layer in layers)
    return numbers * kv_block_size * dtype.itemsize
