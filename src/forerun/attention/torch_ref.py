"""Attention in plain PyTorch: any device, any window, and the oracle for faster backends.

K/V blocks are gathered by whole (block, head) runs into reused buffers: fresh memory of that size
costs more in page faults than the arithmetic. Products accumulate in float32; scores are rounded to
the model's type. torch_plan.py decides what is computed together. Rows of an int8 pool are
quantised when written and become the model's type again when gathered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from forerun.attention.base import AttentionBatch, AttentionCapabilities, AttentionLayer
from forerun.attention.torch_plan import Bucket, LayerPlan, Piece, PlanBuilder
from forerun.cache.kv_store import KVStore
from forerun.quantisation.rows import dequantise_rows, quantise_rows


@dataclass(slots=True)
class TorchRefMetadata:
    """One step; plans and slot indices are built when the first layer of their kind asks."""

    builder: PlanBuilder
    fresh_blocks: Tensor | None
    slot_indices: dict[int, Tensor] = field(default_factory=dict)
    plans: dict[tuple[object, ...], LayerPlan] = field(default_factory=dict)

    def find_plan(self, layer: AttentionLayer, dtype: torch.dtype) -> LayerPlan:
        """Return the plan shared by layers like this one."""
        if layer.kind not in self.plans:
            self.plans[layer.kind] = self.builder.build(layer, dtype)
        return self.plans[layer.kind]

    def find_slot_index(self, num_kv_heads: int) -> Tensor:
        """Return the write index for this many KV heads."""
        if num_kv_heads not in self.slot_indices:
            self.slot_indices[num_kv_heads] = self.builder.build_slot_index(num_kv_heads)
        return self.slot_indices[num_kv_heads]


class _Scratch:
    """Named buffers that grow and are reused by every layer and step. One thread at a time."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return an uninitialised tensor, valid until the name is taken again."""
        size = math.prod(shape)
        key = (name, like.dtype, like.device)
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[key] = like.new_empty(size)
        return buffer[:size].view(shape)


@dataclass(frozen=True, slots=True)
class _Pool:
    """Keys or values of one layer."""

    numbers: Tensor  # [num_blocks, num_kv_heads, kv_block_size, head_dim]
    scales: Tensor | None  # [num_blocks, num_kv_heads, kv_block_size] of an int8 pool

    def clear(self, blocks: Tensor) -> None:
        """Zero these blocks."""
        self.numbers.index_fill_(0, blocks, 0)
        if self.scales is not None:
            self.scales.index_fill_(0, blocks, 0)

    def write(self, slot_index: Tensor, rows: Tensor) -> Tensor:
        """Write rows [num_tokens, num_kv_heads, head_dim]; return them as they read back."""
        numbers, read_back = rows, rows
        if self.scales is not None:
            numbers, scales = quantise_rows(rows)
            read_back = dequantise_rows(numbers, scales, rows.dtype)
            self.scales.view(-1).index_copy_(0, slot_index, scales.view(-1))
        head_dim = self.numbers.shape[3]
        flat = self.numbers.view(-1, head_dim)
        flat.index_copy_(0, slot_index, numbers.reshape(-1, head_dim))
        return read_back


class TorchRefBackend:
    """AttentionBackend in PyTorch. Holds scratch memory only."""

    capabilities = AttentionCapabilities(supports_sliding_window=True, supports_varlen_graph=False)

    def __init__(self) -> None:
        self._scratch = _Scratch()

    def prepare(self, batch: AttentionBatch, kv_store: KVStore) -> TorchRefMetadata:
        """Build the per-step metadata."""
        builder = PlanBuilder(batch, kv_store.kv_block_size, kv_store.keys[0].device)
        return TorchRefMetadata(builder, builder.build_fresh_blocks())

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        layer: AttentionLayer,
        kv_store: KVStore,
        metadata: TorchRefMetadata,
    ) -> Tensor:
        """Write K/V, attend, and return the heads' outputs side by side."""
        keys, values = _find_pools(kv_store, layer.index)
        key, value = _write_rows((key, value), (keys, values), metadata)
        plan = metadata.find_plan(layer, query.dtype)
        output = self._attend_buckets(query, keys, values, layer, plan)
        for piece in plan.pieces:
            output[piece.start : piece.stop] = self._attend_piece(
                query[piece.start : piece.stop], key, value, layer, piece, (keys, values)
            )
        return output.view(len(query), -1)

    def write(
        self,
        key: Tensor,
        value: Tensor,
        *,
        index: int,
        kv_store: KVStore,
        metadata: TorchRefMetadata,
    ) -> None:
        """Write K/V of the step's rows to one layer."""
        _write_rows((key, value), _find_pools(kv_store, index), metadata)

    def _attend_buckets(
        self, query: Tensor, keys: _Pool, values: _Pool, layer: AttentionLayer, plan: LayerPlan
    ) -> Tensor:  # [num_tokens, num_heads, head_dim]
        """Compute all few-row requests; rows of others are left arbitrary."""
        if not plan.buckets:
            return torch.empty_like(query, memory_format=torch.contiguous_format)
        scaled = query * layer.scale
        if plan.result_index is None:
            result = torch.empty_like(scaled)
            self._attend_bucket(scaled, keys, values, plan.buckets[0], result.view(-1))
            return result
        sizes = [b.num_reqs * b.num_rows * scaled[0].numel() for b in plan.buckets]
        joined = self._scratch.take("results", (sum(sizes),), query)
        for bucket, result in zip(plan.buckets, joined.split(sizes), strict=True):
            self._attend_bucket(scaled, keys, values, bucket, result)
        return joined.view(-1, layer.head_dim)[plan.result_index].view(scaled.shape)

    def _attend_bucket(
        self, query: Tensor, keys: _Pool, values: _Pool, bucket: Bucket, result: Tensor
    ) -> None:
        """Write softmax(q K^T + mask) V, in the order [N, Hkv, R, G, D], to flat `result`."""
        num_reqs, num_rows = bucket.num_reqs, bucket.num_rows
        num_kv_heads, head_dim = keys.numbers.shape[1], keys.numbers.shape[3]
        pairs = num_reqs * num_kv_heads
        if bucket.query_index is not None:
            query = query[bucket.query_index]
        heads = query.view(num_reqs, num_rows, num_kv_heads, -1, head_dim).transpose(1, 2)
        queries = heads.reshape(pairs, -1, head_dim)
        # Keys and values pass through one buffer, one after the other: half the cache footprint.
        context = self._gather("context", keys, bucket.gather_index, pairs, query)
        shape = (pairs, queries.shape[1], context.shape[1])
        scores = self._scratch.take("scores", shape, query)
        torch.bmm(queries, context.transpose(1, 2), out=scores)
        scores.view(num_reqs, num_kv_heads, num_rows, -1, shape[2]).add_(bucket.mask)
        probs = self._scratch.take("probs", shape, query)
        torch.softmax(scores, dim=-1, out=probs)
        context = self._gather("context", values, bucket.gather_index, pairs, query)
        torch.bmm(probs, context, out=result.view(queries.shape))

    def _gather(self, name: str, pool: _Pool, index: Tensor, pairs: int, like: Tensor) -> Tensor:
        """Return [pairs, S, head_dim] of the pool's rows, in the type of `like`."""
        num_blocks, num_kv_heads, kv_block_size, head_dim = pool.numbers.shape
        runs = pool.numbers.view(num_blocks * num_kv_heads, kv_block_size * head_dim)
        gathered = self._scratch.take(name, (len(index), kv_block_size * head_dim), runs)
        torch.index_select(runs, 0, index, out=gathered)
        numbers = gathered.view(pairs, -1, head_dim)
        if pool.scales is None:
            return numbers
        scales = pool.scales.view(-1, kv_block_size)[index].view(pairs, -1)
        rows = self._scratch.take(name, tuple(numbers.shape), like)
        return dequantise_rows(numbers, scales, like.dtype, out=rows)

    def _attend_piece(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer: AttentionLayer,
        piece: Piece,
        pools: tuple[_Pool, _Pool],
    ) -> Tensor:  # [rows, num_heads, head_dim]
        """Attend for some rows of one request."""
        if piece.gather_index is None:
            own = slice(piece.key_start, piece.stop)
            context_keys, context_values = key[own].transpose(0, 1), value[own].transpose(0, 1)
        else:
            names = ("keys", "values")
            context_keys, context_values = (
                self._gather(name, pool, piece.gather_index, layer.num_kv_heads, query)
                for name, pool in zip(names, pools, strict=True)
            )
        # KV heads act as the batch, and the query heads of one as its heads: K/V need no copies.
        group_size = layer.num_heads // layer.num_kv_heads
        grouped = query.unflatten(1, (-1, group_size)).permute(1, 2, 0, 3)
        result = F.scaled_dot_product_attention(
            grouped,
            context_keys[:, None].expand(-1, group_size, -1, -1),
            context_values[:, None].expand(-1, group_size, -1, -1),
            attn_mask=piece.mask,
            is_causal=piece.mask is None,
            scale=layer.scale,
        )
        return result.permute(2, 0, 1, 3).flatten(1, 2)


def _write_rows(
    rows: tuple[Tensor, Tensor], pools: tuple[_Pool, _Pool], metadata: TorchRefMetadata
) -> tuple[Tensor, Tensor]:
    """Write keys and values of one layer [T, Hkv, D]; return them as they read back."""
    slot_index = metadata.find_slot_index(rows[0].shape[1])
    if metadata.fresh_blocks is not None:
        # Slots past the last written one are read under a mask; what an earlier owner left there
        # must at least be finite, for 0 * NaN is NaN.
        for pool in pools:
            pool.clear(metadata.fresh_blocks)
    key, value = (pool.write(slot_index, own) for pool, own in zip(pools, rows, strict=True))
    return key, value


def _find_pools(kv_store: KVStore, index: int) -> tuple[_Pool, _Pool]:
    """Return the keys and values of one layer."""
    if not kv_store.is_quantised:
        return _Pool(kv_store.keys[index], None), _Pool(kv_store.values[index], None)
    return (
        _Pool(kv_store.keys[index], kv_store.key_scales[index]),
        _Pool(kv_store.values[index], kv_store.value_scales[index]),
    )
