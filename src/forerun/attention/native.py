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
from typing import Any

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
    plans: dict[AttentionLayer, LayerPlan] = field(default_factory=dict)
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
            return self._attend_whole(query, key, value, layer, kv_store, metadata)
        output = torch.empty((len(query), layer.num_heads * layer.head_dim), dtype=query.dtype)
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
        kind = replace_index(layer)
        plan = metadata.plans.get(kind)
        if plan is None:
            assert metadata.few is not None
            plan = metadata.plans[kind] = self._build_plan(layer, kv_store, metadata.few)
        return plan
