"""Top-k, top-p and min-p of rows of logits, native: None where they cannot be.

What callers run on a None, `sampling.filters` in PyTorch, is the definition.
Shapes: R rows, V vocabulary, C candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from forerun.kernels.abi import CutParams, MaskParams
from forerun.kernels.row_calls import call_kernel, find_usable, list_sizes
from forerun.kernels.sampling_ops import MeasuredRows

# As in cpp/cut.cpp: what its lists have to spare.
_SPARE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class CutRows:
    """Filtered rows: `token_ids` and `probs` by descending logit, zeros after what survives.

    Rows where more survives than was asked for have only `num_kept` and their last token.
    """

    token_ids: Tensor  # [R, C] int64
    probs: Tensor  # [R, C] float32
    num_kept: Tensor  # [R] int64
    last_logits: Tensor  # [R] float32
    last_ids: Tensor  # [R] int64

    def select(self, rows: np.ndarray) -> CutRows:
        """Return some rows."""
        index = torch.from_numpy(rows)
        return CutRows(**{field.name: getattr(self, field.name)[index] for field in fields(self)})


def cut_rows(
    given: MeasuredRows, rows: np.ndarray, filters: dict[str, np.ndarray], capacity: int
) -> CutRows | None:
    """Apply the filters top_k, top_p, min_p of these rows; list up to `capacity` tokens each."""
    kernels = find_usable(given.logits)
    if kernels is None:
        return None
    num_rows, num_threads = len(rows), torch.get_num_threads()
    scratch_size = capacity + 3 * (given.logits.shape[1] + _SPARE)
    token_ids = torch.empty(num_rows, capacity, dtype=torch.int64)
    probs = torch.empty(num_rows, capacity)
    num_kept, last_ids = torch.empty(2, num_rows, dtype=torch.int64)
    last_logits = torch.empty(num_rows)
    tensors: dict[str, Tensor | np.ndarray] = {
        "logits": given.logits,
        "temperature": given.temperature,
        "peaks": given.peak,
        "peak_probs": given.peak_prob,
        "rows": rows,
        **filters,
        "token_ids": token_ids,
        "probs": probs,
        "num_kept": num_kept,
        "last_ids": last_ids,
        "last_logits": last_logits,
        "scratch": torch.empty(num_threads, scratch_size, dtype=torch.int64),
    }
    sizes = {**list_sizes(given.logits), "num_rows": num_rows, "capacity": capacity}
    call_kernel(kernels.cut, CutParams, tensors, **sizes)
    width = max((count for count in num_kept.tolist() if count <= capacity), default=0)
    return CutRows(
        token_ids=token_ids[:, :width],
        probs=probs[:, :width],
        num_kept=num_kept,
        last_logits=last_logits,
        last_ids=last_ids,
    )


def mask_tail(
    logits: Tensor, rows: np.ndarray, last_logits: Tensor, last_ids: Tensor
) -> Tensor | None:
    """Return these rows with -inf after their last tokens by (logit descending, id ascending)."""
    kernels = find_usable(logits)
    if kernels is None:
        return None
    out = torch.empty(len(rows), logits.shape[1])
    tensors: dict[str, Tensor | np.ndarray] = {
        "logits": logits,
        "rows": rows,
        "last_ids": last_ids.contiguous(),
        "last_logits": last_logits.contiguous(),
        "out": out,
    }
    call_kernel(
        kernels.mask_tail, MaskParams, tensors, **{**list_sizes(logits), "num_rows": len(rows)}
    )
    return out
