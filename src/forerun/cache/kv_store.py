"""The K/V tensors of all layers, target first, then drafter. Fixed size, written by slot.

Layout per layer: [num_blocks, num_kv_heads, kv_block_size, head_dim], so that one (block, head)
pair is one contiguous run of kv_block_size * head_dim numbers. Gathering a context is then an
index_select over long rows, which costs a fraction of what token-wise gathering does. An int8 pool
has a float32 scale per token and KV head beside it: half the bytes of bfloat16 and a little.
"""

from __future__ import annotations

import copy
import math
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
        self.dtype = dtype
        self.layers = tuple(layers)
        rows = [(num_blocks, layer.num_kv_heads, kv_block_size) for layer in layers]
        shapes = [(*row, layer.head_dim) for row, layer in zip(rows, layers, strict=True)]
        # Each of keys and values is [num_blocks, num_kv_heads, kv_block_size, head_dim].
        self.keys, self.values = _allocate(shapes, dtype, device)
        # What the numbers of an int8 pool are multiples of, [num_blocks, num_kv_heads,
        # kv_block_size]; empty otherwise.
        self.key_scales, self.value_scales = _allocate(
            rows if self.is_quantised else [], torch.float32, device
        )

    @property
    def is_quantised(self) -> bool:
        """Return whether numbers are int8 with scales."""
        return self.dtype == torch.int8

    def select(self, first: int, count: int) -> KVStore:
        """Return a view on `count` layers from `first` on, numbered from 0; the same tensors."""
        assert first + count <= len(self.layers), (first, count, len(self.layers))
        view, span = copy.copy(self), slice(first, first + count)
        view.layers = self.layers[span]
        view.keys, view.values = self.keys[span], self.values[span]
        view.key_scales, view.value_scales = self.key_scales[span], self.value_scales[span]
        return view


def _allocate(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device | str
) -> tuple[list[Tensor], list[Tensor]]:
    """Return two zeroed tensors of each shape, resident from the start, on huge pages if possible.

    NOTE: zeros, not empty: a padded read must never see NaN (0 * NaN is NaN). Huge pages, because
    attention reads short runs all over the pool and would miss the TLB at every one; one range for
    all, because what does not fill a huge page would be left to small ones in every layer.
    """
    sizes = [math.prod(shape) for shape in (*shapes, *shapes)]
    whole = torch.empty(sum(sizes), dtype=dtype, device=device)
    if whole.is_cpu:
        advise_huge_pages(whole.data_ptr(), whole.numel() * whole.itemsize)
    parts = torch.split(whole.zero_(), sizes)
    pools = [part.view(shape) for part, shape in zip(parts, (*shapes, *shapes), strict=True)]
    return pools[: len(shapes)], pools[len(shapes) :]


def compute_block_bytes(
    layers: Sequence[KVLayerShape], *, kv_block_size: int, dtype: torch.dtype
) -> int:
    """Return the bytes one block takes over all layers: keys, values and scales."""
    scale_bytes = torch.float32.itemsize if dtype == torch.int8 else 0
    return kv_block_size * sum(
        2 * layer.num_kv_heads * (layer.head_dim * dtype.itemsize + scale_bytes) for layer in layers
    )
