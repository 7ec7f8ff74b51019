"""Attention in native code: one call per layer, no gathering, any number of rows.

K/V blocks are read where they lie. A request's positions are cut into chunks at fixed multiples and
its rows are masked exactly, so a row's result depends neither on the rest of the batch nor on how
many rows its request has this step nor on threads. Shapes the kernel cannot read are left to
TorchRefBackend. native_plan.py says how a step is cut.
Shapes: T rows of the step, H heads, D head_dim.
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.attention.base import AttentionBatch, AttentionCapabilities, AttentionLayer
from forerun.attention.native_plan import StepRows
from forerun.attention.torch_ref import TorchRefBackend, TorchRefMetadata
from forerun.cache.kv_store import KVStore
from forerun.kernels import Kernels
from forerun.kernels.abi import DTYPE_CODES, AttentionParams

# Beyond, sums of products of int8 and int16 could leave int32.
MAX_INT8_HEAD_DIM = 512


@dataclass(slots=True)
class LayerPlan:
    """One kernel call, shared by the layers of one kind; `lists` keeps their memory alive.

    `rows` are the q, k and v last pointed at: a model that reuses its buffers is checked once.
    """

    params: AttentionParams
    lists: np.ndarray
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
    """One step. `whole` is made only for what the kernel does not do."""

    batch: AttentionBatch
    rows: StepRows
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
        """Take over the step's rows; they are cut when a layer asks."""
        return NativeMetadata(batch, StepRows(batch))

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
        plan = None
        if query.is_cpu:
            plan = self.find_plan(layer, kv_store, metadata, query.dtype)
        if plan is None:
            return self._attend_whole((query, key, value), layer, kv_store, metadata)
        if plan.rows[0] is not query or plan.rows[1] is not key or plan.rows[2] is not value:
            plan.point_at(query, key, value, layer.head_dim)
        output = query.new_empty(query.shape[0], layer.num_heads * layer.head_dim)
        params = plan.params
        params.keys = kv_store.keys[layer.index].data_ptr()
        params.values = kv_store.values[layer.index].data_ptr()
        if kv_store.is_quantised:
            params.key_scales = kv_store.key_scales[layer.index].data_ptr()
            params.value_scales = kv_store.value_scales[layer.index].data_ptr()
        params.output = output.data_ptr()
        self._kernels.attention(plan.pointer)
        return output

    def write(
        self,
        key: Tensor,
        value: Tensor,
        *,
        index: int,
        kv_store: KVStore,
        metadata: NativeMetadata,
    ) -> None:
        """Write K/V of the step's rows to one layer."""
        whole = self._find_whole(kv_store, metadata)
        self._reference.write(key, value, index=index, kv_store=kv_store, metadata=whole)

    def find_plan(
        self, layer: AttentionLayer, kv_store: KVStore, metadata: NativeMetadata, dtype: torch.dtype
    ) -> LayerPlan | None:
        """Return the call of layers like this one for rows of a type; None: the kernel cannot.

        Pointers to q, k and v, to the pool and to the output stay open.
        """
        plans = metadata.plans
        if layer.kind not in plans:
            is_supported = _is_supported(layer, kv_store, dtype)
            plans[layer.kind] = (
                self._plan(layer, kv_store, metadata, dtype) if is_supported else None
            )
        return plans[layer.kind]

    def _plan(
        self, layer: AttentionLayer, kv_store: KVStore, metadata: NativeMetadata, dtype: torch.dtype
    ) -> LayerPlan:
        params, lists = metadata.rows.plan(self._kernels, layer, kv_store, dtype)
        num_floats = self._kernels.attention_workspace(byref(params))
        if len(self._workspace) < num_floats:
            self._workspace = torch.empty(num_floats)
        params.workspace = self._workspace.data_ptr()
        return LayerPlan(params, lists, self._workspace, byref(params))

    def _attend_whole(
        self,
        rows: tuple[Tensor, Tensor, Tensor],
        layer: AttentionLayer,
        kv_store: KVStore,
        metadata: NativeMetadata,
    ) -> Tensor:
        whole = self._find_whole(kv_store, metadata)
        return self._reference.attend(*rows, layer=layer, kv_store=kv_store, metadata=whole)

    def _find_whole(self, kv_store: KVStore, metadata: NativeMetadata) -> TorchRefMetadata:
        if metadata.whole is None:
            metadata.whole = self._reference.prepare(metadata.batch, kv_store)
        return metadata.whole


def _is_supported(layer: AttentionLayer, kv_store: KVStore, dtype: torch.dtype) -> bool:
    """Whether the kernel can read this layer: CPU, known type, rows of whole 4-byte units."""
    pool = kv_store.keys[layer.index]
    return (
        pool.is_cpu
        and (dtype == pool.dtype or kv_store.is_quantised)
        and (layer.head_dim <= MAX_INT8_HEAD_DIM or not kv_store.is_quantised)
        and dtype in DTYPE_CODES
        and layer.head_dim * dtype.itemsize % 4 == 0
        and (layer.window is None or layer.window > 0)
    )


def _make_dense(rows: Tensor, head_dim: int) -> Tensor:
    """Return [T, H, D] whose heads are dense; rows may be any distance apart."""
    if rows.stride(2) == 1 and (rows.shape[1] == 1 or rows.stride(1) == head_dim):
        return rows
    return rows.contiguous()
