"""The rules that make speculation lossless, as pure functions.

Standard (p target, q draft distribution, x the draft, u uniform): accept x if u < min(1, p(x) /
q(x)); at the first rejection draw from the residual norm(max(p - q, 0)); with all drafts accepted
draw the bonus token from p. A deterministic draft is a one-hot q. Then, whatever q is,
P(token) = q(token) min(1, p/q) + P(reject) residual(token) = p(token).

Exact match (greedy, coupled): each row's own sample is emitted as long as the drafts before it were
equal to the samples before it; drafts change how many rows count, never what a row says.

Shapes: D drafts in all, N requests, k the longest draft, C candidates or the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Less residual mass than float32 can tell from p = q; such rejections have no measurable chance.
_NO_RESIDUAL = 1e-8


def count_matches(sampled_token_ids: Sequence[int], draft_token_ids: Sequence[int]) -> int:
    """Return how many leading drafts equal the samples of their rows."""
    for count, (sampled, draft) in enumerate(zip(sampled_token_ids, draft_token_ids, strict=False)):
        if sampled != draft:
            return count
    return len(draft_token_ids)


def accept_drafts(target_probs: Tensor, draft_probs: Tensor, uniforms: Tensor) -> Tensor:
    """Return, for every draft on its own, whether u < p(x) / q(x), bool [D].

    Written as u q < p, so q = 0 needs no special case. NaN compares false: rejected.
    """
    return uniforms * draft_probs.double() < target_probs.double()


def count_accepted(
    is_accepted: Tensor, requests: Tensor, positions: Tensor, shape: tuple[int, int]
) -> Tensor:
    """Return the length of each request's accepted prefix, int64 [N].

    Draft d is number positions[d] of request requests[d]; `shape` is (N, k).
    """
    grid = torch.zeros(shape, dtype=torch.int64, device=is_accepted.device)
    grid[requests, positions] = is_accepted.long()
    return grid.cumprod(dim=-1).sum(dim=-1)


def compute_one_hot_residual(target_probs: Tensor, is_draft: Tensor) -> Tensor:
    """Return max(p - q, 0) for q one-hot on the entry marked by `is_draft` [N, C]."""
    return _fall_back(target_probs.masked_fill(is_draft, 0.0), target_probs)


def compute_residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Return max(p - q, 0), not normalised, [N, C]."""
    return _fall_back((target_probs - draft_probs).clamp_(min=0.0), target_probs)


def _fall_back(residual: Tensor, target_probs: Tensor) -> Tensor:
    """Return p for rows whose residual has no mass (p = q up to rounding, or q is not finite)."""
    has_mass = residual.sum(dim=-1, keepdim=True) > _NO_RESIDUAL
    return torch.where(has_mass, residual, target_probs)
