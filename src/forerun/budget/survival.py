"""Confidence to survival, and the allocation of a budget by survival.

Shapes: R requests, k draft positions. Survival a[r, j] is the running product of confidences
(DSpark section 3.2.2), so it never rises along a row and the B best slots of all rows form a
prefix of each row.
"""

from __future__ import annotations

import numpy as np

# For so few an array operation costs more than a loop.
_FEW_REQUESTS = 4


def compute_survival(confidence: np.ndarray) -> np.ndarray:
    """Return the running product along each row, float32 [R, k]."""
    return np.cumprod(confidence, axis=1, dtype=np.float32)


def mark_drafts(num_draft_tokens: np.ndarray, num_positions: int) -> np.ndarray:
    """Return which slots hold a draft, bool [R, k]."""
    return np.arange(num_positions) < num_draft_tokens[:, None]


def allocate(
    survival: np.ndarray,  # [R, k]
    num_draft_tokens: np.ndarray,  # [R]
    verification_budget: int,
) -> np.ndarray:  # [R] int64
    """Return how many drafts of each request are admitted: the B slots of highest survival.

    Ties are broken by (position, request), which only reads revealed prefixes: with saturated
    confidences a plain top-k could count slot j + 1 in place of slot j and thereby let token j
    decide its own admission (DSpark appendix A). Linear in the number of slots.
    """
    if verification_budget >= num_draft_tokens.sum():
        return num_draft_tokens.copy()
    if verification_budget <= 0:
        return np.zeros_like(num_draft_tokens)
    if len(num_draft_tokens) == 1:
        return np.array([verification_budget])
    if len(num_draft_tokens) <= _FEW_REQUESTS:
        return _allocate_to_few(survival, num_draft_tokens, verification_budget)
    is_draft = mark_drafts(num_draft_tokens, survival.shape[1])
    slots = survival[is_draft]
    place = len(slots) - verification_budget
    last_admitted = np.partition(slots, place)[place]
    admitted = (is_draft & (survival > last_admitted)).sum(axis=1)
    ties = np.flatnonzero((is_draft & (survival == last_admitted)).T)
    chosen = ties[: verification_budget - admitted.sum()] % len(survival)
    counts: np.ndarray = admitted + np.bincount(chosen, minlength=len(survival))
    return counts


def _allocate_to_few(survival: np.ndarray, num_draft_tokens: np.ndarray, budget: int) -> np.ndarray:
    rows, counts = survival.tolist(), num_draft_tokens.tolist()
    slots = [(-rows[r][j], j, r) for r, count in enumerate(counts) for j in range(count)]
    slots.sort()
    admitted = [0] * len(rows)
    for _, _, request in slots[:budget]:
        admitted[request] += 1
    return np.array(admitted)
