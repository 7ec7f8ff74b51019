"""Attention in native code for requests with few rows: one call per layer, no gathering.

K/V blocks are read where they lie. A request's positions are cut into chunks at fixed multiples and
its rows are masked exactly, so its result depends neither on the rest of the batch nor on how many
rows it has this step nor on threads. Requests with many rows, and shapes the kernel cannot read,
are left to TorchRefBackend.
Shapes: N few-row requests, T rows of the step, C chunks of one layer.
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from forerun.attention.base import AttentionBatch, AttentionCapabilities, AttentionLayer
from forerun.attention.torch_ref import TorchRefBackend, TorchRefMetadata
from forerun.cache.kv_store import KVStore
from forerun.kernels import Kernels
from forerun.kernels.abi import DTYPE_CODES, AttentionParams

FEW_ROWS = 32
# A multiple of every vector width. Small, so that one long request keeps several threads busy.
CHUNK_SIZE = 128


@dataclass(frozen=True, slots=True)
class FewRows:
    """The requests of a step that the kernel computes, as the kernel reads them (int64)."""

    starts: np.ndarray  # [N]
    counts: np.ndarray  # [N]
    contexts: np.ndarray  # [N]
    tables: np.ndarray  # [N, max_blocks]
    slots: np.ndarray  # [T], of all requests


@dataclass(frozen=True, slots=True)
class ManyRows:
    """The other requests of a step, as a batch of their own."""

    rows: Tensor  # their rows of the step
    metadata: TorchRefMetadata


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Arguments shared by layers of one kind; `arrays` keeps their memory alive."""

    params: AttentionParams
    arrays: tuple[np.ndarray, ...]
    num_floats: int


@dataclass(slots=True)
class NativeMetadata:
    """One step. `whole` is made only when a layer's shape is beyond the kernel."""

    batch: AttentionBatch
    few: FewRows | None
    many: ManyRows | None
    plans: dict[tuple[object, ...], LayerPlan] = field(default_factory=dict)
    whole: TorchRefMetadata | None = None


class NativeBackend:
    """AttentionBackend over the native kernel. Holds scratch memory; one thread at a time."""

    capabilities = AttentionCapabilities(supports_sliding_window=True, supports_varlen_graph=False)

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._reference = TorchRefBackend()
        self._workspace = torch.empty(0)

    def prepare(self, batch: AttentionBatch, kv_store: KVStore) -> NativeMetadata:
        """Split the step by row counts."""
        num_rows = np.diff(batch.query_start_loc)
        few = np.flatnonzero((num_rows > 0) & (num_rows <= FEW_ROWS))
        many = np.flatnonzero(num_rows > FEW_ROWS)
        return NativeMetadata(
            batch,
            _select_few(batch, few) if len(few) else None,
            self._select_many(batch, many, kv_store) if len(many) else None,
        )

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
        if not _is_supported(query, layer, kv_store):
            return self._attend_whole((query, key, value), layer, kv_store, metadata)
        output = query.new_empty(query.shape[0], layer.num_heads * layer.head_dim)
        if metadata.few is not None:
            rows = tuple(_make_dense(x, layer.head_dim) for x in (query, key, value))
            self._attend_few(rows, output, layer, kv_store, metadata)
        if metadata.many is not None:
            part = metadata.many
            output[part.rows] = self._reference.attend(
                *(x[part.rows] for x in (query, key, value)),
                layer=layer,
                kv_store=kv_store,
                metadata=part.metadata,
            )
        return output

    def _attend_few(
        self,
        rows: tuple[Tensor, ...],
        output: Tensor,
        layer: AttentionLayer,
        kv_store: KVStore,
        metadata: NativeMetadata,
    ) -> None:
        plan = self._find_plan(layer, kv_store, metadata)
        if len(self._workspace) < plan.num_floats:
            self._workspace = torch.empty(plan.num_floats)
        params = plan.params
        params.keys = kv_store.keys[layer.index].data_ptr()
        params.values = kv_store.values[layer.index].data_ptr()
        params.query, params.key, params.value = (x.data_ptr() for x in rows)
        params.query_stride, params.key_stride, params.value_stride = (x.stride(0) for x in rows)
        params.output = output.data_ptr()
        params.workspace = self._workspace.data_ptr()
        self._kernels.attention(byref(params))

    def _find_plan(
        self, layer: AttentionLayer, kv_store: KVStore, metadata: NativeMetadata
    ) -> LayerPlan:
        """Return the plan shared by layers like this one."""
        kind = (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.window, layer.scale)
        plan = metadata.plans.get(kind)
        if plan is None:
            assert metadata.few is not None
            params, arrays = _build_params(metadata.few, layer, kv_store)
            num_floats = self._kernels.attention_workspace(byref(params))
            plan = metadata.plans[kind] = LayerPlan(params, arrays, num_floats)
        return plan

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

    def _select_many(self, batch: AttentionBatch, reqs: np.ndarray, kv_store: KVStore) -> ManyRows:
        starts, stops = batch.query_start_loc[reqs], batch.query_start_loc[reqs + 1]
        rows = np.concatenate([np.arange(a, b) for a, b in zip(starts, stops, strict=True)])
        part = AttentionBatch(
            query_start_loc=np.concatenate(([0], np.cumsum(stops - starts))),
            context_lens=batch.context_lens[reqs],
            block_tables=batch.block_tables[reqs],
            slot_mapping=batch.slot_mapping[rows],
        )
        return ManyRows(torch.from_numpy(rows), self._reference.prepare(part, kv_store))


def _select_few(batch: AttentionBatch, reqs: np.ndarray) -> FewRows:
    starts = batch.query_start_loc[reqs]
    return FewRows(
        starts=_as_int64(starts),
        counts=_as_int64(batch.query_start_loc[reqs + 1] - starts),
        contexts=_as_int64(batch.context_lens[reqs]),
        tables=_as_int64(batch.block_tables[reqs]),
        slots=_as_int64(batch.slot_mapping),
    )


def _build_params(
    few: FewRows, layer: AttentionLayer, kv_store: KVStore
) -> tuple[AttentionParams, tuple[np.ndarray, ...]]:
    """Cut the visible positions of each request into chunks; pointers to tensors stay open."""
    unseen = np.zeros_like(few.contexts)
    if layer.window is not None:
        unseen = np.maximum(few.contexts - layer.window + 1, 0)
    first = unseen // CHUNK_SIZE * CHUNK_SIZE
    num_chunks = -(-(few.contexts + few.counts - first) // CHUNK_SIZE)
    chunk_begin = np.concatenate(([0], np.cumsum(num_chunks)))
    chunk_request = np.repeat(np.arange(len(few.starts)), num_chunks)
    partial_begin = np.concatenate(([0], np.cumsum(few.counts[chunk_request])))
    arrays = {
        "starts": few.starts,
        "counts": few.counts,
        "contexts": few.contexts,
        "tables": few.tables,
        "slots": few.slots,
        "first": _as_int64(first),
        "chunk_begin": _as_int64(chunk_begin),
        "chunk_request": _as_int64(chunk_request),
        "partial_begin": _as_int64(partial_begin),
    }
    params = AttentionParams(
        **{name: array.ctypes.data for name, array in arrays.items()},
        num_reqs=len(few.starts),
        num_chunks=len(chunk_request),
        table_width=few.tables.shape[1],
        max_count=int(few.counts.max()),
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        block_size=kv_store.kv_block_size,
        chunk_size=CHUNK_SIZE,
        window=layer.window or 0,
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


def _as_int64(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=np.int64)
