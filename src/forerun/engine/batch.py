"""StepPlan to flat arrays: token ids, positions, slots, and which rows need logits.

T rows (num_tokens), N requests (num_reqs). Rows of a request are contiguous, in plan order.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np

from forerun.attention.base import AttentionBatch
from forerun.cache.block_pool import NULL_BLOCK
from forerun.kernels import Kernels, find_kernels
from forerun.kernels.abi import StepLayoutParams
from forerun.plan import ScheduledRequest, StepPlan


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step's rows on the host."""

    token_ids: np.ndarray  # [num_tokens] int64
    positions: np.ndarray  # [num_tokens] int64
    attention: AttentionBatch


def build_batch(plan: StepPlan, *, kv_block_size: int) -> StepBatch:
    """Lay out the rows of a plan; K/V of each row goes where its block table says."""
    token_ids: list[int] = []
    for request in plan.requests:
        start = request.num_computed_tokens
        token_ids.extend(request.token_ids[start : start + request.num_new_tokens])
        token_ids.extend(request.draft_token_ids)
    kernels = find_kernels()
    if kernels is None:
        return _lay_out(plan.requests, token_ids, kv_block_size)
    return _lay_out_natively(kernels, plan.requests, token_ids, kv_block_size)


def _lay_out(
    requests: Sequence[ScheduledRequest], token_ids: list[int], kv_block_size: int
) -> StepBatch:
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


def _lay_out_natively(
    kernels: Kernels,
    requests: Sequence[ScheduledRequest],
    token_ids: list[int],
    kv_block_size: int,
) -> StepBatch:
    """Do the same in one call: a step of one row has no time for thirty small array operations."""
    tables = [request.block_table for request in requests]
    num_reqs, num_rows = len(requests), len(token_ids)
    width = max(len(table) for table in tables)
    given = [request.num_rows for request in requests]
    given += [request.num_computed_tokens for request in requests]
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
    return StepBatch(
        token_ids=np.array(token_ids, dtype=np.int64),
        positions=made[begins[1] : begins[2]],
        attention=AttentionBatch(
            query_start_loc=made[: begins[1]],
            context_lens=numbers[num_reqs : 2 * num_reqs],
            block_tables=made[begins[3] :].reshape(num_reqs, width),
            slot_mapping=made[begins[2] : begins[3]],
        ),
    )


def select_logits_rows(requests: Sequence[ScheduledRequest]) -> list[range]:
    """Return, per request, the flat rows to verify: anchor and drafts, or none for a chunk."""
    selected = []
    end = 0
    for request in requests:
        end += request.num_rows
        wanted = 1 + len(request.draft_token_ids) if request.samples else 0
        selected.append(range(end - wanted, end))
    return selected


def _pad_tables(tables: Sequence[Sequence[int]]) -> np.ndarray:
    width = max(len(table) for table in tables)
    padded = np.full((len(tables), width), NULL_BLOCK, dtype=np.int64)
    for index, table in enumerate(tables):
        padded[index, : len(table)] = table
    return padded
