"""Temperature, top-k, top-p and min-p by partial selection, never a sort of the vocabulary.

Order, as in Hugging Face: temperature; top-k; top-p on the top-k distribution renormalised (keep a
token while the mass before it is below top_p); min-p last (keep p >= min_p * max p). Ties are
ordered by token id, and top-k keeps exactly k. The kept tokens are then a prefix of the list
(logit descending, id ascending), and only its head is built: 256 candidates, then 2048 for rows
whose cut is not inside, then a threshold found by histograms over the vocabulary.
Native kernels find the same prefix row by row; what follows from it is the same for both.
Shapes: R rows, r rows still pending, V vocabulary, C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from forerun.core import SamplingParams
from forerun.kernels.cut_ops import CutRows, cut_rows, mask_tail
from forerun.sampling.distribution import DensePart, Part, SparsePart, TargetDistribution
from forerun.sampling.scaled import ScaledRows

CANDIDATE_WIDTHS = (256, 2048)
_TOP_K_OFF = 2**31
_RADIX_LEVELS = ((21, 2**11), (10, 2**11), (0, 2**10))  # 32-bit ranks, high digits first


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFilters:
    """Sampling parameters per row, on the host."""

    temperature: np.ndarray  # [R] float32
    top_k: np.ndarray  # [R] int64; 2**31 is off
    top_p: np.ndarray  # [R] float64; 1 is off
    min_p: np.ndarray  # [R] float64; 0 is off

    @classmethod
    def from_params(
        cls, params: Sequence[SamplingParams], rows_per_request: np.ndarray
    ) -> RowFilters:
        """Repeat each request's parameters over its rows."""

        def spread(values: list[float], dtype: type) -> np.ndarray:
            return np.repeat(np.array(values, dtype=dtype), rows_per_request)

        return cls(
            temperature=spread([p.temperature for p in params], np.float32),
            top_k=spread([p.top_k if p.top_k > 0 else _TOP_K_OFF for p in params], np.int64),
            top_p=spread([p.top_p for p in params], np.float64),
            min_p=spread([p.min_p for p in params], np.float64),
        )

    def select(self, rows: np.ndarray) -> RowFilters:
        """Return the filters of some rows."""
        return RowFilters(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
        )


def build_distribution(logits: Tensor, filters: RowFilters) -> TargetDistribution:
    """Return the distributions of processed logits [R, V] float32, which are left unchanged."""
    scaled = ScaledRows.measure(logits, filters.temperature)
    is_finite = scaled.peak.isfinite() & scaled.peak_prob.isfinite()
    is_cut = (filters.top_k < logits.shape[1]) | (filters.top_p < 1.0) | (filters.min_p > 0.0)
    parts: list[Part] = []
    dense, pending = np.nonzero(~is_cut)[0], np.nonzero(is_cut)[0]
    if len(dense):
        parts.append(DensePart(rows=dense, scaled=scaled.select(dense)))
    if len(pending):
        parts += _cut_rows(scaled, pending, filters)
    return TargetDistribution(parts, is_finite.squeeze(1))


def _cut_rows(scaled: ScaledRows, pending: np.ndarray, filters: RowFilters) -> list[Part]:
    """Cut the pending rows; parts without rows are left out."""
    chosen = filters.select(pending)
    limits = {"top_k": chosen.top_k, "top_p": chosen.top_p, "min_p": chosen.min_p}
    cut = cut_rows(scaled, pending, limits, CANDIDATE_WIDTHS[-1])
    if cut is None:
        return _cut_reference(scaled, pending, filters)
    is_listed = cut.num_kept.numpy() <= CANDIDATE_WIDTHS[-1]
    if is_listed.all():
        return [SparsePart(rows=pending, token_ids=cut.token_ids, probs=cut.probs)]
    listed, wide = np.nonzero(is_listed)[0], np.nonzero(~is_listed)[0]
    parts: list[Part] = [
        _build_wide(scaled, pending[wide], chosen.temperature[wide], cut.select(wide))
    ]
    if len(listed):
        kept = cut.select(listed)
        parts.append(SparsePart(rows=pending[listed], token_ids=kept.token_ids, probs=kept.probs))
    return parts


def _build_wide(
    scaled: ScaledRows, rows: np.ndarray, temperature: np.ndarray, cut: CutRows
) -> DensePart:
    """Return these rows without the tokens after the last one of each."""
    logits = mask_tail(scaled.logits, rows, cut.last_logits, cut.last_ids)
    assert logits is not None, "kernels that cut these rows can also mask them"
    return DensePart(rows=rows, scaled=ScaledRows.measure(logits, temperature))


def _cut_reference(scaled: ScaledRows, pending: np.ndarray, filters: RowFilters) -> list[Part]:
    """Cut each pending row in PyTorch, with the fewest candidates that suffice."""
    parts: list[Part] = []
    vocab_size = scaled.logits.shape[1]
    for width in CANDIDATE_WIDTHS:
        # NOTE: k < width, because a cut shows only next to the candidate after it.
        least_width = np.where(filters.top_k == _TOP_K_OFF, 0, filters.top_k)[pending]
        fits = (least_width < width) | (width >= vocab_size)
        tried, pending = pending[fits], pending[~fits]
        if len(tried):
            part, is_open = _cut_candidates(
                scaled.select(tried), tried, filters.select(tried), min(width, vocab_size)
            )
            parts.append(part)
            pending = np.sort(np.concatenate([pending, tried[is_open]]))
    if len(pending):
        cut = _cut_by_threshold(scaled.select(pending), filters.select(pending))
        dense = ScaledRows.measure(cut.log_(), np.ones(len(cut), np.float32))
        parts.append(DensePart(rows=pending, scaled=dense))
    return [part for part in parts if len(part.rows)]


def _cut_candidates(
    scaled: ScaledRows, rows: np.ndarray, filters: RowFilters, width: int
) -> tuple[SparsePart, np.ndarray]:
    """Return the rows whose cut lies inside `width` candidates, and a mask of those left open."""
    values, token_ids = _find_candidates(scaled.logits, width)
    probs = scaled.compute_probs(values)
    num_kept = _count_kept(probs, filters)
    # NOTE: tokens outside may equal the last candidate, so a cut at that value is not decided yet.
    is_open = (values.gather(1, num_kept - 1) == values[:, -1:]).squeeze(1)
    is_open_cpu = is_open.cpu().numpy() & (width < scaled.logits.shape[1])
    cut = probs.mul_(torch.arange(width, device=values.device) < num_kept)
    cut /= cut.sum(dim=-1, keepdim=True)
    closed = np.nonzero(~is_open_cpu)[0]
    index = torch.from_numpy(closed).to(values.device)
    part = SparsePart(rows=rows[closed], token_ids=token_ids[index], probs=cut[index])
    return part, is_open_cpu


def _find_candidates(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the largest logits and their token ids, ties by ascending id, [r, C] each."""
    values, token_ids = logits.topk(width, dim=-1, sorted=False)
    token_ids, order = token_ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, token_ids.gather(1, order)


def _count_kept(probs: Tensor, filters: RowFilters) -> Tensor:
    """Return how many leading candidates [r, C] survive, int64 [r, 1], at least 1."""
    top_k, top_p, min_p = _to_columns(filters, probs.device)
    mass = probs.double()
    in_top_k = torch.arange(probs.shape[1], device=probs.device) < top_k
    norm = torch.where(top_k < _TOP_K_OFF, (mass * in_top_k).sum(dim=-1, keepdim=True), 1.0)
    mass_before = functional.pad(mass.cumsum(dim=-1)[:, :-1], (1, 0))
    in_top_p = (mass_before < top_p * norm) | (top_p >= 1.0)
    keep = in_top_k & in_top_p & (mass >= min_p * mass[:, :1]) & (mass > 0)
    return keep.sum(dim=-1, keepdim=True).clamp_(min=1)


def _cut_by_threshold(scaled: ScaledRows, filters: RowFilters) -> Tensor:
    """Return probabilities [r, V] cut, not renormalised, without candidates: for very wide cuts."""
    ranks = _to_ordered_ints(scaled.logits)
    probs = scaled.compute_probs(scaled.logits)
    top_k, top_p, min_p = _to_columns(filters, probs.device)
    kept = probs
    if np.any(filters.top_k < _TOP_K_OFF):
        kept = probs * _mask_head(ranks, torch.ones_like(probs), top_k.double())
    if np.any(filters.top_p < 1.0):
        limit = top_p * kept.sum(dim=-1, keepdim=True)
        kept = kept * _mask_head(ranks, kept, torch.where(top_p < 1.0, limit, torch.inf))
    return kept * (probs >= min_p * scaled.peak_prob)


def _mask_head(ranks: Tensor, mass: Tensor, limit: Tensor) -> Tensor:
    """Return which entries have less than `limit` mass before them, by (rank descending, id).

    Finds the smallest rank t with mass(rank > t) < limit, digit by digit from histograms of mass.
    Higher ranks are all in, lower ones all out, and those equal to t as far as the limit allows.
    """
    threshold = torch.zeros_like(ranks[:, :1])
    above = torch.zeros_like(limit)  # mass of ranks past the digits fixed so far
    pending = mass
    for shift, num_digits in _RADIX_LEVELS:
        digits = (ranks >> shift) & (num_digits - 1)
        histogram = mass.new_zeros(len(mass), num_digits).scatter_add_(1, digits, pending).double()
        mass_before = above + histogram.flip(1).cumsum(dim=-1).flip(1) - histogram
        digit = num_digits - (mass_before < limit).sum(dim=-1, keepdim=True)
        digit = digit.clamp(max=num_digits - 1)
        above = mass_before.gather(1, digit)
        threshold += digit << shift
        pending = pending * (digits == digit)
    tied = pending.double()
    is_tie = ranks == threshold
    return (ranks > threshold) | (is_tie & (above + tied.cumsum(dim=-1) - tied < limit))


def _to_ordered_ints(values: Tensor) -> Tensor:
    """Map float32 to int64 in [0, 2^32) that compare as the floats do, -0.0 equal to 0.0."""
    bits = (values + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() + 2**31


def _to_columns(filters: RowFilters, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return top_k, top_p, min_p as device columns [r, 1]."""
    columns = (filters.top_k, filters.top_p, filters.min_p)
    top_k, top_p, min_p = (torch.from_numpy(c).to(device)[:, None] for c in columns)
    return top_k, top_p, min_p
