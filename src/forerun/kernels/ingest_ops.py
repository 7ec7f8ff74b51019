"""Taps of a step's rows to K/V of a block drafter's layers in the pool, in one native call.

Bit for bit what the linear layers, norms and rotations of ops.py compute one by one and attention
writes. Where that is not possible there is no writer, and callers do the same in steps.
Shapes: T rows, n taps, d hidden_size, L layers of H KV heads of D numbers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.cache.kv_store import KVStore
from forerun.kernels.abi import DTYPE_CODES, UNKNOWN_POSITION, IngestParams
from forerun.kernels.packed import PackedWeight

# Beyond, the int8 attention kernels do not read what was written.
_MAX_INT8_HEAD_DIM = 512
# Scratch memory is for so many rows at first.
_FIRST_ROWS = 32


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ContextWeights:
    """What makes K/V of taps: k, v = split(key_value(norm(fc(taps)))), keys normed by head."""

    fc: PackedWeight  # [d, n * d]
    key_value: PackedWeight  # [2 * L * H * D, d]: keys of all layers, layer by layer, then values
    hidden_norm: Tensor  # [d] float32
    key_norm: Tensor  # [L * H, D] float32
    eps: float


class ContextWriter:
    """The call for one drafter and its layers of one pool, both of which it keeps alive.

    Holds scratch memory; one thread at a time.
    """

    def __init__(self, weights: ContextWeights, kv_store: KVStore) -> None:
        shape = kv_store.layers[0]
        num_heads = len(kv_store.layers) * shape.num_kv_heads
        assert weights.key_norm.shape == (num_heads, shape.head_dim), "made for other layers"
        assert weights.key_value.out_features == 2 * num_heads * shape.head_dim
        self._weights, self._kv_store = weights, kv_store
        self._dtype = weights.fc.dtype
        self._pools = _list_pools(kv_store)
        self._capacity = 0
        self._params = IngestParams(
            fc=weights.fc.describe(None),
            key_value=weights.key_value.describe(None),
            hidden_norm=weights.hidden_norm.data_ptr(),
            key_norm=weights.key_norm.data_ptr(),
            num_layers=len(kv_store.layers),
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=kv_store.kv_block_size,
            dtype=DTYPE_CODES[self._dtype],
            eps=weights.eps,
            **{name: ctypes.addressof(array) for name, array in self._pools.items()},
        )

    @classmethod
    def build(cls, weights: ContextWeights, kv_store: KVStore) -> ContextWriter | None:
        """Return the writer, or None if the kernel cannot read these weights or write this pool."""
        dtype, layers = weights.fc.dtype, kv_store.layers
        norms = (weights.hidden_norm, weights.key_norm)
        is_supported = (
            kv_store.keys[0].is_cpu
            and len(set(layers)) == 1
            and weights.key_value.dtype == dtype
            and (kv_store.is_quantised or kv_store.dtype == dtype)
            and (layers[0].head_dim <= _MAX_INT8_HEAD_DIM or not kv_store.is_quantised)
            and all(norm.dtype == torch.float32 and norm.is_contiguous() for norm in norms)
        )
        return cls(weights, kv_store) if is_supported else None

    def write(
        self, features: Tensor, positions: Tensor, slots: np.ndarray, angles: tuple[Tensor, Tensor]
    ) -> None:
        """Write K/V of rows [T, n * d] of the weights' type at `positions` to `slots`, int64 [T].

        `angles` are cosines and sines by position, [P, D / 2] each; rows may be any distance apart.
        Raises IndexError for a position they do not cover.
        """
        assert features.dtype == self._dtype, f"taps are {features.dtype}, not {self._dtype}"
        features, positions = features.contiguous(), positions.contiguous()
        slots = np.ascontiguousarray(slots, dtype=np.int64)
        cosines, sines = angles
        params, num_rows = self._params, len(features)
        self._reserve(num_rows)
        params.features = features.data_ptr()
        params.positions, params.slots = positions.data_ptr(), slots.ctypes.data
        params.cosines, params.sines = cosines.data_ptr(), sines.data_ptr()
        params.cos_stride, params.sin_stride = cosines.stride(0), sines.stride(0)
        params.num_positions = len(cosines)
        params.num_rows, params.num_threads = num_rows, torch.get_num_threads()
        if self._weights.fc.kernels.ingest(byref(params)) == UNKNOWN_POSITION:
            raise IndexError(f"positions must lie in 0 .. {len(cosines) - 1}")

    def _reserve(self, num_rows: int) -> None:
        """Point at memory for what the call computes on the way; it grows by doubling."""
        if num_rows <= self._capacity:
            return
        self._capacity = max(_FIRST_ROWS, 2 * self._capacity, num_rows)
        fc, key_value = self._weights.fc, self._weights.key_value
        widest = max(fc.in_features, key_value.in_features)
        widths = {"fused": fc.out_features, "heads": key_value.out_features, "scratch": widest}
        self._memory = torch.empty(self._capacity * sum(widths.values()), dtype=self._dtype)
        address = self._memory.data_ptr()
        for name, width in widths.items():
            setattr(self._params, name, address)
            address += self._capacity * width * self._dtype.itemsize


def _list_pools(kv_store: KVStore) -> dict[str, Any]:
    """Return arrays of pointers, a pointer per layer, by their names in the struct."""
    pools: dict[str, Sequence[Tensor]] = {"keys": kv_store.keys, "values": kv_store.values}
    if kv_store.is_quantised:
        pools |= {"key_scales": kv_store.key_scales, "value_scales": kv_store.value_scales}
    return {
        name: (ctypes.c_void_p * len(pool))(*(layer.data_ptr() for layer in pool))
        for name, pool in pools.items()
    }
