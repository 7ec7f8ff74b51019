"""Host side of the native attention: how the rows of a step are cut, as the kernel reads it.

The cutting itself is native too (kernels/cpp/plan.cpp): a step has no time for it in Python.
"""

from __future__ import annotations

from ctypes import addressof, byref

import numpy as np
import torch

from forerun.attention.base import AttentionBatch, AttentionLayer
from forerun.cache.kv_store import KVStore
from forerun.kernels import Kernels
from forerun.kernels.abi import DTYPE_CODES, AttentionParams, AttentionPlanParams

# Requests with more rows are cut: what a block's rows share must stay in the cache.
BLOCK_ROWS = 32
# A multiple of every vector width. Small, so that one long request keeps several threads busy.
CHUNK_SIZE = 128
# Enough for most steps; larger ones ask again.
_CAPACITY = 4096


class StepRows:
    """The rows of a step as the kernels read them; keeps the arrays alive."""

    def __init__(self, batch: AttentionBatch) -> None:
        self.query_start = _as_int64(batch.query_start_loc)
        self.contexts = _as_int64(batch.context_lens)
        self.tables = _as_int64(batch.block_tables)
        self.slots = _as_int64(batch.slot_mapping)
        self._addresses = [
            array.ctypes.data
            for array in (self.query_start, self.contexts, self.tables, self.slots)
        ]

    def plan(
        self, kernels: Kernels, layer: AttentionLayer, kv_store: KVStore, dtype: torch.dtype
    ) -> tuple[AttentionParams, np.ndarray]:
        """Cut rows of a type and their visible positions for layers like this one.

        Returns the call, in which pointers to tensors are open, and the memory of its lists.
        """
        query_start, contexts, tables, slots = self._addresses
        params = AttentionParams(
            slots=slots,
            num_rows=len(self.slots),
            table_width=self.tables.shape[1],
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            block_size=kv_store.kv_block_size,
            chunk_size=CHUNK_SIZE,
            window=layer.window or 0,
            causal=layer.causal,
            dtype=DTYPE_CODES[dtype],
            num_threads=torch.get_num_threads(),
            scale=layer.scale,
        )
        plan = AttentionPlanParams(
            attention=addressof(params),
            query_start=query_start,
            contexts=contexts,
            tables=tables,
            num_requests=len(self.contexts),
            block_rows=BLOCK_ROWS,
        )
        needed = _CAPACITY
        while needed > plan.capacity:
            memory = np.empty(needed, dtype=np.int64)
            plan.memory, plan.capacity = memory.ctypes.data, needed
            needed = kernels.plan_attention(byref(plan))
        return params, memory


def _as_int64(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=np.int64)
