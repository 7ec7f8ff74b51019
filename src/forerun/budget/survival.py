"""Confidence to survival, and the allocation of a budget by survival.

Shapes: R requests, k draft positions. Survival a[r, j] is the running product of confidences
(DSpark section 3.2.2), so it never rises along a row and the B best slots of all rows form a
prefix of each row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def compute_survival(confidence: Sequence[Sequence[float]]) -> tuple[np.ndarray, np.ndarray]:
    """Return (survival [R, k] float32, num_draft_tokens [R]) of ragged confidence rows.

    Positions past the end of a row get survival 0.
    """
    lengths = np.array([len(row) for row in confidence], dtype=np.int64)
    padded = np.zeros((len(confidence), int(lengths.max(initial=0))), dtype=np.float32)
    for index, row in enumerate(confidence):
        padded[index, : len(row)] = row
    return np.cumprod(padded, axis=1, dtype=np.float32), lengths


def allocate(
    survival: np.ndarray,  # [R, k]
    num_draft_tokens: np.ndarray,  # [R]
    verification_budget: int,
) -> np.ndarray:  # [R] int64
    """Return how many drafts of each request are admitted: the B slots of highest survival.

    Ties are broken by (position, request), which only reads revealed prefixes: with saturated
    confidences a plain top-k could count slot j + 1 in place of slot j and thereby let token j
    decide its own admission (DSpark appendix A).
    """
    num_reqs, depth = survival.shape
    if depth == 0 or verification_budget <= 0:
        return np.zeros(num_reqs, dtype=np.int64)
    rows, positions = np.nonzero(np.arange(depth) < num_draft_tokens[:, None])
    order = np.lexsort((rows, positions, -survival[rows, positions]))
    admitted = rows[order[:verification_budget]]
    return np.bincount(admitted, minlength=num_reqs)
