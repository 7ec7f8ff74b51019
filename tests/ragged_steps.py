"""Random ragged attention steps over a paged pool, with a float64 oracle.

`RaggedStep` draws requests given as (context length, rows) and lays them out over shuffled blocks;
with `num_shared` every request's first blocks are the first request's. Slots that no request may
read hold NaN (of an int8 pool: NaN scales), so that reading one shows. Results are compared with
attention computed row by row, over the rows as the pool holds them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from forerun.attention.base import AttentionBackend, AttentionBatch, AttentionLayer
from forerun.cache.kv_store import KVLayerShape, KVStore
from forerun.quantisation.rows import quantise_rows


def make_layer(
    *,
    num_kv_heads: int = 2,
    group_size: int = 2,
    head_dim: int = 8,
    window: int | None = None,
    index: int = 0,
    causal: bool = True,
) -> AttentionLayer:
    """Return a layer whose scores spread over a few units."""
    return AttentionLayer(
        index=index,
        num_heads=num_kv_heads * group_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        window=window,
        causal=causal,
    )


def list_pools(store: KVStore, index: int) -> list[tuple[Tensor, ...]]:
    """Return the tensors of one layer's keys and of its values: numbers, then scales if any."""
    keys, values = [store.keys, store.key_scales], [store.values, store.value_scales]
    return [tuple(pools[index] for pools in kind if pools) for kind in (keys, values)]


class RaggedStep:
    """One step; `keys` and `values` [length, num_kv_heads, head_dim] per request, of one dtype.

    The pool is of that type too, unless `kv_dtype` is another.
    """

    def __init__(
        self,
        requests: Sequence[tuple[int, int]],
        layer: AttentionLayer,
        *,
        kv_block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        num_shared: int = 0,
        seed: int = 0,
    ) -> None:
        self.requests, self.layer, self.kv_block_size = list(requests), layer, kv_block_size
        self.dtype, self.kv_dtype = dtype, kv_dtype or dtype
        self._generator = torch.Generator().manual_seed(seed)
        lengths = [context + rows for context, rows in self.requests]
        counts = [-(-length // kv_block_size) for length in lengths]
        self.num_blocks = sum(counts) + 1
        order = 1 + torch.randperm(sum(counts), generator=self._generator).numpy()
        self.tables = np.split(order, np.cumsum(counts)[:-1])
        self.keys = [self.draw(length, layer.num_kv_heads) for length in lengths]
        self.values = [self.draw(length, layer.num_kv_heads) for length in lengths]
        self.query = self.draw(sum(rows for _, rows in self.requests), layer.num_heads)
        for index in range(1, len(self.requests)):
            self._share(index, num_shared)

    def draw(self, length: int, num_heads: int) -> Tensor:
        """Return normal numbers [length, num_heads, head_dim]."""
        shape = (length, num_heads, self.layer.head_dim)
        return torch.randn(shape, generator=self._generator).to(self.dtype)

    def select(self, index: int) -> RaggedStep:
        """Return the step of one request alone: the same numbers in other blocks."""
        alone = RaggedStep(
            [self.requests[index]],
            self.layer,
            kv_block_size=self.kv_block_size,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            seed=index,
        )
        alone.keys, alone.values = [self.keys[index]], [self.values[index]]
        alone.query = self.query[self.rows(index)]
        return alone

    def rows(self, index: int) -> slice:
        """Return the rows of one request."""
        start = sum(rows for _, rows in self.requests[:index])
        return slice(start, start + self.requests[index][1])

    def slots(self, index: int, start: int, stop: int) -> np.ndarray:
        """Return the physical slots of positions start .. stop - 1."""
        block, offset = np.divmod(np.arange(start, stop), self.kv_block_size)
        return self.tables[index][block] * self.kv_block_size + offset

    def build_batch(self) -> AttentionBatch:
        """Return the host description."""
        width = max(len(table) for table in self.tables)
        slots = [
            self.slots(index, context, context + rows)
            for index, (context, rows) in enumerate(self.requests)
        ]
        return AttentionBatch(
            query_start_loc=np.cumsum([0, *(rows for _, rows in self.requests)]),
            context_lens=np.array([context for context, _ in self.requests]),
            block_tables=np.stack([np.pad(t, (0, width - len(t))) for t in self.tables]),
            slot_mapping=np.concatenate(slots),
        )

    def build_store(self, unused: float = math.nan) -> KVStore:
        """Return a pool with the contexts in place and `unused` everywhere else."""
        layer = self.layer
        shape = KVLayerShape(num_kv_heads=layer.num_kv_heads, head_dim=layer.head_dim)
        store = KVStore(
            [shape] * (layer.index + 1),
            num_blocks=self.num_blocks,
            kv_block_size=self.kv_block_size,
            dtype=self.kv_dtype,
            device="cpu",
        )
        for pools, contexts in zip(list_pools(store, layer.index), self.contexts(), strict=True):
            for pool in pools:
                pool.fill_(unused if pool.is_floating_point() or unused == 0 else 127)
            for index, (context, _) in enumerate(self.requests):
                block, offset = np.divmod(self.slots(index, 0, context), self.kv_block_size)
                rows = contexts[index][:context]
                parts = quantise_rows(rows) if store.is_quantised else (rows,)
                for pool, part in zip(pools, parts, strict=True):
                    pool[block, :, offset] = part
        return store

    def contexts(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return keys and values."""
        return self.keys, self.values

    def read_back(self, rows: Tensor) -> Tensor:
        """Return rows as the pool holds them, in float64."""
        if self.kv_dtype != torch.int8:
            return rows.double()
        numbers, scales = quantise_rows(rows)
        return numbers.double() * scales.double()[..., None]

    def new_rows(self) -> tuple[Tensor, Tensor]:
        """Return this step's keys and values, all requests together."""
        parts = [slice(context, context + rows) for context, rows in self.requests]
        key, value = (
            torch.cat([whole[part] for whole, part in zip(wholes, parts, strict=True)])
            for wholes in (self.keys, self.values)
        )
        return key, value

    @torch.inference_mode()
    def run(self, backend: AttentionBackend, store: KVStore | None = None) -> Tensor:
        """Return the backend's answer [num_tokens, num_heads * head_dim]."""
        store = self.build_store() if store is None else store
        key, value = self.new_rows()
        metadata = backend.prepare(self.build_batch(), store)
        return backend.attend(
            self.query, key, value, layer=self.layer, kv_store=store, metadata=metadata
        )

    def compute_oracle(self) -> Tensor:
        """Return the exact answer in float32."""
        layer, rows = self.layer, []
        group_size = layer.num_heads // layer.num_kv_heads
        for index, (context, count) in enumerate(self.requests):
            keys, values = (
                self.read_back(whole[index]).repeat_interleave(group_size, 1)
                for whole in self.contexts()
            )
            for position in range(context, context + count):
                first = 0 if layer.window is None else position - layer.window + 1
                last = position if layer.causal else context + count - 1
                seen = slice(max(first, 0), last + 1)
                query = self.query[len(rows)].double()
                scores = torch.einsum("hd,khd->hk", query, keys[seen]) * layer.scale
                rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values[seen]).flatten())
        return torch.stack(rows).float()

    def _share(self, index: int, num_shared: int) -> None:
        """Put the first request's first blocks in front of this one, where both have them full."""
        full = min(self.requests[0][0], self.requests[index][0]) // self.kv_block_size
        blocks = min(num_shared, full)
        self.tables[index][:blocks] = self.tables[0][:blocks]
        for wholes in (self.keys, self.values):
            wholes[index][: blocks * self.kv_block_size] = wholes[0][: blocks * self.kv_block_size]
