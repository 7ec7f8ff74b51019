"""A whole step in one native call: embedding, all layers, final norm, head.

For steps whose attention is native too. What does not change from step to step is described once;
scratch memory is kept. Segments and native attention compute the same bits one by one.
Shapes: T rows of the step, n tapped layers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.attention.base import AttentionContext
from forerun.attention.native import LayerPlan, NativeBackend
from forerun.cache.kv_store import KVStore
from forerun.kernels.abi import (
    DTYPE_CODES,
    UNKNOWN_POSITION,
    UNKNOWN_TOKEN,
    ForwardParams,
    PackedWeight,
    SegmentParams,
)
from forerun.kernels.packed import PackedWeight as Packed
from forerun.layers.embedding import Embedding, Head
from forerun.layers.linear import Linear
from forerun.layers.rotary import Rotary, Rotation
from forerun.models.base import ModelOutput
from forerun.models.segments import Segments, find_angles

# Scratch memory grows by doubling from this many rows.
_FIRST_ROWS = 32


@dataclass(frozen=True, slots=True)
class _Pool:
    """Pointers into one KV store."""

    kv_store: KVStore
    arrays: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tables:
    """What surrounds the layers."""

    embed: Embedding
    head: Head


class WholeStep:
    """The calls of one model. Holds scratch memory; one thread at a time."""

    def __init__(
        self,
        segments: Segments,
        tables: Tables,
        ropes: Sequence[Rotary],
        rope_index: Sequence[int],
    ) -> None:
        self._segments = segments
        self._embed = embed = tables.embed
        self._ropes = ropes
        self._rope_index = rope_index
        self._dtype = embed.table.dtype
        self._layers = segments.attention_layers
        # One layer of each kind, and the kind of every layer.
        kinds = {layer.kind: layer for layer in reversed(self._layers)}
        self._kinds = list(kinds.values())
        self._kind_index = [list(kinds).index(layer.kind) for layer in self._layers]
        self._memory = torch.empty(0, dtype=self._dtype)
        self._capacity = 0
        self._pool: _Pool | None = None
        self._calls: Any = None
        self._tap_ids: Any = None
        layer = segments.layer
        self._segment = SegmentParams(
            dtype=DTYPE_CODES[self._dtype],
            cos_stride=layer.head_dim // 2,
            sin_stride=layer.head_dim,
        )
        self._weights = _list_pointers(segments.addresses)
        self._params = ForwardParams(
            segment=ctypes.addressof(self._segment),
            weights=ctypes.addressof(self._weights),
            num_layers=len(self._layers),
            embed_scale=1.0 if embed.scale is None else embed.scale,
        )
        self._embedding = _describe_table(embed.table)
        if self._embedding is not None:
            self._params.embedding = ctypes.addressof(self._embedding)
        # A cap on logits is applied outside.
        self._head = None if tables.head.softcap else _describe_table(tables.head.table)
        self._angles: dict[str, Any] = {}
        self._cover_positions(0)

    def run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionContext,
        target_layer_ids: Sequence[int],
        logits_rows: range,
    ) -> ModelOutput | None:
        """Return what TargetModel.forward does; None: attention is not native.

        Raises IndexError for a token id beyond the vocabulary.
        """
        plans = self._find_plans(attention)
        if plans is None:
            return None
        num_rows = len(token_ids)
        token_ids, positions = token_ids.contiguous(), positions.contiguous()
        normed = torch.empty(num_rows, self._segments.hidden_size, dtype=self._dtype)
        self._reserve(num_rows)
        self._point_at(plans, attention.kv_store)
        segment, params = self._segment, self._params
        segment.normed = normed.data_ptr()
        segment.positions = positions.data_ptr()
        segment.num_rows = num_rows
        segment.num_threads = torch.get_num_threads()
        params.token_ids = token_ids.data_ptr()
        if self._embedding is None:
            rows = self._embed(token_ids)
            segment.residual = rows.data_ptr()
        taps = self._expect_taps(num_rows, target_layer_ids)
        logits = self._expect_logits(logits_rows)
        self._call(positions)
        return ModelOutput(normed, taps, logits)

    def _expect_taps(self, num_rows: int, layer_ids: Sequence[int]) -> Tensor | None:
        """Return the memory [T, n, hidden_size] of the taps that the call will copy, if any."""
        params = self._params
        params.num_taps = len(layer_ids)
        if not layer_ids:
            return None
        size = self._segments.hidden_size
        taps = torch.empty(num_rows, len(layer_ids), size, dtype=self._dtype)
        self._tap_ids = (ctypes.c_int64 * len(layer_ids))(*layer_ids)
        params.taps, params.tap_ids = taps.data_ptr(), ctypes.addressof(self._tap_ids)
        return taps

    def _expect_logits(self, rows: range) -> Tensor | None:
        """Return the memory of the logits that the call will compute, if any."""
        params, head = self._params, self._head
        if head is None or not rows:
            params.head = None
            return None
        logits = torch.empty(len(rows), head.out_features)
        params.head = ctypes.addressof(head)
        params.logits = logits.data_ptr()
        params.first_logits_row, params.num_logits_rows = rows.start, len(rows)
        return logits

    def _call(self, positions: Tensor) -> None:
        answer = self._segments.kernels.forward(ctypes.byref(self._params))
        if answer == UNKNOWN_POSITION:
            self._cover_positions(int(positions.max()))
            answer = self._segments.kernels.forward(ctypes.byref(self._params))
        if answer == UNKNOWN_TOKEN:
            raise IndexError(f"token ids must lie in 0 .. {self._embed.table.out_features - 1}")
        assert answer == 0, f"the forward call answered {answer}"

    def _find_plans(self, attention: AttentionContext) -> list[LayerPlan] | None:
        """Return the attention call of every kind of layer."""
        backend = attention.backend
        if not isinstance(backend, NativeBackend):
            return None
        plans = [
            backend.find_plan(layer, attention.kv_store, attention.metadata, self._dtype)
            for layer in self._kinds
        ]
        known = [plan for plan in plans if plan is not None]
        return known if len(known) == len(plans) else None

    def _reserve(self, num_rows: int) -> None:
        """Point the segments at scratch memory for so many rows."""
        if num_rows <= self._capacity:
            return
        capacity = max(_FIRST_ROWS, self._capacity)
        while capacity < num_rows:
            capacity *= 2
        segments, segment = self._segments, self._segment
        attended = self._layers[0].num_heads * self._layers[0].head_dim
        widths = {
            "residual": segments.hidden_size,
            "update": segments.hidden_size,
            "gated": segments.gate_size,
            "heads": segments.heads_size,
            "scratch": segments.widest,
        }
        total = sum(widths.values()) + attended
        self._memory = torch.empty(capacity * total, dtype=self._dtype)
        self._capacity = capacity
        address, row_bytes = self._memory.data_ptr(), capacity * self._dtype.itemsize
        for name, width in widths.items():
            setattr(segment, name, address)
            address += width * row_bytes
        self._params.attended = address

    def _point_at(self, plans: Sequence[LayerPlan], kv_store: KVStore) -> None:
        """Let the attention calls read the segments' heads and this pool."""
        layer, itemsize = self._segments.layer, self._dtype.itemsize
        heads = self._segment.heads
        head_bytes = layer.head_dim * itemsize
        for plan in plans:
            params = plan.params
            params.query = heads
            params.key = heads + layer.num_heads * head_bytes
            params.value = params.key + layer.num_kv_heads * head_bytes
            stride = self._segments.heads_size
            params.query_stride = params.key_stride = params.value_stride = stride
        addresses = [ctypes.addressof(plan.params) for plan in plans]
        calls = _list_pointers([addresses[index] for index in self._kind_index])
        self._params.attention = ctypes.addressof(calls)
        self._calls = calls  # alive until the next step
        if self._pool is None or self._pool.kv_store is not kv_store:
            self._pool = self._describe_pool(kv_store)

    def _describe_pool(self, kv_store: KVStore) -> _Pool:
        pools = {"keys": kv_store.keys, "values": kv_store.values}
        if kv_store.is_quantised:
            pools |= {"key_scales": kv_store.key_scales, "value_scales": kv_store.value_scales}
        arrays = {
            name: _list_pointers([pool[layer.index].data_ptr() for layer in self._layers])
            for name, pool in pools.items()
        }
        for name in ("keys", "values", "key_scales", "value_scales"):
            array = arrays.get(name)
            setattr(self._params, name, None if array is None else ctypes.addressof(array))
        return _Pool(kv_store, arrays)

    def _cover_positions(self, last: int) -> None:
        """Describe rotations of all positions up to `last`."""
        tables = [rope.find_table(last, self._dtype) for rope in self._ropes]
        self._params.num_positions = min(len(table.cos) for table in tables)
        rotations: list[Rotation] = [tables[index] for index in self._rope_index]
        angles = [find_angles(rotation) for rotation in rotations]
        self._angles = {
            "tables": tables,
            "cosines": _list_pointers([cos for cos, _ in angles]),
            "sines": _list_pointers([sin for _, sin in angles]),
        }
        for name in ("cosines", "sines"):
            setattr(self._params, name, ctypes.addressof(self._angles[name]))


def _describe_table(table: Linear) -> PackedWeight | None:
    """Return the kernels' view of an embedding or head; None: they cannot read it."""
    packed = table.packed
    return packed.describe(table.packed_bias) if isinstance(packed, Packed) else None


def _list_pointers(addresses: Sequence[int]) -> Any:
    return (ctypes.c_void_p * len(addresses))(*addresses)
