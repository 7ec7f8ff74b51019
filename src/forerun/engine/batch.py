"""StepPlan to flat arrays: token ids, positions, slots, and which rows need logits.

T rows (num_tokens), N requests (num_reqs). Rows of a request are contiguous, in plan order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.attention.base import AttentionBatch
from forerun.attention.layout import lay_out
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
    layout = lay_out(plan.requests, kv_block_size)
    return StepBatch(np.array(token_ids, dtype=np.int64), layout.positions, layout.attention)


def select_logits_rows(requests: Sequence[ScheduledRequest]) -> list[range]:
    """Return, per request, the flat rows to verify: anchor and drafts, or none for a chunk."""
    selected = []
    end = 0
    for request in requests:
        end += request.num_rows
        wanted = 1 + len(request.draft_token_ids) if request.samples else 0
        selected.append(range(end - wanted, end))
    return selected
