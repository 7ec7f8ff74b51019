"""StepPlan to flat arrays: token ids, positions, slots, and which rows need logits.

T rows (num_tokens), N requests (num_reqs). Rows of a request are contiguous, in plan order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.attention.base import AttentionBatch
from forerun.cache.block_pool import NULL_BLOCK
from forerun.plan import ScheduledRequest, StepPlan


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step's rows on the host."""

    token_ids: np.ndarray  # [num_tokens] int64
    positions: np.ndarray  # [num_tokens] int64
    attention: AttentionBatch


def build_batch(plan: StepPlan, *, kv_block_size: int) -> StepBatch:
    """Lay out the rows of a plan; K/V of each row goes where its block table says."""
    requests = plan.requests
    token_ids: list[int] = []
    for request in requests:
        start = request.num_computed_tokens
        token_ids.extend(request.token_ids[start : start + request.num_new_tokens])
        token_ids.extend(request.draft_token_ids)
    num_rows = np.array([request.num_rows for request in requests], dtype=np.int64)
    context_lens = np.array([r.num_computed_tokens for r in requests], dtype=np.int64)
    query_start_loc = np.concatenate(([0], np.cumsum(num_rows)))
    request_of_row = np.repeat(np.arange(len(requests)), num_rows)
    row_in_request = np.arange(len(token_ids)) - query_start_loc[request_of_row]
    positions = context_lens[request_of_row] + row_in_request
    block_tables = _pad_tables([request.block_table for request in requests])
    blocks = block_tables[request_of_row, positions // kv_block_size]
    assert (blocks != NULL_BLOCK).all(), "a row has no reserved slot"
    return StepBatch(
        token_ids=np.array(token_ids, dtype=np.int64),
        positions=positions,
        attention=AttentionBatch(
            query_start_loc=query_start_loc,
            context_lens=context_lens,
            block_tables=block_tables,
            slot_mapping=blocks * kv_block_size + positions % kv_block_size,
        ),
    )


def select_logits_rows(requests: Sequence[ScheduledRequest]) -> list[np.ndarray]:
    """Return, per request, the flat rows to verify: anchor and drafts, or none for a chunk."""
    selected = []
    end = 0
    for request in requests:
        end += request.num_rows
        wanted = 1 + len(request.draft_token_ids) if request.samples else 0
        selected.append(np.arange(end - wanted, end))
    return selected


def _pad_tables(tables: Sequence[Sequence[int]]) -> np.ndarray:
    width = max(len(table) for table in tables)
    padded = np.full((len(tables), width), NULL_BLOCK, dtype=np.int64)
    for index, table in enumerate(tables):
        padded[index, : len(table)] = table
    return padded
