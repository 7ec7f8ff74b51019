"""Where rows lie: positions and slots of ragged rows, for any model that runs over the pool.

T rows (num_tokens), N requests (num_reqs). Rows of a request are contiguous, in the order given,
and go on where its computed tokens end; K/V of each row goes where its block table says.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Protocol

import numpy as np

from forerun.attention.base import AttentionBatch
from forerun.cache.block_pool import NULL_BLOCK
from forerun.kernels import Kernels, find_kernels
from forerun.kernels.abi import StepLayoutParams


class RowSpan(Protocol):
    """Consecutive rows of one request: the first sits at position `num_computed_tokens`."""

    @property
    def num_rows(self) -> int:
        """Rows of this request."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Positions cached before these rows."""
        ...

    @property
    def block_table(self) -> Sequence[int]:
        """Blocks of the request, as far as its last row."""
        ...


@dataclass(frozen=True, slots=True)
class RowLayout:
    """All rows on the host."""

    positions: np.ndarray  # [num_tokens] int64
    attention: AttentionBatch


def lay_out(spans: Sequence[RowSpan], kv_block_size: int) -> RowLayout:
    """Lay out the rows of some requests."""
    kernels = find_kernels()
    if kernels is None:
        return _lay_out_plainly(spans, kv_block_size)
    return _lay_out_natively(kernels, spans, kv_block_size)


def lay_out_single_rows(
    block_tables: np.ndarray, positions: np.ndarray, kv_block_size: int
) -> RowLayout:
    """Lay out one row per request, at these positions [num_reqs], from padded block tables."""
    num_reqs = len(positions)
    blocks = block_tables[np.arange(num_reqs), positions // kv_block_size]
    assert (blocks != NULL_BLOCK).all(), "a row has no reserved slot"
    return RowLayout(
        positions=positions,
        attention=AttentionBatch(
            query_start_loc=np.arange(num_reqs + 1),
            context_lens=positions,
            block_tables=block_tables,
            slot_mapping=blocks * kv_block_size + positions % kv_block_size,
        ),
    )


def pad_tables(tables: Sequence[Sequence[int]]) -> np.ndarray:
    """Return block tables as one array, the null block on the right, [num_reqs, longest]."""
    width = max(len(table) for table in tables)
    padded = np.full((len(tables), width), NULL_BLOCK, dtype=np.int64)
    for index, table in enumerate(tables):
        padded[index, : len(table)] = table
    return padded


def _lay_out_plainly(spans: Sequence[RowSpan], kv_block_size: int) -> RowLayout:
    num_rows = np.array([span.num_rows for span in spans], dtype=np.int64)
    context_lens = np.array([span.num_computed_tokens for span in spans], dtype=np.int64)
    query_start_loc = np.concatenate(([0], np.cumsum(num_rows)))
    request_of_row = np.repeat(np.arange(len(spans)), num_rows)
    row_in_request = np.arange(query_start_loc[-1]) - query_start_loc[request_of_row]
    positions = context_lens[request_of_row] + row_in_request
    block_tables = pad_tables([span.block_table for span in spans])
    blocks = block_tables[request_of_row, positions // kv_block_size]
    assert (blocks != NULL_BLOCK).all(), "a row has no reserved slot"
    return RowLayout(
        positions=positions,
        attention=AttentionBatch(
            query_start_loc=query_start_loc,
            context_lens=context_lens,
            block_tables=block_tables,
            slot_mapping=blocks * kv_block_size + positions % kv_block_size,
        ),
    )


def _lay_out_natively(kernels: Kernels, spans: Sequence[RowSpan], kv_block_size: int) -> RowLayout:
    """Do the same in one call: a step of one row has no time for thirty small array operations."""
    tables = [span.block_table for span in spans]
    counts = [span.num_rows for span in spans]
    num_reqs, num_rows = len(spans), sum(counts)
    width = max(len(table) for table in tables)
    given = [*counts, *(span.num_computed_tokens for span in spans)]
    given += accumulate((len(table) for table in tables), initial=0)
    given += chain.from_iterable(tables)
    numbers = np.array(given, dtype=np.int64)
    made = np.empty(num_reqs + 1 + 2 * num_rows + num_reqs * width, dtype=np.int64)
    begins = [0, num_reqs + 1, num_reqs + 1 + num_rows, num_reqs + 1 + 2 * num_rows]
    source, target = numbers.ctypes.data, made.ctypes.data
    params = StepLayoutParams(
        *(source + 8 * begin for begin in (0, num_reqs, 2 * num_reqs, 3 * num_reqs + 1)),
        *(target + 8 * begin for begin in begins),
        num_requests=num_reqs,
        table_width=width,
        block_size=kv_block_size,
    )
    num_lost = kernels.lay_out(byref(params))
    assert num_lost == 0, "a row has no reserved slot"
    return RowLayout(
        positions=made[begins[1] : begins[2]],
        attention=AttentionBatch(
            query_start_loc=made[: begins[1]],
            context_lens=numbers[num_reqs : 2 * num_reqs],
            block_tables=made[begins[3] :].reshape(num_reqs, width),
            slot_mapping=made[begins[2] : begins[3]],
        ),
    )
