"""One procedure per verification method: processed logits of a group -> verdicts.

Each moves its decisions to the host once, at the end (the filters ask once more whether a row needs
more candidates). Shapes: N requests, D drafts, R = N + D rows, V vocabulary, C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.kernels.sampling_ops import LeftOut
from forerun.sampling.distribution import Part, TargetDistribution
from forerun.sampling.filters import build_distribution
from forerun.sampling.noise import Stream
from forerun.sampling.reduce import draw, find_best
from forerun.verification.layout import VerifyLayout
from forerun.verification.rejection import (
    accept_drafts,
    compute_one_hot_residual,
    compute_residual,
    count_accepted,
    count_matches,
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision for one request; `is_finite` is false if a row it rests on had no distribution.

    `token_ids` is the accepted prefix and the next token.
    """

    token_ids: list[int]
    num_accepted: int
    is_finite: bool


def verify_greedy(logits: Tensor, layout: VerifyLayout) -> list[Verdict]:
    """Keep drafts while they are the argmax of their row; the next token is an argmax too."""
    samples_cpu, is_finite_cpu = find_best(logits)
    return _match_samples(samples_cpu, is_finite_cpu, layout)


def verify_coupled(logits: Tensor, layout: VerifyLayout) -> list[Verdict]:
    """Keep drafts while they are their row's coupled sample; so is the next token."""
    distribution = build_distribution(logits, layout.build_filters())
    keys = torch.from_numpy(layout.derive_coupled_keys()).to(logits.device)
    decided = torch.stack([distribution.sample_coupled(keys), distribution.is_finite.long()])
    samples_cpu, is_finite_cpu = decided.tolist()
    return _match_samples(samples_cpu, is_finite_cpu, layout)


def verify_standard(
    logits: Tensor, layout: VerifyLayout, draft_probs: Sequence[Tensor] | None
) -> list[Verdict]:
    """Accept with min(1, p/q), then draw from the residual, or the bonus token from p.

    `draft_probs` holds [m, V] per request for all requests of the group, or None if every draft of
    the group is deterministic.
    """
    distribution = build_distribution(logits, layout.build_filters())
    drafts = _Drafts.build(layout, draft_probs, logits.device)
    num_accepted = _accept(distribution, drafts, layout)
    next_token_ids = _draw_next(distribution, drafts, num_accepted, layout)
    packed = torch.cat([num_accepted, next_token_ids, distribution.is_finite.long()]).tolist()
    num_reqs = len(layout.requests)
    return [
        Verdict(
            token_ids=[*request.draft_token_ids[:accepted], next_token],
            num_accepted=accepted,
            is_finite=all(packed[2 * num_reqs + row : 2 * num_reqs + row + accepted + 1]),
        )
        for request, accepted, next_token, row in zip(
            layout.requests,
            packed[:num_reqs],
            packed[num_reqs : 2 * num_reqs],
            layout.starts,
            strict=True,
        )
    ]


def _match_samples(
    samples_cpu: list[int], is_finite_cpu: Sequence[int], layout: VerifyLayout
) -> list[Verdict]:
    verdicts = []
    for request, row in zip(layout.requests, layout.starts, strict=True):
        sampled = samples_cpu[row : row + 1 + len(request.draft_token_ids)]
        accepted = count_matches(sampled, request.draft_token_ids)
        is_sound = all(is_finite_cpu[row : row + accepted + 1])
        verdicts.append(Verdict(sampled[: accepted + 1], accepted, is_sound))
    return verdicts


@dataclass(frozen=True, kw_only=True, slots=True)
class _Drafts:
    """The drafts of a group on the device."""

    token_ids: Tensor  # [D] int64
    rows: Tensor  # [D] int64
    probs: Tensor | None  # [D, V] float32; None is one-hot

    @classmethod
    def build(
        cls, layout: VerifyLayout, draft_probs: Sequence[Tensor] | None, device: torch.device
    ) -> _Drafts:
        probs = None
        if draft_probs is not None:
            pairs = list(zip(draft_probs, layout.num_drafts.tolist(), strict=True))
            assert all(len(given) >= count for given, count in pairs), "q has too few rows"
            probs = torch.cat([given[:count] for given, count in pairs])
        return cls(
            token_ids=_to_device(layout.draft_token_ids, device),
            rows=_to_device(layout.draft_rows, device),
            probs=probs,
        )


def _accept(distribution: TargetDistribution, drafts: _Drafts, layout: VerifyLayout) -> Tensor:
    """Return the number of accepted drafts per request, int64 [N]."""
    device = drafts.token_ids.device
    num_reqs, longest = len(layout.requests), int(layout.num_drafts.max(initial=0))
    if not longest:
        return torch.zeros(num_reqs, dtype=torch.int64, device=device)
    target_probs = distribution.get_probs(drafts.rows, drafts.token_ids)
    given = torch.ones_like(target_probs)
    if drafts.probs is not None:
        given = _pick(drafts.probs, drafts.token_ids)
    uniforms = _to_device(layout.draw_accept_uniforms(), device)
    return count_accepted(
        accept_drafts(target_probs, given, uniforms),
        _to_device(layout.draft_request, device),
        _to_device(layout.draft_position, device),
        (num_reqs, longest),
    )


def _draw_next(
    distribution: TargetDistribution, drafts: _Drafts, num_accepted: Tensor, layout: VerifyLayout
) -> Tensor:
    """Return the recovered or bonus token of every request, int64 [N]."""
    device = num_accepted.device
    is_rejected = num_accepted < _to_device(layout.num_drafts, device)
    uniforms = torch.where(
        is_rejected,
        _to_device(layout.draw_next_uniforms(Stream.RESIDUAL), device),
        _to_device(layout.draw_next_uniforms(Stream.BONUS), device),
    )
    left_out = None
    if len(drafts.token_ids):
        rejected = _to_device(layout.draft_starts, device) + num_accepted
        left_out = _find_left_out(drafts, torch.where(is_rejected, rejected, -1))
    token_ids = torch.empty_like(num_accepted)
    final_rows = _to_device(layout.row_starts, device) + num_accepted
    for part, places, index in distribution.split(final_rows):
        chosen = None if left_out is None else left_out.select(places)
        token_ids[places] = _draw_part(part, index, uniforms[places], chosen)
    return token_ids


def _find_left_out(drafts: _Drafts, rejected: Tensor) -> LeftOut:
    """Return what each draw leaves out after the rejection of this draft [N], -1 being none."""
    nothing = torch.full_like(rejected, -1)
    if drafts.probs is not None:
        return LeftOut(token_ids=nothing, probs=drafts.probs, rows=rejected)
    token_ids = torch.where(rejected >= 0, drafts.token_ids[rejected.clamp(min=0)], -1)
    return LeftOut(token_ids=token_ids, probs=None, rows=nothing)


def _draw_part(part: Part, index: Tensor, uniforms: Tensor, left_out: LeftOut | None) -> Tensor:
    """Return one token id per row of `index` [N] of one part."""
    token_ids = part.draw_native(index, uniforms, left_out)
    if token_ids is not None:
        return token_ids
    weights, columns = part.select(index)
    if left_out is not None:
        weights = _compute_residual(weights, columns, left_out)
    drawn = draw(weights, uniforms)
    return drawn if columns is None else _pick(columns, drawn)


def _compute_residual(probs: Tensor, token_ids: Tensor | None, left_out: LeftOut) -> Tensor:
    """Return what is left of `probs` [N, C]; rows that leave out nothing stay as they are.

    `token_ids` [N, C] names the columns; None means the whole vocabulary.
    """
    if left_out.probs is not None:
        given = left_out.probs[left_out.rows.clamp(min=0)] * (left_out.rows >= 0)[:, None]
        return compute_residual(probs, given if token_ids is None else given.gather(1, token_ids))
    if token_ids is None:
        token_ids = torch.arange(probs.shape[1], device=probs.device)[None, :]
    return compute_one_hot_residual(probs, token_ids == left_out.token_ids[:, None])


def _pick(values: Tensor, columns: Tensor) -> Tensor:
    """Return one entry per row, [N]."""
    return values.gather(1, columns[:, None]).squeeze(1)


def _to_device(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device)
