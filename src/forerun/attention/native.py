"""Attention in native code: one call per layer, no gathering, any number of rows.

K/V blocks are read where they lie. A request's positions are cut into chunks at fixed multiples and
its rows are masked exactly, so a row's result depends neither on the rest of the batch nor on how
many rows its request has this step nor on threads. Shapes the kernel cannot read are left to
TorchRefBackend.
Shapes: N blocks of rows, T rows of the step, C chunks of one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.attention.base import AttentionBatch, AttentionCapabilities, AttentionLayer
from forerun.attention.torch_ref import TorchRefBackend, TorchRefMetadata
from forerun.cache.kv_store import KVStore
from forerun.kernels import Kernels
from forerun.kernels.abi import DTYPE_CODES, AttentionParams

# Requests with more rows are cut: what a block's rows share must stay in the cache.
BLOCK_ROWS = 32
# A multiple of every vector width. Small, so that one long request keeps several threads busy.
CHUNK_SIZE = 128


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """The rows of a step in blocks of one request each, as the kernel reads them (int64).

    The first `num_shared` are whole requests with few rows; the others are parts of requests.
    """

    starts: np.ndarray  # [N]
    counts: np.ndarray  # [N]
    contexts: np.ndarray  # [N] position of the first row
    totals: np.ndarray  # [N] positions of the request, this step's included
    tables: np.ndarray  # [N, max_blocks]
    slots: np.ndarray  # [T]
    num_shared: int

    @classmethod
    def cut(cls, batch: AttentionBatch) -> RowBlocks:
        """Cut a step."""
        num_rows = np.diff(batch.query_start_loc)
        if num_rows.min(initial=BLOCK_ROWS) > 0 and num_rows.max(initial=0) <= BLOCK_ROWS:
            return cls._take_whole(batch, num_rows)
        num_blocks = -(-num_rows // BLOCK_ROWS)
        owner = np.repeat(np.arange(len(num_rows)), num_blocks)
        # Stable: blocks stay in the order of their rows.
        owner = owner[np.argsort(num_blocks[owner] > 1, kind="stable")]
        begin = np.flatnonzero(np.diff(owner, prepend=-1))
        place = np.arange(len(owner)) - np.repeat(begin, np.diff(begin, append=len(owner)))
        offsets = place * BLOCK_ROWS
        return cls(
            starts=_as_int64(batch.query_start_loc[owner] + offsets),
            counts=_as_int64(np.minimum(num_rows[owner] - offsets, BLOCK_ROWS)),
            contexts=_as_int64(batch.context_lens[owner] + offsets),
            totals=_as_int64(batch.context_lens[owner] + num_rows[owner]),
            tables=_as_int64(batch.block_tables[owner]),
            slots=_as_int64(batch.slot_mapping),
            num_shared=int((num_blocks[owner] == 1).sum()),
        )

    @classmethod
    def _take_whole(cls, batch: AttentionBatch, num_rows: np.ndarray) -> RowBlocks:
        """Return one block per request: what most steps are, and a step has no time for more."""
        return cls(
            starts=_as_int64(batch.query_start_loc[:-1]),
            counts=_as_int64(num_rows),
            contexts=_as_int64(batch.context_lens),
            totals=_as_int64(batch.context_lens + num_rows),
            tables=_as_int64(batch.block_tables),
            slots=_as_int64(batch.slot_mapping),
            num_shared=len(num_rows),
        )


@dataclass(slots=True)
class LayerPlan:
    """One kernel call, shared by the layers of one kind; `arrays` keeps their memory alive.

    `rows` are the q, k and v last pointed at: a model that reuses its buffers is checked once.
    """

    params: AttentionParams
    arrays: tuple[np.ndarray, ...]
    workspace: Tensor
    pointer: Any
    rows: tuple[Tensor | None, ...] = (None, None, None)

    def point_at(self, query: Tensor, key: Tensor, value: Tensor, head_dim: int) -> None:
        """Let the call read these rows."""
        rows = [_make_dense(x, head_dim) for x in (query, key, value)]
        params = self.params
        params.query, params.key, params.value = (x.data_ptr() for x in rows)
        params.query_stride, params.key_stride, params.value_stride = (x.stride(0) for x in rows)
        # What was copied is kept too, or its memory would be free while it is read.
        self.rows = (query, key, value, *rows)


@dataclass(slots=True)
class NativeMetadata:
    """One step. `whole` is made only when a layer's shape is beyond the kernel."""

    batch: AttentionBatch
    blocks: RowBlocks
    plans: dict[tuple[object, ...], LayerPlan | None] = field(default_factory=dict)
    whole: TorchRefMetadata | None = None


class NativeBackend:
    """AttentionBackend over the native kernel. Holds scratch memory; one thread at a time."""

    capabilities = AttentionCapabilities(supports_sliding_window=True, supports_varlen_graph=False)

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._reference = TorchRefBackend()
        self._workspace = torch.empty(0)

    def prepare(self, batch: AttentionBatch, kv_store: KVStore) -> NativeMetadata:
        """Cut the step into blocks of rows."""
        return NativeMetadata(batch, RowBlocks.cut(batch))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        layer: AttentionLayer,
        kv_store: KVStore,
        metadata: NativeMetadata,
    ) -> Tensor:
        """Write K/V, attend, and return the heads' outputs side by side."""
        plan = self._find_plan((query, key, value), layer, kv_store, metadata)
        if plan is None:
            return self._attend_whole((query, key, value), layer, kv_store, metadata)
        output = query.new_empty(query.shape[0], layer.num_heads * layer.head_dim)
        params = plan.params
        params.keys = kv_store.keys[layer.index].data_ptr()
        params.values = kv_store.values[layer.index].data_ptr()
        params.output = output.data_ptr()
        self._kernels.attention(plan.pointer)
        return output

    def plan_layers(
        self,
        rows: tuple[Tensor, Tensor, Tensor],
        layers: Sequence[AttentionLayer],
        kv_store: KVStore,
        metadata: NativeMetadata,
    ) -> list[LayerPlan] | None:
        """Return each layer's call over the same q, k and v; K/V and output pointers stay open.

        None if the kernel cannot compute one of them. Layers of one kind share a call.
        """
        plans = [self._find_plan(rows, layer, kv_store, metadata) for layer in layers]
        known = [plan for plan in plans if plan is not None]
        return known if len(known) == len(plans) else None

    def _find_plan(
        self,
        rows: tuple[Tensor, Tensor, Tensor],
        layer: AttentionLayer,
        kv_store: KVStore,
        metadata: NativeMetadata,
    ) -> LayerPlan | None:
        """Return the call for layers like this one, reading these rows."""
        if layer.kind not in metadata.plans:
            metadata.plans[layer.kind] = self._plan(rows[0], layer, kv_store, metadata)
        plan = metadata.plans[layer.kind]
        if plan is not None and any(a is not b for a, b in zip(rows, plan.rows, strict=False)):
            plan.point_at(*rows, layer.head_dim)
        return plan

    def _plan(
        self, query: Tensor, layer: AttentionLayer, kv_store: KVStore, metadata: NativeMetadata
    ) -> LayerPlan | None:
        """Return the call for layers like this one; None: the kernel cannot compute them."""
        if not _is_supported(query, layer, kv_store):
            return None
        params, arrays = _build_params(metadata.blocks, layer, kv_store)
        num_floats = self._kernels.attention_workspace(byref(params))
        if len(self._workspace) < num_floats:
            self._workspace = torch.empty(num_floats)
        params.workspace = self._workspace.data_ptr()
        return LayerPlan(params, arrays, self._workspace, byref(params))

    def _attend_whole(
        self,
        rows: tuple[Tensor, Tensor, Tensor],
        layer: AttentionLayer,
        kv_store: KVStore,
        metadata: NativeMetadata,
    ) -> Tensor:
        if metadata.whole is None:
            metadata.whole = self._reference.prepare(metadata.batch, kv_store)
        return self._reference.attend(
            *rows, layer=layer, kv_store=kv_store, metadata=metadata.whole
        )


def _build_params(
    blocks: RowBlocks, layer: AttentionLayer, kv_store: KVStore
) -> tuple[AttentionParams, tuple[np.ndarray, ...]]:
    """Cut the visible positions of each block into chunks; pointers to tensors stay open."""
    first = np.zeros_like(blocks.contexts)
    if layer.window is not None:
        unseen = np.maximum(blocks.contexts - layer.window + 1, 0)
        first = unseen // CHUNK_SIZE * CHUNK_SIZE
    ends = blocks.contexts + blocks.counts if layer.causal else blocks.totals
    num_chunks = -(-(ends - first) // CHUNK_SIZE)
    chunk_owner = np.repeat(np.arange(len(ends)), num_chunks)
    arrays = {
        "starts": blocks.starts,
        "counts": blocks.counts,
        "contexts": blocks.contexts,
        "ends": _as_int64(ends),
        "tables": blocks.tables,
        "slots": blocks.slots,
        "first": _as_int64(first),
        "chunk_begin": _cumulate(num_chunks),
        "chunk_owner": _as_int64(chunk_owner),
        "partial_begin": _cumulate(blocks.counts[chunk_owner]),
    }
    params = AttentionParams(
        **{name: array.ctypes.data for name, array in arrays.items()},
        num_blocks=len(ends),
        num_shared=blocks.num_shared,
        max_private_chunks=int(num_chunks[blocks.num_shared :].max(initial=0)),
        table_width=blocks.tables.shape[1],
        max_count=int(blocks.counts.max(initial=0)),
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        block_size=kv_store.kv_block_size,
        chunk_size=CHUNK_SIZE,
        window=layer.window or 0,
        causal=layer.causal,
        dtype=DTYPE_CODES[kv_store.keys[layer.index].dtype],
        num_threads=torch.get_num_threads(),
        scale=layer.scale,
    )
    return params, tuple(arrays.values())


def _is_supported(query: Tensor, layer: AttentionLayer, kv_store: KVStore) -> bool:
    """Whether the kernel can read this layer: CPU, known type, rows of whole 4-byte units."""
    pool = kv_store.keys[layer.index]
    return (
        pool.is_cpu
        and query.is_cpu
        and query.dtype == pool.dtype
        and query.dtype in DTYPE_CODES
        and layer.head_dim * query.itemsize % 4 == 0
        and (layer.window is None or layer.window > 0)
    )


def _make_dense(rows: Tensor, head_dim: int) -> Tensor:
    """Return [T, H, D] whose heads are dense; rows may be any distance apart."""
    if rows.stride(2) == 1 and (rows.shape[1] == 1 or rows.stride(1) == head_dim):
        return rows
    return rows.contiguous()


def _cumulate(counts: np.ndarray) -> np.ndarray:
    """Return where each of these begins, and where the last one ends."""
    begins = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=begins[1:])
    return begins


def _as_int64(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=np.int64)
