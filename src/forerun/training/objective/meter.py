"""What a stretch of training or an evaluation showed, as sums until it is reported.

`acceptance` is the mean of sum min(p, q) per position, on the target's own text: the chance that a
sampled draft is accepted at temperature 1. `acceptance_length` is 1 + the expected number of
accepted drafts, over blocks whose labels all exist. `greedy_match` is how often the likeliest draft
is the target's likeliest token.
Shapes: A blocks, g positions, R = A g rows.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch import Tensor

from forerun.training.objective.batch_loss import BatchLoss


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Averages over the batches a meter saw."""

    loss: float
    hard: float
    soft: float
    l1: float
    confidence: float
    acceptance: tuple[float, ...]  # [g]
    greedy_match: tuple[float, ...] | None  # [g]; None: not measured
    acceptance_length: float
    num_blocks: int

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON takes it, rounded to what means something."""
        rounded = {}
        for name, value in asdict(self).items():
            if value is not None:
                is_list = isinstance(value, tuple)
                rounded[name] = [round(v, 4) for v in value] if is_list else round(value, 4)
        return rounded


class Meter:
    """Adds up batches; the sums are on the device, so that adding does not wait for it."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._terms = torch.zeros(5, device=device)  # loss and terms, one per batch
        self._positions = torch.zeros(3, block_size, device=device)  # counted, accepted, matched
        self._blocks = torch.zeros(3, device=device)  # all, whole ones, tokens whole ones give
        self._num_batches = 0
        self._has_matches = False

    def add(self, loss: BatchLoss) -> None:
        """Add one batch; its blocks may be shorter."""
        losses, labels = loss.rows, loss.labels
        weights, inside = labels.weights, labels.draft_ids >= 0
        hard_weights = weights * inside
        rows = zip(
            (losses.hard, losses.soft, losses.l1), (hard_weights, weights, weights), strict=True
        )
        means = [(row * weight).sum() / weight.sum().clamp_min(1e-6) for row, weight in rows]
        self._terms += torch.stack([loss.total.detach(), *means, loss.confidence.detach()])
        mask = self._spread(weights > 0, loss.block_size)
        acceptance = self._spread(losses.acceptance, loss.block_size) * mask
        matched = mask
        if losses.greedy_match is not None:
            matched = self._spread(losses.greedy_match, loss.block_size) & mask
        self._has_matches = losses.greedy_match is not None
        self._positions += torch.stack([mask.sum(0), acceptance.sum(0), matched.sum(0)])
        whole = mask.all(1)
        lengths = 1 + acceptance.cumprod(1).sum(1)
        num_blocks = torch.full_like(whole, True).sum()
        self._blocks += torch.stack([num_blocks, whole.sum(), (lengths * whole).sum()])
        self._num_batches += 1

    def _spread(self, rows: Tensor, block_size: int) -> Tensor:
        """Return rows [R] as blocks of full length [A, g], zeros at the end."""
        return F.pad(rows.view(-1, block_size), (0, self._block_size - block_size))

    def measure(self) -> Measurement:
        """Return the averages; there must have been a batch."""
        assert self._num_batches, "nothing was measured"
        loss, hard, soft, l1, confidence = (self._terms / self._num_batches).tolist()
        counted, accepted, matched = self._positions
        counted = counted.clamp_min(1)
        num_blocks, num_whole, lengths = self._blocks.tolist()
        return Measurement(
            loss=loss,
            hard=hard,
            soft=soft,
            l1=l1,
            confidence=confidence,
            acceptance=tuple((accepted / counted).tolist()),
            greedy_match=tuple((matched / counted).tolist()) if self._has_matches else None,
            acceptance_length=lengths / num_whole if num_whole else 1.0,
            num_blocks=int(num_blocks),
        )
