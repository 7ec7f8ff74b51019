"""Host side of the native attention: how the rows of a step are cut, as the kernel reads it.

Shapes: N blocks of rows, T rows of the step, C chunks of one layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from forerun.attention.base import AttentionBatch, AttentionLayer
from forerun.cache.kv_store import KVStore
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


def build_params(
    blocks: RowBlocks, layer: AttentionLayer, kv_store: KVStore, dtype: torch.dtype
) -> tuple[AttentionParams, tuple[np.ndarray, ...]]:
    """Cut the visible positions of each block into chunks; pointers to tensors stay open.

    `dtype` is that of the rows; the pool's is the same, or int8.
    """
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
        num_rows=len(blocks.slots),
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
        dtype=DTYPE_CODES[dtype],
        num_threads=torch.get_num_threads(),
        scale=layer.scale,
    )
    return params, tuple(arrays.values())


def _cumulate(counts: np.ndarray) -> np.ndarray:
    """Return where each of these begins, and where the last one ends."""
    begins = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=begins[1:])
    return begins


def _as_int64(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=np.int64)
